//! Options of a command that runs once per period.

use std::time::Duration;

use clap::{ArgGroup, Args};

use super::value::{duration, duration_or_zero, non_blank};

/// The slot that a command runs in, and the hold of its run.
#[derive(Args)]
#[command(group(ArgGroup::new("when").required(true).args(["per", "slot"])))]
pub(crate) struct OnceArgs {
    /// Run once in each period of this length; periods are counted from midnight UTC of 1 January 1970
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) per: Option<Duration>,
    /// Run once in the slot with this name, such as a date
    #[arg(long, value_name = "TEXT", value_parser = non_blank)]
    pub(crate) slot: Option<String>,
    /// Time that a named slot is remembered; a period's slot is remembered for two periods
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = duration, conflicts_with = "per")]
    pub(crate) keep: Duration,
    /// Allow another run in the same slot if the command fails or tenure is killed
    #[arg(long)]
    pub(crate) retry: bool,
    /// With --retry: time without a renewal after which another process may run the command
    #[arg(long, value_name = "DURATION", default_value = "15s", value_parser = duration)]
    pub(crate) ttl: Duration,
    /// Identity shown to other clients; host:pid:nonce by default
    #[arg(long, value_name = "ID", value_parser = non_blank)]
    pub(crate) id: Option<String>,
    /// Time from TERM to KILL when the hold ends; by default a fifth of the ttl, at most 5s
    #[arg(long, value_name = "DURATION", value_parser = duration_or_zero)]
    pub(crate) kill_after: Option<Duration>,
}

impl OnceArgs {
    /// Time that the hold of the run lasts without a renewal: the ttl with --retry, else as long as the mark of the run
    /// is kept in the store.
    pub(crate) fn hold_ttl(&self) -> Duration {
        if self.retry { self.ttl } else { self.per.map_or(self.keep, |per| per.saturating_mul(2)) }
    }
}
