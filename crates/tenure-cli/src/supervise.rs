//! Looks after the child while the lock is held: signals, terminal, and the end of the hold.

use std::future::pending;
use std::time::Duration;

use nix::sys::signal::Signal;
use tenure::Loss;
use tokio::time::{Instant, sleep, sleep_until};

use crate::child::Child;
use crate::hold::Hold;
use crate::link::{Order, Report};
use crate::report::{Event, Reporter};
use crate::signals::{self, Signals};
use crate::terminal::Terminal;

/// How the child ended.
#[derive(Debug)]
pub(crate) enum Ended {
    /// By itself.
    Exited(u8),
    /// Of a signal; `typed` where that was Ctrl-C, as far as anybody at the terminal can tell.
    Killed { signal: i32, typed: bool },
    /// We stopped it, with all its descendants, because the hold was over or about to be.
    Lost(String),
    /// Its guardian was killed, and we killed its group.
    Unguarded,
}

/// What to do when somebody waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnRequest {
    /// Nothing: followers of an election always wait.
    Ignore,
    /// Say so.
    Tell,
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
    pub(crate) on_request: OnRequest,
    /// Ctrl-Z came to us, was passed on, and the child has not stopped since.
    pub(crate) told_to_stop: bool,
}

/// What happens next.
enum News {
    Report(Option<Report>),
    Signal(Signal),
    Ending,
    Lost(String),
    KillDue,
    Wanted,
    Tick,
}

impl Supervisor<'_> {
    /// Until the child has ended. Of a child that was stopped for the sake of the hold, nothing is left then.
    pub(crate) async fn run(&mut self) -> Ended {
        if self.terminal.is_ours_alone()
            && let Some(group) = self.child.group()
        {
            self.terminal.lend(group);
        }
        let ended = self.attend().await;
        let typed = self.terminal.in_foreground();
        self.terminal.take_back();
        match ended {
            Ended::Lost(_) => {
                self.child.kill().await;
                self.child.dismiss().await;
            }
            Ended::Unguarded => self.child.kill_without_guardian().await,
            Ended::Exited(_) | Ended::Killed { .. } => self.child.dismiss().await,
        }
        match ended {
            Ended::Killed { signal, .. } if signal == Signal::SIGINT as i32 => {
                Ended::Killed { signal, typed }
            }
            ended => ended,
        }
    }

    async fn attend(&mut self) -> Ended {
        // Once the end of the hold is near: why, and when patience is over.
        let mut stopping: Option<(String, Instant)> = None;
        let mut wanted = self.on_request == OnRequest::Ignore;
        loop {
            match self.news(stopping.as_ref().map(|(_, at)| *at), wanted).await {
                News::Lost(reason) => return Ended::Lost(stopping.map_or(reason, |(why, _)| why)),
                News::KillDue => {
                    return Ended::Lost(stopping.map_or_else(String::new, |(why, _)| why));
                }
                News::Report(None) => return Ended::Unguarded,
                News::Report(Some(report)) => match (report, stopping.take()) {
                    (Report::Exited(_) | Report::Killed(_), Some((why, _))) => {
                        return Ended::Lost(why);
                    }
                    (Report::Exited(code), None) => return Ended::Exited(code),
                    (Report::Killed(signal), None) => {
                        return Ended::Killed { signal, typed: false };
                    }
                    (Report::Stopped(number), None) => self.stopped(number).await,
                    (_, before) => stopping = before,
                },
                News::Signal(signal) => {
                    match signal {
                        Signal::SIGTSTP => self.told_to_stop = true,
                        Signal::SIGCONT => self.told_to_stop = false,
                        _ => {}
                    }
                    self.child.signal(signal).await;
                }
                News::Ending => stopping = Some(self.stop(self.why_ending()).await),
                News::Wanted => {
                    wanted = true;
                    self.reporter.event(&Event::HandoffRequested);
                    match self.on_request {
                        OnRequest::Ignore | OnRequest::Tell => {}
                        OnRequest::Signal(signal) => self.child.signal(signal).await,
                        OnRequest::Stop if stopping.is_none() => {
                            stopping = Some(self.stop("another waits to lead".to_owned()).await);
                        }
                        OnRequest::Stop => {}
                    }
                }
                News::Tick => self.extend().await,
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

    async fn news(&mut self, kill_at: Option<Instant>, wanted: bool) -> News {
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
            reason = hold.lost() => News::Lost(reason),
            report = self.child.report() => News::Report(report),
            () = due => News::KillDue,
            () = ending => News::Ending,
            signal = self.signals.next() => News::Signal(signal),
            () = tick => News::Tick,
            () = hold.wanted(), if !wanted => News::Wanted,
        }
    }

    /// Tells the guardian when the hold ends, should we not be there to see it: frozen, say.
    async fn extend(&mut self) {
        if let Some(until) = self.hold.end() {
            self.child.order(Order::Until(until)).await;
        }
    }

    fn why_ending(&self) -> String {
        let near = self.hard_end.is_some_and(|end| {
            end.saturating_duration_since(Instant::now()) <= self.kill_after + self.ttl / 12
        });
        if near { Loss::MaxHold.to_string() } else { "no renewal was confirmed in time".to_owned() }
    }

    /// The child was stopped: by the terminal, because it is in the background there, or by somebody.
    async fn stopped(&mut self, number: i32) {
        let Ok(signal) = Signal::try_from(number) else { return };
        let touched = matches!(signal, Signal::SIGTTIN | Signal::SIGTTOU);
        // Continuing the child would undo a Ctrl-Z that came while it was stopped for touching the terminal.
        let told = std::mem::take(&mut self.told_to_stop);
        if touched && !told && self.lend() {
            return self.child.signal(Signal::SIGCONT).await;
        }
        let typed = signal == Signal::SIGTSTP;
        if !(touched || typed || self.terminal.is_lent()) {
            return;
        }
        let lent = self.terminal.is_lent();
        self.terminal.take_back();
        // With the child stopped we stop as well, for the shell to see. It goes on here when the shell wants it to.
        let _ = signals::succumb(Signal::SIGTSTP);
        if !self.hold.is_held() {
            return;
        }
        if lent || touched || self.terminal.is_ours_alone() {
            self.lend();
        }
        self.child.signal(Signal::SIGCONT).await;
    }

    fn lend(&mut self) -> bool {
        self.child.group().is_some_and(|group| self.terminal.lend(group))
    }
}
