//! Compare-and-swap store: one versioned record per key.
//!
//! A register stamps its records by the clock of the leading server. A bucket has two clocks of coarse resolution, one
//! that stamps records and one that dates replies. It sometimes returns an old record, and has a bell beside each
//! record.

use std::time::Duration;

use tenure_core::Time;

use crate::message::{BucketRead, Record, Reply, Request};

#[derive(Debug)]
pub(crate) struct Register {
    slots: Vec<KeySlot>,
    /// Clock resolution of a bucket; `None` for a register.
    grain: Option<Duration>,
    /// Time that a bell rings.
    bell_ttl: Duration,
    /// Lead of the leading server's clock.
    leader_skew: Duration,
}

#[derive(Clone, Copy, Debug, Default)]
struct KeySlot {
    newest: StoredVersion,
    /// State before the last change.
    old: StoredVersion,
    bell: u64,
    rung: Time,
}

#[derive(Clone, Copy, Debug, Default)]
struct StoredVersion {
    version: u64,
    record: Record,
    /// Time of the change. A register shows it only to the checker.
    changed: Time,
    /// Time of the change by the leading server's clock, in nanoseconds.
    stamp: u64,
}

impl Register {
    pub(crate) fn new(keys: usize) -> Self {
        Self {
            slots: vec![KeySlot::default(); keys],
            grain: None,
            bell_ttl: Duration::ZERO,
            leader_skew: Duration::ZERO,
        }
    }

    pub(crate) fn bucket(keys: usize, grain: Duration, life: Duration) -> Self {
        Self { grain: Some(grain), bell_ttl: life, ..Self::new(keys) }
    }

    pub(crate) fn set_leader_skew(&mut self, ahead: Duration) {
        self.leader_skew = ahead;
    }

    pub(crate) fn record(&self, key: usize) -> Record {
        self.slots[key].newest.record
    }

    /// True if a claim holds the key. A record whose lease has ended does not count: any contender may take it.
    pub(crate) fn is_held_by(&self, claim: u64, key: usize, ttl: Duration, now: Time) -> bool {
        let StoredVersion { record, changed, .. } = self.slots[key].newest;
        record.claim == claim && now < changed + ttl
    }

    /// Handles a request: returns the reply, and true if the record changed. With `old`, a read returns the state
    /// before the last change. Records are stamped with `now`, replies are dated with `date`.
    pub(crate) fn handle(
        &mut self,
        key: usize,
        request: Request,
        old: bool,
        (now, date): (Time, Time),
    ) -> (Reply, bool) {
        let (life, mut rung) = (self.bell_ttl, None);
        let stamp = (now + self.leader_skew).as_nanos();
        let slot = &mut self.slots[key];
        match request {
            Request::Write { if_version, record }
                if if_version.is_none_or(|v| v == slot.newest.version) =>
            {
                let version = slot.newest.version + 1;
                slot.old = slot.newest;
                slot.newest = StoredVersion { version, record, changed: now, stamp };
                return (Reply::Written { version }, true);
            }
            // The holder's own bell has served its purpose and may be replaced.
            Request::Ring { claim }
                if [0, claim, slot.newest.record.claim].contains(&slot.bell)
                    || now >= slot.rung + life =>
            {
                (slot.bell, slot.rung) = (claim, now);
                rung = Some(now);
            }
            Request::Silence { claim } if slot.bell == claim => slot.bell = 0,
            _ => {}
        }
        (self.show(key, old && request == Request::Read, rung, (now, date)), false)
    }

    fn show(&self, key: usize, old: bool, rung: Option<Time>, (now, date): (Time, Time)) -> Reply {
        let slot = &self.slots[key];
        let StoredVersion { version, record, changed, stamp } =
            if old { slot.old } else { slot.newest };
        let Some(grain) = self.grain else {
            let now = (now + self.leader_skew).as_nanos();
            return Reply::Record { version, record, stamp, now };
        };
        // Rounded to the resolution, and long after 1970.
        let coarse = |time: Time| {
            let grains = u128::from(time.as_nanos()) / grain.as_nanos().max(1);
            let grains = u32::try_from(grains).unwrap_or(u32::MAX);
            grain * grains.saturating_add(1_000)
        };
        let rings = now < slot.rung + self.bell_ttl && slot.bell != record.claim;
        let bell = if rings { slot.bell } else { 0 };
        let (modified, now, rung) = (coarse(changed), coarse(date), rung.map(coarse));
        Reply::BucketRead(BucketRead { version, record, modified, now, bell, rung })
    }
}
