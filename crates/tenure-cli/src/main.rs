//! The command `tenure`, with the stores of tenure alone.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    tenure_cli::main_with(tenure::Client::builder())
}
