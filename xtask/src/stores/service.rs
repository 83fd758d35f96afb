//! A store as a service that is installed, started and stopped.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::command::Group;
use crate::interrupt;
use crate::setup::Tool;

/// Time that a store gets to answer after its start.
const START_LIMIT: Duration = Duration::from_secs(30);

/// Interval at which stores are polled, during their start and while they run.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A store that can be installed and started.
pub(super) struct Service {
    pub(super) name: &'static str,
    pub(super) tool: Tool,
    /// Starts the store and returns once it answers. Takes a folder for its files, and the environment of the services
    /// before it.
    pub(super) start: fn(&Path, &Environment) -> Result<Running>,
}

/// Environment variables that point tests at the stores.
pub(super) type Environment = Vec<(&'static str, String)>;

/// A running store. Dropping it ends the store's processes.
pub(super) struct Running {
    pub(super) environment: Environment,
    pub(super) groups: Vec<Group>,
}

/// Polls until `answers` returns true. Fails if `group` ends first, at the time limit, and if xtask is interrupted.
pub(crate) fn wait_until(group: &mut Group, mut answers: impl FnMut() -> bool) -> Result<()> {
    let deadline = Instant::now() + START_LIMIT;
    loop {
        if let Some(status) = group.ended()? {
            bail!("it ended at once: {status}");
        }
        if answers() {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!("it does not answer after {} s", START_LIMIT.as_secs());
        }
        if interrupt::requested() {
            bail!("interrupted");
        }
        thread::sleep(POLL_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::signal::Signal;
    use std::process::Command;

    fn shell(script: &str) -> Group {
        Group::spawn(Command::new("sh").args(["-c", script]), Signal::SIGTERM).unwrap()
    }

    #[test]
    fn a_store_that_ends_while_starting_is_noticed() {
        let error = wait_until(&mut shell("exit 4"), || false).unwrap_err();
        assert!(error.to_string().contains("ended at once"), "{error}");
    }

    #[test]
    fn waiting_ends_with_the_first_answer() {
        let mut asked = 0;
        let answers = || {
            asked += 1;
            asked == 3
        };
        wait_until(&mut shell("sleep 600"), answers).unwrap();
        assert_eq!(asked, 3);
    }
}
