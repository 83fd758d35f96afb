//! Stores that are away, refuse or are deleted: the commands wait and report, or end with the right code.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

mod denials;
#[allow(dead_code, reason = "shared with the tests of the store")]
#[path = "../../../tenure/tests/object/fake.rs"]
mod fake;
mod limits;
mod metrics;
mod nats_server;
mod nonsense;
#[allow(dead_code, reason = "shared with the tests of the store")]
#[path = "../../../tenure/tests/pg_lease/server.rs"]
mod pg_server;
mod refusals;
#[path = "../../../tenure/tests/services/mod.rs"]
mod services;
#[allow(dead_code, reason = "shared with the tests of `run`")]
#[path = "../cli/session.rs"]
mod session;
#[allow(dead_code, reason = "shared with the tests of `run`")]
#[path = "../cli/support.rs"]
mod support;
mod table;
mod work;

use std::fs::File;

use serde_json::Value;
use support::{Running, Scene, eventually};

/// Starts a command whose stderr is the file `said`.
fn start(scene: &Scene, arguments: &[&str]) -> Running {
    let mut command = scene.tenure(arguments);
    Running::new(command.stderr(File::create(scene.path("said")).unwrap()))
}

fn until_said(scene: &Scene, text: &str) {
    eventually(text, || scene.read("said").contains(text).then_some(()));
}

/// Names of the events in `text`, in their order.
fn event_names(text: &str) -> Vec<String> {
    let event = |line: &str| serde_json::from_str::<Value>(line).expect(line)["event"].clone();
    text.lines().map(|line| event(line).as_str().unwrap().to_owned()).collect()
}
