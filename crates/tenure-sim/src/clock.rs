//! A drifting clock: it has an offset, its rate changes, and it may stand still while its machine is suspended.

use tenure_core::Time;

/// Maps the real time of the simulation, in nanoseconds, to the time of one machine.
#[derive(Clone, Debug)]
pub(crate) struct Clock {
    /// Real time of the last change of the rate.
    real: u64,
    /// Local time of the last change of the rate.
    local: u64,
    /// Local nanoseconds per million real ones.
    rate: u64,
    frozen: bool,
}

const MILLION: u64 = 1_000_000;

impl Clock {
    pub(crate) fn new(origin: u64, ppm: i64) -> Self {
        Self { real: 0, local: origin, rate: rate(ppm), frozen: false }
    }

    pub(crate) fn read(&self, real: u64) -> Time {
        let passed = if self.frozen { 0 } else { (real - self.real) * self.rate / MILLION };
        Time::from_nanos(self.local + passed)
    }

    /// First real time, not before `now`, at which the clock reads `local` or more; `None` while it stands still.
    pub(crate) fn when(&self, local: Time, now: u64) -> Option<u64> {
        if local == Time::MAX || self.frozen {
            return None;
        }
        let ahead = local.as_nanos().saturating_sub(self.local);
        Some((self.real + (ahead * MILLION).div_ceil(self.rate)).max(now))
    }

    pub(crate) fn slew(&mut self, ppm: i64, real: u64) {
        self.settle(real);
        self.rate = rate(ppm);
    }

    pub(crate) fn freeze(&mut self, real: u64) {
        self.settle(real);
        self.frozen = true;
    }

    pub(crate) fn thaw(&mut self, real: u64) {
        self.settle(real);
        self.frozen = false;
    }

    fn settle(&mut self, real: u64) {
        self.local = self.read(real).as_nanos();
        self.real = real;
    }
}

fn rate(ppm: i64) -> u64 {
    MILLION.saturating_add_signed(ppm)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timer_goes_off_when_the_clock_reads_its_time_and_not_before() {
        let mut clock = Clock::new(5_000, -80_000);
        for (real, ppm) in [(1_000, 80_000), (77_777, 13), (200_001, -79_999)] {
            for ahead in [0, 1, 2, 999, 123_457] {
                let due = Time::from_nanos(clock.read(real).as_nanos() + ahead);
                let at = clock.when(due, real).unwrap();
                assert!(clock.read(at) >= due);
                assert!(at == real || clock.read(at - 1) < due);
            }
            clock.slew(ppm, real);
        }
    }

    #[test]
    fn a_frozen_clock_stands_still_and_then_goes_on() {
        let mut clock = Clock::new(0, 0);
        clock.freeze(100);
        assert_eq!(clock.read(500), Time::from_nanos(100));
        assert_eq!(clock.when(Time::from_nanos(101), 500), None);
        clock.thaw(500);
        assert_eq!(clock.read(510), Time::from_nanos(110));
    }
}
