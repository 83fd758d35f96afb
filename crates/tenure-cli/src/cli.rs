//! Grammar of the command line: the subcommands, and the report of wrong usage.

use std::ffi::OsString;
use std::fmt::Write as _;

use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser, Subcommand};
use clap_complete::Shell;

use crate::args::store::{AdvisoryKeyArgs, StoreUrl};
use crate::exit::{self, Exit};
use crate::{cmd, report};

/// Locks, leases and leader election on the store you already run
#[derive(Parser)]
#[command(name = "tenure", version, max_term_width = 100, disable_help_subcommand = true)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Hold the lock NAME while a command runs
    Run(cmd::run::Run),
    /// Take part in the election NAME, and run a command while leading
    Lead(cmd::lead::Lead),
    /// Acquire NAME without waiting, and keep it held after tenure exits, until its ttl ends; prints a token and a handle
    Acquire(cmd::acquire::Acquire),
    /// Renew a hold of `tenure acquire`
    Renew(cmd::renew::Renew),
    /// Release a hold of `tenure acquire`
    Release(cmd::release::Release),
    /// Show all holders and waiters, one per line
    Status(cmd::status::Status),
    /// List the names in use, one per line, with the number of waiters
    Ls(cmd::ls::Ls),
    /// Print each change of holders and waiters as it happens
    Watch(cmd::watch::Watch),
    /// Show the recent events of a name
    History(cmd::history::History),
    /// Show holders and waiters in the terminal, updated continuously
    Top(cmd::top::Top),
    /// End the hold of another process by force
    Break(cmd::evict::Break),
    /// Run a command at most once per period across a fleet
    Once(cmd::once::Once),
    /// Run a command for each job of a queue in PostgreSQL
    Work(cmd::work::Work),
    /// Enqueue, inspect and change jobs of a queue in PostgreSQL
    #[command(subcommand)]
    Job(cmd::job::JobSubcommand),
    /// Print or apply the SQL of the PostgreSQL tables
    Schema(cmd::schema::Schema),
    /// Check a store: reachability, latency, guarantees and settings
    Doctor(cmd::doctor::Doctor),
    /// Delete objects that released locks left in a store
    Gc(cmd::gc::Gc),
    /// Put a store under load, and print rates and latency percentiles
    Bench(cmd::bench::Bench),
    /// Run the lock server
    Serve(Box<cmd::serve::Serve>),
    /// Print the completion script for a shell
    #[command(after_help = exit::PRINT)]
    Completions {
        /// Shell that the script is for
        shell: Shell,
    },
    /// Print the manual page
    #[command(after_help = exit::PRINT)]
    Man,
    /// Guard the command of `run`; started by tenure itself
    #[command(name = "__guard", hide = true)]
    Guard {
        /// Release the job of the command if tenure itself is killed
        #[arg(long)]
        release_job: bool,
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<OsString>,
    },
    /// Release the job of a killed worker, which stdin describes; started by the guardian
    #[command(name = "__release-job", hide = true)]
    ReleaseJob,
}

impl Command {
    /// The reason to refuse arguments that are valid each, but not together or not in this environment.
    pub(crate) fn usage_error(&self) -> Option<String> {
        match self {
            Self::Serve(serve) => return serve.usage_error(),
            Self::Run(run) => {
                if let Some(error) = run.usage_error() {
                    return Some(error);
                }
            }
            Self::Top(top) => {
                if let Some(error) = top.usage_error() {
                    return Some(error);
                }
            }
            // These two examine the store itself, also that of their own process.
            Self::Doctor(doctor) => return doctor.store().relative_directory_error(),
            Self::Bench(bench) => return bench.store.relative_directory_error(),
            _ => {}
        }
        let (store, pair) = self.store()?;
        if let Some(error) = pair.and_then(|pair| pair.server_error(store)) {
            return Some(error);
        }
        if pair.is_some_and(|pair| pair.dsn().is_some()) {
            return None;
        }
        // Holds in the memory of a process end with that process, and no other process sees them: each command would
        // have its own store.
        if store.is_memory() {
            return Some(
                "the store `memory:` exists only within one process, and no other process sees its holds; use file: \
                 on one host, or a store that all hosts reach (tenure://, postgres://, nats://, s3://, gs://, az://)"
                    .to_owned(),
            );
        }
        store.relative_directory_error()
    }

