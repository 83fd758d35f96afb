//! Tenure's extension of the dflockd protocol: claims that do not block their connection, views of keys, breaks, and
//! watches.
//!
//! A [`Claim`] has an id that its client chose, so that a client whose connection broke can repeat it. The claim exists
//! while it waits and while its hold lasts; [`Claims`] finds it by id, by its place in the table's queue, and by the
//! fencing number of its hold.

use std::collections::HashMap;
use std::time::Duration;

use serde_json::{Value, json};
use tenure_core::table::{
    ClaimAnswer, Ending, Grant, Holder, KeyBytes, KeySpace, Mode, Owner, PlaceId, Summary,
    TableClaim, View, Waiter,
};
use tenure_core::wire::{ClaimId, ExtensionRequest, Push, Reply};
use tenure_core::{LockToken, Time};

use super::Engine;
use super::connection::{Extension, Wake};
use super::history::{self, HistoryEventKind};

/// Maximum number of holders, of waiters and of keys in one reply.
pub(super) const MAX_LISTED: usize = 100;

/// All claims of the extension.
#[derive(Debug)]
pub(super) struct Claims {
    /// Owner of the holds that were claimed as detached. It never disconnects.
    detached_owner: Owner,
    by_id: HashMap<ClaimId, Claim>,
    /// Waiting claims, by their place in a queue.
    by_place: HashMap<PlaceId, ClaimId>,
    /// Granted claims, by the fencing number of their hold.
    by_number: HashMap<u64, ClaimId>,
    /// Holder identities of restored holds, by fencing number. Their claims were lost with the former process.
    restored_identities: HashMap<u64, Box<[u8]>>,
}

#[derive(Debug)]
struct Claim {
    /// Connection that made the claim. It receives the claim's pushes.
    from: Owner,
    space: KeySpace,
    key: Box<[u8]>,
    /// Holder identity that the client sent; may be empty.
    by: Box<[u8]>,
    stage: ClaimStage,
}

#[derive(Clone, Copy, Debug)]
enum ClaimStage {
    Waiting(PlaceId),
    Held { token: LockToken, lease: Duration },
}

impl Claims {
    pub(super) fn new(detached_owner: Owner) -> Self {
        Self {
            detached_owner,
            by_id: HashMap::new(),
            by_place: HashMap::new(),
            by_number: HashMap::new(),
            restored_identities: HashMap::new(),
        }
    }

    /// Stores the holder identity of a restored hold.
    pub(super) fn add_restored_identity(&mut self, number: u64, by: &[u8]) {
        if !by.is_empty() {
            self.restored_identities.insert(number, by.into());
        }
    }

    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    /// Connection that made the claim of the hold with this fencing number.
    fn claiming_connection(&self, number: u64) -> Option<Owner> {
        let id = self.by_number.get(&number)?;
        self.by_id.get(id).map(|claim| claim.from)
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
    }

    fn remove(&mut self, id: ClaimId) -> Option<Claim> {
        let claim = self.by_id.remove(&id)?;
        match claim.stage {
            ClaimStage::Waiting(place) => self.by_place.remove(&place),
            ClaimStage::Held { token, .. } => self.by_number.remove(&token.number()),
        };
        Some(claim)
    }
}

/// Requests of the extension.
impl Engine {
    /// Serves one request of the extension.
    pub(super) fn serve_extension_request(
        &mut self,
        from: Owner,
        request: ExtensionRequest<'_>,
        now: Time,
    ) {
        if !self.settings.extension {
            self.reply(Reply::ERROR);
            return;
        }
        let greeted =
            self.connection(from).is_some_and(|connection| connection.extension.is_some());
        match request {
            ExtensionRequest::Hello { about } => self.hello(from, about),
            ExtensionRequest::Query { key, space } => self.query(key, space, now),
            ExtensionRequest::Break { key, space, number, reason } => {
                self.break_hold(from, key, space, number, reason, now);
            }
            // The remaining requests cause pushes or replies that dflockd clients do not understand. They are served
            // only after `hello`.
            _ if !greeted => self.reply(Reply::ERROR),
            ExtensionRequest::History { key, space } => self.reply_history(key, space),
            ExtensionRequest::Claim { id, key, mode, lease, queue, detached, by } => {
                let owner = if detached { self.claims.detached_owner } else { from };
                let lease = Duration::from_millis(lease).min(self.settings.max_lease);
                self.claim(from, id, key, TableClaim { owner, mode, lease, queue }, by, now);
            }
            ExtensionRequest::Position { id } => {
                let stage = self.claims.by_id.get(&id).map(|claim| claim.stage);
                let ahead = match stage {
                    Some(ClaimStage::Waiting(place)) => self.table.waiters_ahead(place),
                    _ => None,
                };
                self.reply(ahead.map_or(Reply::NOT_ENQUEUED, |ahead| Reply::Number(ahead as u64)));
            }
            ExtensionRequest::Abandon { id } => self.abandon(id, now),
            ExtensionRequest::Detach { id } => self.detach(id, now),
            ExtensionRequest::Renew { key, space, token, lease } => {
                self.renew_millis(key, space, token, lease, now);
            }
            ExtensionRequest::List { prefix, space, after } => self.list(prefix, space, after, now),
            ExtensionRequest::Watch { key, space, seen, id } => {
                self.watch(from, key, space, seen, id, now);
            }
            ExtensionRequest::Unwatch { id } => {
                self.watches.remove(from, id);
                self.reply(Reply::Done);
            }
        }
    }

