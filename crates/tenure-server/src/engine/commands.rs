//! Requests of the dflockd line protocol. Those of tenure's extension are in [`extension`](super::extension).

use std::net::IpAddr;
use std::time::Duration;

use subtle::ConstantTimeEq;
use tenure_core::table::{
    ClaimAnswer, Enqueued, KeySpace, Mode, Owner, Redeemed, Refusal, TableClaim,
};
use tenure_core::wire::{ExtensionRequest, Malformed, Reply, Request};
use tenure_core::{LockToken, Time};

use super::connection::ConnectionState;
use super::long_reply::LongReply;
use super::{Engine, granted_reply};

impl Engine {
    /// Serves one request. Its reply is appended to the output at once, unless the request has to wait.
    pub(super) fn serve_request(
        &mut self,
        from: Owner,
        request: Result<Request<'_>, Malformed>,
        now: Time,
    ) {
        self.counters.requests += 1;
        let authenticated =
            self.connections.get(from).is_some_and(|connection| connection.authenticated);
        if self.draining && !(authenticated && concerns_existing_hold(&request)) {
            self.reply(Reply::DRAINING);
            self.connections.begin_close(from, now);
            return;
        }
        if !authenticated {
            self.authenticate(from, request, now);
            return;
        }
        match request {
            Ok(Request::Lock { key, mode, timeout, lease }) => {
                self.lock(from, key, mode, timeout, lease, now);
            }
            Ok(Request::Release { key, space, token }) => self.release(key, space, token, now),
            Ok(Request::Renew { key, space, token, lease }) => {
                self.renew(key, space, token, lease, now);
            }
            Ok(Request::Enqueue { key, mode, lease }) => self.enqueue(from, key, mode, lease, now),
            Ok(Request::Wait { key, space, timeout }) => self.wait(from, key, space, timeout, now),
            Ok(Request::Ping) => self.reply(Reply::Done),
            Ok(Request::Stats) => {
                self.out.bytes.extend_from_slice(b"ok ");
                self.connections.set_state(
                    from,
                    ConnectionState::LongReply(Box::new(LongReply::new(self.connections.len()))),
                );
                self.continue_long_reply(from, now);
            }
            Ok(Request::Extended(extended)) => self.serve_extension_request(from, extended, now),
            // `auth` on a server without a secret, or on a connection that has authenticated already.
            Ok(Request::Auth { .. }) | Err(Malformed) => self.reply(Reply::ERROR),
        }
    }

    /// Checks the secret of a connection that has not authenticated. Any request but a correct `auth` closes it.
    fn authenticate(&mut self, from: Owner, request: Result<Request<'_>, Malformed>, now: Time) {
        let secret = self.secret.as_deref().unwrap_or_default();
        let authenticated = matches!(request, Ok(Request::Auth { secret: given }) if bool::from(given.ct_eq(secret)));
        let Some(connection) = self.connections.get_mut(from) else { return };
        if authenticated {
            connection.authenticated = true;
            self.reply(Reply::Done);
            return;
        }
        let peer = connection.peer;
        tracing::warn!(target: "tenure::server", connection = from.id(), peer = peer.map(tracing::field::display), "auth_failed");
        self.count_auth_failure(peer, now);
        self.reply(Reply::AUTH);
        self.connections.begin_close(from, now);
    }

    /// Counts an authentication failure, in total and for the address of the client.
    pub(super) fn count_auth_failure(&mut self, peer: Option<IpAddr>, now: Time) {
        self.counters.auth_failures += 1;
        if let Some(peer) = peer {
            self.connections.auth_failed(peer, now);
        }
    }

    fn lock(
        &mut self,
        from: Owner,
        key: &[u8],
        mode: Mode,
        timeout: u64,
        lease: Option<u64>,
        now: Time,
    ) {
        let claim = self.table_claim(from, mode, lease, timeout > 0);
        match self.change(now, |locks| locks.claim(key, claim, now)) {
            ClaimAnswer::Granted(grant) => self.reply(granted_reply(&grant)),
            ClaimAnswer::Queued(place) => {
                let until = now + Duration::from_secs(timeout);
                self.connections
                    .set_state(from, ConnectionState::Waiting { place, until, two_phase: false });
                self.connections.arm(from);
            }
            ClaimAnswer::Contended => {
                self.counters.contended += 1;
                self.reply(Reply::Timeout);
            }
            ClaimAnswer::Refused(refusal) => self.refuse(refusal),
        }
    }

