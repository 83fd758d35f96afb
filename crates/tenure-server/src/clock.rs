//! Clocks of the server.

use rustix::time::{ClockId, clock_gettime};
use tenure_core::Time;

/// Present time on the clock that leases are counted on: nanoseconds since boot, including suspend.
pub fn now() -> Time {
    let time = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(time.tv_nsec).unwrap_or(0);
    Time::from_nanos(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
}

/// Microseconds since 1970 by the wall clock. Fencing numbers start there if no data directory has a larger number.
pub fn wall_micros() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
}
