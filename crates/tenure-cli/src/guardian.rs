//! The guardian: a small process between the command and its child.
//!
//! It starts the child and keeps a copy of the descriptor that the hold depends on. If the command itself is killed,
//! that copy keeps the lock held until the guardian has killed the child with all its descendants and ends. A
//! descendant whose parent dies becomes a child of the guardian, so none escapes it.
//!
//! The guardian uses no store, no lock and no async runtime: it must still work when those hang or fail. The job of a
//! killed worker is released by another run of this program, which takes the place of the guardian when no process of
//! the command is left. The guardian passes it a descriptor that it never reads, so it has no credentials itself.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
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
use crate::hold::MAX_LOCKS;
use crate::signals;

/// Descriptors that the command passes: stdin, stdout, stderr, the two of [`JobRelease`], the two of [`InheritedPipes`], and
/// those that keep the hold.
pub(crate) const MAX_PASSED_DESCRIPTORS: usize = 7 + MAX_LOCKS;

/// Variables that name the descriptors of [`InheritedPipes`].
const PIPE_VARIABLES: [&str; 2] = ["TENURE_PROGRESS_FD", "TENURE_RESULT_FD"];

/// Time that is waited for killed processes to end before the next search for their orphans.
const REAP_INTERVAL: Duration = Duration::from_millis(5);

/// Program of this process, also if its file was replaced since the start.
pub(crate) const OWN_PROGRAM: &str = "/proc/self/exe";

/// Runs `command` and guards it, controlled over the socket on stdin. With `release_job`, releases the job of the command
/// if the worker is killed.
pub(crate) fn run(command: &[OsString], release_job: bool) -> Exit {
    // Errors are not printed: stdout and stderr are null here. The command sees the socket close, still has its own
    // copy of the hold's descriptor, and kills the child itself before it releases the hold.
    Guardian::start(command, release_job)
        .and_then(Guardian::run)
        .map_or(Exit::Failed, |()| Exit::Success)
}

struct Guardian {
    parent: UnixStream,
    /// Has a byte when a child's state may have changed.
    child_signals: UnixStream,
    /// The child; `None` once it was reaped: its pid may be reused then.
    child: Option<Pid>,
    /// Deadline of the hold, at which everything is killed without a command.
    kill_at: Option<u64>,
    /// Bytes of a line that is not complete.
    unread: Vec<u8>,
    job_release: Option<JobRelease>,
    /// Descriptors of the hold. Never used: the locks stay held as long as they are open.
    _hold: Vec<OwnedFd>,
}

/// Streams of the program that releases the job of a killed worker.
struct JobRelease {
    /// Its stdin: the job and the store. Never read here, because it may contain a password.
    record: OwnedFd,
    /// Its stderr: that of the worker.
    log: OwnedFd,
}

/// Descriptors that the command of a job inherits, beside its streams: for its progress and its result.
///
/// The numbers are reserved before all others, and so are small: some shells redirect only to descriptors below 10.
struct InheritedPipes([OwnedFd; 2]);

impl InheritedPipes {
    fn reserve() -> io::Result<Self> {
        let null = || File::open("/dev/null").map(OwnedFd::from);
        Ok(Self([null()?, null()?]))
    }

    /// Puts the passed descriptors at the reserved numbers, where the child inherits them, and names them in its
    /// environment.
    fn pass(&mut self, from: &[OwnedFd; 2], child: &mut Command) -> io::Result<()> {
        for ((from, to), variable) in from.iter().zip(&mut self.0).zip(PIPE_VARIABLES) {
            // A duplicate is not closed on exec.
            rustix::io::dup2(from, to)?;
            child.env(variable, to.as_raw_fd().to_string());
        }
        Ok(())
    }
}

/// Next step of the main loop.
#[derive(PartialEq, Eq)]
enum Next {
    Continue,
    End,
}

