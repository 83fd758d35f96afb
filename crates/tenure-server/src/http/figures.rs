//! The numbers of a server, for its page.

use std::time::Duration;

use serde_json::{Value, json};

use super::now::millis;
use crate::engine::Figures;

pub(super) fn json(figures: &Figures, up: Duration) -> Value {
    let Figures { served, tally, counts, .. } = figures;
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "durable": figures.durable,
        "up_ms": millis(up),
        "memory_bytes": memory(),
        "connections": figures.connections,
        "keys": counts.keys,
        "holds": counts.holds,
        "waiting": counts.waiters,
        "oldest_ms": figures.oldest_wait.map(millis),
        "requests": served.requests,
        "granted": tally.granted,
        "renewed": tally.renewed,
        "expired": tally.expired,
        "evicted": tally.evicted,
        "disconnected": tally.disconnected,
        "wrong_secrets": served.wrong_secrets,
    })
}

/// The memory that this process has, in bytes; 0 where the system does not say.
pub(super) fn memory() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = text.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    pages * rustix::param::page_size() as u64
}
