//! Options of a hold: its times, the identity of its holder, and its handle.

use std::time::Duration;

use clap::Args;
use tenure::Handle;

use super::value::{duration, duration_or_zero, non_blank};

/// Options of a hold.
#[derive(Args, Clone)]
pub(crate) struct HoldArgs {
    /// Fail at once if another process holds the lock
    #[arg(short = 'n', long = "try", conflicts_with = "wait")]
    pub(crate) try_once: bool,
    /// Wait at most this long, such as 500ms, 15s or 1h30m; forever by default
    #[arg(short, long, value_name = "DURATION", value_parser = duration_or_zero)]
    pub(crate) wait: Option<Duration>,
    /// Exit at once if the store denies access after it has worked before: a wrong password, a role that may not log in.
    /// Without this option a later denial is reported and retried, since a password may be replaced at that moment
    #[arg(long)]
    pub(crate) fail_fast: bool,
    /// Time that the hold lasts without a renewal; tenure renews it while the command runs. The file store has no leases:
    /// there, a hold lasts as long as the command
    #[arg(long, value_name = "DURATION", default_value = "15s", value_parser = duration)]
    pub(crate) ttl: Duration,
    /// Maximum time to hold the lock; the command receives TERM when only the time of --kill-after is left
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) max_hold: Option<Duration>,
    #[command(flatten)]
    pub(crate) identity: IdentityArgs,
    /// Make NAME a semaphore with at most N holders at once. A lock of the same name is separate: the two do not
    /// exclude each other
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) limit: Option<u32>,
    /// Hold the lock together with other processes that give --shared; a process without it holds the lock alone
    #[arg(long, conflicts_with = "limit")]
    pub(crate) shared: bool,
    /// Time from TERM to KILL when the hold ends; by default a fifth of the ttl, at most 5s
    #[arg(long, value_name = "DURATION", value_parser = duration_or_zero)]
    pub(crate) kill_after: Option<Duration>,
}

impl HoldArgs {
    /// Time to wait for a store that is away; `None` if the command does not wait at all.
    pub(crate) fn patience(&self) -> Option<Duration> {
        (!self.try_once).then(|| self.wait.unwrap_or(Duration::MAX))
    }

    pub(crate) fn kill_after(&self) -> Duration {
        kill_after(self.kill_after, self.ttl)
    }
}

/// Identity of the holder, as other clients read it.
#[derive(Args, Clone)]
pub(crate) struct IdentityArgs {
    /// Identity shown to other clients; host:pid:nonce by default
    #[arg(long, value_name = "ID", value_parser = non_blank)]
    pub(crate) id: Option<String>,
    /// Text shown to other clients next to the identity
    #[arg(long, value_name = "TEXT")]
    pub(crate) note: Option<String>,
}

/// The secret of a hold. The environment and stdin keep it out of process lists.
#[derive(Args)]
pub(crate) struct HandleArg {
    /// The handle that `tenure acquire` printed; `-` reads it from stdin
    #[arg(long, value_name = "HANDLE", env = "TENURE_HANDLE", hide_env_values = true)]
    handle: String,
}

impl HandleArg {
    pub(crate) fn read(&self) -> std::io::Result<Handle> {
        if self.handle != "-" {
            return Ok(Handle::new(&self.handle));
        }
        let mut line = String::new();
        std::io::stdin().read_line(&mut line)?;
        Ok(Handle::new(line.trim_end_matches(['\n', '\r'])))
    }
}

/// Time that a command has to stop.
pub(crate) fn kill_after(requested: Option<Duration>, ttl: Duration) -> Duration {
    requested.unwrap_or_else(|| (ttl / 5).min(Duration::from_secs(5)))
}
