//! The controlling terminal, whose foreground is one process group at a time.

use std::fs::File;
use std::io::{self, IsTerminal as _};

use rustix::process::Pid;
use rustix::termios::{tcgetpgrp, tcsetpgrp};

/// The controlling terminal of this process, if any.
pub(crate) struct Terminal {
    tty: Option<File>,
    /// The child's group, while it has the foreground.
    foreground_child: Option<Pid>,
}

impl Terminal {
    pub(crate) fn open() -> Self {
        Self {
            tty: File::options().read(true).write(true).open("/dev/tty").ok(),
            foreground_child: None,
        }
    }

    /// No terminal: for several children at once, or for children in the background.
    pub(crate) fn none() -> Self {
        Self { tty: None, foreground_child: None }
    }

    /// True if the child is certain to need the foreground. In a pipeline, other processes of this group may need the
    /// terminal as well: there the child gets the foreground only when it uses the terminal.
    pub(crate) fn is_interactive(&self) -> bool {
        self.tty.is_some() && io::stdin().is_terminal() && io::stdout().is_terminal()
    }

    /// True if this process's group, or the child's group that got the foreground from it, is in the foreground.
    pub(crate) fn in_foreground(&self) -> bool {
        let Some(tty) = &self.tty else { return false };
        let Ok(foreground) = tcgetpgrp(tty) else { return false };
        foreground == rustix::process::getpgrp() || Some(foreground) == self.foreground_child
    }

    pub(crate) fn child_has_foreground(&self) -> bool {
        self.foreground_child.is_some()
    }

    /// Gives the foreground to `group`, if this process has it. Returns true on success.
    pub(crate) fn give_foreground_to(&mut self, group: Pid) -> bool {
        if !self.in_foreground() {
            return false;
        }
        let given = self.tty.as_ref().is_some_and(|tty| tcsetpgrp(tty, group).is_ok());
        if given {
            self.foreground_child = Some(group);
        }
        given
    }

    /// Takes the foreground back from the child.
    pub(crate) fn reclaim_foreground(&mut self) {
        if self.in_foreground()
            && let (Some(tty), Some(_)) = (&self.tty, self.foreground_child)
        {
            // Fails if the terminal has hung up; then no group needs its foreground.
            let _ = tcsetpgrp(tty, rustix::process::getpgrp());
        }
        self.foreground_child = None;
    }
}
