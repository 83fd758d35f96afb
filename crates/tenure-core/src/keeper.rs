//! The keeper: when to renew a hold, when to look for a waiter, and when the hold is lost.
//!
//! One keeper per hold. It is told what the store answered and what the user wants, and says what to ask of the store
//! next. At most one request is under way at a time; while one is, the keeper only *tells* ([`Command::Lost`],
//! [`Command::HandOff`]) and never asks for another.

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use crate::Time;
use crate::lease::Lease;

/// What happened to a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KeeperInput {
    /// The store renewed the hold.
    Renewed {
        /// Somebody waits for it.
        handoff_requested: bool,
    },
    /// No clear answer to a renewal: it may or may not have landed.
    RenewFailed,
    /// The store answered a look for waiters.
    HandoffChecked {
        /// Somebody waits.
        handoff_requested: bool,
    },
    /// No clear answer to a look for waiters.
    HandoffCheckFailed,
    /// The store says that the hold is no longer ours.
    Refused,
    /// The connection that the hold lives on broke, or the store pushed the news of its end.
    Broken(Loss),
    /// The store pushed the news that somebody waits.
    HandoffRequested,
    /// The user lets go.
    Release,
    /// The user leaves the hold to its ttl.
    Detach,
    /// The store released the hold.
    Released,
    /// No clear answer to a release.
    ReleaseFailed,
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KeeperCommand {
    /// Renew the hold; give up on the request after `limit`.
    Renew {
        /// The longest that the request may take.
        limit: Duration,
    },
    /// Ask the store whether somebody waits.
    CheckHandoff {
        /// The longest that the request may take.
        limit: Duration,
    },
    /// Release the hold, if it is still ours.
    Release {
        /// The longest that the request may take.
        limit: Duration,
    },
    /// Tell the user that the hold is lost. Nothing is asked of the store by this.
    Lost(Loss),
    /// Tell the user, once, that somebody waits.
    HandoffRequested,
    /// The keeper has ended; nothing follows.
    Done(HoldEnd),
}

/// Why a hold ended against the holder's will.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Loss {
    /// The lease ended before a renewal was confirmed.
    Expired,
    /// The store says that another has it, or that it is gone.
    Taken,
    /// An operator broke it by hand.
    Evicted,
    /// The connection that it lived on ended.
    Disconnected,
    /// The longest hold that the user allowed has passed.
    MaxHold,
    /// The store's clock jumped: its lease can no longer be counted.
    ClockJump,
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Expired => "the lease ended before a renewal was confirmed",
            Self::Taken => "the store says that it is no longer ours",
            Self::Evicted => "an operator broke it",
            Self::Disconnected => "the connection that it lived on ended",
            Self::MaxHold => "it was held for as long as max_hold allows",
            Self::ClockJump => "the clock of the store jumped",
        })
    }
}

/// How the keeping ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HoldEnd {
    /// The hold was released while it was ours.
    Released,
    /// The hold was lost before it could be released.
    Lost(Loss),
    /// The hold was left to its ttl.
    Detached,
    /// No clear answer to the release: the store may keep the hold until then.
    Unknown {
        /// When the store has let go at the latest.
        until: Time,
    },
}

/// What the keeper starts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Granted {
    /// When the request that was granted went out.
    pub sent: Time,
    /// Until when the hold is valid; [`Time::MAX`] where the store keeps it without a lease.
    pub deadline: Time,
    /// Somebody waits already.
    pub handoff_requested: bool,
}

/// Keeps one hold.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Keeper {
    lease: Lease,
    leased: bool,
    deadline: Time,
    hard_end: Time,
    /// When the last request that may have extended the hold at the store went out.
    last_sent: Time,
    renew_at: Time,
    handoff_check_interval: Option<Duration>,
    handoff_check_at: Time,
    request: InFlightRequest,
    goal: Goal,
    lost: Option<Loss>,
    handoff_notified: bool,
    release_at: Time,
    /// When to stop asking for the release: the store has let go by itself.
    release_until: Time,
    /// A release had no clear answer: a refusal after it means that it had landed.
    release_unclear: bool,
    commands: VecDeque<KeeperCommand>,
}

/// The request under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum InFlightRequest {
    None,
    Renew { sent: Time },
    CheckHandoff,
    Release,
}

/// What the keeper works towards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Goal {
    Keep,
    Release,
    Detach,
    Ended,
}

