//! The project's own commands, run as `cargo xtask …`.
//!
//! A machine with Rust and apt is enough: each command installs or starts everything else that it needs.

#![forbid(unsafe_code)]

mod bench;
mod command;
mod dist;
mod interrupt;
mod pages;
mod platforms;
mod registry;
mod repo;
mod setup;
mod soak;
mod stores;
mod test;
mod verify;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// The project's own commands.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct XtaskArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Install the tools that `verify` and `test` need and this machine lacks
    Setup,
    /// Check everything that needs no running store; changes no file of the repository
    Verify(verify::VerifyArgs),
    /// Print the figures of the language check, or the lines to rewrite in some files
    Language(verify::language::Arguments),
    /// Print the import cycles between the modules of each crate
    Cycles(verify::cycles::CyclesArgs),
    /// Start the real stores, run every test against them, stop the stores
    Test(test::TestArgs),
    /// Start the real stores, print the environment that points tests at them, stop on Ctrl-C
    Stores,
    /// Write the documentation pages that are generated from the code
    Pages(pages::PagesArgs),
    /// Run benchmarks
    Bench(registry::RegistryArgs),
    /// Build the release artifacts in `target/dist`
    Dist,
    /// Run long tests, for faults that a short test cannot find
    Soak(registry::RegistryArgs),
    /// Run as the command that `soak upgrade` starts under locks and for jobs
    #[command(hide = true)]
    UpgradeChild(soak::upgrade::child::UpgradeChildArgs),
}

fn main() -> ExitCode {
    let arguments = XtaskArgs::parse();
    let ready = match arguments.command {
        // SIGTERM must end this process at once, so its default action stays in place.
        Command::UpgradeChild(_) => Ok(()),
        _ => interrupt::listen(),
    };
    let outcome = ready.and_then(|()| match arguments.command {
        Command::Setup => setup::run(),
        Command::Verify(arguments) => Ok(verify::run(&arguments)),
        Command::Language(arguments) => verify::language::run(&arguments),
        Command::Cycles(arguments) => verify::cycles::run(&arguments),
        Command::Test(arguments) => test::run(&arguments),
        Command::Stores => stores::run(),
        Command::Pages(arguments) => pages::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Dist => dist::run(),
        Command::Soak(arguments) => soak::run(&arguments),
        Command::UpgradeChild(arguments) => {
            soak::upgrade::child::run(&arguments).map(|()| ExitCode::SUCCESS)
        }
    });
    outcome.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}
