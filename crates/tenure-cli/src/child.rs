//! The command's end of the guardian: starts it, passes descriptors over, gives orders, reads reports.

use std::ffi::{OsStr, OsString};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream as StdStream;
use std::os::unix::process::CommandExt as _;
use std::process::{Child as Process, Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

use crate::guardian::{self, MAX_PASSED_DESCRIPTORS};
use crate::hold::Hold;
use crate::guardian::protocol::{GuardianCommand, GuardianReport};

/// The child, by way of its guardian.
pub(crate) struct Child {
    guardian: Process,
    commands: OwnedWriteHalf,
    reports: Lines<BufReader<OwnedReadHalf>>,
    group: Option<Pid>,
}

/// What a child has instead of our own.
#[derive(Default)]
pub(crate) struct Streams {
    pub(crate) stdin: Option<OwnedFd>,
    pub(crate) stderr: Option<OwnedFd>,
}

/// Why a child could not be started.
#[derive(Debug)]
pub(crate) enum StartError {
    /// The system refused to execute it.
    Command(Errno),
    /// Its guardian failed.
    Guardian(io::Error),
}

impl Child {
    /// Starts `command` in a process group of its own, with our stdin, stdout and stderr.
    pub(crate) async fn start(
        command: &[OsString],
        environment: &[(&str, String)],
        hold: Hold<'_>,
    ) -> Result<Self, StartError> {
        Self::start_with(command, environment, hold, Streams::default()).await
    }

    /// The same, with other streams for some of ours.
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
                // It may have come as far as to start the command.
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
        // What a guardian leaves that somebody killed comes to us.
        guardian::become_reaper()?;
        // From its start on, nobody may take it for an orphan.
        let mut guardians = guardians();
        // A group of its own: what ends our whole job, even with KILL, must leave somebody to end the child.
        let guardian = Command::new(own_program()?)
            .arg0("lock-guardian")
            .args([OsStr::new("__guard"), OsStr::new("--")])
            .args(command)
            // That of a hold around us is not that of ours, which may have none.
            .env_remove("TENURE_TOKEN")
            // That of a hold around this one, which says nothing of it.
            .env_remove(crate::cmd::REVISION_VARIABLE)
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
        send_descriptors(&ours, hold, &streams)?;
        // The child's ends are the child's alone.
        drop(streams);
        ours.set_nonblocking(true)?;
        let (reports, orders) = UnixStream::from_std(ours)?.into_split();
        Ok(Self {
            guardian,
            commands: orders,
            reports: BufReader::new(reports).lines(),
            group: None,
        })
    }

    /// The process group of the child.
    pub(crate) fn group(&self) -> Option<rustix::process::Pid> {
        self.group.and_then(|group| rustix::process::Pid::from_raw(group.as_raw()))
    }

    /// The next report; `None` when the guardian is gone.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing.
    pub(crate) async fn report(&mut self) -> Option<GuardianReport> {
        self.reports.next_line().await.ok().flatten().and_then(|line| line.parse().ok())
    }

    /// Gives an order. A guardian that is gone is told by [`report`](Self::report).
    pub(crate) async fn send(&mut self, order: GuardianCommand) {
        let _ = self.commands.write_all(format!("{order}\n").as_bytes()).await;
    }

    pub(crate) async fn signal(&mut self, signal: Signal) {
        self.send(GuardianCommand::Signal(signal as i32)).await;
    }

    /// Kills the child and all its descendants. They are gone when this resolves.
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

    /// Lets the guardian go, and leaves alone what the child left behind.
    pub(crate) async fn stop_guardian(&mut self) {
        self.send(GuardianCommand::Quit).await;
        while self.report().await.is_some() {}
        let _ = self.wait_for_guardian();
        reap_orphans();
    }

    /// Waits for the guardian, which has ended or is about to. Its number may be another's from now on.
    fn wait_for_guardian(&mut self) -> io::Result<ExitStatus> {
        let mut guardians = guardians();
        let status = self.guardian.wait();
        guardians.retain(|guardian| *guardian != self.guardian.id());
        status
    }

    /// What is left to do where somebody killed the guardian: its children are ours now, also where it had no time to
    /// tell of them.
    ///
    /// Guardians of other children are left alone, and with them all whom they look after. Any other child of ours may be
    /// one that the dead guardian left, and dies, also where it is a daemon that an earlier command left behind: nobody can
    /// tell these apart, and one that goes on after its hold is worse.
    pub(crate) async fn kill_without_guardian(&mut self) {
        let _ = self.wait_for_guardian();
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

/// The guardians that we started and have not waited for. Nobody starts one or waits for one while this is kept.
fn guardians() -> MutexGuard<'static, Vec<u32>> {
    static GUARDIANS: Mutex<Vec<u32>> = Mutex::new(Vec::new());
    GUARDIANS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Kills what commands left to us; whether there was anything.
fn kill_orphans() -> bool {
    let guardians = guardians();
    let orphans = orphans(&guardians);
    for child in &orphans {
        let _ = kill(*child, Signal::SIGKILL);
        let _ = waitpid(*child, Some(WaitPidFlag::WNOHANG));
    }
    !orphans.is_empty()
}

/// Takes note of the end of what commands left behind: of many commands, one after the other, the dead would pile up.
fn reap_orphans() {
    let guardians = guardians();
    for child in orphans(&guardians) {
        let _ = waitpid(child, Some(WaitPidFlag::WNOHANG));
    }
}

/// Our children that are no guardians.
fn orphans(guardians: &[u32]) -> Vec<Pid> {
    let is_guardian = |id: i32| u32::try_from(id).is_ok_and(|id| guardians.contains(&id));
    let mut children = guardian::own_children();
    children.retain(|child| !is_guardian(child.as_raw()));
    children
}

/// Whether somebody in the group still runs: a new parent that reaps nobody leaves the dead in it for ever.
#[cfg(target_os = "linux")]
fn has_live_process(group: Pid) -> bool {
    let group = group.to_string();
    let lives = |stat: &str| {
        // The name before the last parenthesis may hold anything; then come state, parent and group.
        let fields = stat.rsplit_once(')').map(|(_, rest)| rest.split_whitespace().collect());
        fields.is_some_and(|fields: Vec<&str>| {
            fields.get(2) == Some(&&*group) && !matches!(fields[0], "Z" | "X")
        })
    };
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut stats = processes.filter_map(|it| std::fs::read_to_string(it.path().join("stat")).ok());
    stats.any(|stat| lives(&stat))
}

#[cfg(not(target_os = "linux"))]
fn has_live_process(_: Pid) -> bool {
    true
}

/// Our own program, also where its file was replaced since we were started.
fn own_program() -> io::Result<std::path::PathBuf> {
    if cfg!(target_os = "linux") { Ok("/proc/self/exe".into()) } else { std::env::current_exe() }
}

/// Passes what the child needs and what keeps the hold.
fn send_descriptors(socket: &StdStream, hold: Hold<'_>, streams: &Streams) -> io::Result<()> {
    let keep_open = hold.keep_open().map_err(io::Error::other)?;
    let (stdin, stdout, stderr) = (io::stdin(), io::stdout(), io::stderr());
    let first = streams.stdin.as_ref().map_or(stdin.as_fd(), OwnedFd::as_fd);
    let third = streams.stderr.as_ref().map_or(stderr.as_fd(), OwnedFd::as_fd);
    let mut descriptors = vec![first, stdout.as_fd(), third];
    descriptors.extend(keep_open.iter().map(OwnedFd::as_fd));
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_PASSED_DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    // The descriptors come with the first byte; the rest is read as any order.
    let order = hold
        .deadline_nanos()
        .map(|until| format!("{}\n", GuardianCommand::KillAt(until)))
        .unwrap_or_default();
    let bytes = [IoSlice::new(b"\n"), IoSlice::new(order.as_bytes())];
    sendmsg(socket, &bytes, &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}
