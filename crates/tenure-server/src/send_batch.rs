//! What a turn has for several connections, sent in one call to the system.
//!
//! A hand-over has two replies, for who gave the key back and for who has it now. Sent one by one each costs a call, and
//! the first wakes a client that may take the processor before the second is out.

use std::fmt;
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::{IoUring, Probe, opcode, types};
use rustix::net::SendFlags;

/// How many go into one call at most.
pub(crate) const MAX_BATCH: u16 = 128;

#[expect(clippy::cast_possible_wrap, reason = "flags")]
const SEND_FLAGS: i32 = SendFlags::DONTWAIT.union(SendFlags::NOSIGNAL).bits() as i32;

/// Sends on many sockets at once, where the system can.
pub(crate) struct SendBatch {
    ring: IoUring,
    results: Vec<SendResult>,
}

/// What became of one part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SendResult {
    /// So many bytes were taken, or an error number below 0.
    Done(i32),
    /// The system has not looked at it.
    Untried,
    /// The system has taken it, and not said what became of it.
    Unknown,
}

impl fmt::Debug for SendBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Together")
    }
}

impl SendBatch {
    /// None where the system does not know `io_uring`, or does not allow it, as in many containers.
    pub(crate) fn new() -> Option<Self> {
        Self::open()
            .inspect_err(|error| tracing::info!(target: "tenure::server", %error, "no_io_uring"))
            .ok()
    }

    fn open() -> io::Result<Self> {
        let ring = IoUring::new(MAX_BATCH.into())?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if !probe.is_supported(opcode::Send::CODE) {
            return Err(ErrorKind::Unsupported.into());
        }
        // A filter of system calls may let it be made, and not used.
        ring.submit()?;
        Ok(Self { ring, results: Vec::new() })
    }

    /// Sends to each what it can take now, and says what became of each; who is missing at the end was not
    /// tried. Each socket may occur once: one that takes little
    /// would let a later part of its stream overtake. It is given back where it can be used again.
    #[expect(unsafe_code, reason = "the kernel reads the buffers; see SAFETY")]
    pub(crate) fn send<'a>(
        mut self,
        parts: impl Iterator<Item = (BorrowedFd<'a>, &'a [u8])>,
    ) -> (Vec<SendResult>, Option<Self>) {
        self.results.clear();
        for (index, (socket, bytes)) in parts.enumerate() {
            let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
            let send = opcode::Send::new(types::Fd(socket.as_raw_fd()), bytes.as_ptr(), length)
                .flags(SEND_FLAGS)
                .build()
                .user_data(index as u64);
            // SAFETY: `bytes` and `socket` outlive this call. It returns when all that the kernel has taken is done: what
            // may not wait is not left to do later. What it has not taken goes with the ring.
            let pushed = unsafe { self.ring.submission().push(&send) };
            if pushed.is_err() {
                // It is full: who comes now is not tried.
                break;
            }
            self.results.push(SendResult::Untried);
        }
        let outcome = self.submit_and_wait_all();
        let parts = std::mem::take(&mut self.results);
        match outcome {
            Ok(()) => (parts, Some(self)),
            Err(error) => {
                tracing::error!(target: "tenure::server", %error, "io_uring_broken");
                (parts, None)
            }
        }
    }

    /// Takes back the memory of what it said.
    pub(crate) fn reuse_buffer(&mut self, parts: Vec<SendResult>) {
        self.results = parts;
    }

    fn submit_and_wait_all(&mut self) -> io::Result<()> {
        let (mut taken, mut done) = (0, 0);
        while done < self.results.len() {
            let outcome = self.ring.submit_and_wait(self.results.len() - done);
            if let Ok(more) = outcome {
                self.results[taken..]
                    .iter_mut()
                    .take(more)
                    .for_each(|part| *part = SendResult::Unknown);
                taken += more;
            }
            for completion in self.ring.completion() {
                let index = usize::try_from(completion.user_data()).map_err(io::Error::other)?;
                let part = self.results.get_mut(index).ok_or(ErrorKind::InvalidData)?;
                *part = SendResult::Done(completion.result());
                done += 1;
            }
            match outcome {
                Err(error) if error.kind() != ErrorKind::Interrupted => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}
