//! A tenure process, its guardians and their commands: found, stopped and killed in a safe order.
//!
//! Tenure reaps its guardians, and a guardian reaps its command. While the parent is stopped, the pid of its child
//! cannot be reused by an unrelated process, so every signal here goes to one of our own processes.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Time within which a stop or a kill must take effect.
const SIGNAL_TIMEOUT: Duration = Duration::from_secs(10);

const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A stopped tenure process with all processes below it, which are stopped as well.
pub(super) struct ProcessTree {
    tenure: Pid,
    guardians: Vec<Pid>,
    commands: Vec<Pid>,
}

impl ProcessTree {
    /// Stops all processes, from the top down: a stopped parent starts and reaps no children.
    pub(super) fn stop(tenure: Pid) -> Self {
        stop(tenure);
        let guardians = children(tenure);
        for guardian in &guardians {
            stop(*guardian);
        }
        let commands: Vec<_> = guardians.iter().flat_map(|guardian| children(*guardian)).collect();
        for command in &commands {
            stop(*command);
        }
        Self { tenure, guardians, commands }
    }

    /// Kills all processes. The end of a guardian may free the lock, so the commands are killed first. They are
    /// stopped, so they do not run between the signal and their end.
    pub(super) fn kill(self) {
        for process in self.commands.iter().chain(&self.guardians).chain([&self.tenure]) {
            send(*process, Signal::SIGKILL);
        }
    }

    /// Kills only the guardians and resumes the other processes.
    pub(super) fn kill_guardians(self) {
        for guardian in &self.guardians {
            send(*guardian, Signal::SIGKILL);
        }
        for process in self.commands.iter().chain([&self.tenure]) {
            send(*process, Signal::SIGCONT);
        }
    }

    /// Resumes all processes, for a hold without a deadline.
    pub(super) fn resume(self) {
        for process in self.guardians.iter().chain(&self.commands).chain([&self.tenure]) {
            send(*process, Signal::SIGCONT);
        }
    }

    /// Resumes the processes after the deadline of their hold. True if the guardians killed their commands.
    ///
    /// A command that is resumed before its guardian would act late, which no lock can prevent. So the guardians are
    /// resumed first, and must kill their commands, which stay stopped.
    pub(super) fn resume_after_deadline(self) -> bool {
        self.resume_after_deadline_within(SIGNAL_TIMEOUT)
    }

    fn resume_after_deadline_within(self, limit: Duration) -> bool {
        for guardian in &self.guardians {
            send(*guardian, Signal::SIGCONT);
        }
        let gone = self.commands.iter().all(|command| {
            // A pid is not reused within so short a time.
            within(limit, || matches!(state(*command), None | Some('Z' | 'X')))
        });
        send(self.tenure, Signal::SIGCONT);
        gone
    }
}

/// Sends a signal. The process has not been reaped, so an error means only that it has ended.
pub(super) fn send(process: Pid, signal: Signal) {
    let _ = kill(process, signal);
}

/// The children of a process.
fn children(process: Pid) -> Vec<Pid> {
    let threads = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let lists =
        threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    let lists: String = lists.collect();
    lists.split_whitespace().filter_map(|pid| pid.parse().ok()).map(Pid::from_raw).collect()
}

/// Stops a process and waits until it is stopped: the signal takes effect asynchronously.
fn stop(process: Pid) {
    send(process, Signal::SIGSTOP);
    within(SIGNAL_TIMEOUT, || matches!(state(process), None | Some('T' | 'Z' | 'X')));
}

fn within(limit: Duration, mut seen: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    loop {
        if seen() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// The kernel's letter for the state of a process; `None` if there is no such process.
pub(super) fn state(process: Pid) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The program name before the last parenthesis may contain any character.
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::Group;
    use std::process::Command;

    /// A process with a child and a grandchild, as tenure, guardian and command are.
    fn family() -> (Group, Pid, Pid) {
        let script = "sh -c 'sleep 600 & wait' & wait";
        let group = Group::spawn(Command::new("sh").args(["-c", script]), Signal::SIGTERM).unwrap();
        let top = Pid::from_raw(group.pid().cast_signed());
        let only_child = |parent| {
            let mut found = Vec::new();
            assert!(within(SIGNAL_TIMEOUT, || {
                found = children(parent);
                !found.is_empty()
            }));
            found[0]
        };
        let middle = only_child(top);
        (group, middle, only_child(middle))
    }

    fn is_gone(process: Pid) -> bool {
        within(SIGNAL_TIMEOUT, || matches!(state(process), None | Some('Z' | 'X')))
    }

    #[test]
    fn all_are_stopped_and_go_on_or_are_killed() {
        let (mut group, guardian, command) = family();
        let tenure = Pid::from_raw(group.pid().cast_signed());
        let stopped = ProcessTree::stop(tenure);
        assert_eq!([tenure, guardian, command].map(state), [Some('T'); 3]);
        stopped.resume();
        let goes_on = |process: &Pid| within(SIGNAL_TIMEOUT, || state(*process) == Some('S'));
        assert!([tenure, guardian, command].iter().all(goes_on));
        ProcessTree::stop(tenure).kill();
        assert!([guardian, command].into_iter().all(is_gone));
        assert!(within(SIGNAL_TIMEOUT, || group.ended().unwrap().is_some()));
    }

    #[test]
    fn a_guardian_that_does_not_kill_its_command_is_noticed() {
        let (group, ..) = family();
        let tenure = Pid::from_raw(group.pid().cast_signed());
        assert!(!ProcessTree::stop(tenure).resume_after_deadline_within(Duration::from_millis(20)));
    }
}