impl Keeper {
    /// Starts to keep a hold. `look_every` is how often to ask for waiters on a store that cannot push that news.
    pub fn new(
        lease: Lease,
        granted: Granted,
        handoff_check_interval: Option<Duration>,
        now: Time,
    ) -> Self {
        let hard_end = lease.hard_end(now);
        let mut keeper = Self {
            lease,
            leased: granted.deadline != Time::MAX,
            deadline: granted.deadline.min(hard_end),
            hard_end,
            last_sent: granted.sent,
            renew_at: lease.renew_at(granted.sent),
            handoff_check_interval,
            handoff_check_at: handoff_check_interval.map_or(Time::MAX, |every| now + every),
            request: InFlightRequest::None,
            goal: Goal::Keep,
            lost: None,
            handoff_notified: false,
            release_at: Time::MAX,
            release_until: Time::MAX,
            release_unclear: false,
            commands: VecDeque::new(),
        };
        if granted.handoff_requested {
            keeper.notify_handoff();
        }
        keeper.act(now);
        keeper
    }

    /// Until when the hold is valid. A hold is valid while this is in the future and nothing was lost or let go.
    pub fn deadline(&self) -> Time {
        self.deadline
    }

    /// What it means that the deadline passes.
    pub fn loss_at_deadline(&self) -> Loss {
        if self.deadline < self.hard_end { Loss::Expired } else { Loss::MaxHold }
    }

    /// Why the hold was lost, if it was.
    pub fn lost(&self) -> Option<Loss> {
        self.lost
    }

    /// Takes note of what happened.
    pub fn handle(&mut self, input: KeeperInput, now: Time) {
        // What was released in time was not lost, however late the word of it comes.
        if input != KeeperInput::Released {
            self.expire(now);
        }
        match input {
            KeeperInput::Renewed { handoff_requested } => self.renewed(handoff_requested, now),
            KeeperInput::RenewFailed => self.renew_failed(now),
            KeeperInput::HandoffChecked { handoff_requested } => {
                self.handoff_checked(handoff_requested, now)
            }
            KeeperInput::HandoffCheckFailed => self.handoff_checked(false, now),
            KeeperInput::Refused => self.refused(),
            KeeperInput::Broken(loss) => self.broken(loss),
            KeeperInput::HandoffRequested => self.notify_handoff(),
            KeeperInput::Release => self.stop_keeping(Goal::Release, now),
            KeeperInput::Detach => self.stop_keeping(Goal::Detach, now),
            KeeperInput::Released => self.end(self.ended(HoldEnd::Released)),
            KeeperInput::ReleaseFailed => self.release_failed(now),
        }
        self.act(now);
    }

    /// Takes note of the time.
    pub fn handle_timeout(&mut self, now: Time) {
        self.expire(now);
        self.act(now);
    }

    /// When [`handle_timeout`](Self::handle_timeout) is due.
    pub fn poll_timeout(&self) -> Option<Time> {
        let idle = self.request == InFlightRequest::None;
        let next = match self.goal {
            Goal::Keep => {
                let end = if self.watches_deadline() { self.deadline } else { Time::MAX };
                let ask = if idle { self.renew_at.min(self.handoff_check_at) } else { Time::MAX };
                end.min(ask)
            }
            Goal::Release if idle => self.release_at,
            Goal::Release | Goal::Detach | Goal::Ended => Time::MAX,
        };
        (next != Time::MAX).then_some(next)
    }

    /// What to do next.
    pub fn poll_command(&mut self) -> Option<KeeperCommand> {
        self.commands.pop_front()
    }

    /// The deadline is a timer of its own: a request that hangs must not hold up the news (contract 2).
    fn watches_deadline(&self) -> bool {
        self.lease.rules().lost_by_timer || self.request == InFlightRequest::None
    }

    fn expire(&mut self, now: Time) {
        if self.goal == Goal::Keep && now >= self.deadline && self.watches_deadline() {
            self.lose(self.loss_at_deadline());
            // What the store may still have is given back: a renewal under way may yet land.
            self.stop_keeping(Goal::Release, now);
        }
    }

    fn renewed(&mut self, handoff_requested: bool, now: Time) {
        let InFlightRequest::Renew { sent } =
            std::mem::replace(&mut self.request, InFlightRequest::None)
        else {
            return;
        };
        if handoff_requested {
            self.notify_handoff();
        }
        if self.goal != Goal::Keep {
            return;
        }
        if self.leased {
            self.deadline = self.lease.deadline(sent, now).min(self.hard_end);
        }
        self.renew_at = self.lease.renew_at(sent);
        self.expire(now);
    }

