//! Supervises the child while the lock is held: signals, terminal, and the end of the hold.

use std::future::pending;
use std::time::Duration;

use nix::sys::signal::Signal;
use tenure::Loss;
use tokio::time::{Instant, sleep, sleep_until};

use crate::child::Child;
use crate::guardian::protocol::{GuardianCommand, GuardianReport};
use crate::hold::Hold;
use crate::report::{Event, Reporter};
use crate::signals::{self, Signals};
use crate::terminal::Terminal;

/// End of the child.
#[derive(Debug)]
pub(crate) enum ChildOutcome {
    /// It exited by itself.
    Exited(u8),
    /// It died of a signal; `by_ctrl_c` if that was INT while this job was in the foreground of the terminal.
    Killed { signal: i32, by_ctrl_c: bool },
    /// It was stopped, with all its descendants, because the hold had ended or was about to end.
    Lost(String),
    /// Its guardian was killed, and it was killed in turn.
    GuardianDied,
}

/// Reaction to a requested hand-off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HandoffAction {
    /// None: followers of an election always wait.
    Ignore,
    /// Report it.
    Report,
    /// Report it, and send this signal to the child, which finishes when it can.
    Signal(Signal),
    /// Report it, and stop the child, to release the hold.
    Stop,
}

/// Supervisor of a child that runs under a hold.
pub(crate) struct Supervisor<'a> {
    pub(crate) hold: Hold<'a>,
    pub(crate) child: Child,
    pub(crate) signals: &'a mut Signals,
    pub(crate) terminal: Terminal,
    pub(crate) reporter: &'a Reporter,
    pub(crate) ttl: Duration,
    pub(crate) kill_after: Duration,
    /// Time at which the hold ends even if every renewal succeeds.
    pub(crate) hard_end: Option<Instant>,
    pub(crate) on_request: HandoffAction,
    /// Ctrl-Z was forwarded to the child, which has not stopped since.
    pub(crate) stop_pending: bool,
    /// A signal that asks to stop was forwarded to the child.
    pub(crate) stop_requested: bool,
}

/// Input of the supervisor.
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
    /// Runs until the child has ended. If the child was stopped because of the hold, none of its descendants is left.
    pub(crate) async fn run(&mut self) -> ChildOutcome {
        if self.terminal.is_interactive()
            && let Some(group) = self.child.group()
        {
            self.terminal.give_foreground_to(group);
        }
        let ended = self.supervise().await;
        // Read before the foreground is taken back, which forgets that the child had it.
        let foreground = self.terminal.in_foreground();
        self.terminal.reclaim_foreground();
        // The caller releases the hold as soon as this returns, and the next holder may start. After a loss no
        // descendant may be left by then; `kill` waits for that. After a normal exit, daemons that the child started
        // may stay.
        match ended {
            ChildOutcome::Lost(_) => {
                self.child.kill().await;
                self.child.stop_guardian().await;
            }
            ChildOutcome::GuardianDied => self.child.kill_without_guardian().await,
            ChildOutcome::Exited(_) | ChildOutcome::Killed { .. } => {
                self.child.stop_guardian().await;
            }
        }
        match ended {
            ChildOutcome::Killed { signal, .. } if signal == Signal::SIGINT as i32 => {
                ChildOutcome::Killed { signal, by_ctrl_c: foreground }
            }
            ended => ended,
        }
    }

    async fn supervise(&mut self) -> ChildOutcome {
        // Set once the child is asked to stop: the reason, and the time at which it is killed.
        let mut stopping: Option<(String, Instant)> = None;
        let mut handoff_requested = self.on_request == HandoffAction::Ignore;
        loop {
            match self.next_event(stopping.as_ref().map(|(_, at)| *at), handoff_requested).await {
                SupervisorEvent::Lost(reason) => {
                    // The reason for which the child was stopped came first, and is the cause.
                    return ChildOutcome::Lost(stopping.map_or(reason, |(why, _)| why));
                }
                SupervisorEvent::KillDue => {
                    return ChildOutcome::Lost(stopping.map_or_else(String::new, |(why, _)| why));
                }
                SupervisorEvent::Report(None) => return ChildOutcome::GuardianDied,
                SupervisorEvent::Report(Some(report)) => match (report, stopping.take()) {
                    // Whatever its exit code: the child was stopped before it was done. Its descendants may still run,
                    // and `Lost` has them killed before the hold ends.
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
                        _ => self.stop_requested |= signals::asks_to_stop(signal),
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
                            let reason = "another participant waits to lead".to_owned();
                            stopping = Some(self.stop(reason).await);
                        }
                        HandoffAction::Ignore | HandoffAction::Report | HandoffAction::Stop => {}
                    }
                }
                SupervisorEvent::Tick => self.send_deadline().await,
            }
        }
    }

    /// Sends TERM to the child. Returns the reason, and the time at which it is killed.
    async fn stop(&mut self, why: String) -> (String, Instant) {
        self.child.signal(Signal::SIGTERM).await;
        // A suspended child receives TERM only when it is continued. In this order it does not run in between.
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
        // The order is by urgency. A lost hold comes first: another holder may start at any moment, and the child must
        // not run for the time that it takes to handle a signal or a report. The report of its end comes before the
        // deadlines: a child that has ended in time needs no KILL.
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

    /// Sends the deadline of the hold to the guardian, which kills the child if this process is frozen or stuck by
    /// then.
    async fn send_deadline(&mut self) {
        // While the hold lasts, its deadline only moves later. So a deadline that reaches the guardian late, or not at
        // all, makes it kill too early, never too late.
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

    /// Handles a suspended child: the terminal suspended it because it used the terminal from the background, the user
    /// typed Ctrl-Z, or another process sent the signal.
    async fn child_stopped(&mut self, number: i32) {
        let Ok(signal) = Signal::try_from(number) else { return };
        let used_terminal = matches!(signal, Signal::SIGTTIN | Signal::SIGTTOU);
        // If Ctrl-Z was forwarded as well, the child is not continued here: SIGCONT would discard the pending Ctrl-Z.
        let stop_pending = std::mem::take(&mut self.stop_pending);
        if used_terminal && !stop_pending && self.give_terminal_to_child() {
            return self.child.signal(Signal::SIGCONT).await;
        }
        let typed = signal == Signal::SIGTSTP;
        if !(used_terminal || typed || self.terminal.child_has_foreground()) {
            return;
        }
        let had_foreground = self.terminal.child_has_foreground();
        self.terminal.reclaim_foreground();
        // This process suspends itself with its child, so that the shell sees a suspended job. It continues after this
        // line when the shell continues it. Meanwhile the hold is not renewed: the guardian kills the child at the
        // deadline.
        let _ = signals::raise_with_default_action(Signal::SIGTSTP);
        // The hold may have expired in the meantime. Then the child is not continued: the event loop stops it as lost.
        if !self.hold.is_held() {
            return;
        }
        if had_foreground || used_terminal || self.terminal.is_interactive() {
            self.give_terminal_to_child();
        }
        self.child.signal(Signal::SIGCONT).await;
    }

    fn give_terminal_to_child(&mut self) -> bool {
        self.child.group().is_some_and(|group| self.terminal.give_foreground_to(group))
    }
}
