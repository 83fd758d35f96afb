//! The descriptor of `--events-fd`.

use std::fs::{self, File};
use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd as _, RawFd};
use std::os::unix::net::UnixStream;

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use rustix::fs::{OFlags, fcntl_getfl};

use crate::{guardian, report};

/// Takes over an inherited descriptor, which no process started from now on inherits. Returns the reason to refuse it.
///
/// Must be called before this process opens anything: the number could name that.
pub(crate) fn take(number: RawFd) -> Result<File, String> {
    let refuse = |reason: &str| format!("--events-fd {number}: {reason}");
    if number < 3 {
        return Err(refuse("the command has 0, 1 and 2: give a descriptor from 3 on"));
    }
    // Opens nothing itself.
    if fs::symlink_metadata(format!("/dev/fd/{number}")).is_err() {
        return Err(refuse("no such file descriptor: open it, as in `3>events.log`"));
    }
    let file = own(number).map_err(|error| refuse(&report::os_error_text(&error)))?;
    let flags = fcntl_getfl(&file).map_err(|error| refuse(&error.to_string()))?;
    if flags & OFlags::RWMODE == OFlags::RDONLY {
        return Err(refuse("it is open for reading only"));
    }
    Ok(file)
}

/// Turns the number of an open descriptor into an owned one, close-on-exec, and closes that number.
///
/// The descriptor is passed in a message to this process itself. That works for files, pipes and sockets, and needs no
/// unsafe code.
fn own(number: RawFd) -> io::Result<File> {
    let (sender, receiver) = UnixStream::pair()?;
    let passed = [ControlMessage::ScmRights(&[number])];
    let byte = [IoSlice::new(b"\n")];
    sendmsg::<()>(sender.as_raw_fd(), &byte, &passed, MsgFlags::empty(), None)?;
    let taken = guardian::receive_descriptors(&receiver)?.pop();
    let taken = taken.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
    nix::unistd::close(number)?;
    Ok(File::from(taken))
}
