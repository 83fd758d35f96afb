//! `cargo xtask test`: every test, against real stores.

mod skips;

use std::os::unix::process::ExitStatusExt as _;
use std::process::{ExitCode, ExitStatus};
use std::time::Instant;

use anyhow::Result;
use nix::sys::signal::Signal;

use crate::command::Group;
use crate::setup::{self, DFLOCKD};
use crate::stores::{self, Stores};
use crate::{interrupt, repo};

use self::skips::Skips;

#[derive(clap::Args)]
pub(crate) struct TestArgs {
    /// Run without this store: the tests that need it are skipped, and listed at the end
    #[arg(long, value_name = "STORE")]
    without: Vec<String>,
    /// Arguments passed on to cargo test
    #[arg(last = true)]
    rest: Vec<String>,
}

pub(crate) fn run(arguments: &TestArgs) -> Result<ExitCode> {
    let began = Instant::now();
    setup::ensure(&DFLOCKD)?;
    stores::check_names(&arguments.without)?;
    let stores = Stores::start_some(|name| !arguments.without.iter().any(|other| other == name))?;
    let skips = Skips::begin()?;
    let mut cargo = repo::cargo(["test", "--all-features"]);
    if !picks_packages(&arguments.rest) {
        cargo.arg("--workspace");
    }
    cargo.args(&arguments.rest).envs(stores.environment().iter().cloned());
    if arguments.without.is_empty() {
        // A missing store is a failure here; a plain `cargo test` skips the tests that need it.
        cargo.env("TENURE_TEST_SERVICES", "required");
    }
    cargo.env("TENURE_TEST_SKIPS", skips.file());
    let status = Group::spawn(&mut cargo, Signal::SIGTERM)?.wait()?;
    drop(stores);

    let code = exit_code(status);
    let verdict = match (status, code) {
        (None, _) => "interrupted",
        (_, 0) => "tests passed",
        _ => "TESTS FAILED",
    };
    for line in skips.summary()? {
        println!("{line}");
    }
    println!("{verdict} after {:.1} s, the stores included", began.elapsed().as_secs_f64());
    Ok(ExitCode::from(code))
}

/// True if the arguments select packages: cargo would ignore the selection beside `--workspace`.
fn picks_packages(rest: &[String]) -> bool {
    let ours = rest.iter().take_while(|argument| *argument != "--");
    ours.into_iter().any(|argument| argument.starts_with("-p") || argument.starts_with("--package"))
}

/// The exit code of the program, or 128 plus the signal that ended it, as in shells.
fn exit_code(status: Option<ExitStatus>) -> u8 {
    let Some(status) = status else { return interrupt::EXIT_CODE };
    let code = status.code().or_else(|| Some(128 + status.signal()?));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exit_code_is_passed_on() {
        assert_eq!(exit_code(Some(ExitStatus::from_raw(0))), 0);
        assert_eq!(exit_code(Some(ExitStatus::from_raw(101 << 8))), 101);
        assert_eq!(exit_code(Some(ExitStatus::from_raw(9))), 137);
        assert_eq!(exit_code(None), 130);
    }

    #[test]
    fn only_arguments_of_cargo_pick_packages() {
        let picks = |words: &str| {
            picks_packages(&words.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
        };
        assert!(picks("-p tenure"));
        assert!(picks("--test x --package=tenure"));
        assert!(!picks("--test x -- -p"));
        assert!(!picks(""));
    }
}
