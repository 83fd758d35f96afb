//! A process group that ends with this process, however this process ends.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use super::line;
use crate::interrupt;

/// Interval at which the end of a child and an interrupt are polled.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Time that a group gets to end after the stop signal, before it is killed.
const STOP_GRACE: Duration = Duration::from_secs(10);

/// Script of the watchdog, with the group in `$0` and the stop signal in `$1`.
///
/// `read` returns when stdin closes, that is when xtask has ended. The stop signal comes first, and SIGKILL only if the
/// group still runs ten seconds later.
const WATCHDOG: &str = r#"
read -r _
kill -s "$1" -- "-$0" 2>/dev/null
for _ in 1 2 3 4 5 6 7 8 9 10; do
    kill -s 0 -- "-$0" 2>/dev/null || exit 0
    sleep 1
done
kill -s KILL -- "-$0" 2>/dev/null
"#;

/// A program and its descendants in a process group of their own.
///
/// Dropping it stops the group and waits for its end. A watchdog stops the group if xtask is killed and cannot do it.
pub(crate) struct Group {
    child: Child,
    name: String,
    stop_with: Signal,
    watchdog: Child,
}

impl Group {
    /// Starts `command`; `stop_with` is the signal that makes it shut down cleanly.
    pub(crate) fn spawn(command: &mut Command, stop_with: Signal) -> Result<Self> {
        let name = line(command);
        // A background group that reads from the terminal would be stopped by SIGTTIN.
        let child = command.stdin(Stdio::null()).process_group(0).spawn();
        let mut child = child.with_context(|| format!("cannot start {name}"))?;
        match watchdog(&child, stop_with) {
            Ok(watchdog) => Ok(Self { child, name, stop_with, watchdog }),
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(error).context("cannot start the watchdog")
            }
        }
    }

    /// The process id of the program, which is that of the group.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The exit status, if the program has ended.
    pub(crate) fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().with_context(|| format!("waiting for {}", self.name))
    }

    /// Waits until the program ends (its status) or xtask is interrupted (`None`).
    pub(crate) fn wait(&mut self) -> Result<Option<ExitStatus>> {
        while !interrupt::requested() {
            if let Some(status) = self.ended()? {
                return Ok(Some(status));
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(None)
    }

    fn id(&self) -> Pid {
        group_of(&self.child)
    }

    fn stop(&mut self) {
        let deadline = Instant::now() + STOP_GRACE;
        let _ = killpg(self.id(), self.stop_with);
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
            thread::sleep(POLL_INTERVAL);
        }
        // Sent even if the program itself has ended: it may have left children in its group.
        let _ = killpg(self.id(), Signal::SIGKILL);
        let _ = self.child.wait();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.stop();
        // The watchdog ends last: until the group is gone, it must still stop the group if xtask is killed.
        let _ = killpg(group_of(&self.watchdog), Signal::SIGKILL);
        let _ = self.watchdog.wait();
    }
}

fn watchdog(child: &Child, stop_with: Signal) -> io::Result<Child> {
    let signal = stop_with.as_str().trim_start_matches("SIG");
    Command::new("sh")
        .args(["-c", WATCHDOG, &child.id().to_string(), signal])
        .current_dir("/")
        .process_group(0) // Ctrl-C in the terminal must not end the watchdog before its group.
        .stdin(Stdio::piped()) // Only `Group` holds the pipe open, so the end of xtask closes it.
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
}

fn group_of(child: &Child) -> Pid {
    Pid::from_raw(child.id().try_into().expect("a process id fits a pid_t"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead as _, BufReader};

    /// A shell that prints the process id of its own child, then waits for it.
    fn family() -> (Group, Pid) {
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 600 & echo $!; wait"]).stdout(Stdio::piped());
        let mut group = Group::spawn(&mut command, Signal::SIGTERM).unwrap();
        let mut first = String::new();
        BufReader::new(group.child.stdout.take().unwrap()).read_line(&mut first).unwrap();
        (group, Pid::from_raw(first.trim().parse().unwrap()))
    }

    /// Waits, up to a limit, until the process is gone or a zombie that its new parent has not reaped.
    fn ends(process: Pid) -> bool {
        let deadline = Instant::now() + Duration::from_secs(20);
        while Instant::now() < deadline {
            let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
            if stat.is_empty() || stat.contains(") Z ") {
                return true;
            }
            thread::sleep(POLL_INTERVAL);
        }
        false
    }

    #[test]
    fn dropping_a_group_ends_its_descendants() {
        let (group, grandchild) = family();
        drop(group);
        assert!(ends(grandchild));
    }

    #[test]
    fn the_watchdog_ends_the_group_when_its_pipe_closes() {
        let (mut group, grandchild) = family();
        // The only effect of killing xtask: the kernel closes its end of the pipe.
        drop(group.watchdog.stdin.take());
        assert!(ends(grandchild));
    }

    #[test]
    fn a_program_that_ends_gives_its_status() {
        let mut command = Command::new("sh");
        command.args(["-c", "exit 7"]);
        let mut group = Group::spawn(&mut command, Signal::SIGTERM).unwrap();
        assert_eq!(group.wait().unwrap().unwrap().code(), Some(7));
    }
}
