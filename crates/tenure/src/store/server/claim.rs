//! One claim's stay at a server: what it has, on which connection, and what it hears.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tenure_core::wire::{ClaimId, ExtensionRequest, Request};
use tenure_core::{Key, LockToken, Time};
use tokio::sync::watch;

use super::connection::{Connection, ConnectionEnd, OwnedReply};
use super::{Protocol, ServerShared, wire_key};
use crate::store::{Claim, KeySpace, Loss};

/// When the last who sits here goes, so does what the claim had, as if its process had died.
pub(super) struct ClaimState {
    shared: Arc<ServerShared>,
    connection: Arc<Connection>,
    pub(super) id: u128,
    pub(super) key: Key,
    pub(super) space: KeySpace,
    /// The hold outlives its connection.
    pub(super) detached: bool,
    /// It waits, or has waited, on a connection of its own: the queue of the plain protocol.
    pub(super) own_connection: bool,
    /// The fencing number of its grant.
    number: OnceLock<u64>,
    state: watch::Sender<ClaimStatus>,
}

#[derive(Clone, Debug)]
pub(super) struct ClaimStatus {
    pub(super) stage: ClaimStage,
    /// Somebody waits, and the holder has not been told.
    pub(super) handoff_requested: bool,
    /// The hold outlives its seat.
    detached: bool,
}

/// What a claim has come to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ClaimStage {
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

impl ClaimState {
    pub(super) fn new(
        shared: &Arc<ServerShared>,
        link: Arc<Connection>,
        claim: &Claim,
        alone: bool,
    ) -> Arc<Self> {
        let stage = ClaimStage::Asked;
        let seat = Arc::new(Self {
            shared: Arc::clone(shared),
            connection: link,
            id: claim.id,
            key: claim.key.clone(),
            space: claim.mode.space(),
            detached: claim.detached,
            own_connection: alone,
            number: OnceLock::new(),
            state: watch::Sender::new(ClaimStatus {
                stage,
                handoff_requested: false,
                detached: false,
            }),
        });
        shared.register(&seat);
        seat
    }

    pub(super) fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    pub(super) fn shared(&self) -> &Arc<ServerShared> {
        &self.shared
    }

    pub(super) fn number(&self) -> Option<u64> {
        self.number.get().copied()
    }

    pub(super) fn stage(&self) -> ClaimStage {
        self.state.borrow().stage.clone()
    }

    pub(super) fn watch(&self) -> watch::Receiver<ClaimStatus> {
        self.state.subscribe()
    }

    /// The stage as soon as there is an answer; `None` where the time is over before.
    pub(super) async fn wait_answered(&self, until: Time) -> Option<ClaimStage> {
        let mut news = self.watch();
        let answered = async {
            let answered = news.wait_for(|state| state.stage != ClaimStage::Asked).await;
            answered.map_or(ClaimStage::Unclear, |state| state.stage.clone())
        };
        tokio::select! {
            biased;
            stage = answered => Some(stage),
            () = self.shared.clock.sleep_until(until) => None,
        }
    }

    /// The hold is to outlive this seat.
    pub(super) fn detach(&self) {
        self.state.send_modify(|state| state.detached = true);
        if !self.detached {
            self.connection.send_without_reply(&Request::Extended(ExtensionRequest::Detach {
                id: ClaimId(self.id),
            }));
        }
    }

    /// What the hold is known by was given back, or is found to be no more.
    pub(super) fn set_stage(&self, stage: ClaimStage) {
        self.state.send_modify(|state| state.stage = stage);
    }

    /// The holder takes note that somebody waits.
    pub(super) fn take_handoff_request(&self) -> bool {
        self.state.send_if_modified(|state| std::mem::take(&mut state.handoff_requested))
    }
}

/// What the connection hears.
impl ClaimState {
    pub(super) fn handle_reply(&self, said: OwnedReply) {
        self.state.send_if_modified(|state| {
            let next = match (&state.stage, said) {
                (ClaimStage::Asked | ClaimStage::Waiting, OwnedReply::Granted { token, lease }) => {
                    let number = *self.number.get_or_init(|| token.number());
                    self.shared.note_number(number, self.id);
                    ClaimStage::Held { token, lease: self.shared.protocol.lease_from_wire(lease) }
                }
                (ClaimStage::Asked, OwnedReply::Queued) => ClaimStage::Waiting,
                (ClaimStage::Asked, OwnedReply::Timeout) => ClaimStage::Busy,
                (ClaimStage::Asked, OwnedReply::Error(why)) => ClaimStage::Refused(why),
                (ClaimStage::Waiting, OwnedReply::Timeout | OwnedReply::Error(_)) => {
                    ClaimStage::Gone
                }
                _ => return false,
            };
            state.stage = next;
            true
        });
    }

    pub(super) fn handle_gone(&self) {
        self.state.send_modify(|state| {
            if matches!(state.stage, ClaimStage::Asked | ClaimStage::Waiting) {
                state.stage = ClaimStage::Gone;
            }
        });
    }

    pub(super) fn handle_handoff_request(&self) {
        self.state.send_modify(|state| state.handoff_requested = true);
    }

    pub(super) fn handle_ended(&self, why: &[u8]) {
        let loss = if why.starts_with(b"evicted") { Loss::Evicted } else { Loss::Expired };
        self.set_stage(ClaimStage::Lost(loss));
    }

    pub(super) fn handle_disconnect(&self, end: &ConnectionEnd) {
        self.state.send_if_modified(|state| {
            state.stage = match &state.stage {
                ClaimStage::Waiting if *end == ConnectionEnd::ClosedByServer => ClaimStage::Gone,
                ClaimStage::Asked | ClaimStage::Waiting => ClaimStage::Unclear,
                ClaimStage::Held { .. } if !self.detached => ClaimStage::Lost(Loss::Disconnected),
                _ => return false,
            };
            true
        });
    }
}

impl Drop for ClaimState {
    fn drop(&mut self) {
        self.shared.unregister(self);
        let ClaimStatus { stage, detached: left, .. } = self.state.borrow().clone();
        let kept = left || self.detached;
        let key = wire_key(&self.key);
        match (self.shared.protocol, stage) {
            (_, ClaimStage::Held { .. }) if kept => {}
            (Protocol::Extended, ClaimStage::Held { .. } | ClaimStage::Waiting) => {
                self.connection.send_without_reply(&Request::Extended(ExtensionRequest::Abandon {
                    id: ClaimId(self.id),
                }));
            }
            (Protocol::Plain, ClaimStage::Held { token, .. }) => {
                let (key, space, token) = (&key[..], self.space, Some(token));
                self.connection.send_without_reply(&Request::Release { key, space, token });
            }
            // A place of the plain protocol goes with its connection.
            (Protocol::Plain, ClaimStage::Asked | ClaimStage::Waiting) if self.own_connection => {
                self.connection.close()
            }
            _ => {}
        }
        if self.own_connection {
            self.shared.return_connection(Arc::clone(&self.connection));
        }
    }
}

impl fmt::Debug for ClaimState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}: {:?}", self.key, self.shared, self.stage())
    }
}

#[cfg(unix)]
impl crate::store::KeepOpen for ClaimState {
    fn keep_open(&self) -> std::io::Result<std::os::fd::OwnedFd> {
        match self.stage() {
            ClaimStage::Held { .. } => self.connection.keep_open(),
            _ => Err(std::io::ErrorKind::NotConnected.into()),
        }
    }
}
