//! `tenure once`: runs a command at most once per period across a fleet.

use std::ffi::OsString;
use std::os::unix::net::UnixStream;
use std::time::{Duration, SystemTime};

use clap::{ArgGroup, Args};
use nix::sys::signal::Signal;
use tenure::once::{OnceRequest, OnceRun};
use tenure::store::Identity;
use tenure::{Client, ErrorKind, Key, once};

use super::HoldContext;
use super::run::SupervisedCommand;
use crate::args::{self, IdentityArgs, Output, StoreUrl, duration, duration_or_zero};
use crate::exit::{self, Exit};
use crate::humanize;
use crate::report::{self, Event, Reporter};
use crate::signals::{self, Signals};
use crate::supervise::{ChildOutcome, HandoffAction};

#[derive(Args)]
#[command(after_help = exit::ONCE, group(ArgGroup::new("when").required(true).args(["per", "slot"])))]
pub(crate) struct Once {
    #[command(flatten)]
    pub(crate) store: StoreUrl,
    /// Run once in each period of this length; periods are counted from midnight UTC of 1 January 1970
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    per: Option<Duration>,
    /// Run once in the slot with this name, such as a date
    #[arg(long, value_name = "TEXT")]
    slot: Option<String>,
    /// Time that a named slot is remembered; a period's slot is remembered for two periods
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = duration, conflicts_with = "per")]
    keep: Duration,
    /// Allow another run in the same slot if the command fails or tenure is killed
    #[arg(long)]
    retry: bool,
    /// With --retry: time without a renewal after which another process may run the command
    #[arg(long, value_name = "DURATION", default_value = "15s", value_parser = duration)]
    ttl: Duration,
    /// Identity shown to other clients; host:pid:nonce by default
    #[arg(long, value_name = "ID")]
    id: Option<String>,
    /// Time from TERM to KILL when the hold ends; by default a fifth of the ttl, at most 5s
    #[arg(long, value_name = "DURATION", value_parser = duration_or_zero)]
    kill_after: Option<Duration>,
    #[command(flatten)]
    output: Output,
    /// The name of the task
    name: Key,
    /// The command to run, with its arguments; a `--` before it is optional. Its environment has the fencing token in
    /// `TENURE_TOKEN` and, on NATS, the revision of the record in `TENURE_REVISION`
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

pub(crate) fn run(arguments: Once) -> Exit {
    match super::listen_for_signals() {
        Ok(stream) => super::on_runtime(session(arguments, stream)),
        Err(error) => super::fail("cannot listen for signals", &error),
    }
}

async fn session(arguments: Once, stream: UnixStream) -> Exit {
    let reporter = Reporter::new(arguments.name.clone(), arguments.output);
    let exit = match Signals::new(stream) {
        Ok(signals) => begin(&arguments, signals, &reporter).await,
        Err(error) => {
            reporter.error(&format!("cannot listen for signals: {error}"));
            Exit::Failed
        }
    };
    reporter.flush().await;
    match exit {
        Exit::Interrupted => {
            signals::interrupt_own_group();
            Exit::Signal(Signal::SIGINT as i32)
        }
        exit => exit,
    }
}

async fn begin(arguments: &Once, mut signals: Signals, reporter: &Reporter) -> Exit {
    let begun = async {
        let client = arguments.store.connect().await?;
        reporter.print_creation_notice(&**client.store());
        let once = arguments.request(&client).begin().await?;
        Ok::<_, tenure::Error>((client, once))
    };
    let begun = tokio::select! {
        biased;
        begun = begun => begun,
        signal = stop_signal(&mut signals) => {
            reporter.event(&Event::Stopped { signal: Some(signal.as_str()), reason: None });
            return Exit::Signal(signal as i32);
        }
    };
    match begun {
        Ok((client, once::Once::Run(run))) => {
            let token = humanize::token(run.guard().fencing_token());
            reporter.event(&Event::Acquired { token, attempt: None });
            arguments.run(&client, run, &mut signals, reporter).await
        }
        Ok((_, once::Once::Ran(by))) => {
            arguments.report_skipped(by.as_ref(), reporter);
            Exit::Success
        }
        Err(error) => {
            reporter.error(&report::chain(&error));
            match error.kind() {
                ErrorKind::Contention => Exit::NotAcquired,
                _ => Exit::Failed,
            }
        }
    }
}

