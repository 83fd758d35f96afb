//! Supervises the child while the lock is held: signals, terminal, and the end of the hold.

use std::future::pending;
use std::time::Duration;

use nix::sys::signal::Signal;
use tenure::Loss;
use tokio::time::{Instant, sleep, sleep_until};

use crate::child::Child;
use crate::guardian::protocol::{GuardianCommand, GuardianReport};
use crate::hold::{Hold, LostHold};
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
    /// Maximum time that the child may run, whatever the hold.
    pub(crate) max_run: Option<Duration>,
    pub(crate) on_request: HandoffAction,
    /// Ctrl-Z was forwarded to the child, which has not stopped since.
    pub(crate) stop_pending: bool,
    /// A signal that asks to stop was forwarded to the child.
    pub(crate) stop_requested: bool,
}

/// Progress of a supervised child.
struct Supervision {
    /// Set once the child is asked to stop: the reason, and the time at which it is killed.
    stopping: Option<(String, Instant)>,
    /// The requested hand-off was handled, or is to be ignored.
    handoff_requested: bool,
    /// The child has completed its job, which therefore has no deadline any longer.
    completed: bool,
    /// The job was cancelled: the hold has ended, and the child is stopped as at any other stop.
    cancelled: bool,
    /// Time at which the child has run for as long as it may.
    run_until: Option<Instant>,
}

/// Input of the supervisor.
enum SupervisorEvent {
    Report(Option<GuardianReport>),
    Signal(Signal),
    Ending,
    Lost(LostHold),
    KillDue,
    RunLimit,
    HandoffRequested,
    Completed,
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
        let ignored = self.on_request == HandoffAction::Ignore;
        let mut state = Supervision {
            stopping: None,
            handoff_requested: ignored,
            completed: false,
            cancelled: false,
            run_until: self.max_run.map(|limit| Instant::now() + limit),
        };
        loop {
            match self.next_event(&state).await {
                SupervisorEvent::Lost(LostHold { reason, urgent: false }) => {
                    state.cancelled = true;
                    if state.stopping.is_none() {
                        state.stopping = Some(self.stop(reason).await);
                    }
                }
                SupervisorEvent::RunLimit => {
                    let limit = humantime::format_duration(self.max_run.unwrap_or_default());
                    let reason = format!("it ran for longer than --max-run {limit}");
                    state.stopping = Some(self.stop(reason).await);
                }
                SupervisorEvent::Lost(LostHold { reason, .. }) => {
                    // The reason for which the child was stopped came first, and is the cause.
                    return ChildOutcome::Lost(state.stopping.map_or(reason, |(why, _)| why));
                }
                SupervisorEvent::KillDue => {
                    let why = state.stopping.map(|(why, _)| why);
                    return ChildOutcome::Lost(why.unwrap_or_default());
                }
                SupervisorEvent::Report(None) => return ChildOutcome::GuardianDied,
                SupervisorEvent::Report(Some(report)) => match (report, state.stopping.take()) {
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
                    (_, before) => state.stopping = before,
                },
                SupervisorEvent::Signal(signal) => {
                    match signal {
                        Signal::SIGTSTP => self.stop_pending = true,
                        Signal::SIGCONT => self.stop_pending = false,
                        _ => self.stop_requested |= signals::asks_to_stop(signal),
                    }
                    self.child.signal(signal).await;
                }
                SupervisorEvent::Ending => {
                    state.stopping = Some(self.stop(self.stop_reason()).await);
                }
                SupervisorEvent::Completed => {
                    state.completed = true;
                    // The guardian would kill the child at the last deadline that it knows.
                    self.child.send(GuardianCommand::KillAt(u64::MAX)).await;
                }
                SupervisorEvent::HandoffRequested => {
                    state.handoff_requested = true;
                    self.reporter.event(&Event::HandoffRequested);
                    match self.on_request {
                        HandoffAction::Signal(signal) => self.child.signal(signal).await,
                        HandoffAction::Stop if state.stopping.is_none() => {
                            let reason = "another participant waits to lead".to_owned();
                            state.stopping = Some(self.stop(reason).await);
                        }
                        HandoffAction::Ignore | HandoffAction::Report | HandoffAction::Stop => {}
                    }
                }
                // The guardian keeps the last deadline of a hold that has ended: until then the child may stop.
                SupervisorEvent::Tick if state.cancelled => {}
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

    async fn next_event(&mut self, state: &Supervision) -> SupervisorEvent {
        let hold = self.hold;
        let kill_at = state.stopping.as_ref().map(|(_, at)| *at);
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
        let limit = async {
            match (state.run_until, kill_at) {
                (Some(at), None) => sleep_until(at).await,
                _ => pending().await,
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
            lost = hold.lost(), if !state.cancelled => SupervisorEvent::Lost(lost),
            report = self.child.report() => SupervisorEvent::Report(report),
            () = due => SupervisorEvent::KillDue,
            () = ending => SupervisorEvent::Ending,
            () = limit => SupervisorEvent::RunLimit,
            signal = self.signals.next() => SupervisorEvent::Signal(signal),
            () = tick => SupervisorEvent::Tick,
            () = hold.completed(), if !state.completed => SupervisorEvent::Completed,
            () = hold.handoff_requested(), if !state.handoff_requested => {
                SupervisorEvent::HandoffRequested
            }
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
