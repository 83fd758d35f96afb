//! The command `tenure`: locks, leases and leader election on the store you already run.
//!
//! This crate parses arguments, starts child processes and prints. The locks themselves are in the library.
//!
//! The command is a library too, for one reason: a store of another crate becomes a URL scheme of the command in a
//! program of a few lines. `examples/with_own_store.rs` is such a program.
//!
//! ```no_run
//! use std::process::ExitCode;
//! use std::sync::Arc;
//! use tenure::{Client, MemoryStore, Store};
//!
//! fn main() -> ExitCode {
//!     let client = Client::builder()
//!         .scheme("scratch", async |_url: String| Ok(Arc::new(MemoryStore::new()) as Arc<dyn Store>));
//!     tenure_cli::main_with(client) // tenure --store scratch: run demo -- echo hello
//! }
//! ```

#![forbid(unsafe_code)]

#[cfg(not(target_os = "linux"))]
compile_error!("the command needs Linux; on this system, use the library");

mod args;
mod child;
mod cli;
mod client;
mod cmd;
mod enclosing_hold;
mod events_fd;
mod exit;
mod guardian;
mod health;
mod hold;
mod humanize;
mod keys;
mod mutex;
mod notify;
mod other_kind;
mod queue_monitor;
mod report;
mod signals;
mod supervise;
mod terminal;
mod waiting;

use std::process::ExitCode;

use clap::Parser as _;
use cli::{Arguments, Command};
use exit::Exit;
use tenure::ClientBuilder;

/// Runs the command with the arguments of this process. Its clients are made by `client`, so the command accepts the
/// URL schemes registered there.
///
/// Call it first in `main`, once: it handles the signals of the process, and starts the program again for the process
/// that watches over a child.
///
/// # Panics
///
/// Panics if it is called twice.
#[must_use]
pub fn main_with(client: ClientBuilder) -> ExitCode {
    client::set_builder(client);
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return cli::report_usage_error(&error).into(),
    };
    if let Some(message) = arguments.command.usage_error() {
        report::print_line(&message);
        return Exit::Usage.into();
    }
    let exit = match arguments.command {
        Command::Run(arguments) => cmd::run::run(&arguments),
        Command::Lead(arguments) => cmd::lead::run(arguments),
        Command::Acquire(arguments) => cmd::acquire::run(&arguments),
        Command::Renew(arguments) => cmd::renew::run(arguments),
        Command::Release(arguments) => cmd::release::run(arguments),
        Command::Status(arguments) => cmd::status::run(&arguments),
        Command::Ls(arguments) => cmd::ls::run(&arguments),
        Command::Watch(arguments) => cmd::watch::run(&arguments),
        Command::Break(arguments) => cmd::evict::run(&arguments),
        Command::History(arguments) => cmd::history::run(&arguments),
        Command::Top(arguments) => cmd::top::run(&arguments),
        Command::Once(arguments) => cmd::once::run(&arguments),
        Command::Work(arguments) => cmd::work::run(arguments),
        Command::Job(command) => cmd::job::run(&command),
        Command::Schema(arguments) => cmd::schema::run(&arguments),
        Command::Doctor(arguments) => cmd::doctor::run(&arguments),
        Command::Gc(arguments) => cmd::gc::run(&arguments),
        Command::Bench(arguments) => cmd::bench::run(&arguments),
        Command::Serve(arguments) => cmd::serve::run(&arguments),
        Command::Completions { shell } => cmd::completions::run(shell, cli::grammar()),
        Command::Man => cmd::man::run(cli::grammar()),
        Command::Guard { release_job, command } => guardian::run(&command, release_job),
        Command::ReleaseJob => cmd::work::release_job(),
    };
    exit.into()
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}
