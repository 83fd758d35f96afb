//! The keeper: renews a hold, checks for waiters, and detects the loss of the hold.
//!
//! One keeper per hold. Its inputs are the store's answers and the user's requests; its commands are requests to the
//! store and notifications to the user. At most one request is in flight. Until it is answered, the keeper may notify
//! the user ([`KeeperCommand::Lost`], [`KeeperCommand::HandoffRequested`]), but it issues no other request.

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use crate::lease::Lease;
use crate::{Machine, Time};

/// Event of a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KeeperInput {
    /// The store renewed the hold.
    Renewed {
        /// A waiter has asked for the lock.
        handoff_requested: bool,
    },
    /// No clear answer to a renewal: it may or may not have taken effect.
    RenewFailed,
    /// The store answered a check for waiters.
    HandoffChecked {
        /// A waiter has asked for the lock.
        handoff_requested: bool,
    },
    /// No clear answer to a check for waiters.
    HandoffCheckFailed,
    /// The store reports that the hold is no longer ours.
    Refused,
    /// The hold ended without a request of ours: its connection broke, or the store pushed its end.
    HoldEnded(Loss),
    /// The store pushed that a waiter has asked for the lock.
    HandoffRequested,
    /// The user releases the hold.
    Release,
    /// The user detaches the hold: it stays until its ttl ends.
    Detach,
    /// The store released the hold.
    Released,
    /// No clear answer to a release.
    ReleaseFailed,
}

/// Command to the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KeeperCommand {
    /// Renew the hold; time the request out after `limit`.
    Renew {
        /// Time limit of the request.
        limit: Duration,
    },
    /// Ask the store for waiters.
    CheckHandoff {
        /// Time limit of the request.
        limit: Duration,
    },
    /// Release the hold, if it is still ours.
    Release {
        /// Time limit of the request.
        limit: Duration,
    },
    /// Notify the user that the hold is lost. This sends no request to the store.
    Lost(Loss),
    /// Notify the user, once, that a waiter has asked for the lock.
    HandoffRequested,
    /// The keeper has ended; no command follows.
    Done(HoldEnd),
}

/// Reason for which a hold ended without a release by its holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Loss {
    /// The lease ended before a renewal was confirmed.
    Expired,
    /// The store reports another holder, or that the hold is gone.
    Taken,
    /// An operator ended the hold.
    Evicted,
    /// The hold's connection ended.
    Disconnected,
    /// The hold reached the longest time to hold that the user allowed.
    MaxHold,
    /// The store's clock jumped: the end of the lease is no longer known.
    ClockJump,
    /// The job was cancelled, or marked as failed. No other worker holds it.
    Cancelled,
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Expired => "the lease ended before a renewal was confirmed",
            Self::Taken => "the store reports that the hold is no longer ours",
            Self::Evicted => "an operator broke the hold",
            Self::Disconnected => "the connection of the hold ended",
            Self::MaxHold => "it was held for as long as max_hold allows",
            Self::ClockJump => "the clock of the store jumped",
            Self::Cancelled => "the job was cancelled",
        })
    }
}

/// Final outcome of a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HoldEnd {
    /// The hold was released while it was ours.
    Released,
    /// The hold was lost before it could be released.
    Lost(Loss),
    /// The hold was detached: it stays until its ttl ends.
    Detached,
    /// No clear answer to the release: the store may still keep the hold.
    Unknown {
        /// Instant at which the store's lease has expired at the latest.
        until: Time,
    },
}

/// Grant from which the keeper starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Granted {
    /// Time at which the granted request was sent.
    pub sent: Time,
    /// End of the hold's validity; [`Time::MAX`] if the store keeps the hold without a lease.
    pub deadline: Time,
    /// A waiter has already asked for the lock.
    pub handoff_requested: bool,
}

/// State machine that keeps one hold.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Keeper {
    lease: Lease,
    /// False if the store keeps the hold without a lease. Then renewals do not move the deadline.
    leased: bool,
    deadline: Time,
    hard_end: Time,
    /// Time at which the last request that may have extended the hold at the store was sent.
    last_sent: Time,
    renew_at: Time,
    handoff_check_interval: Option<Duration>,
    handoff_check_at: Time,
    request: InFlightRequest,
    goal: Goal,
    lost: Option<Loss>,
    handoff_notified: bool,
    release_at: Time,
    /// End of the attempts to release: from then on the store's lease has expired.
    release_until: Time,
    /// A release had no clear answer. A later refusal then means that the release took effect.
    release_unclear: bool,
    commands: VecDeque<KeeperCommand>,
}

/// Request in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum InFlightRequest {
    None,
    Renew { sent: Time },
    CheckHandoff,
    Release,
}

