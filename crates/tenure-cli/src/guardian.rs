//! The guardian: a small process between the command and its child.
//!
//! It keeps the descriptor that the hold lives on, starts the child, and is the one whose end frees the lock when the
//! command itself was killed. Every process that the child leaves behind becomes a child of the guardian, so nothing can
//! hide from it. It knows no lock, no store and no runtime.

use std::ffi::OsString;
use std::io::{self, IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, getppid};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};

pub(crate) mod protocol;

use protocol::{GuardianCommand, GuardianReport, MAX_LINE};

use crate::exit::Exit;
use crate::signals;

/// What the command passes over: stdin, stdout, stderr, and what keeps the hold.
pub(crate) const MAX_PASSED_DESCRIPTORS: usize = 4;

/// How long killed processes are waited for before those that they left are looked for again.
const REAP_INTERVAL: Duration = Duration::from_millis(5);

/// Runs `command` and looks after it, as told over stdin.
pub(crate) fn run(command: &[OsString]) -> Exit {
    // Nothing can be printed: stdout and stderr are the child's. The command sees the socket close.
    Guardian::start(command).and_then(Guardian::run).map_or(Exit::Failed, |()| Exit::Success)
}

struct Guardian {
    parent: UnixStream,
    /// Tells that a child's state changed.
    child_signals: UnixStream,
    /// The child; `None` once it was waited for: its number may be another's then.
    child: Option<Pid>,
    /// When to kill everything unasked.
    kill_at: Option<u64>,
    /// Read, and not yet a whole line.
    unread: Vec<u8>,
    /// Never used: what it refers to stays locked until we end.
    _hold: Option<OwnedFd>,
}

/// Whether to go on.
#[derive(PartialEq, Eq)]
enum Next {
    Continue,
    End,
}

impl Guardian {
    fn start(command: &[OsString]) -> io::Result<Self> {
        let blocked = [&signals::FORWARDED[..], &[Signal::SIGCHLD]].concat();
        let children = signals::listen(&blocked)?;
        children.set_nonblocking(true)?;
        become_reaper()?;
        // Not after us: `pkill -9 tenure` must leave somebody who ends the child.
        #[cfg(target_os = "linux")]
        nix::sys::prctl::set_name(c"lock-guardian")?;
        let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
        let mut passed = receive_descriptors(&socket)?.into_iter();
        let mut standard = || passed.next().map_or_else(Stdio::null, Stdio::from);
        let (program, arguments) = command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        let mut child = Command::new(program);
        child.args(arguments).process_group(0);
        child.stdin(standard()).stdout(standard()).stderr(standard());
        let spawned = signals::with_signals_unblocked(|| child.spawn())?;
        // Our copies of what is the child's now: whoever reads its output waits for the last of them to close.
        drop(child);
        let mut guardian = Self {
            parent: socket,
            child_signals: children,
            child: None,
            kill_at: None,
            unread: Vec::new(),
            _hold: passed.next(),
        };
        match spawned {
            Ok(child) => {
                let id = i32::try_from(child.id()).map_err(io::Error::other)?;
                guardian.child = Some(Pid::from_raw(id));
                guardian.send_report(GuardianReport::Started(id));
            }
            Err(error) => {
                guardian.send_report(GuardianReport::StartFailed(
                    error.raw_os_error().unwrap_or(Errno::EIO as i32),
                ));
            }
        }
        Ok(guardian)
    }

    /// Goes on until told to end, or until the command is gone and nobody is left.
    fn run(mut self) -> io::Result<()> {
        loop {
            // First of all: of a child that ended at once no signal may have told.
            self.reap();
            if self.kill_at.is_some_and(|until| protocol::boottime_nanos() >= until) {
                self.kill_at = None;
                self.kill_all()?;
                self.send_report(GuardianReport::AllExited);
            }
            if self.read_commands()? == Next::End {
                return Ok(());
            }
            self.wait()?;
        }
    }

    /// Waits for an order, a child or the deadline.
    fn wait(&self) -> io::Result<()> {
        let left = self
            .kill_at
            .map(|until| Duration::from_nanos(until.saturating_sub(protocol::boottime_nanos())));
        let mut fds = [
            PollFd::new(&self.parent, PollFlags::IN),
            PollFd::new(&self.child_signals, PollFlags::IN),
        ];
        wait_for(&mut fds, left)
    }