impl Guardian {
    fn start(command: &[OsString], release_job: bool) -> io::Result<Self> {
        let mut outputs = release_job.then(InheritedPipes::reserve).transpose()?;
        // Before the child exists, so that no SIGCHLD is missed. The forwarded signals are blocked as well: one that is
        // sent to the guardian must not kill it before it has killed the child.
        let blocked = [&signals::FORWARDED[..], &[Signal::SIGCHLD]].concat();
        let children = signals::listen(&blocked)?;
        children.set_nonblocking(true)?;
        // Before the child exists: a process that is orphaned earlier goes to init, where the guardian never finds it.
        become_reaper()?;
        // A process name without "tenure": `pkill -9 tenure` must leave the guardian alive to kill the child.
        nix::sys::prctl::set_name(c"lock-guardian")?;
        let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
        let mut passed = receive_descriptors(&socket)?.into_iter();
        let mut standard = || passed.next().map_or_else(Stdio::null, Stdio::from);
        let (program, arguments) = command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        let mut child = Command::new(program);
        child.args(arguments).process_group(0);
        child.stdin(standard()).stdout(standard()).stderr(standard());
        let job_release = match release_job.then(|| passed.next().zip(passed.next())) {
            Some(Some((record, log))) => Some(JobRelease { record, log }),
            Some(None) => return Err(io::ErrorKind::InvalidInput.into()),
            None => None,
        };
        if let Some(outputs) = &mut outputs {
            let passed = passed.next().zip(passed.next()).ok_or(io::ErrorKind::InvalidInput)?;
            outputs.pass(&passed.into(), &mut child)?;
        }
        // The child would inherit the blocked signals, and could not be stopped with TERM.
        let spawned = signals::with_signals_unblocked(|| child.spawn())?;
        // Closes the guardian's copies of the child's streams: a reader of its output sees the end of file only when
        // the last copy is closed.
        drop((child, outputs));
        let mut guardian = Self {
            parent: socket,
            child_signals: children,
            child: None,
            kill_at: None,
            unread: Vec::new(),
            job_release,
            _hold: passed.collect(),
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

    /// Runs until the command sends `Quit`, or until the command is gone and all descendants are killed.
    fn run(mut self) -> io::Result<()> {
        loop {
            // In every round, whatever woke it: pending SIGCHLDs are not counted, so one may stand for several
            // children. Before the deadline is checked: a child that ended by itself is reported with its own exit
            // code.
            self.reap();
            // Before commands are read: past the deadline another holder may have started, so nothing in the socket may
            // delay the kill. A later deadline that is still unread, because this process was frozen itself, does not
            // count: to kill a child too many is the lesser harm.
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

    /// Waits for a command, a change of a child, or the deadline.
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

    /// Reads the commands that have arrived, and executes them.
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
            // The command ended without `Quit`: it was killed. Its copy of the hold's descriptor is closed, and the
            // lock becomes free when ours is closed at the exit of this process. So everything is killed first: when
            // the next holder starts, no process of this one is left.
            self.kill_all()?;
            // Not before this line: the next worker may claim the job as soon as it is released.
            return match self.job_release.take() {
                Some(release) => Err(release.exec()),
                None => Ok(Next::End),
            };
        }
        self.unread.extend_from_slice(&bytes[..read]);
        while let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.unread.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line[..end]);
            let command = line.parse().map_err(io::Error::other)?;
            if self.execute(command)? == Next::End {
                return Ok(Next::End);
            }
        }
        if self.unread.len() > MAX_LINE {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Next::Continue)
    }

