//! Bucket: one versioned record per key, with a bell beside it.
//!
//! It has two clocks of coarse resolution, one that stamps records and one that dates replies. It sometimes returns an
//! old record, and may lose acknowledged writes: a record goes back to an earlier version, or is gone.

use std::time::Duration;

use tenure_core::Time;

use crate::message::{BucketRead, Record, Reply, Request};

#[derive(Debug)]
pub(crate) struct Register {
    slots: Vec<KeySlot>,
    /// Clock resolution.
    grain: Duration,
    /// Time that a bell rings.
    bell_ttl: Duration,
}

#[derive(Clone, Copy, Debug, Default)]
struct KeySlot {
    newest: StoredVersion,
    /// State before the last change.
    old: StoredVersion,
    bell: u64,
    rung: Time,
    /// Last version number that was given. A generation is unique, also after a loss.
    last_version: u64,
    /// Time at which the object was created.
    created: Time,
}

#[derive(Clone, Copy, Debug, Default)]
struct StoredVersion {
    version: u64,
    record: Record,
    /// Time of the change.
    changed: Time,
}

impl Register {
    pub(crate) fn new(keys: usize, grain: Duration, bell_ttl: Duration) -> Self {
        Self { slots: vec![KeySlot::default(); keys], grain, bell_ttl }
    }

    pub(crate) fn record(&self, key: usize) -> Record {
        self.slots[key].newest.record
    }

    /// True if a claim holds the key. A record whose lease has ended does not count: any contender may take it.
    pub(crate) fn is_held_by(&self, claim: u64, key: usize, ttl: Duration, now: Time) -> bool {
        let StoredVersion { record, changed, .. } = self.slots[key].newest;
        record.claim == claim && now < changed + ttl
    }

    /// Loses acknowledged writes: the object is gone, or back at the version before its last change. False if there is
    /// nothing to lose.
    ///
    /// An object that was created within the last units of the clock stays: its token may repeat, as the documentation
    /// says.
    pub(crate) fn lose(&mut self, key: usize, gone: bool, now: Time) -> bool {
        let slot = &mut self.slots[key];
        let young = now < slot.created + self.grain * 2;
        if slot.newest.version == 0 || young || !gone && slot.old.version == slot.newest.version {
            return false;
        }
        let earlier = if gone { StoredVersion::default() } else { slot.old };
        if !gone && earlier.version == 0 {
            return false;
        }
        (slot.newest, slot.old) = (earlier, earlier);
        true
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
        let slot = &mut self.slots[key];
        match request {
            Request::Write { if_version, record }
                if if_version.is_none_or(|v| v == slot.newest.version) =>
            {
                let version = slot.last_version + 1;
                if slot.newest.version == 0 {
                    slot.created = now;
                }
                (slot.old, slot.last_version) = (slot.newest, version);
                slot.newest = StoredVersion { version, record, changed: now };
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

    /// Number of an object that is created at a date.
    pub(crate) fn first_number(&self, date: Time) -> u64 {
        u64::try_from(self.coarse(date).as_micros()).unwrap_or(u64::MAX)
    }

    /// Time as a reply shows it: rounded to the resolution, and long after 1970.
    fn coarse(&self, time: Time) -> Duration {
        let grains = u128::from(time.as_nanos()) / self.grain.as_nanos().max(1);
        let grains = u32::try_from(grains).unwrap_or(u32::MAX);
        self.grain * grains.saturating_add(1_000)
    }

    fn show(&self, key: usize, old: bool, rung: Option<Time>, (now, date): (Time, Time)) -> Reply {
        let slot = &self.slots[key];
        let StoredVersion { version, record, changed } = if old { slot.old } else { slot.newest };
        let coarse = |time| self.coarse(time);
        let rings = now < slot.rung + self.bell_ttl && slot.bell != record.claim;
        let bell = if rings { slot.bell } else { 0 };
        let (modified, now, rung) = (coarse(changed), coarse(date), rung.map(coarse));
        Reply::BucketRead(BucketRead { version, record, modified, now, bell, rung })
    }
}