    /// The store of a command that acts on holds; with `--dsn` and the like, if the command has them.
    fn store(&self) -> Option<(&StoreUrl, Option<&AdvisoryKeyArgs>)> {
        Some(match self {
            Self::Run(run) => (&run.store, None),
            Self::Lead(lead) => (&lead.store, Some(&lead.pair)),
            Self::Acquire(acquire) => (&acquire.store, Some(&acquire.pair)),
            Self::Renew(renew) => (&renew.store, None),
            Self::Release(release) => (&release.store, None),
            Self::Status(status) => (&status.store, Some(&status.pair)),
            Self::Ls(ls) => (&ls.store, None),
            Self::Watch(watch) => (&watch.store, None),
            Self::History(history) => (&history.store, None),
            Self::Top(top) => (&top.store, None),
            Self::Break(evict) => (&evict.store, None),
            Self::Once(once) => (&once.store, None),
            Self::Gc(gc) => (&gc.store, None),
            _ => return None,
        })
    }
}

/// Prints help if it was requested, else one line that names the error.
pub(crate) fn report_usage_error(error: &clap::Error) -> Exit {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            let _ = error.print();
            Exit::Success
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let message = error.render().to_string();
            let command = usage(&message).map_or("tenure", command_of_usage);
            report::print_line(&format!(
                "a command is required; `{command} --help` lists the commands"
            ));
            Exit::Usage
        }
        _ => {
            report::print_line(&one_line(error.kind(), &error.render().to_string()));
            Exit::Usage
        }
    }
}

/// The first paragraph of clap's message as one line, followed by the usage or by the command that prints it.
fn one_line(kind: ErrorKind, message: &str) -> String {
    let paragraph = message.split("\n\n").next().unwrap_or_default();
    let words = paragraph.trim_start_matches("error:").split_whitespace();
    let mut line = words.collect::<Vec<_>>().join(" ");
    if let Some(usage) = usage(message) {
        let command = command_of_usage(usage);
        // For an unknown flag, clap's usage shows a flag that resembles it: of no help if it does not.
        let _ = match kind {
            ErrorKind::InvalidSubcommand => write!(line, "; `{command} --help` lists the commands"),
            ErrorKind::UnknownArgument => write!(line, "; `{command} --help` lists the options"),
            _ => write!(line, "; usage: {usage}"),
        };
    }
    line
}

/// The usage in a message of clap.
fn usage(message: &str) -> Option<&str> {
    message.lines().rev().find_map(|line| line.trim().strip_prefix("Usage: "))
}

/// The command without its arguments: `tenure job` of `tenure job [OPTIONS] <COMMAND>`.
fn command_of_usage(usage: &str) -> &str {
    let arguments = usage.find(['<', '[', '-']).unwrap_or(usage.len());
    usage[..arguments].trim_end()
}

/// The grammar, for completions and the manual page.
pub(crate) fn grammar() -> clap::Command {
    Arguments::command()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grammar_holds_together() {
        grammar().debug_assert();
    }

    #[test]
    fn all_after_the_name_is_the_command() {
        for line in [
            &["tenure", "run", "a", "sh", "-c", "x"][..],
            &["tenure", "run", "a", "--", "sh", "-c", "x"],
            &["tenure", "run", "--ttl", "5s", "a", "sh", "-c", "x"],
        ] {
            let Command::Run(run) = Arguments::try_parse_from(line).unwrap().command else {
                panic!("{line:?}");
            };
            assert_eq!(run.name.as_str(), "a");
            assert_eq!(run.command, ["sh", "-c", "x"], "{line:?}");
        }
    }

    #[test]
    fn usage_errors_are_reported_in_one_line() {
        let complaint = |line: &[&str]| {
            let error = Arguments::try_parse_from(line).err().unwrap();
            one_line(error.kind(), &error.render().to_string())
        };
        let missing = complaint(&["tenure", "run", "a"]);
        assert!(missing.contains("required") && missing.contains("<COMMAND>"), "{missing}");
        let bad = complaint(&["tenure", "run", "--ttl", "soon", "a", "true"]);
        assert!(bad.contains("soon") && bad.contains("--ttl") && bad.contains("15s"), "{bad}");
        let flag = complaint(&["tenure", "run", "--tri", "a", "true"]);
        assert!(flag.ends_with("; `tenure run --help` lists the options"), "{flag}");
        let command = complaint(&["tenure", "job", "steal"]);
        assert!(command.ends_with("; `tenure job --help` lists the commands"), "{command}");
        for line in [missing, bad, flag, command] {
            assert!(!line.contains('\n') && !line.starts_with(' '), "{line:?}");
        }
    }

    #[test]
    fn every_command_is_in_the_manual_page_and_no_other_page_is_named() {
        let page = cmd::man::page(grammar()).expect("a page");
        for command in ["TENURE RUN", "TENURE SERVE", "TENURE JOB", "TENURE JOB ADD", "TENURE MAN"]
        {
            assert!(page.contains(&format!(".SH \"{command}\"\n")), "{command}: {page}");
        }
        assert!(page.contains("\n.TH tenure 1 \"\" \"tenure "), "{page}");
        assert!(page.contains("\n\\fBtenure job add\\fR\n"), "{page}");
        assert!(!page.contains("(1)") && !page.contains("GUARD"), "{page}");
    }
}
