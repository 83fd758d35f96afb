//! The controlling terminal, which belongs to one process group at a time.

use std::fs::File;
use std::io::{self, IsTerminal as _};

use rustix::process::Pid;
use rustix::termios::{tcgetpgrp, tcsetpgrp};

/// The terminal that our job runs on, if any.
pub(crate) struct Terminal {
    tty: Option<File>,
    /// The group that it was lent to.
    foreground_child: Option<Pid>,
}

impl Terminal {
    pub(crate) fn open() -> Self {
        Self {
            tty: File::options().read(true).write(true).open("/dev/tty").ok(),
            foreground_child: None,
        }
    }

    /// None: for children that are several, or run behind somebody's back.
    pub(crate) fn none() -> Self {
        Self { tty: None, foreground_child: None }
    }

    /// Whether the child will surely expect to be in the foreground. In a pipeline others of our group may need the
    /// terminal as much: there it is lent when the child asks for it.
    pub(crate) fn is_interactive(&self) -> bool {
        self.tty.is_some() && io::stdin().is_terminal() && io::stdout().is_terminal()
    }

    /// Whether we, or the child in our stead, are in the foreground.
    pub(crate) fn in_foreground(&self) -> bool {
        let Some(tty) = &self.tty else { return false };
        let Ok(foreground) = tcgetpgrp(tty) else { return false };
        foreground == rustix::process::getpgrp() || Some(foreground) == self.foreground_child
    }

    pub(crate) fn child_has_foreground(&self) -> bool {
        self.foreground_child.is_some()
    }

    /// Makes `group` the one in the foreground, where we are that now. Whether it is.
    pub(crate) fn give_foreground_to(&mut self, group: Pid) -> bool {
        if !self.in_foreground() {
            return false;
        }
        let lent = self.tty.as_ref().is_some_and(|tty| tcsetpgrp(tty, group).is_ok());
        if lent {
            self.foreground_child = Some(group);
        }
        lent
    }

    /// Takes back what was lent.
    pub(crate) fn reclaim_foreground(&mut self) {
        if self.in_foreground()
            && let (Some(tty), Some(_)) = (&self.tty, self.foreground_child)
        {
            // A terminal that hung up meanwhile cannot be had, and needs no owner.
            let _ = tcsetpgrp(tty, rustix::process::getpgrp());
        }
        self.foreground_child = None;
    }
}
