//! `cargo xtask setup`: installs the tools that the other commands need and this machine lacks.

mod apt;
mod crates;
mod dflockd;
mod jsonschema;
mod tool;
mod wheel;

use std::process::ExitCode;

use anyhow::Result;

use crate::stores;

pub(crate) use apt::apt_install;
pub(crate) use crates::{CARGO_DENY, MDBOOK};
pub(crate) use dflockd::DFLOCKD;
pub(crate) use jsonschema::CHECK_JSONSCHEMA;
pub(crate) use tool::{Tool, ensure};
pub(crate) use wheel::Wheel;

pub(crate) fn run() -> Result<ExitCode> {
    let own = [&CARGO_DENY, &MDBOOK, &CHECK_JSONSCHEMA, &DFLOCKD];
    for tool in own.into_iter().chain(stores::tools()) {
        let path = ensure(tool)?;
        println!("{:<12} {}", tool.name, path.display());
    }
    Ok(ExitCode::SUCCESS)
}
