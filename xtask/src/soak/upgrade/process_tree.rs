//! A process of tenure, its guardians and their commands: found, stopped and killed in an order that is safe.
//!
//! Tenure waits for its guardians and a guardian for its command, so while the parent is stopped the number of a child
//! cannot become that of an unrelated process: every signal here goes to a process of ours.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Upper bound of the time that a stop or a kill takes to be seen.
const SIGNAL_TIMEOUT: Duration = Duration::from_secs(10);

const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A stopped process of tenure with all that is below it, stopped as well.
pub(super) struct ProcessTree {
    tenure: Pid,
    guardians: Vec<Pid>,
    commands: Vec<Pid>,
}

impl ProcessTree {
    /// Stops them all, from the top down.
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

    /// Kills them all. The end of a guardian may free the lock, so the commands come first; since they are stopped, they
    /// run no further until they are gone.
    pub(super) fn kill(self) {
        for process in self.commands.iter().chain(&self.guardians).chain([&self.tenure]) {
            send(*process, Signal::SIGKILL);
        }
    }

    /// Kills the guardians alone, and lets the rest go on.
    pub(super) fn kill_guardians(self) {
        for guardian in &self.guardians {
            send(*guardian, Signal::SIGKILL);
        }
        for process in self.commands.iter().chain([&self.tenure]) {
            send(*process, Signal::SIGCONT);
        }
    }

    /// Lets all go on whose hold has no deadline.
    pub(super) fn resume(self) {
        for process in self.guardians.iter().chain(&self.commands).chain([&self.tenure]) {
            send(*process, Signal::SIGCONT);
        }
    }

    /// Lets them go on after their deadline. A command that went on first would act late, which no lock can prevent. So
    /// the guardians go on alone, and have to kill their commands. Whether they did.
    pub(super) fn resume_after_deadline(self) -> bool {
        self.resume_after_deadline_within(SIGNAL_TIMEOUT)
    }

    fn resume_after_deadline_within(self, limit: Duration) -> bool {
        for guardian in &self.guardians {
            send(*guardian, Signal::SIGCONT);
        }
        let gone = self.commands.iter().all(|command| {
            // Their number cannot be reused within so short a time.
            within(limit, || matches!(state(*command), None | Some('Z' | 'X')))
        });
        send(self.tenure, Signal::SIGCONT);
        gone
    }
}

/// A process that has not been waited for is meant, so an error says only that it has ended.
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

/// Stops a process and waits until it is: the signal alone is only a word.
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

/// The letter by which the kernel shows a process's state; `None` if there is no such process.
pub(super) fn state(process: Pid) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name before the last parenthesis may contain anything.
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