    fn hello(&mut self, from: Owner, about: &[u8]) {
        let Ok(Value::Object(fields)) = serde_json::from_slice(about) else {
            self.reply(Reply::ERROR);
            return;
        };
        let about = String::from_utf8_lossy(about).into();
        let keep = fields.get("keep").and_then(Value::as_bool).unwrap_or(false);
        let Some(connection) = self.connection_mut(from) else { return };
        let extension = connection.extension.get_or_insert_default();
        extension.about = about;
        extension.keep_holds = keep;
        let limits = &self.settings;
        let answer = json!({
            "server": "tenure",
            "version": env!("CARGO_PKG_VERSION"),
            "instance": format!("{:032x}", self.instance),
            "connection": from.id(),
            "durable": self.is_durable(),
            "auth": self.secret.is_some(),
            "auto_release": limits.auto_release,
            "max_lease_ms": u64::try_from(limits.max_lease.as_millis()).unwrap_or(u64::MAX),
        });
        self.reply(Reply::Json(answer.to_string().as_bytes()));
    }

    /// Makes a claim, or repeats one: a client that lost the reply sends the same id again.
    fn claim(
        &mut self,
        from: Owner,
        id: ClaimId,
        key: &[u8],
        table_claim: TableClaim,
        by: &[u8],
        now: Time,
    ) {
        // Leases that are over must end first. Otherwise a repeated claim could be answered with a grant that has
        // expired, and its client would believe in a hold that the table is about to grant to the next waiter.
        self.grant_due_claims(now);
        if let Some(claim) = self.claims.by_id.get(&id) {
            // The client has reconnected, but the server has not yet noticed the end of the claim's connection. When it
            // does, the claim may be released with that connection. A reply of `granted` now could therefore be wrong a
            // moment later: the client has to retry until the old connection is gone.
            let elsewhere = claim.from != from && self.connection(claim.from).is_some();
            let reply = match claim.stage {
                _ if elsewhere || *claim.key != *key || claim.space != table_claim.mode.space() => {
                    Reply::Error(b"claimed_elsewhere")
                }
                ClaimStage::Waiting(_) => Reply::Queued,
                ClaimStage::Held { token, lease } => Reply::Granted { token, lease: millis(lease) },
            };
            let takes_over = matches!(reply, Reply::Granted { .. }) && claim.from != from;
            self.reply(reply);
            if takes_over && let Some(mut claim) = self.remove_claim(id) {
                // The new connection takes over the claim and receives its pushes. `remove_claim` has cleared the index
                // by number, so it is filled again.
                if let ClaimStage::Held { token, .. } = claim.stage {
                    self.claims.by_number.insert(token.number(), id);
                }
                claim.from = from;
                self.insert_claim(id, claim);
            }
            return;
        }
        let max_claims = self.settings.max_claims_per_connection;
        if self.extension_mut(from).is_none_or(|extension| extension.claims.len() >= max_claims) {
            self.reply(Reply::Error(b"max_claims"));
            return;
        }
        let space = table_claim.mode.space();
        let new_claim = |stage| Claim { from, space, key: key.into(), by: by.into(), stage };
        match self.table.claim(key, table_claim, now) {
            ClaimAnswer::Granted(grant) => {
                let claim = new_claim(ClaimStage::Held { token: grant.token, lease: grant.lease });
                self.claims.by_number.insert(grant.token.number(), id);
                self.insert_claim(id, claim);
                self.record_grant(key, table_claim.mode, &grant, (by, from), now);
                self.key_changed(space, key);
                self.reply(Reply::Granted { token: grant.token, lease: millis(grant.lease) });
            }
            ClaimAnswer::Queued(place) => {
                let claim = new_claim(ClaimStage::Waiting(place));
                self.claims.by_place.insert(place, id);
                self.insert_claim(id, claim);
                self.key_changed(space, key);
                self.record_history(
                    (space, key),
                    HistoryEventKind::Waiting,
                    0,
                    by,
                    Some(from),
                    now,
                );
                self.reply(Reply::Queued);
            }
            ClaimAnswer::Contended => {
                self.counters.contended += 1;
                self.reply(Reply::Timeout);
            }
            ClaimAnswer::Refused(refusal) => self.refuse(refusal),
        }
        self.handle_table_events(now);
    }

