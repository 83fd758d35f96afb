//! The command's side of the guardian: starts it, passes descriptors, sends commands, reads reports.

use std::ffi::OsString;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream as StdStream;
use std::os::unix::process::CommandExt as _;
use std::process::{Child as Process, Command, ExitStatus, Stdio};
use std::sync::MutexGuard;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

use crate::guardian::protocol::{GuardianCommand, GuardianReport};
use crate::guardian::{self, MAX_PASSED_DESCRIPTORS, OWN_PROGRAM};
use crate::hold::{Hold, REVISION_VARIABLE, TOKENS_VARIABLE};
use crate::mutex::Mutex;

/// The child, controlled through its guardian.
pub(crate) struct Child {
    guardian: Process,
    commands: OwnedWriteHalf,
    reports: Lines<BufReader<OwnedReadHalf>>,
    group: Option<Pid>,
}

/// Streams of a child that are not those of this process.
#[derive(Default)]
pub(crate) struct Streams {
    pub(crate) stdin: Option<OwnedFd>,
    pub(crate) stdout: Option<OwnedFd>,
    pub(crate) stderr: Option<OwnedFd>,
    /// Descriptors of a child that runs a job.
    pub(crate) job: Option<JobDescriptors>,
}

/// Descriptors of a child that runs a job.
pub(crate) struct JobDescriptors {
    /// Stdin of the program that releases the job if this process is killed.
    pub(crate) record: OwnedFd,
    /// Pipe for the progress of the job.
    pub(crate) progress: OwnedFd,
    /// Pipe for the result of the job.
    pub(crate) result: OwnedFd,
}

/// Reason for which a child could not be started.
#[derive(Debug)]
pub(crate) enum StartError {
    /// The system could not execute the command.
    Command(Errno),
    /// The guardian failed.
    Guardian(io::Error),
}

impl Child {
    /// Starts `command` in its own process group, with stdin, stdout and stderr of this process.
    pub(crate) async fn start(
        command: &[OsString],
        environment: &[(&str, String)],
        hold: Hold<'_>,
    ) -> Result<Self, StartError> {
        Self::start_with(command, environment, hold, Streams::default()).await
    }

    /// Like [`start`](Self::start), with `streams` in place of those of this process.
    pub(crate) async fn start_with(
        command: &[OsString],
        environment: &[(&str, String)],
        hold: Hold<'_>,
        streams: Streams,
    ) -> Result<Self, StartError> {
        let started = Self::start_guardian(command, environment, hold, streams);
        let mut child = started.map_err(StartError::Guardian)?;
        match child.report().await {
            Some(GuardianReport::Started(group)) => {
                child.group = Some(Pid::from_raw(group));
                Ok(child)
            }
            Some(GuardianReport::StartFailed(number)) => {
                child.stop_guardian().await;
                Err(StartError::Command(Errno::from_raw(number)))
            }
            _ => {
                let _ = child.guardian.kill();
                let status = child.wait_for_guardian().map_err(StartError::Guardian)?;
                // The guardian may have started the command before it failed, and could not report it. No process may
                // outlive the hold, so whatever it started is killed here.
                child.kill_without_guardian().await;
                Err(StartError::Guardian(io::Error::other(format!("it ended: {status}"))))
            }
        }
    }

