//! A slot for a contender: runs one tenure process after another, and injects faults into them.

use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use serde_json::Value;
use tenure_core::Random;

use super::judge::{Completion, Violation};
use super::log::Version;
use super::process_tree::{self, ProcessTree};
use crate::command::Group;

/// Delay after a process that ended with an error, so that a store that is down is not flooded with starts.
const RESTART_DELAY: Duration = Duration::from_millis(150);

/// A fault that is injected into a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Fault {
    /// SIGTERM to tenure.
    Term,
    /// SIGKILL to tenure alone: its guardian ends the command.
    Kill,
    /// SIGKILL to the command, the guardian and tenure.
    KillAll,
    /// SIGKILL to the guardian alone: tenure ends the command.
    KillGuardian,
    /// Tenure alone is stopped for longer than its ttl.
    Stop,
    /// Tenure, guardian and command are stopped for longer than the ttl.
    StopAll,
}

impl Fault {
    /// Faults to draw from. Kills are more frequent, because a stop lasts longer than a ttl.
    const DRAWN: [Self; 8] = [
        Self::Kill,
        Self::Kill,
        Self::KillAll,
        Self::KillAll,
        Self::KillGuardian,
        Self::Term,
        Self::Stop,
        Self::StopAll,
    ];

    pub(super) fn draw(random: &mut Random) -> Self {
        let index = random.below(Self::DRAWN.len() as u64);
        Self::DRAWN[usize::try_from(index).unwrap_or_default()]
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Term => "term",
            Self::Kill => "kill",
            Self::KillAll => "kill all",
            Self::KillGuardian => "kill guardian",
            Self::Stop => "stop",
            Self::StopAll => "stop all",
        }
    }
}

/// Outcome of a process.
pub(super) struct Ended {
    pub(super) version: Version,
    /// Jobs that the process reported as completed.
    pub(super) completions: Vec<Completion>,
    /// Exit code and stderr, if the process failed by itself.
    pub(super) error: Option<String>,
}

/// A slot for one process at a time.
pub(super) struct ProcessSlot {
    pub(super) number: usize,
    generation: usize,
    process: Option<SlotProcess>,
    not_before: Option<Instant>,
}

struct SlotProcess {
    group: Group,
    by: String,
    version: Version,
    stderr_path: PathBuf,
    /// The process was asked to end, so that another version can replace it.
    leaving: bool,
    stopped: Option<(Instant, Stopped)>,
    /// A process that still runs after this time hangs.
    deadline: Option<Instant>,
}

enum Stopped {
    Tenure,
    All(ProcessTree),
}

impl ProcessSlot {
    pub(super) fn new(number: usize) -> Self {
        Self { number, generation: 0, process: None, not_before: None }
    }

    /// The name of the process in this slot, as its commands write it to the log.
    pub(super) fn by(&self) -> Option<&str> {
        self.process.as_ref().map(|process| &*process.by)
    }

    /// True if a process can be started.
    pub(super) fn is_free(&self) -> bool {
        self.process.is_none() && self.not_before.is_none_or(|at| Instant::now() >= at)
    }

    /// The name of the next process.
    pub(super) fn next_by(&self) -> String {
        format!("{}.{}", self.number, self.generation + 1)
    }

    /// Starts the next process; its stderr goes to a file in `folder`. After `longest` it counts as hanging.
    pub(super) fn start(
        &mut self,
        mut command: Command,
        version: Version,
        folder: &Path,
        longest: Option<Duration>,
    ) -> Result<()> {
        let by = self.next_by();
        let stderr_path = folder.join(format!("{by}.stderr"));
        command.stdout(Stdio::null());
        command.stderr(File::create(&stderr_path).context("creating a file for messages")?);
        let group = Group::spawn(&mut command, Signal::SIGTERM)?;
        let deadline = longest.map(|longest| Instant::now() + longest);
        self.generation += 1;
        let (leaving, stopped) = (false, None);
        self.process =
            Some(SlotProcess { group, by, version, stderr_path, leaving, stopped, deadline });
        Ok(())
    }

    /// Ends a process of another version than `wanted` by the fault `with`, once. True if the fault was injected.
    pub(super) fn replace(&mut self, wanted: Version, with: Fault) -> bool {
        let Some(process) = &mut self.process else { return false };
        if process.version == wanted || process.leaving || process.stopped.is_some() {
            return false;
        }
        process.leaving = true;
        process.inject(with, Duration::ZERO);
        true
    }

    /// True if a fault can be injected: a process runs here and is not stopped.
    pub(super) fn is_healthy(&self) -> bool {
        self.process.as_ref().is_some_and(|process| process.stopped.is_none())
    }

    /// Injects a fault into the process; a stop lasts for `stop`.
    pub(super) fn inject(&mut self, fault: Fault, stop: Duration) {
        if let Some(process) = &mut self.process {
            process.inject(fault, stop);
        }
    }

