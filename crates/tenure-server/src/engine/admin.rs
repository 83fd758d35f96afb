//! What the engine shows to whoever looks after it: counts, keys, what happened. It changes nothing but by
//! [`Engine::break_by_hand`] and [`Engine::ask_by_hand`].

use std::net::IpAddr;
use std::time::Duration;

use subtle::ConstantTimeEq as _;
use tenure_core::Time;
use tenure_core::table::{KeySpace, Owner, TableSizes, TableStats};

use super::Engine;
use super::extension::MAX_LISTED;
use super::history::{HistoryEvent, HistoryEventKind};

/// What the engine counts beside the table. Plain integers: it has one owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Requests, whatever their answer.
    pub requests: u64,
    /// Connections that were let in.
    pub connections: u64,
    /// Connections that were turned away.
    pub connections_rejected: u64,
    /// Claims that found the key held and did not want to wait.
    pub contended: u64,
    /// Waits that ran out.
    pub timeouts: u64,
    /// Claims that a limit stood against.
    pub refused: u64,
    /// Renewals of holds that were over.
    pub renewals_refused: u64,
    /// Wrong secrets.
    pub auth_failures: u64,
}

/// The numbers of a server at one moment.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is so or not by itself")]
pub struct ServerMetrics {
    /// What was served.
    pub counters: Counters,
    /// What the table did.
    pub stats: TableStats,
    /// What the table has.
    pub sizes: TableSizes,
    /// How long the one has waited who waits the longest.
    pub oldest_wait: Option<Duration>,
    /// Connections at this moment.
    pub connections: usize,
    /// Whether what is granted survives a restart.
    pub durable: bool,
    /// Whether it has begun to stop.
    pub draining: bool,
    /// Whether it asks for a secret: nothing can be broken otherwise.
    pub has_secret: bool,
    /// How many events of a key are remembered.
    pub keeps_history: bool,
}

/// A key in use, in short.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRow {
    /// Its space.
    pub space: KeySpace,
    /// Its name.
    pub key: Box<[u8]>,
    /// How many hold it.
    pub held: u32,
    /// How many may, for a semaphore.
    pub limit: Option<u32>,
    /// How many wait.
    pub waiting: u32,
    /// How long the first of them has.
    pub oldest_wait: Option<Duration>,
    /// Who has held it the longest.
    pub holder: Option<RowHolder>,
}

/// Who holds a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowHolder {
    /// Who, as the client said it.
    pub by: String,
    /// The fencing number.
    pub number: u64,
    /// For how long.
    pub held_for: Duration,
    /// How long it lasts from its last renewal on.
    pub lease: Duration,
    /// How much of that is left.
    pub left: Duration,
    /// Whether it outlives its connection: nobody renews it.
    pub detached: bool,
}

/// What became of something that was tried by hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdminOutcome {
    /// It is done.
    Done,
    /// The server asks nobody for a secret, so that anybody could have sent this.
    NoSecret,
    /// The secret is wrong, or too many were.
    WrongSecret,
    /// No hold of the key has this number, or no longer.
    NotHeld,
    /// Its holder cannot be told anything: it has no connection, or knows no such words.
    HolderUnreachable,
}

impl Engine {
    /// The numbers at this moment. Walks all who wait.
    pub fn metrics(&self, now: Time) -> ServerMetrics {
        ServerMetrics {
            counters: self.counters,
            stats: self.table.stats().clone(),
            sizes: self.table.sizes(),
            oldest_wait: self.table.oldest_wait().map(|since| now.since(since)),
            connections: self.count,
            durable: self.is_durable(),
            draining: self.draining,
            has_secret: self.secret.is_some(),
            keeps_history: self.history.is_enabled(),
        }
    }

