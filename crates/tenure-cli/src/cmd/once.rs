//! `tenure once`: runs a command at most once per period across a fleet.

use std::ffi::OsString;
use std::time::{Duration, SystemTime};

use clap::Args;
use tenure::once::OnceRun;
use tenure::store::Identity;
use tenure::{Client, ErrorKind, Key, once};

use super::supervised_command::{CommandEnd, HoldContext, SupervisedCommand};
use super::{request, session};
use crate::args::hold::{IdentityArgs, kill_after};
use crate::args::once::OnceArgs;
use crate::args::output::Output;
use crate::args::store::StoreUrl;
use crate::exit::{self, Exit};
use crate::hold::Hold;
use crate::humanize;
use crate::report::{Event, Reporter};
use crate::signals::Signals;
use crate::supervise::HandoffAction;

#[derive(Args)]
#[command(after_help = exit::ONCE)]
pub(crate) struct Once {
    #[command(flatten)]
    pub(crate) store: StoreUrl,
    #[command(flatten)]
    schedule: OnceArgs,
    #[command(flatten)]
    output: Output,
    /// The name of the task
    #[arg(allow_negative_numbers = true)]
    name: Key,
    /// The command to run, with its arguments; a `--` before it is optional. Its environment has the fencing token in
    /// `TENURE_TOKEN` and, on NATS, the revision of the record in `TENURE_REVISION`
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

/// Time limit for the release of a claim that was abandoned.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(2);

pub(crate) fn run(arguments: &Once) -> Exit {
    let reporter = |events| Reporter::new(arguments.name.clone(), arguments.output, events);
    session::run(arguments.output, reporter, None, async |session| {
        begin(arguments, session.signals, &session.reporter).await
    })
}

async fn begin(arguments: &Once, mut signals: Signals, reporter: &Reporter) -> Exit {
    let opening = session::open_store(arguments.store.connect(), reporter);
    let client = match session::unless_stopped(opening, &mut signals, reporter).await {
        Ok(Ok(client)) => client,
        Ok(Err(exit)) => return exit,
        Err(signal) => return Exit::Signal(signal as i32),
    };
    let claiming = request::once(&arguments.schedule, &client, &arguments.name).begin();
    let begun = session::unless_stopped(claiming, &mut signals, reporter).await;
    if !matches!(begun, Ok(Ok(_))) {
        // A claim whose answer was not awaited, or did not come, may have marked the slot as run. It is released in the
        // background: otherwise no host would run the slot.
        let _ = tokio::time::timeout(LEAVE_TIMEOUT, client.idle()).await;
    }
    let begun = match begun {
        Ok(begun) => begun,
        Err(signal) => return Exit::Signal(signal as i32),
    };
    match begun {
        Ok(once::Once::Run(run)) => {
            let token = humanize::token(run.guard().fencing_token());
            reporter.event(&Event::Acquired { token, attempt: None });
            arguments.run(&client, run, &mut signals, reporter).await
        }
        Ok(once::Once::Ran(by)) => {
            arguments.report_skipped(by.as_ref(), reporter);
            Exit::Success
        }
        Err(error) => {
            reporter.error(&error.chain());
            match error.kind() {
                ErrorKind::Contention => Exit::NotAcquired,
                _ => Exit::Failed,
            }
        }
    }
}

impl Once {
    async fn run(
        &self,
        client: &Client,
        run: OnceRun,
        signals: &mut Signals,
        reporter: &Reporter,
    ) -> Exit {
        let identity = IdentityArgs { id: self.schedule.id.clone(), note: None };
        let ttl = self.schedule.hold_ttl();
        let supervised = SupervisedCommand {
            context: HoldContext { client, name: &self.name, identity: &identity, ttl },
            command: &self.command,
            kill_after: kill_after(self.schedule.kill_after, ttl),
            hard_end: None,
            slot: Some(self.slot_text(run.slot())),
            on_request: HandoffAction::Ignore,
        };
        let ended = supervised.run(Hold::Lock(run.guard()), signals, reporter).await;
        let exit = match ended {
            CommandEnd::NotStarted(exit) | CommandEnd::Ended { exit, .. } => exit,
            CommandEnd::Lost(reason) => {
                reporter.error(&format!("lost {}: {reason}; the command was stopped", self.name));
                Exit::Lost
            }
        };
        let done = exit == Exit::Child(0);
        let settled = if done { run.done().await } else { run.failed().await };
        match settled {
            Ok(()) => {
                reporter.event(&Event::Released);
                exit
            }
            Err(_) if exit == Exit::Lost => exit,
            Err(error) => {
                let consequence = if self.schedule.retry {
                    "another process may run the command again in this slot"
                } else {
                    "the command was run"
                };
                reporter.error(&format!("{}; {consequence}", error.chain()));
                if done { Exit::Failed } else { exit }
            }
        }
    }

    /// The slot as printed: the time when it begins, or its name.
    fn slot_text(&self, slot: Option<once::Slot>) -> String {
        match slot {
            Some(slot) => {
                humantime::format_rfc3339(SystemTime::UNIX_EPOCH + slot.begins()).to_string()
            }
            None => self.schedule.slot.clone().unwrap_or_else(|| "of now".to_owned()),
        }
    }

    fn report_skipped(&self, by: Option<&Identity>, reporter: &Reporter) {
        let slot = self.slot_text(by.and_then(|by| once::Slot::parse(&by.note)));
        if self.output.has_events() {
            reporter.event(&Event::Skipped { holder: by.map(|by| by.id.clone()), slot });
        } else if !self.output.quiet {
            let mut by = by.cloned();
            if let Some(by) = &mut by {
                by.note.clear();
            }
            let by = humanize::identity(by.as_ref());
            reporter.error(&format!(
                "{} was already started in slot {slot}, by {by}; skipped",
                self.name
            ));
        }
    }
}
