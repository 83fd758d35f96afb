//! `cargo xtask bench`: measurements, by name.

use std::process::ExitCode;

use anyhow::Result;

use crate::command;
use crate::registry::{self, Arguments, Entry};
use crate::repo;

const BENCHES: &[Entry] = &[Entry {
    name: "core",
    about: "the lock table alone, and what the library adds to it on the memory store",
    run: |rest| cargo_bench("tenure", "core", rest),
}];

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    registry::run("bench", BENCHES, arguments)
}

fn cargo_bench(package: &str, name: &str, rest: &[String]) -> Result<()> {
    let mut cargo = repo::cargo(["bench", "--quiet", "--package", package, "--bench", name, "--"]);
    command::show(cargo.args(rest))
}