    fn enqueue(&mut self, from: Owner, key: &[u8], mode: Mode, lease: Option<u64>, now: Time) {
        let claim = self.table_claim(from, mode, lease, true);
        match self.change(now, |locks| locks.enqueue(key, claim, now)) {
            Enqueued::Granted(grant) => {
                self.reply(Reply::Acquired { token: grant.token, lease: grant.lease.as_secs() });
            }
            Enqueued::Queued(_) => self.reply(Reply::Queued),
            Enqueued::AlreadyEnqueued => self.reply(Reply::ALREADY_ENQUEUED),
            Enqueued::Refused(refusal) => self.refuse(refusal),
        }
    }

    fn wait(&mut self, from: Owner, key: &[u8], space: KeySpace, timeout: u64, now: Time) {
        match self.change(now, |locks| locks.redeem(from, space, key, now)) {
            Redeemed::Granted(grant) => self.reply(granted_reply(&grant)),
            Redeemed::Waiting(place) if timeout == 0 => {
                self.change(now, |locks| locks.abandon(place, now));
                self.counters.timeouts += 1;
                self.reply(Reply::Timeout);
            }
            Redeemed::Waiting(place) => {
                let until = now + Duration::from_secs(timeout);
                self.connections
                    .set_state(from, ConnectionState::Waiting { place, until, two_phase: true });
                self.connections.arm(from);
            }
            Redeemed::LeaseExpired => self.reply(Reply::LEASE_EXPIRED),
            Redeemed::NotEnqueued => self.reply(Reply::NOT_ENQUEUED),
        }
    }

    fn renew(
        &mut self,
        key: &[u8],
        space: KeySpace,
        token: Option<LockToken>,
        lease: Option<u64>,
        now: Time,
    ) {
        let lease = self.effective_lease(lease);
        let renewed =
            token.map(|token| self.change(now, |locks| locks.renew(space, key, token, lease, now)));
        if let Some(Ok(_)) = renewed {
            self.reply(Reply::Number(lease.as_secs()));
        } else {
            self.counters.renewals_refused += 1;
            self.reply(Reply::ERROR);
        }
    }

    fn release(&mut self, key: &[u8], space: KeySpace, token: Option<LockToken>, now: Time) {
        let released =
            token.map(|token| self.change(now, |locks| locks.release(space, key, token, now)));
        self.reply(if let Some(Ok(())) = released { Reply::Done } else { Reply::ERROR });
    }

    /// Replies to a claim that a limit of the server refuses.
    pub(super) fn refuse(&mut self, refusal: Refusal) {
        self.counters.refused += 1;
        self.reply(match refusal {
            Refusal::MaxKeys => Reply::MAX_LOCKS,
            Refusal::MaxWaiters => Reply::MAX_WAITERS,
            Refusal::LimitMismatch => Reply::LIMIT_MISMATCH,
            Refusal::UnknownOwner => Reply::ERROR,
        });
    }

    fn table_claim(&self, owner: Owner, mode: Mode, lease: Option<u64>, queue: bool) -> TableClaim {
        TableClaim { owner, mode, lease: self.effective_lease(lease), queue }
    }

    /// Lease for a client that requests `seconds`, or the default if it requests none; at most [`Settings::max_lease`].
    ///
    /// [`Settings::max_lease`]: crate::Settings::max_lease
    fn effective_lease(&self, seconds: Option<u64>) -> Duration {
        let lease = seconds.map_or(self.settings.default_lease, Duration::from_secs);
        lease.min(self.settings.max_lease)
    }
}

/// True if a request renews, releases, abandons or detaches an existing hold or claim.
///
/// Such requests are served while the server stops. A holder whose renewal was refused would take its hold for lost. A
/// key whose release was refused would stay held on the next server until the lease ends.
fn concerns_existing_hold(request: &Result<Request<'_>, Malformed>) -> bool {
    match request {
        Ok(Request::Renew { .. } | Request::Release { .. }) => true,
        Ok(Request::Extended(extended)) => matches!(
            extended,
            ExtensionRequest::Renew { .. }
                | ExtensionRequest::Abandon { .. }
                | ExtensionRequest::Detach { .. }
        ),
        _ => false,
    }
}
