//! What `pg_locks` and `pg_stat_activity` show of who holds what.

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher};
use std::time::Duration;

use tenure_core::{FencingToken, Key};
use tokio_postgres::SimpleQueryRow;

use super::pair::Pair;
use super::session::flag;
use super::tag::{self, SessionTag};
use crate::store::{HolderState, Identity, KeySpace, KeyState, Version, WaiterState};

/// One session that holds or waits.
#[derive(Clone, Debug)]
pub(super) struct LockSession {
    pair: Pair,
    pub(super) pid: i32,
    pub(super) granted: bool,
    pub(super) application_name: String,
    pub(super) token: Option<FencingToken>,
    by: Identity,
    /// The key as its claim names it, where that can be read.
    key: Option<Key>,
    held_for: Option<Duration>,
    lease_left: Option<Duration>,
    waited_for: Option<Duration>,
}

impl LockSession {
    fn read(row: &SimpleQueryRow) -> Option<Self> {
        let number = |at| row.get(at).and_then(|text| text.parse::<i64>().ok());
        let (first, second) = (number(0)?.try_into().ok()?, number(1)?.try_into().ok()?);
        let pid = i32::try_from(number(2)?).ok()?;
        let application_name = row.get(4).unwrap_or_default().to_owned();
        let (name, token) = tag::parse_name(&application_name);
        let read = row.get(5).and_then(SessionTag::comment).unwrap_or_default();
        let stranger = || Identity {
            id: if name.is_empty() { format!("backend {pid}") } else { name.to_owned() },
            host: row.get(6).unwrap_or_default().to_owned(),
            pid: 0,
            note: format!("PostgreSQL backend {pid}"),
        };
        let span = |micros: i64| Duration::from_micros(micros.max(0).unsigned_abs());
        let (idle_for, now) = (number(8).map(span), number(10)?);
        let active = flag(row, 7);
        let granted = flag(row, 3);
        // A session that told no more than its claim has been idle since.
        let held_for = read.granted_at.map(|at| span(now.saturating_sub(at)));
        let held_for = held_for.or(idle_for.filter(|_| read.by.is_some() && !active));
        let left = |ttl: u64| {
            let silent = if active { Duration::ZERO } else { idle_for.unwrap_or_default() };
            Duration::from_millis(ttl).saturating_sub(silent)
        };
        Some(Self {
            pair: Pair::from_unsigned(first, second),
            pid,
            granted,
            token,
            key: read.key.as_deref().and_then(|key| Key::new(key).ok()),
            held_for: held_for.filter(|_| granted),
            lease_left: read.ttl_ms.map(left).filter(|_| granted),
            waited_for: number(9).map(span),
            by: read.by.unwrap_or_else(stranger),
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

    /// Who it is, to say who is in the way.
    pub(super) fn by(&self) -> &Identity {
        &self.by
    }
}

/// Everybody who is shown, by the lock.
pub(super) fn by_pair(rows: &[SimpleQueryRow]) -> BTreeMap<Pair, Vec<LockSession>> {
    let mut found: BTreeMap<Pair, Vec<LockSession>> = BTreeMap::new();
    for shown in rows.iter().filter_map(LockSession::read) {
        found.entry(shown.pair).or_default().push(shown);
    }
    found
}

/// One lock, under the name by which it was asked for.
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

/// All locks, each under the name that its holder gives it, or else as its pair.
pub(super) fn states(found: BTreeMap<Pair, Vec<LockSession>>, space: KeySpace) -> Vec<KeyState> {
    let mut states: Vec<_> = found
        .into_iter()
        .filter_map(|(pair, shown)| {
            let named = shown.iter().find_map(|one| one.key.clone());
            // Only a name that is hashed to this very pair is its name.
            let named = named.filter(|key| Pair::of(key).is_ok_and(|own| own == pair));
            Some(state(named.or_else(|| pair.key())?, space, &shown))
        })
        .collect();
    states.sort_by(|a, b| a.key.cmp(&b.key));
    states
}

/// The version of who holds a key.
pub(super) fn version_of(shown: &[LockSession]) -> Version {
    let holders = shown.iter().filter(|one| one.granted);
    let mut holders: Vec<_> = holders.map(|one| (one.pid, &one.application_name)).collect();
    holders.sort_unstable();
    // Compared within this process only: any hasher without a seed will do.
    Version(BuildHasherDefault::<DefaultHasher>::default().hash_one(holders).into())
}
