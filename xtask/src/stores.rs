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
mod service;
mod watchers;

use std::process::ExitCode;
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};

use self::service::{Environment, POLL_INTERVAL, Running, Service};
use crate::interrupt;
use crate::setup::{self, Tool};

pub(crate) use folder::Folder;
pub(crate) use postgres::Cluster;
pub(crate) use service::wait_until;

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

/// Fails if a name is not that of a service.
pub(crate) fn check_names(names: &[String]) -> Result<()> {
    let known = SERVICES.iter().map(|service| service.name).collect::<Vec<_>>();
    match names.iter().find(|name| !known.contains(&name.as_str())) {
        Some(name) => bail!("unknown store `{name}`; known: {}", known.join(", ")),
        None => Ok(()),
    }
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