    /// Abandons a claim: leaves the queue, or releases the hold.
    fn abandon(&mut self, id: ClaimId, now: Time) {
        self.grant_due_claims(now);
        match self.remove_claim(id) {
            Some(claim) => {
                self.take_back_grant(id, &claim);
                self.end_claim(&claim, now);
                self.reply(Reply::Done);
            }
            None => self.reply(Reply::NOT_ENQUEUED),
        }
        self.handle_table_events(now);
    }

    /// Detaches a granted claim: its hold then survives the end of the connection.
    fn detach(&mut self, id: ClaimId, now: Time) {
        let detached = match self.claims.by_id.get(&id) {
            Some(Claim { space, key, stage: ClaimStage::Held { token, .. }, .. }) => {
                self.table.detach(*space, key, *token, now).is_ok()
            }
            _ => false,
        };
        self.reply(if detached { Reply::Done } else { Reply::ERROR });
        self.handle_table_events(now);
    }

    fn renew_millis(
        &mut self,
        key: &[u8],
        space: KeySpace,
        token: Option<LockToken>,
        lease: u64,
        now: Time,
    ) {
        let lease = Duration::from_millis(lease).min(self.settings.max_lease);
        let renewed = token.map(|token| (token, self.table.renew(space, key, token, lease, now)));
        if let Some((token, Ok(renewed))) = renewed {
            self.record_renewal(token, lease, renewed.ends);
            let waiters = u64::from(renewed.waiters);
            self.reply(Reply::Renewed { lease: millis(lease), waiters });
        } else {
            self.counters.renewals_refused += 1;
            self.reply(Reply::ERROR);
        }
        self.handle_table_events(now);
    }

    /// JSON of a key's holders and waiters.
    pub(super) fn key_json(&mut self, space: KeySpace, key: &[u8], now: Time) -> Value {
        let view = self.table.inspect(space, key, MAX_LISTED, now);
        self.handle_table_events(now);
        self.view_json(key, space, view, now)
    }

    fn reply_history(&mut self, key: &[u8], space: KeySpace) {
        let events: Vec<Value> =
            self.history.events_of(space, key).iter().map(history::event_json).collect();
        let kept = self.history.is_enabled();
        self.reply(Reply::Json(json!({ "kept": kept, "events": events }).to_string().as_bytes()));
    }

    fn query(&mut self, key: &[u8], space: KeySpace, now: Time) {
        let view = self.key_json(space, key, now);
        self.reply(Reply::Json(view.to_string().as_bytes()));
    }

    fn list(&mut self, prefix: &[u8], space: KeySpace, after: Option<&[u8]>, now: Time) {
        let keys: Vec<Summary> = self.table.list(space, prefix, after, MAX_LISTED, now);
        let in_use = keys.iter().filter(|key| key.idle_since.is_none());
        let names: Vec<Box<[u8]>> = in_use.map(|key| (*key.key).into()).collect();
        let continue_after =
            keys.last().filter(|_| keys.len() == MAX_LISTED).map(|key| hex(&key.key));
        let mut views = Vec::new();
        for name in names {
            let view = self.table.inspect(space, &name, MAX_LISTED, now);
            views.push(self.view_json(&name, space, view, now));
        }
        self.handle_table_events(now);
        let answer = json!({ "keys": views, "after": continue_after });
        self.reply(Reply::Json(answer.to_string().as_bytes()));
    }

