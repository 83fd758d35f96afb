//! Options of a participant of an election.

use std::time::Duration;

use clap::Args;

use super::hold::{IdentityArgs, kill_after};
use super::value::{duration, duration_or_zero};

/// Options of an election.
#[derive(Args)]
pub(crate) struct ElectionArgs {
    /// Time that the leadership lasts unless renewed; by default three times the health interval and at least
    /// the minimum of the store, or 15s
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    ttl: Option<Duration>,
    /// Interval between renewals of the leadership; by default a third of the ttl
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) health_interval: Option<Duration>,
    /// Poll with exponential backoff that starts at this pause, instead of waiting in the store's queue; 1s if only
    /// --retry-max is given
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) retry_base: Option<Duration>,
    /// The longest pause between polls; 30s by default
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) retry_max: Option<Duration>,
    /// Time in which an interrupted leadership may recover before it is reported as lost; the command is stopped
    /// in the meantime
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) reconnect_grace: Option<Duration>,
    /// Exit when the leadership is lost
    #[arg(long)]
    pub(crate) no_auto_reacquire: bool,
    /// Exit at once if the store denies access after it has worked before: a wrong password, a role that may not log in.
    /// Without this option a later denial is reported and retried, since a password may be replaced at that moment
    #[arg(long)]
    pub(crate) fail_fast: bool,
    /// Stop the command and step down when another participant waits to lead. Only on stores that report waiters
    #[arg(long)]
    pub(crate) step_down_on_request: bool,
    #[command(flatten)]
    pub(crate) identity: IdentityArgs,
    /// Time from TERM to KILL when the leadership ends; by default a fifth of the ttl, at most 5s
    #[arg(long, value_name = "DURATION", value_parser = duration_or_zero)]
    kill_after: Option<Duration>,
}

impl ElectionArgs {
    /// The ttl on a store that accepts none below `min`.
    pub(crate) fn ttl(&self, min: Duration) -> Duration {
        let from_health = |interval: Duration| interval.saturating_mul(3).max(min);
        let unless_given = self.health_interval.map_or(Duration::from_secs(15), from_health);
        self.ttl.unwrap_or(unless_given)
    }

    /// Time from TERM to KILL under a leadership of `ttl`.
    pub(crate) fn kill_after(&self, ttl: Duration) -> Duration {
        kill_after(self.kill_after, ttl)
    }
}
