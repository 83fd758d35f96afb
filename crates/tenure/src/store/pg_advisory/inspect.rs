//! Read-only views of `pg_locks` and `pg_stat_activity`: holders, waiters and versions of keys.

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher};
use std::time::Duration;

use tenure_core::{FencingToken, Key};
use tokio_postgres::SimpleQueryRow;

use super::pair::Pair;
use super::session::flag;
use super::tag::{self, SessionTag};
use crate::store::{HolderState, Identity, KeySpace, KeyState, Version, WaiterState};

/// A session that holds a lock or waits for it.
#[derive(Clone, Debug)]
pub(super) struct LockSession {
    pair: Pair,
    pub(super) pid: i32,
    pub(super) granted: bool,
    pub(super) application_name: String,
    pub(super) token: Option<FencingToken>,
    by: Identity,
    /// Key as the claim names it, if its comment can be read.
    key: Option<Key>,
    held_for: Option<Duration>,
    lease_left: Option<Duration>,
    waited_for: Option<Duration>,
}

impl LockSession {
    fn read(row: &SimpleQueryRow) -> Option<Self> {
        let number = |column: &str| row.get(column).and_then(|text| text.parse::<i64>().ok());
        let (first, second) =
            (number("classid")?.try_into().ok()?, number("objid")?.try_into().ok()?);
        let pid = i32::try_from(number("pid")?).ok()?;
        let application_name = row.get("application_name").unwrap_or_default().to_owned();
        let (name, token) = tag::parse_name(&application_name);
        let read = row.get("comment").and_then(SessionTag::comment).unwrap_or_default();
        let unknown = || Identity {
            id: if name.is_empty() { format!("backend {pid}") } else { name.to_owned() },
            host: row.get("host").unwrap_or_default().to_owned(),
            pid: 0,
            note: format!("PostgreSQL backend {pid}"),
        };
        let span = |micros: i64| Duration::from_micros(micros.max(0).unsigned_abs());
        let (idle_for, now) = (number("idle_for").map(span), number("now")?);
        let active = flag(row, "is_active");
        let granted = flag(row, "granted");
        // A session whose comment has no grant time has sent nothing since its claim, so it has been idle since the
        // grant.
        let held_for = read.granted_at.map(|at| span(now.saturating_sub(at)));
        let held_for = held_for.or(idle_for.filter(|_| read.by.is_some() && !active));
        let left = |ttl: u64| {
            let idle = if active { Duration::ZERO } else { idle_for.unwrap_or_default() };
            Duration::from_millis(ttl).saturating_sub(idle)
        };
        Some(Self {
            pair: Pair::from_unsigned(first, second),
            pid,
            granted,
            token,
            key: read.key.as_deref().and_then(|key| Key::new(key).ok()),
            held_for: held_for.filter(|_| granted),
            lease_left: read.ttl_ms.map(left).filter(|_| granted),
            waited_for: number("waited_for").map(span),
            by: read.by.unwrap_or_else(unknown),
            application_name,
        })
    }

    fn holder(&self) -> HolderState {
        HolderState {
            by: Some(self.by.clone()),
            token: self.token.unwrap_or_default(),
            held_for: self.held_for,
            lease_left: self.lease_left,
            revision: None,
        }
    }

    fn waiter(&self) -> WaiterState {
        WaiterState { by: Some(self.by.clone()), waited_for: self.waited_for }
    }

    /// Identity of the session's claimer.
    pub(super) fn by(&self) -> &Identity {
        &self.by
    }
}

/// All sessions in the rows, by lock.
pub(super) fn by_pair(rows: &[SimpleQueryRow]) -> BTreeMap<Pair, Vec<LockSession>> {
    let mut found: BTreeMap<Pair, Vec<LockSession>> = BTreeMap::new();
    for shown in rows.iter().filter_map(LockSession::read) {
        found.entry(shown.pair).or_default().push(shown);
    }
    found
}

/// State of one lock, under the key by which the caller named it.
pub(super) fn state(key: Key, space: KeySpace, shown: &[LockSession]) -> KeyState {
    let mut holders: Vec<_> = shown.iter().filter(|one| one.granted).collect();
    holders.sort_by_key(|one| one.token);
    KeyState {
        key,
        space,
        holders: holders.into_iter().map(LockSession::holder).collect(),
        waiters: shown.iter().filter(|one| !one.granted).map(LockSession::waiter).collect(),
        version: version_of(shown),
    }
}

/// States of all locks, each under the key that a session names, or else under its pair.
pub(super) fn states(found: BTreeMap<Pair, Vec<LockSession>>, space: KeySpace) -> Vec<KeyState> {
    let mut states: Vec<_> = found
        .into_iter()
        .filter_map(|(pair, shown)| {
            let named = shown.iter().find_map(|one| one.key.clone());
            // Any client can write such a comment. A key that is not hashed to this pair is not the key of this lock.
            let named = named.filter(|key| Pair::of(key).is_ok_and(|own| own == pair));
            Some(state(named.or_else(|| pair.key())?, space, &shown))
        })
        .collect();
    states.sort_by(|a, b| a.key.cmp(&b.key));
    states
}

/// Version of a key: a hash of its holders' sessions.
pub(super) fn version_of(shown: &[LockSession]) -> Version {
    let holders = shown.iter().filter(|one| one.granted);
    let mut holders: Vec<_> = holders.map(|one| (one.pid, &one.application_name)).collect();
    holders.sort_unstable();
    // Compared within this process only: any hasher without a seed will do.
    Version(BuildHasherDefault::<DefaultHasher>::default().hash_one(holders).into())
}
