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
pub enum Input {
    /// The store renewed the hold.
    Renewed {
        /// Somebody waits for it.
        waiter: bool,
    },
    /// No clear answer to a renewal: it may or may not have landed.
    RenewFailed,
    /// The store answered a look for waiters.
    Looked {
        /// Somebody waits.
        waiter: bool,
    },
    /// No clear answer to a look for waiters.
    LookFailed,
    /// The store says that the hold is no longer ours.
    Refused,
    /// The connection that the hold lives on broke, or the store pushed the news of its end.
    Broken(Loss),
    /// The store pushed the news that somebody waits.
    Wanted,
    /// The user lets go.
    Release,
    /// The user leaves the hold to its ttl.
    Forget,
    /// The store released the hold.
    Released,
    /// No clear answer to a release.
    ReleaseFailed,
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Command {
    /// Renew the hold; give up on the request after `limit`.
    Renew {
        /// The longest that the request may take.
        limit: Duration,
    },
    /// Ask the store whether somebody waits.
    Look {
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
    HandOff,
    /// The keeper has ended; nothing follows.
    Done(End),
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
pub enum End {
    /// The hold was released while it was ours.
    Released,
    /// The hold was lost before it could be released.
    Lost(Loss),
    /// The hold was left to its ttl.
    Forgotten,
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
    pub waiter: bool,
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
    look_every: Option<Duration>,
    look_at: Time,
    request: Request,
    wish: Wish,
    lost: Option<Loss>,
    asked: bool,
    release_at: Time,
    /// When to stop asking for the release: the store has let go by itself.
    release_until: Time,
    /// A release had no clear answer: a refusal after it means that it had landed.
    release_unclear: bool,
    commands: VecDeque<Command>,
}

/// The request under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Request {
    None,
    Renew { sent: Time },
    Look,
    Release,
}

/// What the keeper works towards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Wish {
    Keep,
    LetGo,
    Forget,
    Nothing,
}

impl Keeper {
    /// Starts to keep a hold. `look_every` is how often to ask for waiters on a store that cannot push that news.
    pub fn new(lease: Lease, granted: Granted, look_every: Option<Duration>, now: Time) -> Self {
        let hard_end = lease.hard_end(now);
        let mut keeper = Self {
            lease,
            leased: granted.deadline != Time::MAX,
            deadline: granted.deadline.min(hard_end),
            hard_end,
            last_sent: granted.sent,
            renew_at: lease.renew_at(granted.sent),
            look_every,
            look_at: look_every.map_or(Time::MAX, |every| now + every),
            request: Request::None,
            wish: Wish::Keep,
            lost: None,
            asked: false,
            release_at: Time::MAX,
            release_until: Time::MAX,
            release_unclear: false,
            commands: VecDeque::new(),
        };
        if granted.waiter {
            keeper.hand_off();
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
    pub fn handle(&mut self, input: Input, now: Time) {
        // What was released in time was not lost, however late the word of it comes.
        if input != Input::Released {
            self.expire(now);
        }
        match input {
            Input::Renewed { waiter } => self.renewed(waiter, now),
            Input::RenewFailed => self.renew_failed(now),
            Input::Looked { waiter } => self.looked(waiter, now),
            Input::LookFailed => self.looked(false, now),
            Input::Refused => self.refused(),
            Input::Broken(loss) => self.broken(loss),
            Input::Wanted => self.hand_off(),
            Input::Release => self.let_go(Wish::LetGo, now),
            Input::Forget => self.let_go(Wish::Forget, now),
            Input::Released => self.end(self.ended(End::Released)),
            Input::ReleaseFailed => self.release_failed(now),
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
        let idle = self.request == Request::None;
        let next = match self.wish {
            Wish::Keep => {
                let end = if self.watches_deadline() { self.deadline } else { Time::MAX };
                let ask = if idle { self.renew_at.min(self.look_at) } else { Time::MAX };
                end.min(ask)
            }
            Wish::LetGo if idle => self.release_at,
            Wish::LetGo | Wish::Forget | Wish::Nothing => Time::MAX,
        };
        (next != Time::MAX).then_some(next)
    }

    /// What to do next.
    pub fn poll_command(&mut self) -> Option<Command> {
        self.commands.pop_front()
    }

    /// The deadline is a timer of its own: a request that hangs must not hold up the news (contract 2).
    fn watches_deadline(&self) -> bool {
        self.lease.rules().lost_by_timer || self.request == Request::None
    }

    fn expire(&mut self, now: Time) {
        if self.wish == Wish::Keep && now >= self.deadline && self.watches_deadline() {
            self.lose(self.loss_at_deadline());
            // What the store may still have is given back: a renewal under way may yet land.
            self.let_go(Wish::LetGo, now);
        }
    }

    fn renewed(&mut self, waiter: bool, now: Time) {
        let Request::Renew { sent } = std::mem::replace(&mut self.request, Request::None) else {
            return;
        };
        if waiter {
            self.hand_off();
        }
        if self.wish != Wish::Keep {
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
        if matches!(self.request, Request::Renew { .. }) {
            self.request = Request::None;
            self.renew_at = now + self.lease.retry_pause();
        }
    }

    fn looked(&mut self, waiter: bool, now: Time) {
        if self.request == Request::Look {
            self.request = Request::None;
        }
        self.look_at = self.look_every.map_or(Time::MAX, |every| now + every);
        if waiter {
            self.hand_off();
        }
    }

    /// The store's word is final, to whatever request it was the answer.
    fn refused(&mut self) {
        self.lose(Loss::Taken);
        self.gone(Loss::Taken);
    }

    /// The store has let go. Where that may be our own release, which landed unheard, nothing was lost.
    fn gone(&mut self, loss: Loss) {
        let end = if self.release_unclear { End::Released } else { End::Lost(loss) };
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
        self.request = Request::None;
        self.release_unclear = true;
        self.release_at = now + self.lease.retry_pause();
        if self.release_at >= self.release_until {
            self.end(self.ended(End::Unknown { until: self.release_until }));
        }
    }

    /// A hold that was lost ended so, whatever became of giving it back.
    fn ended(&self, otherwise: End) -> End {
        self.lost.map_or(otherwise, End::Lost)
    }

    fn lose(&mut self, loss: Loss) {
        if self.lost.is_none() && self.wish == Wish::Keep {
            self.lost = Some(loss);
            self.commands.push_back(Command::Lost(loss));
        }
    }

    fn hand_off(&mut self) {
        if !self.asked && self.wish == Wish::Keep {
            self.asked = true;
            self.look_at = Time::MAX;
            self.look_every = None;
            self.commands.push_back(Command::HandOff);
        }
    }

    fn let_go(&mut self, wish: Wish, now: Time) {
        if self.wish == Wish::Keep {
            self.wish = wish;
            self.release_at = now;
            let alive = if self.leased { self.last_sent } else { now };
            self.release_until = self.lease.settled_at(alive);
        }
    }

    fn end(&mut self, end: End) {
        if self.wish != Wish::Nothing {
            self.wish = Wish::Nothing;
            self.request = Request::None;
            self.commands.push_back(Command::Done(end));
        }
    }

    /// Asks for the next thing that is due. A release waits for a renewal under way: released at an older version the
    /// renewal would bring the hold back.
    fn act(&mut self, now: Time) {
        if self.request != Request::None {
            return;
        }
        match self.wish {
            Wish::Keep if now >= self.renew_at => {
                let limit = self.lease.request_limit().min(self.deadline.since(now));
                self.request = Request::Renew { sent: now };
                self.last_sent = now;
                self.commands.push_back(Command::Renew { limit });
            }
            Wish::Keep if now >= self.look_at => {
                self.request = Request::Look;
                self.commands.push_back(Command::Look { limit: self.lease.look_limit() });
            }
            Wish::LetGo if now >= self.release_at => {
                self.request = Request::Release;
                self.commands.push_back(Command::Release { limit: self.lease.request_limit() });
            }
            Wish::Forget => self.end(End::Forgotten),
            Wish::Keep | Wish::LetGo | Wish::Nothing => {}
        }
    }
}

#[cfg(test)]
mod tests;
