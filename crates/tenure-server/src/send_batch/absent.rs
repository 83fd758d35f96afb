//! Processors on which replies are sent one by one.

use std::os::fd::BorrowedFd;

pub(crate) const MAX_BATCH: u16 = 1;

/// There is none.
#[derive(Debug)]
pub(crate) enum SendBatch {}

/// What became of one part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(dead_code, reason = "nothing is sent together")]
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
