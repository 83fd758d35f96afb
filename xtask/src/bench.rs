//! `cargo xtask bench`: measurements, by name.

use std::process::ExitCode;

use anyhow::Result;

use crate::registry::{self, Arguments, Entry};

const BENCHES: &[Entry] = &[];

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    registry::run("bench", BENCHES, arguments)
}
