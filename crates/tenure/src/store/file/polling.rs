//! Stand-in for inotify on systems without it: no file is watched, so that waiters poll.

#![expect(clippy::unused_self, reason = "the signatures are those of inotify")]

use std::path::Path;
use std::sync::Arc;

use super::wake::{FileEvents, Wake};

#[derive(Debug)]
pub(super) struct Hub;

#[derive(Debug)]
pub(super) struct Watch;

impl Hub {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self)
    }

    pub(super) fn watch(self: &Arc<Self>, _: &Path, _: FileEvents, _: &Arc<Wake>) -> Option<Watch> {
        None
    }

    pub(super) fn ensure_reader(self: &Arc<Self>) -> bool {
        false
    }
}

impl Watch {
    pub(super) fn redirect_to(&self, _: &Arc<Wake>) {}
}