    /// The keys in use among the next `most` slots of the table after the first `from`, and how far that went; `None` at
    /// the end.
    pub fn rows(
        &mut self,
        from: usize,
        max_slots: usize,
        now: Time,
    ) -> (Vec<KeyRow>, Option<usize>) {
        let (keys, next) = self.table.page(from, max_slots);
        let mut rows = Vec::new();
        for (space, summary) in keys {
            if summary.idle_since.is_some() {
                continue;
            }
            // Who waits is looked for only where somebody does.
            let view = if summary.waiters > 0 {
                self.table.inspect(space, &summary.key, 1, now)
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
        self.pump(now);
        self.process_woken(now);
        (rows, next)
    }

    /// A key closely, as `q` tells it, and what happened to it of late.
    pub fn key(&mut self, space: KeySpace, key: &[u8], now: Time) -> (String, Vec<HistoryEvent>) {
        let view = self.view(space, key, now);
        self.process_woken(now);
        (view.to_string(), self.history.of(space, key))
    }

    /// Whether a secret is the one that clients must know; where it is not, that is counted against `peer`.
    pub fn verify_secret(&mut self, given: &[u8], peer: IpAddr, now: Time) -> bool {
        let Some(secret) = &self.secret else { return false };
        if self.peer_limits.is_blocked(peer, now) {
            return false;
        }
        let right = bool::from(given.ct_eq(secret));
        if !right {
            self.count_auth_failure(Some(peer), now);
        }
        right
    }

    /// Breaks a hold, for somebody who knows the secret.
    pub fn admin_break(
        &mut self,
        credentials: (&[u8], IpAddr),
        (space, key): (KeySpace, &[u8]),
        number: u64,
        reason: &str,
        now: Time,
    ) -> AdminOutcome {
        if let Some(refused) = self.admin_refusal(credentials, now) {
            return refused;
        }
        let done = self.evict(key, space, number, reason.as_bytes(), Some(credentials.1), now);
        self.pump(now);
        self.process_woken(now);
        if done { AdminOutcome::Done } else { AdminOutcome::NotHeld }
    }

    /// Tells a holder that its hold is wanted, as if somebody had begun to wait for it, for somebody who knows the
    /// secret. What it does about it is its own decision.
    pub fn admin_request_handoff(
        &mut self,
        credentials: (&[u8], IpAddr),
        (space, key): (KeySpace, &[u8]),
        number: u64,
        reason: &str,
        now: Time,
    ) -> AdminOutcome {
        if let Some(refused) = self.admin_refusal(credentials, now) {
            return refused;
        }
        let view = self.table.inspect(space, key, MAX_LISTED, now);
        self.pump(now);
        let holders = view.map(|view| view.holders).unwrap_or_default();
        let holder = holders.iter().find(|holder| holder.number == number);
        let outcome = match holder.map(|holder| self.notify_handoff_requested(holder.owner, number))
        {
            Some(true) => AdminOutcome::Done,
            Some(false) => AdminOutcome::HolderUnreachable,
            None => AdminOutcome::NotHeld,
        };
        if outcome == AdminOutcome::Done {
            self.history.add((space, key), HistoryEventKind::HandoffRequested, number, reason, now);
            let (key, peer) = (String::from_utf8_lossy(key), credentials.1);
            tracing::warn!(target: "tenure::server", %key, fence = number, reason, %peer, "handoff_requested");
        }
        self.process_woken(now);
        outcome
    }

    /// Why somebody may not do anything by hand.
    fn admin_refusal(
        &mut self,
        (secret, peer): (&[u8], IpAddr),
        now: Time,
    ) -> Option<AdminOutcome> {
        if self.secret.is_none() {
            return Some(AdminOutcome::NoSecret);
        }
        (!self.verify_secret(secret, peer, now)).then_some(AdminOutcome::WrongSecret)
    }

    /// Remembers `most` events of each key that was used of late, from now on. `wall` is the time since 1970 in
    /// milliseconds, and `before` what [`history`](Self::history) gave at another time.
    pub fn keep_history(&mut self, max_events: usize, wall: u64, before: &str, now: Time) {
        self.history.enable(max_events, wall.saturating_sub(now.as_nanos() / 1_000_000));
        self.history.read(before);
    }

    /// What is remembered, as text.
    pub fn history(&self) -> String {
        self.history.write()
    }

    pub(super) fn record_history(
        &mut self,
        of: (KeySpace, &[u8]),
        what: HistoryEventKind,
        number: u64,
        by: &[u8],
        owner: Option<Owner>,
        now: Time,
    ) {
        if !self.history.is_enabled() {
            return;
        }
        let text = if by.is_empty() {
            self.connection_identity(owner)
        } else {
            String::from_utf8_lossy(by).into_owned()
        };
        self.history.add(of, what, number, &text, now);
    }
}
