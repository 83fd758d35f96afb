//! Processors on which replies are sent one by one.

use std::os::fd::BorrowedFd;

pub(crate) const AT_ONCE: u16 = 1;

/// There is none.
#[derive(Debug)]
pub(crate) enum Together {}

/// What became of one part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(dead_code, reason = "nothing is sent together")]
pub(crate) enum Part {
    Done(i32),
    Untried,
    Unknown,
}

impl Together {
    pub(crate) fn new() -> Option<Self> {
        None
    }

    pub(crate) fn send<'a>(
        self,
        _: impl Iterator<Item = (BorrowedFd<'a>, &'a [u8])>,
    ) -> (Vec<Part>, Option<Self>) {
        match self {}
    }

    pub(crate) fn recycle(&mut self, _: Vec<Part>) {
        match *self {}
    }
}
