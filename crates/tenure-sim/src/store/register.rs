//! A store that can only compare and swap: one versioned record a key, and no clock.

use crate::message::{Record, Reply, Request};

#[derive(Debug)]
pub(crate) struct Register {
    slots: Vec<(u64, Record)>,
}

impl Register {
    pub(crate) fn new(keys: usize) -> Self {
        Self { slots: vec![(0, Record::default()); keys] }
    }

    pub(crate) fn record(&self, key: usize) -> Record {
        self.slots[key].1
    }

    /// The answer, and whether the record changed.
    pub(crate) fn handle(&mut self, key: usize, request: Request) -> (Reply, bool) {
        let (version, record) = &mut self.slots[key];
        match request {
            Request::Write { if_version, record: new }
                if if_version.is_none_or(|v| v == *version) =>
            {
                *version += 1;
                *record = new;
                (Reply::Written { version: *version }, true)
            }
            _ => (Reply::Record { version: *version, record: *record }, false),
        }
    }
}
