//! Claims of tenure's extension.
//!
//! A claim has an id that its client chose, so that a client whose connection broke can repeat it. The claim exists
//! while it waits and while its hold lasts; [`Claims`] finds it by id, by its place in the table's queue, and by the
//! fencing number of its hold. After it was added, only the events of the table change it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tenure_core::LockToken;
use tenure_core::table::{KeySpace, Owner, PlaceId, TableEvent};
use tenure_core::wire::ClaimId;

/// All claims of the extension.
#[derive(Debug, Default)]
pub(super) struct Claims {
    by_id: HashMap<ClaimId, Claim>,
    /// Waiting claims, by their place in a queue.
    by_place: HashMap<PlaceId, ClaimId>,
    /// Granted claims, by the fencing number of their hold.
    by_number: HashMap<u64, ClaimId>,
    /// Claims of the open connections, indexed by the slot of the connection.
    by_connection: Vec<HashSet<ClaimId>>,
    /// Holder identities of restored holds, by fencing number. Their claims were lost with the former process.
    restored_identities: HashMap<u64, Box<[u8]>>,
}

/// A claim that waits or holds.
#[derive(Clone, Debug)]
pub(super) struct Claim {
    /// Connection that made the claim. It receives the claim's pushes.
    pub(super) from: Owner,
    pub(super) space: KeySpace,
    pub(super) key: Box<[u8]>,
    /// Holder identity that the client sent; may be empty.
    pub(super) by: Arc<[u8]>,
    pub(super) stage: ClaimStage,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum ClaimStage {
    Waiting(PlaceId),
    Held { token: LockToken, lease: Duration },
}

/// Claim that an event of the table concerns.
#[derive(Clone, Debug)]
pub(super) struct ClaimRef {
    pub(super) id: ClaimId,
    pub(super) from: Owner,
    pub(super) by: Arc<[u8]>,
}

impl Claims {
    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(super) fn get(&self, id: ClaimId) -> Option<&Claim> {
        self.by_id.get(&id)
    }

    pub(super) fn by_place(&self, place: PlaceId) -> Option<&Claim> {
        self.by_id.get(self.by_place.get(&place)?)
    }

    pub(super) fn by_number(&self, number: u64) -> Option<&Claim> {
        self.by_id.get(self.by_number.get(&number)?)
    }

    /// Number of claims of an open connection.
    pub(super) fn count_of(&self, connection: Owner) -> usize {
        self.by_connection.get(connection.index()).map_or(0, HashSet::len)
    }

    /// Adds the claim of a new hold or place.
    pub(super) fn insert(&mut self, id: ClaimId, claim: Claim) {
        match claim.stage {
            ClaimStage::Waiting(place) => self.by_place.insert(place, id),
            ClaimStage::Held { token, .. } => self.by_number.insert(token.number(), id),
        };
        self.claims_of(claim.from).insert(id);
        self.by_id.insert(id, claim);
    }

    /// Binds a claim to another connection, which receives its pushes from now on.
    pub(super) fn rebind(&mut self, id: ClaimId, from: Owner) {
        let Some(claim) = self.by_id.get_mut(&id) else { return };
        let former = std::mem::replace(&mut claim.from, from);
        self.claims_of(former).remove(&id);
        self.claims_of(from).insert(id);
    }

    /// Forgets that these claims belong to a connection, which has ended. Returns those that wait.
    pub(super) fn disconnect(&mut self, connection: Owner) -> Vec<ClaimId> {
        let mut ids: Vec<ClaimId> =
            std::mem::take(self.claims_of(connection)).into_iter().collect();
        ids.retain(|id| matches!(self.by_id[id].stage, ClaimStage::Waiting(_)));
        // Sorted, so that the same requests cause the same output: a hash set has no fixed order.
        ids.sort_unstable();
        ids
    }