    fn renew_failed(&mut self, now: Time) {
        if !self.lease.rules().only_clear_answers_extend {
            return self.renewed(false, now);
        }
        if matches!(self.request, InFlightRequest::Renew { .. }) {
            self.request = InFlightRequest::None;
            self.renew_at = now + self.lease.retry_pause();
        }
    }

    fn handoff_checked(&mut self, handoff_requested: bool, now: Time) {
        if self.request == InFlightRequest::CheckHandoff {
            self.request = InFlightRequest::None;
        }
        self.handoff_check_at = self.handoff_check_interval.map_or(Time::MAX, |every| now + every);
        if handoff_requested {
            self.notify_handoff();
        }
    }

    /// The store's word is final, to whatever request it was the answer.
    fn refused(&mut self) {
        self.lose(Loss::Taken);
        self.gone(Loss::Taken);
    }

    /// The store has let go. Where that may be our own release, which landed unheard, nothing was lost.
    fn gone(&mut self, loss: Loss) {
        let end = if self.release_unclear { HoldEnd::Released } else { HoldEnd::Lost(loss) };
        self.end(self.ended(end));
    }

    fn broken(&mut self, loss: Loss) {
        if loss == Loss::Disconnected && !self.lease.rules().lost_on_broken_connection {
            return;
        }
        self.lose(loss);
        self.gone(loss);
    }

    fn release_failed(&mut self, now: Time) {
        self.request = InFlightRequest::None;
        self.release_unclear = true;
        self.release_at = now + self.lease.retry_pause();
        if self.release_at >= self.release_until {
            self.end(self.ended(HoldEnd::Unknown { until: self.release_until }));
        }
    }

    /// A hold that was lost ended so, whatever became of giving it back.
    fn ended(&self, otherwise: HoldEnd) -> HoldEnd {
        self.lost.map_or(otherwise, HoldEnd::Lost)
    }

    fn lose(&mut self, loss: Loss) {
        if self.lost.is_none() && self.goal == Goal::Keep {
            self.lost = Some(loss);
            self.commands.push_back(KeeperCommand::Lost(loss));
        }
    }

    fn notify_handoff(&mut self) {
        if !self.handoff_notified && self.goal == Goal::Keep {
            self.handoff_notified = true;
            self.handoff_check_at = Time::MAX;
            self.handoff_check_interval = None;
            self.commands.push_back(KeeperCommand::HandoffRequested);
        }
    }

    fn stop_keeping(&mut self, goal: Goal, now: Time) {
        if self.goal == Goal::Keep {
            self.goal = goal;
            self.release_at = now;
            let alive = if self.leased { self.last_sent } else { now };
            self.release_until = self.lease.settled_at(alive);
        }
    }

    fn end(&mut self, end: HoldEnd) {
        if self.goal != Goal::Ended {
            self.goal = Goal::Ended;
            self.request = InFlightRequest::None;
            self.commands.push_back(KeeperCommand::Done(end));
        }
    }

    /// Asks for the next thing that is due. A release waits for a renewal under way: released at an older version the
    /// renewal would bring the hold back.
    fn act(&mut self, now: Time) {
        if self.request != InFlightRequest::None {
            return;
        }
        match self.goal {
            Goal::Keep if now >= self.renew_at => {
                let limit = self.lease.request_limit().min(self.deadline.since(now));
                self.request = InFlightRequest::Renew { sent: now };
                self.last_sent = now;
                self.commands.push_back(KeeperCommand::Renew { limit });
            }
            Goal::Keep if now >= self.handoff_check_at => {
                self.request = InFlightRequest::CheckHandoff;
                self.commands.push_back(KeeperCommand::CheckHandoff {
                    limit: self.lease.handoff_check_limit(),
                });
            }
            Goal::Release if now >= self.release_at => {
                self.request = InFlightRequest::Release;
                self.commands
                    .push_back(KeeperCommand::Release { limit: self.lease.request_limit() });
            }
            Goal::Detach => self.end(HoldEnd::Detached),
            Goal::Keep | Goal::Release | Goal::Ended => {}
        }
    }
}

#[cfg(test)]
mod tests;
