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
pub(crate) const AT_ONCE: u16 = 128;

#[expect(clippy::cast_possible_wrap, reason = "a flag")]
const DONTWAIT: i32 = SendFlags::DONTWAIT.bits() as i32;

/// Sends on many sockets at once, where the system can.
pub(crate) struct Together {
    ring: IoUring,
    /// What became of each: so many bytes were taken, or an error number below 0.
    taken: Vec<i32>,
}

impl fmt::Debug for Together {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Together")
    }
}

impl Together {
    /// None where the system does not know `io_uring`, or does not allow it, as in many containers.
    pub(crate) fn new() -> Option<Self> {
        Self::open()
            .inspect_err(|error| tracing::debug!(target: "tenure::server", %error, "no_io_uring"))
            .ok()
    }

    fn open() -> io::Result<Self> {
        let ring = IoUring::new(AT_ONCE.into())?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if !probe.is_supported(opcode::Send::CODE) {
            return Err(ErrorKind::Unsupported.into());
        }
        // A filter of system calls may let it be made, and not used.
        ring.submit()?;
        Ok(Self { ring, taken: Vec::new() })
    }

    /// Sends to each what it can take now. Each socket may occur once: one that takes little would let a later part of
    /// its stream overtake.
    ///
    /// # Errors
    ///
    /// What the system says of the ring itself. What was sent then is not known, and it must not be used again.
    #[expect(unsafe_code, reason = "the kernel reads the buffers; see SAFETY")]
    pub(crate) fn send<'a>(
        &mut self,
        parts: impl Iterator<Item = (BorrowedFd<'a>, &'a [u8])>,
    ) -> io::Result<&[i32]> {
        self.taken.clear();
        for (index, (socket, bytes)) in parts.enumerate() {
            let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
            let send = opcode::Send::new(types::Fd(socket.as_raw_fd()), bytes.as_ptr(), length)
                .flags(DONTWAIT)
                .build()
                .user_data(index as u64);
            // SAFETY: `bytes` and `socket` outlive this call, which returns when all sends are done; and none is
            // left to do later, since they may not wait.
            unsafe { self.ring.submission().push(&send) }.map_err(io::Error::other)?;
            self.taken.push(i32::MIN);
        }
        let mut left = self.taken.len();
        while left > 0 {
            match self.ring.submit_and_wait(left) {
                Err(error) if error.kind() != ErrorKind::Interrupted => return Err(error),
                _ => {}
            }
            for done in self.ring.completion() {
                let index = usize::try_from(done.user_data()).map_err(io::Error::other)?;
                *self.taken.get_mut(index).ok_or(ErrorKind::InvalidData)? = done.result();
                left -= 1;
            }
        }
        Ok(&self.taken)
    }
}
