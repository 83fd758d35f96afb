//! Tenure's extension of the dflockd protocol: claims that do not block their connection, views of keys, breaks, and
//! watches.

use std::time::Duration;

use serde_json::{Value, json};
use tenure_core::table::{ClaimAnswer, KeySpace, Owner, Summary, TableClaim};
use tenure_core::wire::{ClaimId, ExtensionRequest, Push, Reply};
use tenure_core::{LockToken, Time, hex};

use super::Engine;
use super::claims::{Claim, ClaimStage};
use super::connection::Wake;
use super::encode::{MAX_LISTED, lossy_text, version_of};
use super::history;
use crate::units::millis;

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
            self.connections.get(from).is_some_and(|connection| connection.extension.is_some());
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
                let owner = if detached { self.locks.detached_owner() } else { from };
                let lease = Duration::from_millis(lease).min(self.settings.max_lease);
                self.claim(from, id, key, TableClaim { owner, mode, lease, queue }, by, now);
            }
            ExtensionRequest::Position { id } => {
                let ahead = match self.locks.claims().get(id).map(|claim| claim.stage) {
                    Some(ClaimStage::Waiting(place)) => self.locks.table().waiters_ahead(place),
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
        let Some(connection) = self.connections.get_mut(from) else { return };
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
        self.change(now, |locks| locks.handle_timeout(now));
        if self.locks.claims().get(id).is_some() {
            self.repeat_claim(from, id, (table_claim.mode.space(), key));
            return;
        }
        if self.locks.claims().count_of(from) >= self.settings.max_claims_per_connection {
            self.reply(Reply::Error(b"max_claims"));
            return;
        }
        let about = (id, from, by);
        match self.change(now, |locks| locks.claim_as(about, key, table_claim, now)) {
            ClaimAnswer::Granted(grant) => {
                self.reply(Reply::Granted { token: grant.token, lease: millis(grant.lease) });
            }
            ClaimAnswer::Queued(_) => self.reply(Reply::Queued),
            ClaimAnswer::Contended => {
                self.counters.contended += 1;
                self.reply(Reply::Timeout);
            }
            ClaimAnswer::Refused(refusal) => self.refuse(refusal),
        }
    }

    /// Answers a claim that exists already.
    fn repeat_claim(&mut self, from: Owner, id: ClaimId, (space, key): (KeySpace, &[u8])) {
        let Some(claim) = self.locks.claims().get(id) else { return };
        // The client has reconnected, but the server has not yet noticed the end of the claim's connection. When it
        // does, the claim may be released with that connection. A reply of `granted` now could therefore be wrong a
        // moment later: the client has to retry until the old connection is gone.
        let elsewhere = claim.from != from && self.connections.get(claim.from).is_some();
        let reply = match claim.stage {
            _ if elsewhere || *claim.key != *key || claim.space != space => {
                Reply::Error(b"claimed_elsewhere")
            }
            ClaimStage::Waiting(_) => Reply::Queued,
            ClaimStage::Held { token, lease } => {
                self.locks.rebind(id, from);
                Reply::Granted { token, lease: millis(lease) }
            }
        };
        self.reply(reply);
    }

    /// Abandons a claim: leaves the queue, or releases the hold.
    fn abandon(&mut self, id: ClaimId, now: Time) {
        let existed = self.abandon_claim(id, now);
        self.reply(if existed { Reply::Done } else { Reply::NOT_ENQUEUED });
    }

    /// Abandons a claim. False if there is no such claim.
    fn abandon_claim(&mut self, id: ClaimId, now: Time) -> bool {
        // Leases that are over must end first. The table would end them now, and could grant the very place that is to
        // be abandoned: that hold would be left behind until its lease ends.
        self.change(now, |locks| locks.handle_timeout(now));
        let claim = self.locks.claims().get(id);
        if let Some(&Claim { from, stage: ClaimStage::Held { token, lease }, .. }) = claim {
            self.take_back_push(from, Push::Granted { id, token, lease: millis(lease) });
        }
        self.change(now, |locks| locks.abandon_claim(id, now))
    }

    /// Removes a push, unless it is in the output already. Behind the reply to the abandonment, the push of the claim's
    /// grant would look like the grant of a new claim with the same id.
    fn take_back_push(&mut self, to: Owner, push: Push<'_>) {
        let mut line = Vec::new();
        push.write(&mut line);
        let is_it = |wake: &Wake| matches!(wake, Wake::Push(push) if **push == *line);
        self.woken.retain(|(owner, wake)| *owner != to || !is_it(wake));
    }

    /// Detaches a granted claim: its hold then survives the end of the connection.
    fn detach(&mut self, id: ClaimId, now: Time) {
        let detached = self.change(now, |locks| locks.detach_claim(id, now));
        self.reply(if detached { Reply::Done } else { Reply::ERROR });
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
        let renewed =
            token.map(|token| self.change(now, |locks| locks.renew(space, key, token, lease, now)));
        if let Some(Ok(renewed)) = renewed {
            let waiters = u64::from(renewed.waiters);
            self.reply(Reply::Renewed { lease: millis(lease), waiters });
        } else {
            self.counters.renewals_refused += 1;
            self.reply(Reply::ERROR);
        }
    }

    /// JSON of a key's holders and waiters.
    pub(super) fn key_json(&mut self, space: KeySpace, key: &[u8], now: Time) -> Value {
        let view = self.change(now, |locks| locks.inspect(space, key, MAX_LISTED, now));
        self.view_json(key, space, view, now)
    }

    fn reply_history(&mut self, key: &[u8], space: KeySpace) {
        let events: Vec<Value> =
            self.audit.history().events_of(space, key).iter().map(history::event_json).collect();
        let kept = self.audit.history().is_enabled();
        self.reply(Reply::Json(json!({ "kept": kept, "events": events }).to_string().as_bytes()));
    }

    fn query(&mut self, key: &[u8], space: KeySpace, now: Time) {
        let view = self.key_json(space, key, now);
        self.reply(Reply::Json(view.to_string().as_bytes()));
    }

    fn list(&mut self, prefix: &[u8], space: KeySpace, after: Option<&[u8]>, now: Time) {
        let keys: Vec<Summary> =
            self.change(now, |locks| locks.list(space, prefix, after, MAX_LISTED, now));
        let in_use = keys.iter().filter(|key| key.idle_since.is_none());
        let names: Vec<Box<[u8]>> = in_use.map(|key| (*key.key).into()).collect();
        let continue_after =
            keys.last().filter(|_| keys.len() == MAX_LISTED).map(|key| hex::encode(&key.key));
        let mut views = Vec::new();
        for name in names {
            let view = self.change(now, |locks| locks.inspect(space, &name, MAX_LISTED, now));
            views.push(self.view_json(&name, space, view, now));
        }
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
        let view = self.change(now, |locks| locks.inspect(space, key, MAX_LISTED, now));
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
        let peer = self.connections.get(from).and_then(|connection| connection.peer);
        let broken = self.evict(key, space, number, reason, peer, now);
        self.reply(if broken { Reply::Done } else { Reply::ERROR });
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
        let evicted = self.change(now, |locks| locks.evict(space, key, number, reason, now));
        if evicted.is_err() {
            return false;
        }
        let (key, reason) = (lossy_text(key), lossy_text(reason));
        let peer = peer.map(tracing::field::display);
        tracing::warn!(target: "tenure::server", key, fence = number, reason, peer, "broken");
        true
    }

    /// Abandons the waiting claims of a connection that ended. Its holds are left to the table.
    pub(super) fn abandon_waiting_claims(&mut self, connection: Owner, now: Time) {
        for id in self.locks.forget_connection(connection) {
            self.abandon_claim(id, now);
        }
    }

    /// Ends all waiting claims, for a server that stops, and notifies their clients.
    pub(super) fn refuse_waiting_claims(&mut self, now: Time) {
        for id in self.locks.claims().waiting() {
            let Some(&Claim { from, .. }) = self.locks.claims().get(id) else { continue };
            self.abandon_claim(id, now);
            self.push(from, Push::Gone { id });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Settings;
    use crate::engine::Hangup;

    /// The end of the first claim makes room for the second, which must end with the same connection.
    #[test]
    fn waiting_claims_of_an_ended_connection_leave_no_detached_hold() {
        let now = Time::ZERO;
        let mut engine = Engine::new(Settings::default(), None, 1, 1);
        let [holder, client] = [(); 2].map(|()| engine.open(None, now).expect("a connection"));
        let claim = |id: u32, mode: &str, bound: &str| {
            format!("x\nkey\n{id:032} {mode} 9000 queue {bound} \n")
        };
        let hello = "hello\n_\n{}\n";
        engine.receive(holder, [hello, &claim(1, "s", "bound")].concat().as_bytes(), now);
        let waiting = [hello, &claim(2, "x", "detached"), &claim(3, "s", "detached")].concat();
        engine.receive(client, waiting.as_bytes(), now);
        assert_eq!(engine.locks.table().sizes().waiters, 2);
        engine.hang_up(client, Hangup::Finished, now);
        engine.check();
        engine.hang_up(holder, Hangup::Finished, now);
        assert_eq!(engine.leftovers(), [0; 6]);
    }
}