    /// Reads what there is, and does it.
    fn read_commands(&mut self) -> io::Result<Next> {
        let mut bytes = [0; 256];
        let mut fds = [PollFd::new(&self.parent, PollFlags::IN)];
        wait_for(&mut fds, Some(Duration::ZERO))?;
        if fds[0].revents().is_empty() {
            return Ok(Next::Continue);
        }
        let read = match self.parent.read(&mut bytes) {
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(Next::Continue),
            Err(_) => 0,
        };
        if read == 0 {
            // The command is gone without a word: nobody may outlive the hold that ends with us.
            self.kill_all()?;
            return Ok(Next::End);
        }
        self.unread.extend_from_slice(&bytes[..read]);
        while let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.unread.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line[..end]);
            let order = line.parse().map_err(io::Error::other)?;
            if self.execute(order)? == Next::End {
                return Ok(Next::End);
            }
        }
        if self.unread.len() > MAX_LINE {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Next::Continue)
    }

    fn execute(&mut self, order: GuardianCommand) -> io::Result<Next> {
        match order {
            GuardianCommand::Signal(number) => {
                if let (Some(child), Ok(signal)) = (self.child, Signal::try_from(number)) {
                    // A group whose last member has just ended needs no signal.
                    let _ = killpg(child, signal);
                }
            }
            GuardianCommand::KillAt(nanos) => self.kill_at = Some(nanos),
            GuardianCommand::Kill => {
                self.kill_all()?;
                self.send_report(GuardianReport::AllExited);
            }
            GuardianCommand::Quit => return Ok(Next::End),
        }
        Ok(Next::Continue)
    }

    /// Takes note of every child whose state changed. Whether there is any child left.
    fn reap(&mut self) -> bool {
        // The bytes say only that there is something to see.
        let _ = self.child_signals.read(&mut [0; 64]);
        let flags = WaitPidFlag::WNOHANG | WaitPidFlag::WUNTRACED | WaitPidFlag::WCONTINUED;
        loop {
            let status = match waitpid(None, Some(flags)) {
                Ok(WaitStatus::StillAlive) => return true,
                Ok(status) => status,
                Err(Errno::EINTR) => continue,
                Err(_) => return false,
            };
            if status.pid() == self.child {
                self.report_status(status);
            }
        }
    }

    fn report_status(&mut self, status: WaitStatus) {
        match status {
            WaitStatus::Exited(_, code) => {
                self.child = None;
                // The kernel keeps eight bits of it.
                self.send_report(GuardianReport::Exited(
                    u8::try_from(code & 0xff).unwrap_or_default(),
                ));
            }
            WaitStatus::Signaled(_, signal, _) => {
                self.child = None;
                self.send_report(GuardianReport::Killed(signal as i32));
            }
            WaitStatus::Stopped(_, signal) => {
                self.send_report(GuardianReport::Stopped(signal as i32))
            }
            WaitStatus::Continued(_) => {
                // The command stopped with its child and cannot read this: somebody else continued the child.
                let _ = kill(getppid(), Signal::SIGCONT);
                self.send_report(GuardianReport::Continued);
            }
            _ => {}
        }
    }

    /// Kills the child and every descendant, and waits until they are gone, not only told to go.
    fn kill_all(&mut self) -> io::Result<()> {
        loop {
            if let Some(child) = self.child {
                let _ = killpg(child, Signal::SIGKILL);
            }
            // Only we wait for our children, and not now: their numbers are theirs. Those who were below them come to us
            // as they die, and are found the next time around.
            for child in own_children() {
                let _ = kill(child, Signal::SIGKILL);
            }
            if !self.reap() {
                return Ok(());
            }
            wait_for(&mut [PollFd::new(&self.child_signals, PollFlags::IN)], Some(REAP_INTERVAL))?;
        }
    }

    fn send_report(&mut self, report: GuardianReport) {
        // A command that is gone is noticed when its orders are read.
        let _ = self.parent.write_all(format!("{report}\n").as_bytes());
    }
}

/// Waits until one of `fds` can be read, for `limit` at most.
fn wait_for(fds: &mut [PollFd<'_>], limit: Option<Duration>) -> io::Result<()> {
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    match poll(fds, limit.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// The descriptors that the command passes over.
fn receive_descriptors(socket: &UnixStream) -> io::Result<Vec<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_PASSED_DESCRIPTORS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut bytes = [IoSliceMut::new(&mut byte)];
    // What the child is not given by name it must not inherit.
    let received = recvmsg(socket, &mut bytes, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    if received.bytes == 0 || received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut passed = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            passed.extend(descriptors);
        }
    }
    Ok(passed)
}

#[cfg(target_os = "linux")]
pub(crate) fn become_reaper() -> io::Result<()> {
    Ok(nix::sys::prctl::set_child_subreaper(true)?)
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn become_reaper() -> io::Result<()> {
    Ok(())
}

/// Our children, those of dead descendants among them.
#[cfg(target_os = "linux")]
pub(crate) fn own_children() -> Vec<Pid> {
    let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let lists = threads.map(|thread| std::fs::read_to_string(thread.path().join("children")));
    match lists.collect::<io::Result<String>>() {
        Ok(list) => list.split_whitespace().filter_map(pid).collect(),
        // A kernel without those lists: look at every process.
        Err(_) => children_by_parent(),
    }
}

#[cfg(target_os = "linux")]
fn children_by_parent() -> Vec<Pid> {
    let me = std::process::id().to_string();
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let is_mine = |stat: &str| {
        // The name before the last parenthesis may hold anything.
        stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1)) == Some(&me)
    };
    processes
        .filter_map(|process| pid(process.file_name().to_str()?))
        .filter(|pid| {
            std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|s| is_mine(&s))
        })
        .collect()
}

#[cfg(target_os = "linux")]
fn pid(text: &str) -> Option<Pid> {
    text.parse().ok().map(Pid::from_raw)
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn own_children() -> Vec<Pid> {
    Vec::new()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn both_ways_to_find_children_find_them() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let id = Pid::from_raw(i32::try_from(child.id()).unwrap());
        let (quick, slow) = (own_children(), children_by_parent());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(quick.contains(&id), "{quick:?}");
        assert!(slow.contains(&id), "{slow:?}");
    }
}
