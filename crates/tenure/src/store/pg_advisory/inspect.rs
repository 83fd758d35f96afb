//! Read-only views of `pg_locks` and `pg_stat_activity`: holders, waiters and versions of keys.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher};
use std::time::Duration;

use tenure_core::{FencingToken, Key};
use tokio_postgres::SimpleQueryRow;

use super::lock_id::LockId;
use super::options::KeyForm;
use super::queue_locks::QueueLocks;
use super::session::flag;
use super::tag::{self, SessionTag};
use crate::store::{HolderState, Identity, KeySpace, KeyState, Version, WaiterState};

/// A session that holds a lock, waits for it, or stands by.
#[derive(Clone, Debug)]
pub(super) struct LockSession {
    lock: LockId,
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
    /// Reads a row about this lock; about the lock of the key that its session names, if it is `None`.
    fn read(row: &SimpleQueryRow, form: KeyForm, lock: Option<LockId>) -> Option<Self> {
        let number = |column: &str| row.get(column).and_then(|text| text.parse::<i64>().ok());
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
        let key = read.key.as_deref().and_then(|key| Key::new(key).ok());
        Some(Self {
            lock: lock.or_else(|| LockId::of(form, key.as_ref()?).ok())?,
            pid,
            granted,
            token,
            key,
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

    /// True if the upper half `class` is that of the queue of the session's own key, as a key of `form`. No session may
    /// hold that key at the moment.
    fn stands_in_queue(&self, form: KeyForm, class: u32) -> bool {
        let lock = self.key.as_ref().and_then(|key| LockId::of(form, key).ok());
        lock.is_some_and(|lock| QueueLocks::of(lock).classes().contains(&class))
    }

    /// Identity of the session's claimer.
    pub(super) fn by(&self) -> &Identity {
        &self.by
    }
}

/// All sessions in the rows, by lock. `asked` are the locks of the request; if there are none, it lists all locks.
pub(super) fn by_lock(
    rows: &[SimpleQueryRow],
    form: KeyForm,
    asked: &[LockId],
) -> BTreeMap<LockId, Vec<LockSession>> {
    let lists_all = asked.is_empty();
    let foreign = if lists_all { foreign_queues(rows, form) } else { HashSet::new() };
    let mut found: BTreeMap<LockId, Vec<LockSession>> = BTreeMap::new();
    for row in rows.iter().filter(|row| !flag(row, "is_ticket")) {
        let Some(lock) = lock_in_row(row, form) else { continue };
        let class = lock.catalog().0;
        let Some(shown) = LockSession::read(row, form, Some(lock)) else { continue };
        // A lock that was asked for by its number is shown whatever its holder uses it for.
        let hidden = foreign.contains(&class) || shown.stands_in_queue(form.other(), class);
        if !(lists_all && hidden) {
            found.entry(lock).or_default().push(shown);
        }
    }
    // The number of a ticket is a hash of its lock's. The lock is one of those that were asked for, or of those that
    // have a holder, or it is known by the key that the reserve names.
    let known = asked.iter().chain(found.keys());
    let locks: HashMap<u32, LockId> =
        known.map(|lock| (QueueLocks::of(*lock).ticket_class(), *lock)).collect();
    for row in rows.iter().filter(|row| flag(row, "is_ticket")) {
        let Some(class) = class(row) else { continue };
        let shown = LockSession::read(row, form, locks.get(&class).copied());
        let is_ticket = |shown: &LockSession| QueueLocks::of(shown.lock).ticket_class() == class;
        if let Some(shown) = shown.filter(is_ticket) {
            found.entry(shown.lock).or_default().push(shown);
        }
    }
    found
}

/// Upper halves of the places and tickets of the other form's locks, which are among the rows. In this form they look
/// like locks that sessions hold.
fn foreign_queues(rows: &[SimpleQueryRow], form: KeyForm) -> HashSet<u32> {
    let others = rows.iter().filter(|row| flag(row, "is_ticket"));
    let locks = others.filter_map(|row| lock_in_row(row, form.other()));
    locks.flat_map(|lock| QueueLocks::of(lock).classes()).collect()
}

fn lock_in_row(row: &SimpleQueryRow, form: KeyForm) -> Option<LockId> {
    let object = row.get("objid")?.parse().ok()?;
    Some(LockId::from_catalog(form, class(row)?, object))
}

fn class(row: &SimpleQueryRow) -> Option<u32> {
    row.get("classid")?.parse().ok()
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

/// States of all locks, each under the key that a session names, or else under its numbers.
pub(super) fn states(found: BTreeMap<LockId, Vec<LockSession>>, space: KeySpace) -> Vec<KeyState> {
    let mut states: Vec<_> = found
        .into_iter()
        .filter_map(|(lock, shown)| {
            let named = shown.iter().find_map(|one| one.key.clone());
            // Any client can write such a comment. A key that is not hashed to this lock is not its key.
            let is_own = |key: &Key| LockId::of(lock.form(), key).is_ok_and(|own| own == lock);
            Some(state(named.filter(is_own).or_else(|| lock.key())?, space, &shown))
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
