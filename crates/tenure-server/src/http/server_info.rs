//! Server metrics for the status page.

use std::time::Duration;

use serde_json::{Value, json};

use crate::engine::ServerMetrics;
use crate::units::millis;

pub(super) fn json(metrics: &ServerMetrics, up: Duration) -> Value {
    let ServerMetrics { counters, stats, sizes, .. } = metrics;
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "durable": metrics.durable,
        "up_ms": millis(up),
        "memory_bytes": memory(),
        "connections": metrics.connections,
        "keys": sizes.keys,
        "holds": sizes.holds,
        "waiting": sizes.waiters,
        "oldest_ms": metrics.oldest_wait.map(millis),
        "requests": counters.requests,
        "granted": stats.granted,
        "renewed": stats.renewed,
        "expired": stats.expired,
        "evicted": stats.evicted,
        "disconnected": stats.disconnected,
        "wrong_secrets": counters.auth_failures,
    })
}

/// Resident memory of this process in bytes; 0 if the system does not report it.
pub(super) fn memory() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = text.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    pages * rustix::param::page_size() as u64
}
