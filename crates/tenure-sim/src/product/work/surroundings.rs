//! Facts of the world that users depend on, and the reports of users to the world.

use std::time::Duration;

use tenure::{Error, ErrorKind};

use super::super::referee::ProductBreach;
use super::super::world::{self, note};

/// Slots of the semaphores.
pub(super) const SLOTS: u32 = 2;
/// Errors that only faults explain.
pub(super) const FAULTS: &[ErrorKind] =
    &[ErrorKind::Unavailable, ErrorKind::Unknown, ErrorKind::Lost];

/// True once all faults have ended.
pub(super) fn is_healed() -> bool {
    world::with(|world| world.healed.get())
}

/// Shortest ttl of the plan.
pub(super) fn ttl_base() -> Duration {
    world::with(|world| world.plan.ttl)
}

pub(super) fn key_name(number: u64) -> String {
    format!("k{number}")
}

pub(super) fn breach(breach: ProductBreach, what: String) {
    world::with(|world| world.breach(breach, what));
}

pub(super) fn activity(client: usize, user: usize, text: impl FnOnce() -> String) {
    world::with(|world| {
        let text = text();
        note!(world, &format!("client {client}"), "user {user} {text}");
        world.process(client).set_activity(user, text);
    });
}

/// Breaks the run unless the error is one of these kinds, and a fault that has struck explains it.
pub(super) fn expect_kind(client: usize, what: &str, error: &Error, kinds: &[ErrorKind]) {
    let explained = world::with(|world| {
        note!(world, &format!("client {client}"), "fails {what}: {error}");
        !FAULTS.contains(&error.kind()) || world.disturbances.borrow().explain(client)
    });
    if !explained || !kinds.contains(&error.kind()) {
        let what = format!("client {client} fails {what}: {:?}: {error}", error.kind());
        breach(ProductBreach::UnexpectedError, what);
    }
}
