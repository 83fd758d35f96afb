//! Jobs and checkpoints in rows of PostgreSQL, against a real server, beside workers that use plain SQL.
#![cfg(feature = "jobs")]
#![expect(clippy::unwrap_used, reason = "helpers of tests are tests, which clippy cannot see")]

mod bulk;
mod checkpoints;
mod children;
mod completing;
mod counting;
mod crowds;
mod faults;
mod glance;
mod import;
mod input;
#[allow(dead_code, reason = "shared with the tests of advisory locks")]
#[path = "../pg_advisory/link.rs"]
mod link;
mod listing;
mod live;
mod mapped;
mod optional;
mod pausing;
mod plain;
mod prepared;
mod progress;
mod queue;
mod retention;
mod rows;
#[cfg(feature = "schedules")]
mod schedules;
mod schema;
#[allow(dead_code, reason = "shared with the tests of locks")]
#[path = "../pg_lease/server.rs"]
mod server;
#[path = "../services/mod.rs"]
mod services;
mod steps;
mod support;
mod tables;
mod transactions;
mod worker;