    fn watch(&mut self, from: Owner, key: &[u8], space: KeySpace, seen: u64, id: u64, now: Time) {
        if self.watches.count_of(from) >= self.settings.max_watches_per_connection {
            self.reply(Reply::Error(b"max_watches"));
            return;
        }
        self.reply(Reply::Done);
        // The watch fires at once if the key's version is not the one that the client saw. A watch for later changes
        // only would miss a change between the client's query and this request.
        let view = self.table.inspect(space, key, MAX_LISTED, now);
        self.handle_table_events(now);
        self.watches.insert(space, key, from, id);
        if version_of(view.as_ref()) != seen {
            self.key_changed(space, key);
        }
    }

    fn break_hold(
        &mut self,
        from: Owner,
        key: &[u8],
        space: KeySpace,
        number: u64,
        reason: &[u8],
        now: Time,
    ) {
        // Without a secret every client that can connect could break any hold.
        if self.secret.is_none() {
            self.reply(Reply::AUTH);
            return;
        }
        let peer = self.connection(from).and_then(|connection| connection.peer);
        let broken = self.evict(key, space, number, reason, peer, now);
        self.reply(if broken { Reply::Done } else { Reply::ERROR });
        self.handle_table_events(now);
    }

    /// Breaks a hold, notifies its holder, and logs the break. False if no hold of the key has this number.
    pub(super) fn evict(
        &mut self,
        key: &[u8],
        space: KeySpace,
        number: u64,
        reason: &[u8],
        peer: Option<std::net::IpAddr>,
        now: Time,
    ) -> bool {
        // The connection that made the claim is notified. For a detached hold that is not the owner in the table.
        let claimed_by = self.claims.claiming_connection(number);
        self.history.break_reason = lossy_text(reason).into();
        let Ok(owner) = self.table.evict(space, key, number, now) else { return false };
        let why = [b"evicted ", reason].concat();
        if let Some(owner) = claimed_by.or(owner) {
            self.push(owner, Push::Ended { number, why: &why });
        }
        let (key, reason) = (lossy_text(key), lossy_text(reason));
        let peer = peer.map(tracing::field::display);
        tracing::warn!(target: "tenure::server", key, fence = number, reason, peer, "broken");
        true
    }
}

/// Changes of claims.
impl Engine {
    /// Records the grant of a waiting claim and pushes it to the client. False if the place belongs to no claim of the
    /// extension.
    pub(super) fn claim_granted(
        &mut self,
        place: PlaceId,
        key: &KeyBytes,
        mode: Mode,
        grant: &Grant,
        now: Time,
    ) -> bool {
        let Some(id) = self.claims.by_place.remove(&place) else { return false };
        let token = grant.token;
        self.claims.by_number.insert(token.number(), id);
        let Some(claim) = self.claims.by_id.get_mut(&id) else { return false };
        claim.stage = ClaimStage::Held { token, lease: grant.lease };
        let (from, by) = (claim.from, claim.by.clone());
        self.record_grant(key, mode, grant, (&by, from), now);
        self.push(from, Push::Granted { id, token, lease: millis(grant.lease) });
        true
    }

    /// Removes the claim of a hold that was released by a release request.
    pub(super) fn claim_released(&mut self, number: u64) {
        // The maps are empty on a server without clients of the extension: this saves two hashes per release.
        if !self.claims.restored_identities.is_empty() {
            self.claims.restored_identities.remove(&number);
        }
        if !self.claims.by_number.is_empty()
            && let Some(id) = self.claims.by_number.get(&number)
        {
            self.remove_claim(*id);
        }
    }

    /// Removes the claim of a hold that ended without a release. If the hold expired, the connection that made the
    /// claim is notified.
    pub(super) fn claim_ended(&mut self, how: Ending, owner: Option<Owner>, number: u64) {
        self.claims.restored_identities.remove(&number);
        let claim =
            self.claims.by_number.get(&number).copied().and_then(|id| self.remove_claim(id));
        if how == Ending::Expired
            && let Some(owner) = claim.map(|claim| claim.from).or(owner)
        {
            self.push(owner, Push::Ended { number, why: b"expired" });
        }
    }

    /// Pushes a hand-off request to the holder. False if the holder has no connection or does not accept pushes.
    pub(super) fn notify_handoff_requested(&mut self, owner: Option<Owner>, number: u64) -> bool {
        let Some(holder) = self.claims.claiming_connection(number).or(owner) else { return false };
        self.push(holder, Push::HandoffRequested { number })
    }

