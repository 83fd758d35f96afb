//! Options of the output.

use std::os::fd::RawFd;

use clap::Args;

/// Output on stderr while a command runs.
#[derive(Args, Clone, Copy)]
pub(crate) struct Output {
    /// Print only errors; a lock that another process holds is not an error
    #[arg(short, long)]
    pub(crate) quiet: bool,
    /// Print events as JSON lines on stderr
    #[arg(long)]
    pub(crate) json: bool,
    /// Print events as JSON lines on file descriptor N instead of stderr; the command does not inherit N
    #[arg(long, value_name = "N")]
    pub(crate) events_fd: Option<RawFd>,
}

impl Output {
    /// True if events are printed as JSON, wherever.
    pub(crate) fn has_events(self) -> bool {
        self.json || self.events_fd.is_some()
    }
}
