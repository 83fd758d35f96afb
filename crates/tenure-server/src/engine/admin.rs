//! Operator interface of the engine: metrics, keys, history. Only [`Engine::admin_break`] and
//! [`Engine::admin_request_handoff`] change anything.

use std::net::IpAddr;

use subtle::ConstantTimeEq as _;
use tenure_core::Time;
use tenure_core::table::KeySpace;
use tenure_core::wire::Push;

use super::Engine;
use super::encode::MAX_LISTED;
use super::history::HistoryEvent;
use super::report::{AdminOutcome, KeyRow, RowHolder, ServerMetrics};

impl Engine {
    /// Metrics at this moment. Visits every waiter.
    pub fn metrics(&self, now: Time) -> ServerMetrics {
        ServerMetrics {
            counters: self.counters,
            stats: self.locks.table().stats().clone(),
            sizes: self.locks.table().sizes(),
            oldest_wait: self.locks.table().oldest_wait().map(|since| now.since(since)),
            connections: self.connections.len(),
            durable: self.is_durable(),
            draining: self.draining,
            has_secret: self.secret.is_some(),
            keeps_history: self.audit.history().is_enabled(),
        }
    }

    /// Keys in use in one part of the table: `max_slots` slots, from slot `from` on. Also returns the slot at which the
    /// next part begins, or `None` at the end of the table.
    pub fn key_rows(
        &mut self,
        from: usize,
        max_slots: usize,
        now: Time,
    ) -> (Vec<KeyRow>, Option<usize>) {
        let (keys, next) = self.locks.table().page(from, max_slots);
        let mut rows = Vec::new();
        for (space, summary) in keys {
            if summary.idle_since.is_some() {
                continue;
            }
            // `inspect` costs a look-up, and is needed only for the age of the first waiter.
            let view = if summary.waiters > 0 {
                self.change(now, |locks| locks.inspect(space, &summary.key, 1, now))
            } else {
                None
            };
            let oldest = view.and_then(|view| view.waiters.first().map(|w| now.since(w.since)));
            let holder = summary.first.map(|holder| RowHolder {
                by: self.holder_identity(holder.number, holder.owner),
                number: holder.number,
                held_for: now.since(holder.granted),
                lease: holder.lease,
                left: holder.ends.since(now),
                detached: self.is_detached(holder.owner),
            });
            rows.push(KeyRow {
                space,
                key: (*summary.key).into(),
                held: summary.holders,
                limit: summary.limit,
                waiting: summary.waiters,
                oldest_wait: oldest,
                holder,
            });
        }
        self.process_woken(now);
        (rows, next)
    }

    /// Holders and waiters of a key as JSON, as in the reply to `q`, and the key's history.
    pub fn key_details(
        &mut self,
        space: KeySpace,
        key: &[u8],
        now: Time,
    ) -> (String, Vec<HistoryEvent>) {
        let view = self.key_json(space, key, now);
        self.process_woken(now);
        (view.to_string(), self.audit.history().events_of(space, key))
    }

    /// Compares `given` with the server's secret, in constant time. A wrong secret is counted against `peer`.
    ///
    /// False if the server has no secret, or if `peer` is blocked after too many wrong ones.
    pub fn verify_secret(&mut self, given: &[u8], peer: IpAddr, now: Time) -> bool {
        let Some(secret) = &self.secret else { return false };
        if self.connections.is_blocked(peer, now) {
            return false;
        }
        let matches = bool::from(given.ct_eq(secret));
        if !matches {
            self.count_auth_failure(Some(peer), now);
        }
        matches
    }

    /// Breaks the hold with fencing number `number`, for an operator with the server's secret.
    pub fn admin_break(
        &mut self,
        credentials: (&[u8], IpAddr),
        (space, key): (KeySpace, &[u8]),
        number: u64,
        reason: &str,
        now: Time,
    ) -> AdminOutcome {
        if let Some(refusal) = self.operator_refusal(credentials, now) {
            return refusal;
        }
        let (_, peer) = credentials;
        let broken = self.evict(key, space, number, reason.as_bytes(), Some(peer), now);
        self.process_woken(now);
        if broken { AdminOutcome::Done } else { AdminOutcome::NotHeld }
    }

