//! Looks after the child while the lock is held: signals, terminal, and the end of the hold.

use std::future::pending;
use std::time::Duration;

use nix::sys::signal::Signal;
use tenure::Loss;
use tokio::time::{Instant, sleep, sleep_until};

use crate::child::Child;
use crate::hold::Hold;
use crate::guardian::protocol::{GuardianCommand, GuardianReport};
use crate::report::{Event, Reporter};
use crate::signals::{self, Signals};
use crate::terminal::Terminal;

/// How the child ended.
#[derive(Debug)]
pub(crate) enum ChildOutcome {
    /// By itself.
    Exited(u8),
    /// Of a signal; `typed` where that was Ctrl-C, as far as anybody at the terminal can tell.
    Killed { signal: i32, by_ctrl_c: bool },
    /// We stopped it, with all its descendants, because the hold was over or about to be.
    Lost(String),
    /// Its guardian was killed, and we killed its group.
    GuardianDied,
}

/// What to do when somebody waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HandoffAction {
    /// Nothing: followers of an election always wait.
    Ignore,
    /// Say so.
    Report,
    /// Say so, and send the child this signal: it finishes when it can.
    Signal(Signal),
    /// Say so, and stop the child, to hand over.
    Stop,
}

/// The child of a held lock.
pub(crate) struct Supervisor<'a> {
    pub(crate) hold: Hold<'a>,
    pub(crate) child: Child,
    pub(crate) signals: &'a mut Signals,
    pub(crate) terminal: Terminal,
    pub(crate) reporter: &'a Reporter,
    pub(crate) ttl: Duration,
    pub(crate) kill_after: Duration,
    /// When the hold ends however well renewals go.
    pub(crate) hard_end: Option<Instant>,
    pub(crate) on_request: HandoffAction,
    /// Ctrl-Z came to us, was passed on, and the child has not stopped since.
    pub(crate) stop_pending: bool,
}

/// What happens next.
enum SupervisorEvent {
    Report(Option<GuardianReport>),
    Signal(Signal),
    Ending,
    Lost(String),
    KillDue,
    HandoffRequested,
    Tick,
}

