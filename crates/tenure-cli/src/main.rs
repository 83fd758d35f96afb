//! The command `tenure`: locks, leases and leader election on the store you already run.
//!
//! This crate parses arguments, starts child processes and prints. The locks themselves are in the library.

#![forbid(unsafe_code)]

#[cfg(not(target_os = "linux"))]
compile_error!("the command needs Linux; on this system, use the library");

mod args;
mod child;
mod cli;
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
mod report;
mod signals;
mod supervise;
mod terminal;
mod waiting;

use std::process::ExitCode;

use clap::Parser as _;
use cli::{Arguments, Command};
use exit::Exit;

fn main() -> ExitCode {
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
        Command::Guard { command } => guardian::run(&command),
    };
    exit.into()
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}