    /// Abandons the waiting claims of a connection that ended. Granted claims are left to [`LockTable::disconnect`].
    ///
    /// [`LockTable::disconnect`]: tenure_core::LockTable::disconnect
    pub(super) fn abandon_waiting_claims(&mut self, connection: &super::Connection, now: Time) {
        let Some(extension) = &connection.extension else { return };
        self.grant_due_claims(now);
        // Sorted, so that the same requests cause the same output: a hash set has no fixed order.
        let mut ids: Vec<_> = extension.claims.iter().copied().collect();
        ids.sort_unstable();
        for id in ids {
            let waits = matches!(
                self.claims.by_id.get(&id),
                Some(Claim { stage: ClaimStage::Waiting(_), .. })
            );
            if waits && let Some(claim) = self.remove_claim(id) {
                self.end_claim(&claim, now);
            }
        }
        self.handle_table_events(now);
    }

    /// Ends all waiting claims, for a server that stops, and notifies their clients.
    pub(super) fn refuse_waiting_claims(&mut self, now: Time) {
        let mut waiting: Vec<(PlaceId, ClaimId)> =
            self.claims.by_place.iter().map(|(place, id)| (*place, *id)).collect();
        waiting.sort_unstable();
        for (_, id) in waiting {
            if let Some(claim) = self.remove_claim(id) {
                self.end_claim(&claim, now);
                self.push(claim.from, Push::Gone { id });
            }
        }
        self.handle_table_events(now);
    }

    /// Removes the push of an abandoned claim's grant, unless it is in the output already. Behind the reply to the
    /// abandonment, the push would look like the grant of a new claim with the same id.
    fn take_back_grant(&mut self, id: ClaimId, claim: &Claim) {
        if let ClaimStage::Held { token, lease } = claim.stage {
            let mut line = Vec::new();
            Push::Granted { id, token, lease: millis(lease) }.write(&mut line);
            self.woken.retain(|(to, wake)| {
                *to != claim.from || !matches!(wake, Wake::Push(push) if **push == *line)
            });
        }
    }

    /// Ends the leases that are over, and grants their keys to the claims that wait for them.
    ///
    /// To be called before a waiting claim is removed. The table ends such leases first and may grant the very place
    /// that is to be abandoned. Without its claim that hold would be left behind until its lease ends: its client has
    /// been told that nothing is left.
    fn grant_due_claims(&mut self, now: Time) {
        self.table.handle_timeout(now);
        self.handle_table_events(now);
    }

    fn insert_claim(&mut self, id: ClaimId, claim: Claim) {
        if let Some(extension) = self.extension_mut(claim.from) {
            extension.claims.insert(id);
        }
        self.claims.by_id.insert(id, claim);
    }

    fn remove_claim(&mut self, id: ClaimId) -> Option<Claim> {
        let claim = self.claims.remove(id)?;
        if let Some(extension) = self.extension_mut(claim.from) {
            extension.claims.remove(&id);
        }
        Some(claim)
    }

    /// Removes an abandoned claim from the table: leaves the queue, or releases the hold.
    fn end_claim(&mut self, claim: &Claim, now: Time) {
        match claim.stage {
            ClaimStage::Waiting(place) => {
                self.table.abandon(place, now);
                let of = (claim.space, &*claim.key);
                self.record_history(
                    of,
                    HistoryEventKind::GaveUp,
                    0,
                    &claim.by,
                    Some(claim.from),
                    now,
                );
            }
            ClaimStage::Held { token, .. } => {
                if self.table.release(claim.space, &claim.key, token, now).is_ok() {
                    let of = (claim.space, &*claim.key);
                    self.record_end(of, token.number(), HistoryEventKind::Released, now);
                }
            }
        }
        self.key_changed(claim.space, &claim.key);
    }

    fn extension_mut(&mut self, owner: Owner) -> Option<&mut Extension> {
        self.connection_mut(owner)?.extension.as_deref_mut()
    }

    /// Queues a push to a client. False if the connection is gone or does not accept pushes.
    fn push(&mut self, to: Owner, push: Push<'_>) -> bool {
        let accepted = self.connection(to).is_some_and(super::Connection::accepts_pushes);
        if accepted {
            let mut line = Vec::new();
            push.write(&mut line);
            self.woken.push_back((to, Wake::Push(line.into())));
        }
        accepted
    }
}

