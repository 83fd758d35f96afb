//! Reservation of fencing numbers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use tenure_core::LockToken;
use tenure_core::table::Mode;

use super::super::writer::FENCE_BLOCK_SIZE;
use super::faulty::{Hook, Op};
use super::{BOOT, START, open_with, small, temporary};

#[test]
fn fencing_numbers_are_reserved_two_seconds_ahead_with_three_syncs_each_time() {
    let folder = temporary();
    let syncs = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&syncs);
    let hook = Hook::new(move |op| {
        if matches!(op, Op::Sync { .. } | Op::SyncNames) {
            count.fetch_add(1, Relaxed);
        }
        Ok(())
    });
    let opened = open_with(&small(&folder.path().join("data")), Some(hook), BOOT, START).unwrap();
    let (mut journal, first, lease) = (opened.journal, opened.next_number, Duration::from_secs(9));
    assert_eq!(journal.facts.ceiling - first, 2_097_151, "microseconds of the wall clock");
    let mut grant = |number| {
        let before = syncs.load(Relaxed);
        journal.granted(b"k", Mode::Shared, LockToken::new(number, 1), lease, START + lease, b"");
        journal.commit().unwrap();
        syncs.load(Relaxed) - before
    };
    assert_eq!(grant(first), 3, "the first lease raises the bound");
    assert_eq!(grant(first + FENCE_BLOCK_SIZE - 1), 0, "reserved numbers cost no sync");
    assert_eq!(grant(first + FENCE_BLOCK_SIZE), 3);
    assert_eq!(grant(first + 2 * FENCE_BLOCK_SIZE), 0);
    assert_eq!(grant(first + 2 * FENCE_BLOCK_SIZE + 1), 3);
}
