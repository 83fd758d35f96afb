//! Replacement on processors without `io_uring` support: replies are sent one by one.

use std::os::fd::BorrowedFd;

pub(crate) const MAX_BATCH: u16 = 1;

/// Never exists: [`SendBatch::new`] returns `None`.
#[derive(Debug)]
pub(crate) enum SendBatch {}

/// Result of one send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(dead_code, reason = "no batch is ever sent")]
pub(crate) enum SendResult {
    Done(i32),
    Untried,
    Unknown,
}

impl SendBatch {
    pub(crate) fn new() -> Option<Self> {
        None
    }

    pub(crate) fn send<'a>(
        self,
        _: impl Iterator<Item = (BorrowedFd<'a>, &'a [u8])>,
    ) -> (Vec<SendResult>, Option<Self>) {
        match self {}
    }

    pub(crate) fn reuse_buffer(&mut self, _: Vec<SendResult>) {
        match *self {}
    }
}