impl Supervisor<'_> {
    /// Until the child has ended. Of a child that was stopped for the sake of the hold, nothing is left then.
    pub(crate) async fn run(&mut self) -> ChildOutcome {
        if self.terminal.is_interactive()
            && let Some(group) = self.child.group()
        {
            self.terminal.give_foreground_to(group);
        }
        let ended = self.supervise().await;
        let typed = self.terminal.in_foreground();
        self.terminal.reclaim_foreground();
        match ended {
            ChildOutcome::Lost(_) => {
                self.child.kill().await;
                self.child.stop_guardian().await;
            }
            ChildOutcome::GuardianDied => self.child.kill_without_guardian().await,
            ChildOutcome::Exited(_) | ChildOutcome::Killed { .. } => {
                self.child.stop_guardian().await
            }
        }
        match ended {
            ChildOutcome::Killed { signal, .. } if signal == Signal::SIGINT as i32 => {
                ChildOutcome::Killed { signal, by_ctrl_c: typed }
            }
            ended => ended,
        }
    }

    async fn supervise(&mut self) -> ChildOutcome {
        // Once the end of the hold is near: why, and when patience is over.
        let mut stopping: Option<(String, Instant)> = None;
        let mut handoff_requested = self.on_request == HandoffAction::Ignore;
        loop {
            match self.next_event(stopping.as_ref().map(|(_, at)| *at), handoff_requested).await {
                SupervisorEvent::Lost(reason) => {
                    return ChildOutcome::Lost(stopping.map_or(reason, |(why, _)| why));
                }
                SupervisorEvent::KillDue => {
                    return ChildOutcome::Lost(stopping.map_or_else(String::new, |(why, _)| why));
                }
                SupervisorEvent::Report(None) => return ChildOutcome::GuardianDied,
                SupervisorEvent::Report(Some(report)) => match (report, stopping.take()) {
                    (GuardianReport::Exited(_) | GuardianReport::Killed(_), Some((why, _))) => {
                        return ChildOutcome::Lost(why);
                    }
                    (GuardianReport::Exited(code), None) => return ChildOutcome::Exited(code),
                    (GuardianReport::Killed(signal), None) => {
                        return ChildOutcome::Killed { signal, by_ctrl_c: false };
                    }
                    (GuardianReport::Stopped(number), None) => self.child_stopped(number).await,
                    (_, before) => stopping = before,
                },
                SupervisorEvent::Signal(signal) => {
                    match signal {
                        Signal::SIGTSTP => self.stop_pending = true,
                        Signal::SIGCONT => self.stop_pending = false,
                        _ => {}
                    }
                    self.child.signal(signal).await;
                }
                SupervisorEvent::Ending => stopping = Some(self.stop(self.stop_reason()).await),
                SupervisorEvent::HandoffRequested => {
                    handoff_requested = true;
                    self.reporter.event(&Event::HandoffRequested);
                    match self.on_request {
                        HandoffAction::Signal(signal) => self.child.signal(signal).await,
                        HandoffAction::Stop if stopping.is_none() => {
                            stopping = Some(self.stop("another waits to lead".to_owned()).await);
                        }
                        HandoffAction::Ignore | HandoffAction::Report | HandoffAction::Stop => {}
                    }
                }
                SupervisorEvent::Tick => self.send_deadline().await,
            }
        }
    }

    /// Asks the child to stop; why, and until when it may take.
    async fn stop(&mut self, why: String) -> (String, Instant) {
        self.child.signal(Signal::SIGTERM).await;
        // One that is stopped could not see it.
        self.child.signal(Signal::SIGCONT).await;
        (why, Instant::now() + self.kill_after)
    }

    async fn next_event(
        &mut self,
        kill_at: Option<Instant>,
        handoff_requested: bool,
    ) -> SupervisorEvent {
        let hold = self.hold;
        let ending = async {
            match kill_at {
                None => hold.ending().await,
                Some(_) => pending().await,
            }
        };
        let due = async {
            match kill_at {
                Some(at) => sleep_until(at).await,
                None => pending().await,
            }
        };
        let tick = async {
            match hold.remaining() {
                Duration::MAX => pending().await,
                _ => sleep(self.ttl / 12).await,
            }
        };
        tokio::select! {
            biased;
            reason = hold.lost() => SupervisorEvent::Lost(reason),
            report = self.child.report() => SupervisorEvent::Report(report),
            () = due => SupervisorEvent::KillDue,
            () = ending => SupervisorEvent::Ending,
            signal = self.signals.next() => SupervisorEvent::Signal(signal),
            () = tick => SupervisorEvent::Tick,
            () = hold.handoff_requested(), if !handoff_requested => SupervisorEvent::HandoffRequested,
        }
    }

    /// Tells the guardian when the hold ends, should we not be there to see it: frozen, say.
    async fn send_deadline(&mut self) {
        if let Some(until) = self.hold.deadline_nanos() {
            self.child.send(GuardianCommand::KillAt(until)).await;
        }
    }

    fn stop_reason(&self) -> String {
        let near = self.hard_end.is_some_and(|end| {
            end.saturating_duration_since(Instant::now()) <= self.kill_after + self.ttl / 12
        });
        if near { Loss::MaxHold.to_string() } else { "no renewal was confirmed in time".to_owned() }
    }

    /// The child was stopped: by the terminal, because it is in the background there, or by somebody.
    async fn child_stopped(&mut self, number: i32) {
        let Ok(signal) = Signal::try_from(number) else { return };
        let touched = matches!(signal, Signal::SIGTTIN | Signal::SIGTTOU);
        // Continuing the child would undo a Ctrl-Z that came while it was stopped for touching the terminal.
        let told = std::mem::take(&mut self.stop_pending);
        if touched && !told && self.give_terminal_to_child() {
            return self.child.signal(Signal::SIGCONT).await;
        }
        let typed = signal == Signal::SIGTSTP;
        if !(touched || typed || self.terminal.child_has_foreground()) {
            return;
        }
        let lent = self.terminal.child_has_foreground();
        self.terminal.reclaim_foreground();
        // With the child stopped we stop as well, for the shell to see. It goes on here when the shell wants it to.
        let _ = signals::raise_with_default_action(Signal::SIGTSTP);
        if !self.hold.is_held() {
            return;
        }
        if lent || touched || self.terminal.is_interactive() {
            self.give_terminal_to_child();
        }
        self.child.signal(Signal::SIGCONT).await;
    }

    fn give_terminal_to_child(&mut self) -> bool {
        self.child.group().is_some_and(|group| self.terminal.give_foreground_to(group))
    }
}