    fn start_guardian(
        command: &[OsString],
        environment: &[(&str, String)],
        hold: Hold<'_>,
        streams: Streams,
    ) -> io::Result<Self> {
        let (ours, theirs) = StdStream::pair()?;
        // Before the guardian exists: no guardian has to be stopped if this fails.
        let keep_open = hold.keep_open().map_err(io::Error::other)?;
        // Before the guardian exists: if it is killed, its children are reparented to the nearest reaper. Unless that
        // is this process they go to init, and `kill_without_guardian` does not find them.
        guardian::become_reaper()?;
        // Locked until the guardian is listed: `kill_orphans` of another job would take a child of ours that is not
        // listed for an orphan, and kill it.
        let mut guardians = guardians();
        // In its own process group: a KILL to our whole group must leave the guardian to kill the child.
        let guardian = Command::new(OWN_PROGRAM)
            .arg0("lock-guardian")
            .arg("__guard")
            .args(streams.job.as_ref().map(|_| "--release-job"))
            .arg("--")
            .args(command)
            // Inherited from an enclosing hold. This hold may have no token or revision, and then the child must not
            // take that of the enclosing hold for its own.
            .env_remove("TENURE_TOKEN")
            .env_remove(REVISION_VARIABLE)
            .env_remove(TOKENS_VARIABLE)
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .env_remove("TENURE_AUTH_TOKEN")
            .env_remove("TENURE_HANDLE")
            .env_remove("NOTIFY_SOCKET")
            .env_remove("WATCHDOG_USEC")
            .env_remove("WATCHDOG_PID")
            .process_group(0)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        guardians.push(guardian.id());
        drop(guardians);
        send_descriptors(&ours, hold, &keep_open, &streams)?;
        // Our copies: as long as they are open, a reader of the child's stderr sees no end of file after its exit.
        drop(streams);
        ours.set_nonblocking(true)?;
        let (reports, commands) = UnixStream::from_std(ours)?.into_split();
        Ok(Self { guardian, commands, reports: BufReader::new(reports).lines(), group: None })
    }

    /// Process group of the child.
    pub(crate) fn group(&self) -> Option<rustix::process::Pid> {
        self.group.and_then(|group| rustix::process::Pid::from_raw(group.as_raw()))
    }

    /// Resolves with the next report; `None` once the guardian has ended.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing.
    pub(crate) async fn report(&mut self) -> Option<GuardianReport> {
        self.reports.next_line().await.ok().flatten().and_then(|line| line.parse().ok())
    }

    /// Sends a command. That the guardian has ended is reported by [`report`](Self::report), not here.
    pub(crate) async fn send(&mut self, command: GuardianCommand) {
        let _ = self.commands.write_all(format!("{command}\n").as_bytes()).await;
    }

    pub(crate) async fn signal(&mut self, signal: Signal) {
        self.send(GuardianCommand::Signal(signal as i32)).await;
    }

    /// Kills the child and all its descendants. They have ended when this resolves.
    pub(crate) async fn kill(&mut self) {
        self.send(GuardianCommand::Kill).await;
        loop {
            match self.report().await {
                Some(GuardianReport::AllExited) => return,
                Some(_) => {}
                None => return self.kill_without_guardian().await,
            }
        }
    }

    /// Ends the guardian. Processes that the child left behind continue to run.
    pub(crate) async fn stop_guardian(&mut self) {
        self.send(GuardianCommand::Quit).await;
        while self.report().await.is_some() {}
        let _ = self.wait_for_guardian();
        reap_orphans();
    }

    /// Waits for the guardian, which has ended or is about to. Its pid may be reused from now on.
    fn wait_for_guardian(&mut self) -> io::Result<ExitStatus> {
        // Locked over both steps. Removed from the list before the wait, the guardian would be taken for an orphan, and
        // its exit status stolen. Removed after an unlocked wait, a new guardian may have got the same pid, and its
        // entry would be removed instead.
        let mut guardians = guardians();
        let status = self.guardian.wait();
        guardians.retain(|guardian| *guardian != self.guardian.id());
        status
    }