/// Resolves at the next signal that ends a wait.
async fn stop_signal(signals: &mut Signals) -> Signal {
    loop {
        let signal = signals.next().await;
        if let Signal::SIGINT | Signal::SIGTERM | Signal::SIGHUP | Signal::SIGQUIT = signal {
            return signal;
        }
    }
}

impl Once {
    fn request(&self, client: &Client) -> OnceRequest {
        let mut request = client
            .once(&self.name)
            .retry(self.retry)
            .ttl(self.ttl)
            .stop_grace(args::kill_after(self.kill_after, self.ttl));
        request = match (&self.slot, self.per) {
            (Some(slot), _) => request.slot(slot, self.keep),
            (None, per) => request.per(per.unwrap_or_default()),
        };
        match &self.id {
            Some(id) => request.id(id),
            None => request,
        }
    }

    async fn run(
        &self,
        client: &Client,
        run: OnceRun,
        signals: &mut Signals,
        reporter: &Reporter,
    ) -> Exit {
        let identity = IdentityArgs { id: self.id.clone(), note: None };
        let ttl = if self.retry { self.ttl } else { self.mark_lifetime() };
        let supervised = SupervisedCommand {
            context: HoldContext { client, name: &self.name, identity: &identity, ttl },
            command: &self.command,
            kill_after: args::kill_after(self.kill_after, ttl),
            hard_end: None,
            slot: Some(self.slot_text(run.slot())),
            on_request: HandoffAction::Ignore,
        };
        let ended = supervised.run(run.guard(), signals, reporter).await;
        let (exit, done) = match &ended {
            Ok(ChildOutcome::Exited(code)) => (Exit::Child(*code), *code == 0),
            Ok(ChildOutcome::Killed { signal, by_ctrl_c: false }) => (Exit::Signal(*signal), false),
            Ok(ChildOutcome::Killed { by_ctrl_c: true, .. }) => (Exit::Interrupted, false),
            Ok(ChildOutcome::Lost(reason)) => {
                reporter.error(&format!("lost {}: {reason}; the command was stopped", self.name));
                (Exit::Lost, false)
            }
            Ok(ChildOutcome::GuardianDied) => {
                reporter.error("the guardian was killed; the command was killed with it");
                (Exit::Failed, false)
            }
            Err(exit) => (*exit, false),
        };
        let settled = if done { run.done().await } else { run.failed().await };
        match settled {
            Ok(()) => {
                reporter.event(&Event::Released);
                exit
            }
            Err(_) if exit == Exit::Lost => exit,
            Err(error) => {
                let consequence = if self.retry {
                    "another process may run the command again in this slot"
                } else {
                    "the command was run"
                };
                reporter.error(&format!("{}; {consequence}", report::chain(&error)));
                if done { Exit::Failed } else { exit }
            }
        }
    }

    /// Time that the mark of a run is kept in the store.
    fn mark_lifetime(&self) -> Duration {
        self.per.map_or(self.keep, |per| per.saturating_mul(2))
    }

    /// The slot as printed: the time when it begins, or its name.
    fn slot_text(&self, slot: Option<once::Slot>) -> String {
        match slot {
            Some(slot) => {
                humantime::format_rfc3339(SystemTime::UNIX_EPOCH + slot.begins()).to_string()
            }
            None => self.slot.clone().unwrap_or_else(|| "of now".to_owned()),
        }
    }

    fn report_skipped(&self, by: Option<&Identity>, reporter: &Reporter) {
        let slot = self.slot_text(by.and_then(|by| once::Slot::parse(&by.note)));
        if self.output.json {
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
