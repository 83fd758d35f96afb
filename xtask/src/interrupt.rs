//! Ctrl-C and SIGTERM as a flag, so that every way out of a command runs its destructors.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, Result};

static REQUESTED: AtomicBool = AtomicBool::new(false);

/// The exit code of a command that was interrupted: 128 + SIGINT, as in shells.
pub(crate) const EXIT_CODE: u8 = 130;

/// Makes SIGINT, SIGTERM and SIGHUP only set the flag from now on.
pub(crate) fn listen() -> Result<()> {
    ctrlc::set_handler(|| REQUESTED.store(true, Ordering::Relaxed)).context("listening for Ctrl-C")
}

/// True once this process was asked to stop.
pub(crate) fn requested() -> bool {
    REQUESTED.load(Ordering::Relaxed)
}
