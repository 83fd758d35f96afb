//! `cargo xtask soak`: long runs, by name.

mod mutations;
pub(crate) mod upgrade;

use std::process::{Command, ExitCode};

use anyhow::Result;

use crate::registry::{self, Entry, RegistryArgs};
use crate::{command, repo};

const SOAKS: &[Entry] = &[
    Entry {
        name: "sim",
        about: "a million seeds of the product on simulated time, network and disk (-- FIRST COUNT THREADS)",
        run: |rest| {
            let all = ["0", "1000000", "2"].map(str::to_owned);
            example("product", if rest.is_empty() { &all } else { rest })
        },
    },
    Entry {
        name: "rules",
        about: "a million seeds of clients and models of stores: never two holders (-- FIRST COUNT THREADS)",
        run: |rest| {
            let all = ["0", "1000000", "2"].map(str::to_owned);
            example("soak", if rest.is_empty() { &all } else { rest })
        },
    },
    Entry {
        name: "jobs",
        about: "16 workers on 10,000 jobs, killed and frozen at random: each effect once (-- WORKERS JOBS KILLS)",
        run: |rest| {
            let size = if rest.is_empty() { "16 10000 60".to_owned() } else { rest.join(" ") };
            let mut cargo = stores_test("jobs");
            cargo.args(["random_kills", "--", "--nocapture"]).env("TENURE_SOAK_JOBS", size);
            command::show(&mut cargo)
        },
    },
    Entry {
        name: "model",
        about: "every state of the larger small-world model of keeper and table",
        run: |rest| example("small_world", rest),
    },
    Entry {
        name: "mutations",
        about: "wrong changes of the code: a test or a seed notices each (-- --help)",
        run: mutations::run,
    },
    Entry {
        name: "nats",
        about: "a NATS cluster under load, whose servers are killed and stopped: the leader, a follower, or all",
        run: |_| {
            command::show(stores_test("nats").args(["soak", "--", "--ignored", "--nocapture"]))
        },
    },
    Entry {
        name: "postgres",
        about: "real statements on PostgreSQL in seeded order, with crashes and fail-overs: never two holders (-- FIRST COUNT)",
        run: |rest| {
            let seeds = if rest.is_empty() { "0 2000".to_owned() } else { rest.join(" ") };
            let mut cargo = stores_test("pg_schedules");
            cargo.args(["seeded", "--", "--nocapture"]).env("TENURE_SOAK_POSTGRES", seeds);
            command::show(&mut cargo)
        },
    },
    Entry {
        name: "restarts",
        about: "the lock server killed with -9 under load, 200 times: never two holders (-- COUNT)",
        run: |rest| {
            let count = rest.first().map_or("200", String::as_str);
            let test = [
                "test",
                "--release",
                "--package",
                "tenure-cli",
                "--test",
                "restart",
                "--",
                "--nocapture",
                "kill_9",
            ];
            command::show(repo::cargo(test).env("TENURE_TEST_RESTARTS", count))
        },
    },
    Entry {
        name: "schema",
        about: "a table of a million rows with its own column names, changed and undone under load: the longest stall (-- ROWS)",
        run: |rest| {
            let rows = rest.first().map_or("1000000", String::as_str);
            let mut cargo = stores_test("jobs");
            cargo.args(["under_load", "--", "--nocapture"]).env("TENURE_SOAK_SCHEMA", rows);
            command::show(&mut cargo)
        },
    },
    Entry {
        name: "server",
        about: "ten million requests of random clients of the lock server (-- COUNT THREADS FIRST)",
        // Not a release build, so that an integer overflow panics.
        run: |rest| {
            let base = ["test", "--quiet", "--package", "tenure-server", "--test", "fuzz", "soak"];
            let mut cargo = repo::cargo(base);
            cargo.args(["--", "--ignored", "--nocapture"]).env("TENURE_SOAK", rest.join(" "));
            command::show(&mut cargo)
        },
    },
    Entry {
        name: "upgrade",
        about: "an earlier version and this one on every store, in turn and together: never two holders (--help)",
        run: upgrade::run,
    },
];

pub(crate) fn run(arguments: &RegistryArgs) -> Result<ExitCode> {
    registry::run("soak", SOAKS, arguments)
}

/// A test of the library against real stores, in a release build as users run it.
fn stores_test(name: &str) -> Command {
    repo::cargo(["xtask", "test", "--", "--release", "--package", "tenure", "--test", name])
}

fn example(name: &str, rest: &[String]) -> Result<()> {
    let base = ["run", "--quiet", "--release", "--package", "tenure-sim", "--example", name, "--"];
    command::show(repo::cargo(base).args(rest))
}
