//! One claim's stay at a server: what it has, on which connection, and what it hears.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tenure_core::wire::{ClaimId, ExtensionRequest, Request};
use tenure_core::{Key, LockToken, Time};
use tokio::sync::watch;

use super::link::{End, Link, Said};
use super::{Dialect, Shared, wire_key};
use crate::store::{Claim, KeySpace, Loss};

/// When the last who sits here goes, so does what the claim had, as if its process had died.
pub(super) struct Seat {
    shared: Arc<Shared>,
    link: Arc<Link>,
    pub(super) id: u128,
    pub(super) key: Key,
    pub(super) space: KeySpace,
    /// The hold outlives its connection.
    pub(super) detached: bool,
    /// It waits, or has waited, on a connection of its own: the queue of the plain protocol.
    pub(super) alone: bool,
    /// The fencing number of its grant.
    number: OnceLock<u64>,
    state: watch::Sender<State>,
}

#[derive(Clone, Debug)]
pub(super) struct State {
    pub(super) stage: Stage,
    /// Somebody waits, and the holder has not been told.
    pub(super) wanted: bool,
    /// The hold outlives its seat.
    left: bool,
}

/// What a claim has come to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Nothing was heard yet.
    Asked,
    Waiting,
    Held {
        token: LockToken,
        lease: Duration,
    },
    /// Another holds it.
    Busy,
    /// The server's word for why not.
    Refused(String),
    /// It was given back, or its place is gone.
    Gone,
    /// The hold ended against our will.
    Lost(Loss),
    /// Its connection broke before anything was clear.
    Unclear,
}

impl Seat {
    pub(super) fn new(
        shared: &Arc<Shared>,
        link: Arc<Link>,
        claim: &Claim,
        alone: bool,
    ) -> Arc<Self> {
        let stage = Stage::Asked;
        let seat = Arc::new(Self {
            shared: Arc::clone(shared),
            link,
            id: claim.id,
            key: claim.key.clone(),
            space: claim.mode.space(),
            detached: claim.detached,
            alone,
            number: OnceLock::new(),
            state: watch::Sender::new(State { stage, wanted: false, left: false }),
        });
        shared.admit(&seat);
        seat
    }

    pub(super) fn link(&self) -> &Arc<Link> {
        &self.link
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(super) fn number(&self) -> Option<u64> {
        self.number.get().copied()
    }

    pub(super) fn stage(&self) -> Stage {
        self.state.borrow().stage.clone()
    }

    pub(super) fn watch(&self) -> watch::Receiver<State> {
        self.state.subscribe()
    }

    /// The stage as soon as there is an answer; `None` where the time is over before.
    pub(super) async fn answered(&self, until: Time) -> Option<Stage> {
        let mut news = self.watch();
        let answered = async {
            let answered = news.wait_for(|state| state.stage != Stage::Asked).await;
            answered.map_or(Stage::Unclear, |state| state.stage.clone())
        };
        tokio::select! {
            biased;
            stage = answered => Some(stage),
            () = self.shared.clock.sleep_until(until) => None,
        }
    }

    /// The hold is to outlive this seat.
    pub(super) fn leave(&self) {
        self.state.send_modify(|state| state.left = true);
        if !self.detached {
            self.link.tell(&Request::Extended(ExtensionRequest::Detach { id: ClaimId(self.id) }));
        }
    }

    /// What the hold is known by was given back, or is found to be no more.
    pub(super) fn set(&self, stage: Stage) {
        self.state.send_modify(|state| state.stage = stage);
    }

    /// The holder takes note that somebody waits.
    pub(super) fn take_wanted(&self) -> bool {
        self.state.send_if_modified(|state| std::mem::take(&mut state.wanted))
    }
}

/// What the connection hears.
impl Seat {
    pub(super) fn heard(&self, said: Said) {
        self.state.send_if_modified(|state| {
            let next = match (&state.stage, said) {
                (Stage::Asked | Stage::Waiting, Said::Granted { token, lease }) => {
                    let number = *self.number.get_or_init(|| token.number());
                    self.shared.note_number(number, self.id);
                    Stage::Held { token, lease: self.shared.dialect.span(lease) }
                }
                (Stage::Asked, Said::Queued) => Stage::Waiting,
                (Stage::Asked, Said::Timeout) => Stage::Busy,
                (Stage::Asked, Said::Error(why)) => Stage::Refused(why),
                (Stage::Waiting, Said::Timeout | Said::Error(_)) => Stage::Gone,
                _ => return false,
            };
            state.stage = next;
            true
        });
    }

    pub(super) fn gone(&self) {
        self.state.send_modify(|state| {
            if matches!(state.stage, Stage::Asked | Stage::Waiting) {
                state.stage = Stage::Gone;
            }
        });
    }

    pub(super) fn wanted(&self) {
        self.state.send_modify(|state| state.wanted = true);
    }

    pub(super) fn ended(&self, why: &[u8]) {
        let loss = if why.starts_with(b"evicted") { Loss::Evicted } else { Loss::Expired };
        self.set(Stage::Lost(loss));
    }

    pub(super) fn disconnected(&self, end: &End) {
        self.state.send_if_modified(|state| {
            state.stage = match &state.stage {
                Stage::Waiting if *end == End::Closed => Stage::Gone,
                Stage::Asked | Stage::Waiting => Stage::Unclear,
                Stage::Held { .. } if !self.detached => Stage::Lost(Loss::Disconnected),
                _ => return false,
            };
            true
        });
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.shared.dismiss(self);
        let State { stage, left, .. } = self.state.borrow().clone();
        let kept = left || self.detached;
        let key = wire_key(&self.key);
        match (self.shared.dialect, stage) {
            (_, Stage::Held { .. }) if kept => {}
            (Dialect::Extended, Stage::Held { .. } | Stage::Waiting) => {
                self.link
                    .tell(&Request::Extended(ExtensionRequest::Abandon { id: ClaimId(self.id) }));
            }
            (Dialect::Plain, Stage::Held { token, .. }) => {
                let (key, space, token) = (&key[..], self.space, Some(token));
                self.link.tell(&Request::Release { key, space, token });
            }
            // A place of the plain protocol goes with its connection.
            (Dialect::Plain, Stage::Asked | Stage::Waiting) if self.alone => self.link.leave(),
            _ => {}
        }
        if self.alone {
            self.shared.give_back(Arc::clone(&self.link));
        }
    }
}

impl fmt::Debug for Seat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}: {:?}", self.key, self.shared, self.stage())
    }
}

#[cfg(unix)]
impl crate::store::KeepOpen for Seat {
    fn keep_open(&self) -> std::io::Result<std::os::fd::OwnedFd> {
        match self.stage() {
            Stage::Held { .. } => self.link.keep_open(),
            _ => Err(std::io::ErrorKind::NotConnected.into()),
        }
    }
}
