//! Options of the output.

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
}
