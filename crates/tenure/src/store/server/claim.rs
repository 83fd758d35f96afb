//! Client-side state of a claim at a server: its stage, its connection, and the server's messages about it.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, MutexGuard, OnceLock, Weak};
use std::time::Duration;

use tenure_core::wire::{ClaimId, ExtensionRequest, Request};
use tenure_core::{Key, LockToken, Time};
use tokio::sync::watch;

use super::connection::{Connection, ConnectionEnd};
use super::pool::FreeConnections;
use super::wire::{OwnedReply, Protocol, wire_key};
use crate::Clock;
use crate::mutex::Mutex;
use crate::store::{Claim, KeySpace, Loss};

/// A connection with the claims that it carries.
pub(super) type ServerConnection = Connection<ClaimState>;

/// State of a claim. When the last reference is dropped, the claim leaves the queue or releases its hold, as if its
/// process had died.
pub(super) struct ClaimState {
    known: Arc<ServerClaims>,
    connection: Arc<ServerConnection>,
    protocol: Protocol,
    pub(super) id: u128,
    pub(super) key: Key,
    pub(super) space: KeySpace,
    /// The hold outlives its connection.
    pub(super) detached: bool,
    /// Pool that keeps the connection afterwards, if the claim waits, or has waited, on a connection of its own, as the
    /// plain protocol requires.
    pool: Option<Arc<FreeConnections<Self>>>,
    /// Token number of its grant.
    number: OnceLock<u64>,
    state: watch::Sender<ClaimStatus>,
}

#[derive(Clone, Debug)]
pub(super) struct ClaimStatus {
    pub(super) stage: ClaimStage,
    /// A waiter has asked for the lock, and the holder was not notified yet.
    pub(super) handoff_requested: bool,
    /// The hold outlives this [`ClaimState`].
    detached: bool,
}

/// Stage of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ClaimStage {
    /// Sent, not answered yet.
    Asked,
    Waiting,
    Held {
        token: LockToken,
        lease: Duration,
    },
    /// Another client holds the lock.
    Busy,
    /// Refused, with the reason word of the server.
    Refused(String),
    /// The hold was released, or the place in the queue is gone.
    Gone,
    /// The hold was lost.
    Lost(Loss),
    /// The connection broke before the outcome was known.
    Unclear,
}

impl ClaimState {
    /// Returns the state of a claim that is about to be sent. `pool` is given if the claim has the connection for itself.
    pub(super) fn new(
        known: &Arc<ServerClaims>,
        connection: Arc<ServerConnection>,
        protocol: Protocol,
        claim: &Claim,
        pool: Option<Arc<FreeConnections<Self>>>,
    ) -> Arc<Self> {
        let stage = ClaimStage::Asked;
        let claim_state = Arc::new(Self {
            known: Arc::clone(known),
            connection,
            protocol,
            id: claim.id,
            key: claim.key.clone(),
            space: claim.mode.space(),
            detached: claim.detached,
            pool,
            number: OnceLock::new(),
            state: watch::Sender::new(ClaimStatus {
                stage,
                handoff_requested: false,
                detached: false,
            }),
        });
        known.register(&claim_state);
        claim_state
    }

    pub(super) fn connection(&self) -> &Arc<ServerConnection> {
        &self.connection
    }

