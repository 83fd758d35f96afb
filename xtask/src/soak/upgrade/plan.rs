//! Schedule of an upgrade: the versions that may run at each time. Pure: no I/O.

use std::time::Duration;

use super::log::Version;

/// A phase of the upgrade.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    /// Only the old version.
    Old,
    /// Processes of the old version are replaced one by one.
    Switch,
    /// Either version, at random.
    Together,
    /// Only the new version.
    New,
    /// Processes of the new version are replaced one by one by old ones: a roll-back.
    Back,
}

impl Phase {
    /// All phases in order, each with its share of the time.
    const COURSE: [(Self, u32); 5] =
        [(Self::Old, 1), (Self::Switch, 1), (Self::Together, 2), (Self::New, 1), (Self::Back, 1)];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Old => "old",
            Self::Switch => "switch",
            Self::Together => "together",
            Self::New => "new",
            Self::Back => "back",
        }
    }

    /// The hand-overs that must be seen, by the version of the later turn: a soak without them has shown nothing.
    pub(super) fn needed(self) -> &'static [Version] {
        match self {
            Self::Old | Self::New => &[],
            Self::Switch => &[Version::New],
            Self::Together => &Version::BOTH,
            Self::Back => &[Version::Old],
        }
    }

    /// The version of a phase in which only one version runs.
    pub(super) fn alone(self) -> Option<Version> {
        match self {
            Self::Old => Some(Version::Old),
            Self::New => Some(Version::New),
            Self::Switch | Self::Together | Self::Back => None,
        }
    }
}

/// Schedule of the phases for one store.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    length: Duration,
    forward_only: bool,
}

impl Plan {
    pub(super) fn new(length: Duration, forward_only: bool) -> Self {
        Self { length, forward_only }
    }

    pub(super) fn phases(self) -> impl Iterator<Item = Phase> {
        self.shares().map(|(phase, _)| phase)
    }

    /// The phase at a time, and its progress from 0 to 1; `None` after the last phase.
    pub(super) fn at(self, time: Duration) -> Option<(Phase, f64)> {
        let whole: u32 = self.shares().map(|(_, share)| share).sum();
        let one = self.length.as_secs_f64() / f64::from(whole);
        let mut left = time.as_secs_f64();
        for (phase, share) in self.shares() {
            let length = one * f64::from(share);
            if left < length {
                return Some((phase, left / length));
            }
            left -= length;
        }
        None
    }

    /// The version of a client at a time: `None` if it may be either, or after the last phase.
    ///
    /// `lasting` clients do not end by themselves. With random versions they could all have the same one for a long
    /// time, so their versions alternate by slot.
    pub(super) fn client(
        self,
        time: Duration,
        (slot, slots): (usize, usize),
        lasting: bool,
    ) -> Option<Version> {
        let (phase, progress) = self.at(time)?;
        #[expect(clippy::cast_precision_loss, reason = "there are few slots")]
        let replaced = progress * (slots as f64) > slot as f64 + 0.5;
        match phase {
            Phase::Switch if replaced => Some(Version::New),
            Phase::Old | Phase::Switch => Some(Version::Old),
            Phase::Together if lasting => Some(Version::BOTH[slot % 2]),
            Phase::Together => None,
            Phase::Back if replaced => Some(Version::Old),
            Phase::New | Phase::Back => Some(Version::New),
        }
    }

    /// The version to start a lock server as at a time; `before` is its version until then.
    pub(super) fn server(self, time: Duration, before: Version) -> Version {
        match self.at(time) {
            Some((Phase::Old | Phase::Back, _)) => Version::Old,
            Some((Phase::Together, _)) if !self.forward_only => before.other(),
            Some((Phase::Switch | Phase::Together | Phase::New, _)) => Version::New,
            None => before,
        }
    }

    fn shares(self) -> impl Iterator<Item = (Phase, u32)> {
        let left_out = move |phase| self.forward_only && phase == Phase::Back;
        Phase::COURSE.into_iter().filter(move |(phase, _)| !left_out(*phase))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(count: f64) -> Duration {
        Duration::from_secs_f64(count)
    }

    #[test]
    fn the_phases_fill_the_time() {
        let plan = Plan::new(seconds(60.0), false);
        let phase = |time| plan.at(seconds(time)).map(|(phase, _)| phase);
        assert_eq!(phase(0.0), Some(Phase::Old));
        assert_eq!(phase(10.1), Some(Phase::Switch));
        assert_eq!(phase(20.1), Some(Phase::Together));
        assert_eq!(phase(39.9), Some(Phase::Together));
        assert_eq!(phase(40.1), Some(Phase::New));
        assert_eq!(phase(59.9), Some(Phase::Back));
        assert_eq!(phase(60.1), None);
    }

    #[test]
    fn clients_are_replaced_one_by_one_there_and_back() {
        let plan = Plan::new(seconds(60.0), false);
        let new = |time| {
            let versions = (0..4).map(|slot| plan.client(seconds(time), (slot, 4), false));
            versions.filter(|version| *version == Some(Version::New)).count()
        };
        assert_eq!([5.0, 10.1, 12.0, 15.1, 19.9].map(new), [0, 0, 1, 2, 4]);
        assert_eq!([45.0, 50.1, 52.0, 55.1, 59.9].map(new), [4, 4, 3, 2, 0]);
        assert_eq!(plan.client(seconds(30.0), (0, 4), false), None);
        let lasting = [0, 1].map(|slot| plan.client(seconds(30.0), (slot, 4), true));
        assert_eq!(lasting, [Some(Version::Old), Some(Version::New)]);
    }

    #[test]
    fn without_a_way_back_no_server_is_old_again() {
        let plan = Plan::new(seconds(50.0), true);
        assert_eq!(plan.phases().last(), Some(Phase::New));
        for time in [10.1, 25.0, 49.0] {
            assert_eq!(plan.server(seconds(time), Version::New), Version::New, "{time}");
        }
        let both = Plan::new(seconds(60.0), false);
        assert_eq!(both.server(seconds(30.0), Version::New), Version::Old);
        assert_eq!(both.server(seconds(30.0), Version::Old), Version::New);
    }
}