/// Goal of the keeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Goal {
    Keep,
    Release,
    Detach,
    Ended,
}

impl Keeper {
    /// Starts to keep a hold. `handoff_check_interval` is the interval of checks for waiters, on a store that cannot
    /// push.
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

    /// End of the hold's validity. A hold is valid until this instant, unless it was lost, released or detached before.
    pub fn deadline(&self) -> Time {
        self.deadline
    }

    /// Loss to report if the deadline passes.
    pub fn loss_at_deadline(&self) -> Loss {
        if self.deadline < self.hard_end { Loss::Expired } else { Loss::MaxHold }
    }

    /// Reason of the loss, if the hold was lost.
    pub fn lost(&self) -> Option<Loss> {
        self.lost
    }
}

impl Machine for Keeper {
    type Input = KeeperInput;
    type Command = KeeperCommand;

    fn handle(&mut self, input: KeeperInput, now: Time) {
        // A hold that was released in time was not lost, however late the store's answer arrives.
        if input != KeeperInput::Released {
            self.expire(now);
        }
        match input {
            KeeperInput::Renewed { handoff_requested } => self.renewed(handoff_requested, now),
            KeeperInput::RenewFailed => self.renew_failed(now),
            KeeperInput::HandoffChecked { handoff_requested } => {
                self.handoff_checked(handoff_requested, now);
            }
            KeeperInput::HandoffCheckFailed => self.handoff_checked(false, now),
            KeeperInput::Refused => self.refused(),
            KeeperInput::HoldEnded(loss) => self.on_hold_ended(loss),
            KeeperInput::HandoffRequested => self.notify_handoff(),
            KeeperInput::Release => self.stop_keeping(Goal::Release, now),
            KeeperInput::Detach => self.stop_keeping(Goal::Detach, now),
            KeeperInput::Released => self.end(self.outcome(HoldEnd::Released)),
            KeeperInput::ReleaseFailed => self.release_failed(now),
        }
        self.act(now);
    }

    fn handle_timeout(&mut self, now: Time) {
        self.expire(now);
        self.act(now);
    }

    fn poll_timeout(&self) -> Option<Time> {
        let idle = self.request == InFlightRequest::None;
        let next = match self.goal {
            Goal::Keep => {
                let end = if self.watches_deadline() { self.deadline } else { Time::MAX };
                let request =
                    if idle { self.renew_at.min(self.handoff_check_at) } else { Time::MAX };
                end.min(request)
            }
            Goal::Release if idle => self.release_at,
            Goal::Release | Goal::Detach | Goal::Ended => Time::MAX,
        };
        (next != Time::MAX).then_some(next)
    }

    fn poll_command(&mut self) -> Option<KeeperCommand> {
        self.commands.pop_front()
    }
}

impl Keeper {
    /// True if the deadline has a timer now. The rule `lost_by_timer` makes this true at all times: a hanging request
    /// must not delay the notification (contract 2).
    fn watches_deadline(&self) -> bool {
        self.lease.rules().lost_by_timer || self.request == InFlightRequest::None
    }

    fn expire(&mut self, now: Time) {
        if self.goal == Goal::Keep && now >= self.deadline && self.watches_deadline() {
            self.lose(self.loss_at_deadline());
            // The store may still keep the hold, and a renewal in flight may yet extend it: release it.
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

    /// A refusal is final, whichever request it answers.
    fn refused(&mut self) {
        self.lose(Loss::Taken);
        self.gone(Loss::Taken);
    }

    /// Ends because the store no longer keeps the hold. That is no loss if a release of ours got no answer: the release
    /// probably took effect.
    fn gone(&mut self, loss: Loss) {
        let end = if self.release_unclear { HoldEnd::Released } else { HoldEnd::Lost(loss) };
        self.end(self.outcome(end));
    }

    fn on_hold_ended(&mut self, loss: Loss) {
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
            self.end(self.outcome(HoldEnd::Unknown { until: self.release_until }));
        }
    }

    /// Outcome of a hold. A loss stands, whatever the outcome of the release that follows it.
    fn outcome(&self, unless_lost: HoldEnd) -> HoldEnd {
        self.lost.map_or(unless_lost, HoldEnd::Lost)
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
            let last_extended = if self.leased { self.last_sent } else { now };
            self.release_until = self.lease.settled_at(last_extended);
        }
    }

    fn end(&mut self, end: HoldEnd) {
        if self.goal != Goal::Ended {
            self.goal = Goal::Ended;
            self.request = InFlightRequest::None;
            self.commands.push_back(KeeperCommand::Done(end));
        }
    }

    /// Issues the next request that is due. A release waits for a renewal in flight: if the store handled the release
    /// first, the renewal could restore the hold.
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
