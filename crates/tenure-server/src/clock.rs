//! The clock that leases are counted on.

use rustix::time::{ClockId, clock_gettime};
use tenure_core::Time;

/// The present instant: nanoseconds since the machine was started, time asleep included.
pub fn now() -> Time {
    let time = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(time.tv_nsec).unwrap_or(0);
    Time::from_nanos(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
}

/// Microseconds since 1970, by the clock on the wall: where fencing numbers begin that no directory remembers.
pub fn wall_micros() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
}