    /// Requests a hand-off from a holder, for an operator with the server's secret. The holder is notified as if a
    /// waiter had joined the queue, and decides whether to release.
    pub fn admin_request_handoff(
        &mut self,
        credentials: (&[u8], IpAddr),
        (space, key): (KeySpace, &[u8]),
        number: u64,
        reason: &str,
        now: Time,
    ) -> AdminOutcome {
        if let Some(refusal) = self.operator_refusal(credentials, now) {
            return refusal;
        }
        let view = self.change(now, |locks| locks.inspect(space, key, MAX_LISTED, now));
        let holders = view.map(|view| view.holders).unwrap_or_default();
        let holder = holders.iter().find(|holder| holder.number == number);
        let claimed_by = self.locks.claims().by_number(number).map(|claim| claim.from);
        let notified = holder.map(|holder| {
            let holder = claimed_by.or(holder.owner);
            holder.is_some_and(|holder| self.push(holder, Push::HandoffRequested { number }))
        });
        let outcome = match notified {
            Some(true) => AdminOutcome::Done,
            Some(false) => AdminOutcome::HolderUnreachable,
            None => AdminOutcome::NotHeld,
        };
        if outcome == AdminOutcome::Done {
            self.audit.record_handoff_request((space, key), number, reason, now);
            let (_, peer) = credentials;
            let key = String::from_utf8_lossy(key);
            tracing::warn!(target: "tenure::server", %key, fence = number, reason, %peer, "handoff_requested");
        }
        self.process_woken(now);
        outcome
    }

    /// Reason to refuse an operator's action; `None` if the credentials are valid.
    pub fn operator_refusal(
        &mut self,
        (secret, peer): (&[u8], IpAddr),
        now: Time,
    ) -> Option<AdminOutcome> {
        if self.secret.is_none() {
            return Some(AdminOutcome::NoSecret);
        }
        (!self.verify_secret(secret, peer, now)).then_some(AdminOutcome::WrongSecret)
    }

    /// Keeps up to `max_events` events per recently used key from now on.
    ///
    /// `wall_ms` is the present time in milliseconds since 1970. `saved` is an earlier result of
    /// [`history`](Self::history), or empty.
    pub fn keep_history(&mut self, max_events: usize, wall_ms: u64, saved: &str, now: Time) {
        let origin = wall_ms.saturating_sub(now.as_nanos() / 1_000_000);
        self.audit.keep_history(max_events, origin, saved);
    }

    /// Serialized history, as JSON lines.
    pub fn history(&self) -> String {
        self.audit.history().to_json_lines()
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::time::Duration;

    use super::*;
    use crate::Settings;
    use crate::engine::HistoryEventKind;

    const OPERATOR: (&[u8], IpAddr) = (b"secret", IpAddr::V4(Ipv4Addr::LOCALHOST));

    /// The older hold of a shared key expires in the call that breaks the other.
    #[test]
    fn the_reason_of_a_break_is_recorded_with_the_broken_hold() {
        let mut engine = Engine::new(Settings::default(), Some(b"secret"), 1, 1);
        let start = Time::ZERO;
        engine.keep_history(9, 0, "", start);
        let owner = engine.open(None, start).expect("a connection");
        let claim = |id: u32, lease: u32| format!("x\nkey\n{id:032} s {lease} try bound \n");
        let requests =
            ["auth\n_\nsecret\n", "hello\n_\n{}\n", &claim(1, 1_000), &claim(2, 9_000)].concat();
        engine.receive(owner, requests.as_bytes(), start);
        let late = start + Duration::from_secs(5);
        let key = (KeySpace::Lock, &b"key"[..]);
        assert_eq!(engine.admin_break(OPERATOR, key, 2, "stuck", late), AdminOutcome::Done);
        let (_, events) = engine.key_details(key.0, key.1, late);
        let ends: Vec<_> = events.iter().filter(|event| event.number > 0).skip(2).collect();
        let told = |event: &HistoryEvent| (event.kind, event.number, event.text.clone());
        let expected = [
            (HistoryEventKind::Expired, 1, "".into()),
            (HistoryEventKind::Broken, 2, "stuck".into()),
        ];
        assert_eq!(ends.into_iter().map(told).collect::<Vec<_>>(), expected);
        engine.check();
    }
}
