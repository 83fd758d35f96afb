//! Prefetching changes no answer.

use std::cell::Cell;
use std::hash::BuildHasher;
use std::rc::Rc;

use super::*;

/// Hasher that counts its uses.
#[derive(Clone, Default)]
struct Counting(Rc<Cell<u32>>);

impl BuildHasher for Counting {
    type Hasher = DefaultHasher;

    fn build_hasher(&self) -> DefaultHasher {
        self.0.set(self.0.get() + 1);
        DefaultHasher::new()
    }
}

fn lock(key: &[u8]) -> UpcomingOp<'_> {
    UpcomingOp { space: KeySpace::Lock, key, is_renewal: false }
}

#[test]
fn an_operation_that_was_looked_ahead_at_finds_its_key_without_hashing_it_again() {
    let hasher = Counting::default();
    let count = Rc::clone(&hasher.0);
    let mut table = LockTable::new(TableConfig::default(), hasher, Counter::default());
    let (ann, gone) = (table.connect(), table.connect());
    table.disconnect(gone, OnDisconnect::Release, at(0));
    let a = table.claim(b"a", exclusive(ann), at(0)).grant();
    let b = table.claim(b"b", exclusive(ann), at(0)).grant();
    let long = [b'l'; 100];
    let l = table.claim(&long, exclusive(ann), at(0)).grant();

    table.prefetch([lock(b"new"), lock(b"a"), lock(b"b"), lock(&long), lock(b"b")]);
    count.set(0);
    let refused = table.claim(b"new", exclusive(gone), at(1));
    assert_eq!(refused, ClaimAnswer::Refused(Refusal::UnknownOwner));
    assert_eq!(count.replace(0), 1, "a new key has no entry yet");
    table.release(KeySpace::Lock, b"a", a.token, at(1)).expect("held");
    table.renew(KeySpace::Lock, b"b", b.token, LEASE, at(1)).expect("held");
    table.release(KeySpace::Lock, &long, l.token, at(1)).expect("held");
    assert!(matches!(table.claim(b"b", exclusive(ann), at(1)), ClaimAnswer::Queued(_)));
    assert_eq!(count.replace(0), 0, "in step even after a refusal");
    assert!(matches!(table.claim(b"b", exclusive(ann), at(1)), ClaimAnswer::Queued(_)));
    assert_eq!(count.get(), 1, "not prefetched");

    table.prefetch([lock(b"a"), lock(b"b")]);
    table.claim(b"a", exclusive(ann), at(1)).grant();
    table.prefetch([lock(b"b")]);
    count.set(0);
    table.renew(KeySpace::Lock, b"b", b.token, LEASE, at(1)).expect("held");
    assert_eq!(count.get(), 0, "a second prefetch replaces the first");
    table.prefetch([lock(b"b"); MAX_PREFETCH + 1]);
    assert_eq!(count.get(), 64, "operations beyond the limit are not prefetched");
    table.check();
}

#[test]
fn prefetched_key_slot_may_be_reused_by_another_key() {
    let mut table = with(TableConfig { max_idle_keys: 0, ..TableConfig::default() });
    let ann = table.connect();
    let a = table.claim(b"a", exclusive(ann), at(0)).grant();
    table.prefetch([lock(b"a"), lock(b"a"), lock(b"a")]);
    table.release(KeySpace::Lock, b"a", a.token, at(0)).expect("held");
    // The key was dropped, and another key has its slot.
    let other = table.claim(b"other", exclusive(ann), at(0)).grant();
    let again = table.claim(b"a", exclusive(ann), at(0)).grant();
    table.check();
    assert_eq!(table.release(KeySpace::Lock, b"a", other.token, at(0)), Err(NotHeld));
    assert_eq!(table.release(KeySpace::Lock, b"a", again.token, at(0)), Ok(()));
}

#[test]
fn the_same_bytes_in_the_other_space_are_another_key() {
    let mut table = table();
    let ann = table.connect();
    table.claim(KEY, exclusive(ann), at(0)).grant();
    table.prefetch([lock(KEY)]);
    table.claim(KEY, slot(ann, 1), at(0)).grant();
    assert_eq!(table.sizes().keys, 2);
    table.check();
}

#[test]
fn keys_of_every_kind_may_be_looked_at() {
    let mut table = table();
    let owners = [table.connect(), table.connect()];
    table.prefetch([lock(b"an empty table")]);
    for owner in owners {
        table.claim(b"shared", shared(owner), at(0)).grant();
        table.claim(b"queue", exclusive(owner), at(0));
        table.claim(b"slots", slot(owner, 2), at(0)).grant();
        let idle = table.claim(b"idle", exclusive(owner), at(0)).grant();
        table.release(KeySpace::Lock, b"idle", idle.token, at(0)).expect("held");
    }
    let restored = LockToken::new(100, 0);
    table.restore(b"restored", Mode::Exclusive, restored, at(9), at(0)).expect("free");
    let keys: [&[u8]; 6] = [b"shared", b"queue", b"slots", b"idle", b"restored", b"none"];
    let kinds = keys.iter().flat_map(|key| {
        [KeySpace::Lock, KeySpace::Semaphore].map(|space| UpcomingOp {
            space,
            key,
            is_renewal: false,
        })
    });
    table.prefetch(kinds);
    table.check();
    assert_eq!(table.events(), [], "a prefetch changes nothing");
    assert_eq!(table.release(KeySpace::Lock, b"restored", restored, at(1)), Ok(()));
}