    /// All claims that wait, in the order of arrival.
    pub(super) fn waiting(&self) -> Vec<ClaimId> {
        let mut waiting: Vec<(PlaceId, ClaimId)> =
            self.by_place.iter().map(|(place, id)| (*place, *id)).collect();
        waiting.sort_unstable();
        waiting.into_iter().map(|(_, id)| id).collect()
    }

    /// Stores the holder identity of a restored hold.
    pub(super) fn add_restored_identity(&mut self, number: u64, by: &[u8]) {
        if !by.is_empty() {
            self.restored_identities.insert(number, by.into());
        }
    }

    /// Holder identity of a restored hold.
    pub(super) fn restored_identity(&self, number: u64) -> Option<&[u8]> {
        self.restored_identities.get(&number).map(|by| &**by)
    }

    /// Follows a change of the table. Returns the claim that it concerns, also if the claim has ended with it.
    pub(super) fn apply(&mut self, change: &TableEvent) -> Option<ClaimRef> {
        if let TableEvent::Ended { token, .. } = change
            && !self.restored_identities.is_empty()
        {
            self.restored_identities.remove(&token.number());
        }
        // Most servers have no clients of the extension: this saves a hash per event.
        if self.by_id.is_empty() {
            return None;
        }
        match change {
            TableEvent::Granted { place: Some(place), grant, .. } => {
                let id = self.by_place.remove(place)?;
                self.by_number.insert(grant.token.number(), id);
                let claim = self.by_id.get_mut(&id)?;
                claim.stage = ClaimStage::Held { token: grant.token, lease: grant.lease };
                Some(claim.reference(id))
            }
            TableEvent::Granted { place: None, grant, .. } => self.holder(grant.token),
            TableEvent::HandoffRequested { token, .. } => self.holder(*token),
            TableEvent::Queued { place, .. } => {
                let id = *self.by_place.get(place)?;
                Some(self.by_id.get(&id)?.reference(id))
            }
            TableEvent::Left { place, .. } => {
                let id = *self.by_place.get(place)?;
                self.remove(id)
            }
            TableEvent::Ended { token, .. } => {
                let id = *self.by_number.get(&token.number())?;
                self.remove(id)
            }
            TableEvent::Renewed { .. } | TableEvent::Detached { .. } => None,
        }
    }

    /// Panics unless every claim is in exactly the index of its stage.
    pub(super) fn check(&self) {
        assert_eq!(self.by_id.len(), self.by_place.len() + self.by_number.len(), "claims");
        for (id, claim) in &self.by_id {
            let found = match claim.stage {
                ClaimStage::Waiting(place) => self.by_place.get(&place),
                ClaimStage::Held { token, .. } => self.by_number.get(&token.number()),
            };
            assert_eq!(found, Some(id), "a claim is not in the index of its stage");
        }
        let known = |id: &ClaimId| self.by_id.contains_key(id);
        assert!(self.by_connection.iter().flatten().all(known), "an ended claim of a connection");
    }

    fn holder(&self, token: LockToken) -> Option<ClaimRef> {
        let id = *self.by_number.get(&token.number())?;
        Some(self.by_id.get(&id)?.reference(id))
    }

    fn remove(&mut self, id: ClaimId) -> Option<ClaimRef> {
        let claim = self.by_id.remove(&id)?;
        match claim.stage {
            ClaimStage::Waiting(place) => self.by_place.remove(&place),
            ClaimStage::Held { token, .. } => self.by_number.remove(&token.number()),
        };
        self.claims_of(claim.from).remove(&id);
        Some(claim.reference(id))
    }

    fn claims_of(&mut self, connection: Owner) -> &mut HashSet<ClaimId> {
        if self.by_connection.len() <= connection.index() {
            self.by_connection.resize_with(connection.index() + 1, HashSet::new);
        }
        &mut self.by_connection[connection.index()]
    }
}

impl Claim {
    fn reference(&self, id: ClaimId) -> ClaimRef {
        ClaimRef { id, from: self.from, by: Arc::clone(&self.by) }
    }
}
