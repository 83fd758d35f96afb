//! Values of replies in their form on the wire.

use tenure_core::table::View;

/// Maximum number of holders, of waiters and of keys in one reply.
pub(super) const MAX_LISTED: usize = 100;

/// Version of a key's view: changes when its holders or waiters change; 0 for a key without either.
pub(super) fn version_of(view: Option<&View>) -> u64 {
    let Some(view) = view else { return 0 };
    let counts = [u64::from(view.summary.holders), u64::from(view.summary.waiters)];
    let holders = view.holders.iter().map(|holder| holder.number);
    let waiters = view.waiters.iter().map(|waiter| waiter.place.id());
    let parts: Vec<u64> = counts.into_iter().chain(holders).chain(waiters).collect();
    if parts == [0, 0] {
        return 0;
    }
    // FNV-1a, because the version must not change with a restart. It need not resist attacks: the server chooses the
    // hashed numbers, and a collision would only delay a watcher.
    parts.iter().flat_map(|part| part.to_le_bytes()).fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

pub(super) fn lossy_text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