    /// True if the claim has its connection for itself.
    pub(super) fn has_own_connection(&self) -> bool {
        self.pool.is_some()
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

    /// Waits for an answer and returns the stage; `None` if `until` has passed before.
    pub(super) async fn wait_answered(&self, clock: &Clock, until: Time) -> Option<ClaimStage> {
        let mut news = self.watch();
        let answered = async {
            let answered = news.wait_for(|state| state.stage != ClaimStage::Asked).await;
            answered.map_or(ClaimStage::Unclear, |state| state.stage.clone())
        };
        tokio::select! {
            biased;
            stage = answered => Some(stage),
            () = clock.sleep_until(until) => None,
        }
    }

    /// Lets the hold outlive this state. The server has confirmed that it outlives the connection.
    pub(super) fn set_detached(&self) {
        self.state.send_modify(|state| state.detached = true);
    }

    /// Sets the stage after a release, or after a loss that a request has detected.
    pub(super) fn set_stage(&self, stage: ClaimStage) {
        self.state.send_modify(|state| state.stage = stage);
    }

    /// Takes the hand-off request; true if there was one.
    pub(super) fn take_handoff_request(&self) -> bool {
        self.state.send_if_modified(|state| std::mem::take(&mut state.handoff_requested))
    }
}

/// Messages of the connection.
impl ClaimState {
    pub(super) fn handle_reply(&self, reply: OwnedReply) {
        self.state.send_if_modified(|state| {
            let next = match (&state.stage, reply) {
                (ClaimStage::Asked | ClaimStage::Waiting, OwnedReply::Granted { token, lease }) => {
                    let number = *self.number.get_or_init(|| token.number());
                    self.known.note_number(number, self.id);
                    ClaimStage::Held { token, lease: self.protocol.lease_from_wire(lease) }
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
                // dflockd ends a place with its connection. Our own server may have granted the claim before: the
                // connection may have been closed by a proxy, or by the server because this client did not read, and a
                // detached hold does not end with it. A server that stops says that a place is gone.
                ClaimStage::Waiting
                    if *end == ConnectionEnd::ClosedByPeer && self.protocol == Protocol::Plain =>
                {
                    ClaimStage::Gone
                }
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
        self.known.unregister(self);
        let ClaimStatus { stage, detached: left, .. } = self.state.borrow().clone();
        let kept = left || self.detached;
        let key = wire_key(&self.key);
        match (self.protocol, stage) {
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
            // Closing the connection leaves the queue: the plain protocol has no request for it.
            (Protocol::Plain, ClaimStage::Asked | ClaimStage::Waiting) if self.pool.is_some() => {
                self.connection.close();
            }
            _ => {}
        }
        if let Some(pool) = &self.pool {
            pool.put(Arc::clone(&self.connection));
        }
    }
}

impl fmt::Debug for ClaimState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {:?}", self.key, self.stage())
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

/// Live claims of a store. A claim that is sent again continues here, and pushed messages find their claim here.
#[derive(Default)]
pub(super) struct ServerClaims(Mutex<ClaimRegistry>);

/// Live claims, by claim id and by token number.
#[derive(Default)]
struct ClaimRegistry {
    by_id: HashMap<u128, Weak<ClaimState>>,
    by_number: HashMap<u64, u128>,
}

impl ServerClaims {
    fn register(&self, state: &Arc<ClaimState>) {
        self.lock().by_id.insert(state.id, Arc::downgrade(state));
    }

    /// Removes a claim. If the claim was sent again, its id belongs to the later state.
    fn unregister(&self, state: &ClaimState) {
        let mut registry = self.lock();
        let own = |known: &Weak<ClaimState>| std::ptr::eq(known.as_ptr(), state);
        if registry.by_id.get(&state.id).is_some_and(own) {
            registry.by_id.remove(&state.id);
        }
        if let Some(number) = state.number() {
            registry.by_number.remove(&number);
        }
    }

    fn note_number(&self, number: u64, id: u128) {
        self.lock().by_number.insert(number, id);
    }

    pub(super) fn claim_by_id(&self, id: u128) -> Option<Arc<ClaimState>> {
        self.lock().by_id.get(&id).and_then(Weak::upgrade)
    }

    pub(super) fn claim_by_number(&self, number: u64) -> Option<Arc<ClaimState>> {
        let state = {
            let registry = self.lock();
            registry.by_id.get(registry.by_number.get(&number)?).and_then(Weak::upgrade)
        };
        state.filter(|state| state.number() == Some(number))
    }

    /// Every live claim.
    pub(super) fn all(&self) -> Vec<Arc<ClaimState>> {
        let mut claims: Vec<_> = self.lock().by_id.values().filter_map(Weak::upgrade).collect();
        // Sorted, so that a simulated run is repeatable: a hash map has no fixed order.
        claims.sort_unstable_by_key(|claim| claim.id);
        claims
    }

    fn lock(&self) -> MutexGuard<'_, ClaimRegistry> {
        self.0.lock()
    }
}
