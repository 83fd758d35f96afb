//! A store that can only compare and swap: one versioned record a key, and no clock.

use std::time::Duration;

use tenure_core::Time;

use crate::message::{Record, Reply, Request};

#[derive(Debug)]
pub(crate) struct Register {
    slots: Vec<Slot>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    version: u64,
    record: Record,
    /// For the referee only: the store itself has no clock.
    changed: Time,
}

impl Register {
    pub(crate) fn new(keys: usize) -> Self {
        Self { slots: vec![Slot::default(); keys] }
    }

    pub(crate) fn record(&self, key: usize) -> Record {
        self.slots[key].record
    }

    /// Whether a claim holds the key: a record that outlived its lease is there for the taking.
    pub(crate) fn is_held_by(&self, claim: u64, key: usize, ttl: Duration, now: Time) -> bool {
        let Slot { record, changed, .. } = self.slots[key];
        record.claim == claim && now < changed + ttl
    }

    /// The answer, and whether the record changed.
    pub(crate) fn handle(&mut self, key: usize, request: Request, now: Time) -> (Reply, bool) {
        let Slot { version, record, changed } = &mut self.slots[key];
        match request {
            Request::Write { if_version, record: new }
                if if_version.is_none_or(|v| v == *version) =>
            {
                *version += 1;
                *record = new;
                *changed = now;
                (Reply::Written { version: *version }, true)
            }
            _ => (Reply::Record { version: *version, record: *record }, false),
        }
    }
}