/// Views of a key.
impl Engine {
    fn view_json(&self, key: &[u8], space: KeySpace, view: Option<View>, now: Time) -> Value {
        let seen = version_of(view.as_ref()).to_string();
        let space_name = match space {
            KeySpace::Lock => "lock",
            KeySpace::Semaphore => "semaphore",
        };
        let Some(View { summary, holders, waiters }) = view else {
            return json!({ "key": lossy_text(key), "space": space_name, "seen": seen, "held": 0, "waiting": 0, "holders": [], "waiters": [] });
        };
        let holders: Vec<Value> =
            holders.iter().map(|holder| self.holder_json(holder, now)).collect();
        let waiters: Vec<Value> =
            waiters.iter().map(|waiter| self.waiter_json(waiter, now)).collect();
        json!({
            "key": lossy_text(key), "space": space_name, "limit": summary.limit, "seen": seen,
            "held": summary.holders, "waiting": summary.waiters, "holders": holders, "waiters": waiters,
        })
    }

    fn holder_json(&self, holder: &Holder, now: Time) -> Value {
        let owner = holder.owner.filter(|owner| *owner != self.claims.detached_owner);
        json!({
            "fence": holder.number.to_string(),
            "mode": mode_name(holder.mode),
            "by": self.holder_identity(holder.number, holder.owner),
            "connection": owner.map(Owner::id),
            "held_ms": millis(now.since(holder.granted)),
            "lease_ms": millis(holder.lease),
            "left_ms": millis(holder.ends.since(now)),
        })
    }

    /// Identity of the holder with this fencing number.
    pub(super) fn holder_identity(&self, number: u64, owner: Option<Owner>) -> String {
        let claim = self.claims.by_number.get(&number).and_then(|id| self.claims.by_id.get(id));
        let restored = self.claims.restored_identities.get(&number).map(|by| lossy_text(by));
        let owner = owner.filter(|owner| *owner != self.claims.detached_owner);
        restored.unwrap_or_else(|| self.identity(claim, owner))
    }

    /// Identity of the client of a connection.
    pub(super) fn connection_identity(&self, owner: Option<Owner>) -> String {
        self.identity(None, owner)
    }

    /// True if a hold with this owner belongs to no connection: it was detached, restored, or kept after a disconnect.
    pub(super) fn is_detached(&self, owner: Option<Owner>) -> bool {
        owner.is_none_or(|owner| owner == self.claims.detached_owner)
    }

    fn waiter_json(&self, waiter: &Waiter, now: Time) -> Value {
        let claim =
            self.claims.by_place.get(&waiter.place).and_then(|id| self.claims.by_id.get(id));
        let owner = claim.map_or(waiter.owner, |claim| claim.from);
        json!({
            "mode": mode_name(waiter.mode),
            "by": self.identity(claim, Some(owner)),
            "connection": owner.id(),
            "waited_ms": millis(now.since(waiter.since)),
        })
    }

    /// First of these that is known: the identity sent with the claim, the one sent with `hello`, the client's address.
    /// Empty if none is known.
    fn identity(&self, claim: Option<&Claim>, owner: Option<Owner>) -> String {
        if let Some(claim) = claim.filter(|claim| !claim.by.is_empty()) {
            return lossy_text(&claim.by);
        }
        let connection = owner.and_then(|owner| self.connection(owner));
        match connection.map(|connection| (&connection.extension, connection.peer)) {
            Some((Some(extension), _)) => extension.about.to_string(),
            Some((None, Some(peer))) => peer.to_string(),
            _ => String::new(),
        }
    }
}

/// Version of a key's view: changes when its holders or waiters change; 0 for a key without either.
fn version_of(view: Option<&View>) -> u64 {
    let Some(view) = view else { return 0 };
    let counts = [u64::from(view.summary.holders), u64::from(view.summary.waiters)];
    let holders = view.holders.iter().map(|holder| holder.number);
    let waiters = view.waiters.iter().map(|waiter| waiter.place.id());
    let parts: Vec<u64> = counts.into_iter().chain(holders).chain(waiters).collect();
    if parts == [0, 0] {
        return 0;
    }
    // FNV-1a, because the version must not change with a restart. It need not resist attacks: the server chooses the
    // hashed numbers, and a collision would only delay a watcher.
    parts.iter().flat_map(|part| part.to_le_bytes()).fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn mode_name(mode: Mode) -> &'static str {
    match mode {
        Mode::Exclusive => "exclusive",
        Mode::Shared => "shared",
        Mode::Slot { .. } => "slot",
    }
}

fn lossy_text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Hexadecimal form of bytes that need not be UTF-8, for JSON.
fn hex(bytes: &[u8]) -> String {
    const DIGITS: [char; 16] =
        ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'a', 'b', 'c', 'd', 'e', 'f'];
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    digits.map(|digit| DIGITS[usize::from(digit)]).collect()
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
