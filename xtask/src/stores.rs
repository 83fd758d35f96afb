//! The real stores that tests run against, and `cargo xtask stores`.
//!
//! A store is one file below this folder that exports a [`Service`], and one line in [`SERVICES`].

mod azurite;
mod faketime;
mod folder;
mod moto;
mod nats;
mod pgbouncer;
pub(crate) mod port;
mod postgres;
mod watchers;

use std::path::Path;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::command::Group;
use crate::interrupt;
use crate::setup::{self, Tool};

pub(crate) use folder::Folder;
pub(crate) use postgres::Cluster;

/// All services in start order: a service may need an earlier one.
const SERVICES: &[Service] = &[
    postgres::SERVICE,
    pgbouncer::SERVICE,
    faketime::SERVICE,
    nats::SERVICE,
    moto::SERVICE,
    azurite::SERVICE,
    watchers::PROMTOOL,
    watchers::CHROMIUM,
];

/// Time that a store gets to answer after its start.
const START_LIMIT: Duration = Duration::from_secs(30);

/// Interval at which stores are polled, during their start and while they run.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A store that can be installed and started.
struct Service {
    name: &'static str,
    tool: Tool,
    /// Starts the store and returns once it answers. Takes a folder for its files, and the environment of the services
    /// before it.
    start: fn(&Path, &Environment) -> Result<Running>,
}

/// Environment variables that point tests at the stores.
type Environment = Vec<(&'static str, String)>;

/// A running store. Dropping it ends the store's processes.
struct Running {
    environment: Environment,
    groups: Vec<Group>,
}

/// All stores, running. Dropping this stops them and removes their files.
pub(crate) struct Stores {
    environment: Environment,
    // Dropped in this order: the processes before the folder they write to.
    running: Vec<(&'static str, Running)>,
    folder: Folder,
}

impl Stores {
    /// Starts every store on a free loopback port, after installing what is missing.
    pub(crate) fn start() -> Result<Self> {
        Self::start_some(|_| true)
    }

    /// Starts the stores of chosen names.
    pub(crate) fn start_some(chosen: impl Fn(&str) -> bool) -> Result<Self> {
        let services = || SERVICES.iter().filter(|service| chosen(service.name));
        let tools = services().map(|service| setup::ensure(&service.tool));
        tools.collect::<Result<Vec<_>>>()?;
        Folder::sweep("stores");
        let folder = Folder::create("stores")?;
        let mut stores = Self { environment: vec![], running: vec![], folder };
        for service in services() {
            let began = Instant::now();
            let running = (service.start)(stores.folder.path(), &stores.environment)
                .with_context(|| format!("starting {}", service.name))?;
            println!("{} answers after {:.1} s", service.name, began.elapsed().as_secs_f64());
            stores.environment.extend(running.environment.iter().cloned());
            stores.running.insert(0, (service.name, running));
        }
        Ok(stores)
    }

    /// The environment variables that point tests at the stores.
    pub(crate) fn environment(&self) -> &[(&'static str, String)] {
        &self.environment
    }

    /// Fails if a store has ended by itself.
    fn check(&mut self) -> Result<()> {
        for (name, running) in &mut self.running {
            for group in &mut running.groups {
                if let Some(status) = group.ended()? {
                    bail!("{name} ended by itself: {status}");
                }
            }
        }
        Ok(())
    }
}

/// The tools that the stores need.
pub(crate) fn tools() -> impl Iterator<Item = &'static Tool> {
    SERVICES.iter().map(|service| &service.tool)
}

pub(crate) fn run() -> Result<ExitCode> {
    let mut stores = Stores::start()?;
    for (name, value) in stores.environment() {
        println!("export {name}={value}");
    }
    println!("# Ctrl-C stops the stores");
    while !interrupt::requested() {
        stores.check()?;
        thread::sleep(POLL_INTERVAL);
    }
    Ok(ExitCode::SUCCESS)
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