    fn execute(&mut self, command: GuardianCommand) -> io::Result<Next> {
        match command {
            GuardianCommand::Signal(number) => {
                // Only while the child is not reaped: until then the kernel reserves its pid, and thereby the number of
                // its group. Later the number may belong to an unrelated group.
                if let (Some(child), Ok(signal)) = (self.child, Signal::try_from(number)) {
                    // Fails if the last process of the group has just ended; then there is none to signal.
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

    /// Reaps every child that has ended, and reports changes of the child's state. Returns true if any child is left.
    fn reap(&mut self) -> bool {
        // The bytes are only a wake-up. They are read before the children are examined: a child that changes after its
        // turn writes a new byte and wakes the next `wait`. In the other order that byte would be swallowed here.
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
                // The kernel keeps eight bits of the exit code.
                self.send_report(GuardianReport::Exited(
                    u8::try_from(code & 0xff).unwrap_or_default(),
                ));
            }
            WaitStatus::Signaled(_, signal, _) => {
                self.child = None;
                self.send_report(GuardianReport::Killed(signal as i32));
            }
            WaitStatus::Stopped(_, signal) => {
                self.send_report(GuardianReport::Stopped(signal as i32));
            }
            WaitStatus::Continued(_) => {
                // The command suspended itself when the child was suspended, and cannot read the report. If another
                // process continued the child, the command must be continued too: it has to renew the hold and watch
                // the deadline.
                let _ = kill(getppid(), Signal::SIGCONT);
                self.send_report(GuardianReport::Continued);
            }
            _ => {}
        }
    }

    /// Kills the child and every descendant, and waits until they have ended. After a KILL alone, a process may still
    /// write for a moment.
    fn kill_all(&mut self) -> io::Result<()> {
        // One round is not enough: a grandchild in another process group becomes visible only when its parent dies and
        // the kernel makes it a child of the guardian. The loop ends when there is no child left, and then there is no
        // descendant either: an orphan would have become a child.
        loop {
            if let Some(child) = self.child {
                let _ = killpg(child, Signal::SIGKILL);
            }
            // The pids cannot be reused between the listing and the kill: only this thread reaps, and does so below.
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
        // If the command is gone, `read_commands` sees the end of the stream.
        let _ = self.parent.write_all(format!("{report}\n").as_bytes());
    }
}

impl JobRelease {
    /// Replaces this process by the program that releases the job. Returns only if that fails.
    fn exec(self) -> io::Error {
        let mut program = Command::new(OWN_PROGRAM);
        program.arg0("lock-guardian").arg("__release-job");
        program.stdin(self.record).stdout(Stdio::null()).stderr(self.log);
        // Signals stay blocked: a service manager sends TERM to the processes that a killed worker left, and the
        // release takes only a moment more.
        program.exec()
    }
}

/// Waits until one of `fds` can be read, at most for `limit`.
fn wait_for(fds: &mut [PollFd<'_>], limit: Option<Duration>) -> io::Result<()> {
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    match poll(fds, limit.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Receives the descriptors that a process passes.
pub(crate) fn receive_descriptors(socket: &UnixStream) -> io::Result<Vec<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_PASSED_DESCRIPTORS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut bytes = [IoSliceMut::new(&mut byte)];
    // Close-on-exec: the child gets its three streams by name, and must not inherit the descriptor of the hold. A
    // daemon that it leaves behind would keep the lock.
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

/// Makes this process the parent of its orphaned descendants.
pub(crate) fn become_reaper() -> io::Result<()> {
    Ok(nix::sys::prctl::set_child_subreaper(true)?)
}

/// Children of this process, including orphans that it inherited.
pub(crate) fn own_children() -> Vec<Pid> {
    let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let lists = threads.map(|thread| std::fs::read_to_string(thread.path().join("children")));
    match lists.collect::<io::Result<String>>() {
        Ok(list) => list.split_whitespace().filter_map(pid).collect(),
        // The kernel has no such lists: read the parent of every process.
        Err(_) => children_by_parent(),
    }
}

fn children_by_parent() -> Vec<Pid> {
    let me = std::process::id().to_string();
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let is_mine = |stat: &str| {
        // The name before the last parenthesis may contain any characters.
        stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1)) == Some(&me)
    };
    processes
        .filter_map(|process| pid(process.file_name().to_str()?))
        .filter(|pid| {
            std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|s| is_mine(&s))
        })
        .collect()
}

fn pid(text: &str) -> Option<Pid> {
    text.parse().ok().map(Pid::from_raw)
}

#[cfg(test)]
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
