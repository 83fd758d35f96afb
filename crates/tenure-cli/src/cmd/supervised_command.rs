//! A command that runs under a lock or a leadership: its environment, its start, and its end.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::time::Duration;

use nix::errno::Errno;
use tenure::store::Identity;
use tenure::{Client, Key};
use tokio::time::Instant;

use crate::args::hold::IdentityArgs;
use crate::child::{Child, StartError};
use crate::enclosing_hold::{self, EnclosingHold};
use crate::exit::Exit;
use crate::hold::{Hold, REVISION_VARIABLE, TOKENS_VARIABLE};
use crate::humanize;
use crate::report::{self, Reporter};
use crate::signals::Signals;
use crate::supervise::{ChildOutcome, HandoffAction, Supervisor};
use crate::terminal::Terminal;

/// A command that runs under a hold.
pub(super) struct SupervisedCommand<'a> {
    pub(super) context: HoldContext<'a>,
    pub(super) command: &'a [OsString],
    pub(super) kill_after: Duration,
    /// Time at which the hold ends even if every renewal succeeds.
    pub(super) hard_end: Option<Instant>,
    /// Slot that the command runs for, with `once`.
    pub(super) slot: Option<String>,
    pub(super) on_request: HandoffAction,
}

/// Properties of a hold that the environment of its command shows.
pub(super) struct HoldContext<'a> {
    pub(super) client: &'a Client,
    pub(super) name: &'a Key,
    pub(super) identity: &'a IdentityArgs,
    pub(super) ttl: Duration,
}

/// End of a supervised command.
pub(super) enum CommandEnd {
    /// It was not started; the reason was reported.
    NotStarted(Exit),
    /// It ended, or its guardian was killed, which was reported. `stop_requested` if a signal that asks to stop was
    /// forwarded to it.
    Ended { exit: Exit, stop_requested: bool },
    /// It was stopped, or not started, because the hold had ended or was about to end.
    Lost(String),
}

impl SupervisedCommand<'_> {
    /// Runs the command until it has ended.
    pub(super) async fn run(
        &self,
        hold: Hold<'_>,
        signals: &mut Signals,
        reporter: &Reporter,
    ) -> CommandEnd {
        let mut environment = match environment(&self.context, hold) {
            Ok(environment) => environment,
            Err(error) => {
                reporter.error(&error.chain());
                return CommandEnd::NotStarted(Exit::Failed);
            }
        };
        environment.extend(self.slot.iter().map(|slot| ("TENURE_SLOT", slot.clone())));
        // Before the child starts: lines that are still queued would be mixed into its output.
        reporter.flush().await;
        // Events of an election are queued, and this process may have been stopped since the grant.
        if !hold.is_held() {
            return CommandEnd::Lost("it ended before the command was started".to_owned());
        }
        let child = match Child::start(self.command, &environment, hold).await {
            Ok(child) => child,
            Err(error) => {
                let exit = report_start_error(&error, self.command, reporter);
                return CommandEnd::NotStarted(exit);
            }
        };
        let mut supervisor = Supervisor {
            hold,
            child,
            signals,
            terminal: Terminal::open(),
            reporter,
            ttl: self.context.ttl,
            kill_after: self.kill_after,
            hard_end: self.hard_end,
            max_run: None,
            on_request: self.on_request,
            stop_pending: false,
            stop_requested: false,
        };
        let outcome = supervisor.run().await;
        let exit = match outcome {
            ChildOutcome::Exited(code) => Exit::Child(code),
            ChildOutcome::Killed { signal, by_ctrl_c: false } => Exit::Signal(signal),
            ChildOutcome::Killed { by_ctrl_c: true, .. } => Exit::Interrupted,
            ChildOutcome::Lost(reason) => return CommandEnd::Lost(reason),
            ChildOutcome::GuardianDied => {
                reporter.error("the guardian was killed; the command was killed with it");
                Exit::Failed
            }
        };
        CommandEnd::Ended { exit, stop_requested: supervisor.stop_requested }
    }
}

fn environment(
    context: &HoldContext<'_>,
    hold: Hold<'_>,
) -> tenure::Result<Vec<(&'static str, String)>> {
    let holder = match &context.identity.id {
        Some(id) => id.clone(),
        None => Identity::of_process()?.id.clone(),
    };
    let name = context.name.to_string();
    let store = context.client.store().to_string();
    let mut environment = vec![
        ("TENURE_NAME", name.clone()),
        ("TENURE_HOLDER", holder),
        ("TENURE_STORE", store.clone()),
        ("TENURE_TTL_MS", context.ttl.as_millis().to_string()),
    ];
    // A nested `run` recognises an enclosing hold by its token: a hold without a token is not listed.
    if let Some(token) = humanize::token(hold.token()) {
        environment.push(("TENURE_TOKEN", token.clone()));
        let mut holds: Vec<EnclosingHold> = hold
            .others()
            .filter_map(|guard| {
                let (name, token) =
                    (guard.key().to_string(), humanize::token(guard.fencing_token())?);
                Some(EnclosingHold { store: store.clone(), name, token })
            })
            .collect();
        holds.push(EnclosingHold { store, name, token });
        if holds.len() > 1 {
            let tokens: BTreeMap<&str, &str> =
                holds.iter().map(|hold| (&*hold.name, &*hold.token)).collect();
            environment.push((TOKENS_VARIABLE, serde_json::json!(tokens).to_string()));
        }
        environment.push((enclosing_hold::VARIABLE, EnclosingHold::child_variable(holds)));
    }
    environment.extend(hold.revision().map(|revision| (REVISION_VARIABLE, revision.to_string())));
    if let Hold::Lead(_) = hold {
        environment.push(("TENURE_ROLE", "leader".to_owned()));
    }
    Ok(environment)
}

/// Reports why a command could not be started. Returns the exit code.
pub(super) fn report_start_error(
    error: &StartError,
    command: &[OsString],
    reporter: &Reporter,
) -> Exit {
    let program = command.first().map(|program| program.to_string_lossy()).unwrap_or_default();
    let (message, exit) = match error {
        StartError::Guardian(error) => (
            format!("cannot start the guardian of {program}: {}", report::os_error_text(error)),
            Exit::Failed,
        ),
        StartError::Command(error) => {
            let exit = match error {
                Errno::ENOENT => Exit::NotFound,
                // No fault of the program: the system is out of processes, memory or descriptors.
                Errno::EAGAIN | Errno::ENOMEM | Errno::EMFILE | Errno::ENFILE => Exit::Failed,
                _ => Exit::CannotExecute,
            };
            let reason = report::os_error_text(&io::Error::from_raw_os_error(*error as i32));
            let hint =
                if program.starts_with('-') { "; options of tenure go before NAME" } else { "" };
            (format!("cannot run {program}: {reason}{hint}"), exit)
        }
    };
    reporter.error(&message);
    exit
}
