//! Sends the output of a turn to several connections in one system call, by `io_uring`.
//!
//! A release of a contended key has two replies: for the releaser and for the next holder. Sent one by one, each costs
//! a system call, and the first may wake a client that takes the processor before the second is sent.

use std::fmt;
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::{IoUring, Probe, opcode, types};
use rustix::net::SendFlags;

/// Maximum number of sends per system call.
pub(crate) const MAX_BATCH: u16 = 128;

#[expect(clippy::cast_possible_wrap, reason = "flags")]
const SEND_FLAGS: i32 = SendFlags::DONTWAIT.union(SendFlags::NOSIGNAL).bits() as i32;

/// Sender for many sockets at once.
pub(crate) struct SendBatch {
    ring: IoUring,
    results: Vec<SendResult>,
}

/// Result of one send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SendResult {
    /// Number of bytes sent, or a negated error number.
    Done(i32),
    /// The kernel did not take the send.
    Untried,
    /// The kernel took the send and did not report its result.
    Unknown,
}

impl fmt::Debug for SendBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SendBatch")
    }
}

impl SendBatch {
    /// `None` if the kernel does not support `io_uring`, or does not allow it, as in many containers.
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
        // A system call filter may allow the ring to be created, but not to be used: tried once here.
        ring.submit()?;
        Ok(Self { ring, results: Vec::new() })
    }

    /// Sends each part as far as its socket has room, and returns a result per part. Parts beyond the end of the
    /// results were not tried. The sender is returned unless it broke.
    ///
    /// Each socket may occur only once: after a partial send, a second part would be sent before the rest of the first.
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
            // SAFETY: `bytes` and `socket` outlive this call. It returns when the kernel has completed every send that
            // it took: with `DONTWAIT` no send stays pending. If it returns early with an error, the ring is dropped,
            // and with it the sends that the kernel did not take.
            let pushed = unsafe { self.ring.submission().push(&send) };
            if pushed.is_err() {
                // The ring is full: the remaining parts are not tried.
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

    /// Returns the buffer of the results for the next call.
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
