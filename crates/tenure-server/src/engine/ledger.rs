//! What is written down before it is said.

use std::io;
use std::time::Duration;

use tenure_core::table::{Grant, Mode};
use tenure_core::{LockToken, Time};

use super::Engine;

#[expect(clippy::unused_self, reason = "nothing is written down yet")]
impl Engine {
    pub(super) fn wrote_grant(&mut self, _key: &[u8], _mode: Mode, _grant: &Grant, _by: &[u8]) {}

    pub(super) fn wrote_renewal(&mut self, _token: LockToken, _lease: Duration, _ends: Time) {}

    pub(super) fn wrote_end(&mut self, _number: u64) {}

    /// Whether what is granted is written down, and survives a restart.
    pub fn is_durable(&self) -> bool {
        false
    }

    /// Writes down what was granted since the last time. Nothing may be sent before.
    ///
    /// # Errors
    ///
    /// What the system says. The server must then stop, and send nothing more.
    pub fn commit(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Writes down all there is, for a server that stops.
    ///
    /// # Errors
    ///
    /// What the system says.
    pub fn close(self, _now: Time) -> io::Result<()> {
        Ok(())
    }
}