    /// Resumes a stopped process when its stop is over. `leased`: its hold has ended meanwhile.
    pub(super) fn resume_if_due(&mut self, leased: bool) -> Option<Violation> {
        let process = self.process.as_mut()?;
        match process.stopped.take_if(|(until, _)| Instant::now() >= *until)?.1 {
            Stopped::Tenure => process_tree::send(process.pid(), Signal::SIGCONT),
            Stopped::All(tree) if !leased => tree.resume(),
            Stopped::All(tree) => {
                if !tree.resume_after_deadline() {
                    let by = &process.by;
                    return Some(Violation::Other(format!(
                        "{by}: the guardian did not kill the command after the deadline"
                    )));
                }
            }
        }
        None
    }

    /// Removes a process that has ended from the slot.
    pub(super) fn ended(&mut self) -> Result<Option<Ended>> {
        let Some(process) = &mut self.process else { return Ok(None) };
        let Some(status) = process.group.ended()? else { return Ok(None) };
        let stderr = fs::read_to_string(&process.stderr_path).unwrap_or_default();
        let _ = fs::remove_file(&process.stderr_path);
        let completions = completions(&process.by, &stderr);
        // An error of tenure itself: not a signal, a wait that timed out, a lost hold, or the end of a killed command.
        let failed = status.signal().is_none()
            && status.code().is_some_and(|code| !matches!(code, 0 | 75 | 79 | 128..));
        let error = failed.then(|| format!("{status}: {}", stderr.trim_end()));
        let version = process.version;
        self.process = None;
        self.not_before = failed.then(|| Instant::now() + RESTART_DELAY);
        Ok(Some(Ended { version, completions, error }))
    }

    /// Description of a process that still runs after its deadline.
    pub(super) fn hangs(&self) -> Option<String> {
        let process = self.process.as_ref()?;
        let over = process.deadline.is_some_and(|deadline| Instant::now() > deadline);
        over.then(|| format!("{} {} hangs", process.version, process.by))
    }

    /// Asks the process to end; a stopped process is resumed first.
    pub(super) fn terminate(&mut self, leased: bool) {
        if let Some(process) = &mut self.process {
            match process.stopped.take() {
                Some((_, Stopped::All(tree))) if leased => drop(tree.resume_after_deadline()),
                Some((_, Stopped::All(tree))) => tree.resume(),
                Some((_, Stopped::Tenure)) => process_tree::send(process.pid(), Signal::SIGCONT),
                None => {}
            }
            process_tree::send(process.pid(), Signal::SIGTERM);
        }
    }
}

impl SlotProcess {
    fn pid(&self) -> Pid {
        Pid::from_raw(self.group.pid().cast_signed())
    }

    fn inject(&mut self, fault: Fault, stop: Duration) {
        let pid = self.pid();
        let until = Instant::now() + stop;
        if let Some(deadline) = &mut self.deadline {
            *deadline += stop;
        }
        match fault {
            Fault::Term => process_tree::send(pid, Signal::SIGTERM),
            Fault::Kill => process_tree::send(pid, Signal::SIGKILL),
            Fault::KillAll => ProcessTree::stop(pid).kill(),
            Fault::KillGuardian => ProcessTree::stop(pid).kill_guardians(),
            Fault::Stop => {
                process_tree::send(pid, Signal::SIGSTOP);
                self.stopped = Some((until, Stopped::Tenure));
            }
            Fault::StopAll => {
                self.stopped = Some((until, Stopped::All(ProcessTree::stop(pid))));
            }
        }
    }
}

impl Drop for SlotProcess {
    fn drop(&mut self) {
        // Kill the whole tree: processes that are stopped or ignore SIGTERM would outlive the soak.
        if matches!(self.group.ended(), Ok(None)) {
            ProcessTree::stop(self.pid()).kill();
        }
    }
}

/// The completions among the events of `tenure work --json`.
fn completions(by: &str, stderr: &str) -> Vec<Completion> {
    let events = stderr.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let completed = events
        .filter(|event| event["event"] == "job_ended" && event["outcome"] == "completed")
        .filter_map(|event| {
            let attempt = u32::try_from(event["attempt"].as_u64()?).ok()?;
            Some((by.to_owned(), format!("job-{}", event["job"].as_str()?), attempt))
        });
    completed.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completions_are_read_from_events() {
        let stderr = r#"{"event":"job_started","job":"7","attempt":2,"token":"5"}
            not json
            {"event":"job_ended","job":"7","attempt":2,"outcome":"completed"}
            {"event":"job_ended","job":"8","attempt":1,"outcome":"lost"}"#;
        let by = "1.2".to_owned();
        assert_eq!(completions(&by, stderr), [(by.clone(), "job-7".to_owned(), 2)]);
    }
}
