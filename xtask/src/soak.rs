//! `cargo xtask soak`: long runs, by name.

use std::process::ExitCode;

use anyhow::Result;

use crate::registry::{self, Arguments, Entry};

const SOAKS: &[Entry] = &[];

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    registry::run("soak", SOAKS, arguments)
}
