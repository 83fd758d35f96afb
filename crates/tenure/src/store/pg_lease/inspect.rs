//! Read-only views of the table: holders and versions of keys.

use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher};
use std::time::Duration;

use tenure_core::{FencingToken, Key};
use tokio_postgres::Row;

use crate::store::{HolderState, Identity, KeySpace, KeyState, Version, WaiterState};

/// Version for a claim that was neither granted nor refused because of a holder: retry soon.
pub(super) const UNSETTLED: Version = Version(u128::MAX);

/// One holder or waiter in the answer to `inspect` or `list`.
pub(super) struct LeaseHolder {
    now: i64,
    /// True for a waiter, whose token is zero. `granted` is then the start of its wait.
    pub(super) waits: bool,
    pub(super) space: i16,
    pub(super) key: Key,
    pub(super) epoch: i64,
    pub(super) number: i64,
    by: Identity,
    granted: Option<i64>,
    pub(super) until: i64,
}

impl LeaseHolder {
    /// All holders and waiters in the rows. A row without a key carries only the time, and is skipped.
    pub(super) fn all(rows: &[Row]) -> impl Iterator<Item = Self> {
        rows.iter().filter_map(|row| {
            Some(Self {
                now: row.get("now"),
                space: row.get::<_, Option<_>>("space")?,
                waits: row.get("waits"),
                key: Key::new(row.get::<_, Option<&str>>("key")?).ok()?,
                epoch: row.get("epoch"),
                number: row.get("number"),
                by: identity(row),
                granted: row.get("granted"),
                until: row.get("until"),
            })
        })
    }

    fn state(&self) -> HolderState {
        HolderState {
            by: Some(self.by.clone()),
            token: token(self.epoch, self.number),
            held_for: self.since_grant(),
            lease_left: Some(span(self.until.saturating_sub(self.now))),
            revision: None,
        }
    }

    fn waiter(&self) -> WaiterState {
        WaiterState { by: Some(self.by.clone()), waited_for: self.since_grant() }
    }

    fn since_grant(&self) -> Option<Duration> {
        self.granted.map(|granted| span(self.now.saturating_sub(granted)))
    }
}

fn span(micros: i64) -> Duration {
    Duration::from_micros(micros.max(0).unsigned_abs())
}

/// Reads the identity of a holder.
pub(super) fn identity(row: &Row) -> Identity {
    let text = |column| row.get::<_, Option<String>>(column).unwrap_or_default();
    let pid = row.get::<_, Option<i64>>("pid").unwrap_or_default();
    Identity {
        id: text("id"),
        host: text("host"),
        pid: u32::try_from(pid).unwrap_or_default(),
        note: text("note"),
    }
}

/// States of the keys in the rows, each with its holders, in the order of the rows.
pub(super) fn states(rows: &[Row], space: KeySpace) -> Vec<KeyState> {
    let mut states: Vec<KeyState> = Vec::new();
    let mut tokens: Vec<Vec<(i64, i64)>> = Vec::new();
    for shown in LeaseHolder::all(rows) {
        if states.last().is_none_or(|state| state.key != shown.key) {
            states.push(free_key(shown.key.clone(), space));
            tokens.push(Vec::new());
        }
        if let (Some(state), Some(tokens)) = (states.last_mut(), tokens.last_mut()) {
            if shown.waits {
                state.waiters.push(shown.waiter());
                continue;
            }
            tokens.push((shown.epoch, shown.number));
            state.holders.push(shown.state());
        }
    }
    for (state, tokens) in states.iter_mut().zip(tokens) {
        state.version = version_of(tokens);
    }
    states
}

/// State of a free key.
pub(super) fn free_key(key: Key, space: KeySpace) -> KeyState {
    KeyState {
        key,
        space,
        holders: Vec::new(),
        waiters: Vec::new(),
        version: version_of(Vec::new()),
    }
}

/// Version of a key: a hash of its holders' tokens.
pub(super) fn version_of(mut holders: Vec<(i64, i64)>) -> Version {
    holders.sort_unstable();
    // Compared within this process only: any hasher without a seed will do.
    let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(holders);
    let version = Version(hash.into());
    debug_assert_ne!(version, UNSETTLED);
    version
}

pub(super) fn token(epoch: i64, number: i64) -> FencingToken {
    FencingToken::new(epoch.unsigned_abs(), number.unsigned_abs())
}
