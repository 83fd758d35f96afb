//! What is written down before it is said.

use std::time::Duration;

use tenure_core::table::{Grant, Mode};
use tenure_core::{LockToken, Time};

use super::Engine;

impl Engine {
    pub(super) fn wrote_grant(&mut self, _key: &[u8], _mode: Mode, _grant: &Grant, _by: &[u8]) {}

    pub(super) fn wrote_renewal(&mut self, _token: LockToken, _lease: Duration, _ends: Time) {}

    pub(super) fn wrote_end(&mut self, _number: u64) {}

    pub(super) fn is_durable(&self) -> bool {
        false
    }
}