    /// Kills the child and all its descendants after the guardian was killed. Its children are children of this process
    /// now, also those that it had no time to report.
    ///
    /// Guardians of other children, and the processes that they guard, are not touched. All other children of this
    /// process are killed. One of them may be a daemon that an earlier command left behind on purpose: it cannot be
    /// told from a process of this child, and a process that continues to run after its hold is the greater harm.
    pub(crate) async fn kill_without_guardian(&mut self) {
        let _ = self.wait_for_guardian();
        // Repeated until neither the group nor an orphan is left: the descendants of a killed process become children
        // of this process only when it dies, so each round may find those that the last one uncovered.
        loop {
            let kill_group = |group| killpg(group, Signal::SIGKILL) != Err(Errno::ESRCH);
            let group_lives =
                self.group.is_some_and(|group| kill_group(group) && has_live_process(group));
            let orphans = kill_orphans();
            if !orphans && !group_lives {
                return;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

/// The guardians that were started and not waited for yet. While the list is locked, none is started or waited for.
fn guardians() -> MutexGuard<'static, Vec<u32>> {
    static GUARDIANS: Mutex<Vec<u32>> = Mutex::new(Vec::new());
    GUARDIANS.lock()
}

/// Kills the orphans that commands left to this process. Returns true if there were any.
fn kill_orphans() -> bool {
    let guardians = guardians();
    let orphans = orphans(&guardians);
    for child in &orphans {
        let _ = kill(*child, Signal::SIGKILL);
        let _ = waitpid(*child, Some(WaitPidFlag::WNOHANG));
    }
    !orphans.is_empty()
}

/// Reaps orphans that have ended. Without this, the zombies of many successive commands would pile up.
fn reap_orphans() {
    let guardians = guardians();
    for child in orphans(&guardians) {
        let _ = waitpid(child, Some(WaitPidFlag::WNOHANG));
    }
}

/// Children of this process that are no guardians.
fn orphans(guardians: &[u32]) -> Vec<Pid> {
    let is_guardian = |id: i32| u32::try_from(id).is_ok_and(|id| guardians.contains(&id));
    let mut children = guardian::own_children();
    children.retain(|child| !is_guardian(child.as_raw()));
    children
}

/// True if a process of the group is alive. Zombies do not count: a parent that never reaps keeps them in the group
/// forever.
fn has_live_process(group: Pid) -> bool {
    let group = group.to_string();
    let lives = |stat: &str| {
        // The name before the last parenthesis may contain any characters. State, parent and group follow it.
        let fields = stat.rsplit_once(')').map(|(_, rest)| rest.split_whitespace().collect());
        fields.is_some_and(|fields: Vec<&str>| {
            fields.get(2) == Some(&&*group) && !matches!(fields[0], "Z" | "X")
        })
    };
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut stats = processes.filter_map(|it| std::fs::read_to_string(it.path().join("stat")).ok());
    stats.any(|stat| lives(&stat))
}

/// Passes the child's streams and the descriptors that keep the hold, with the first deadline.
fn send_descriptors(
    socket: &StdStream,
    hold: Hold<'_>,
    keep_open: &[OwnedFd],
    streams: &Streams,
) -> io::Result<()> {
    let (stdin, stdout, stderr) = (io::stdin(), io::stdout(), io::stderr());
    let first = streams.stdin.as_ref().map_or(stdin.as_fd(), OwnedFd::as_fd);
    let second = streams.stdout.as_ref().map_or(stdout.as_fd(), OwnedFd::as_fd);
    let third = streams.stderr.as_ref().map_or(stderr.as_fd(), OwnedFd::as_fd);
    let mut descriptors = vec![first, second, third];
    if let Some(JobDescriptors { record, progress, result }) = &streams.job {
        descriptors.extend([record.as_fd(), stderr.as_fd(), progress.as_fd(), result.as_fd()]);
    }
    descriptors.extend(keep_open.iter().map(OwnedFd::as_fd));
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_PASSED_DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    // The descriptors arrive with the first byte; the rest is read as a command. The deadline is sent in the same
    // message: if this process is killed or frozen right after it, the guardian already knows when the hold ends.
    let command = hold
        .deadline_nanos()
        .map(|until| format!("{}\n", GuardianCommand::KillAt(until)))
        .unwrap_or_default();
    let bytes = [IoSlice::new(b"\n"), IoSlice::new(command.as_bytes())];
    sendmsg(socket, &bytes, &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}
