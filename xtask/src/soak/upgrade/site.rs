//! The stores of the soak: their URLs, the names that are contended for, and the drivers of their servers.

mod driver;
mod postgres;
mod server;

use std::time::Duration;

use anyhow::{Context as _, Result};

use self::postgres::PostgresDriver;
use self::server::ServerDriver;
use super::build::Programs;
use super::log::Version;
use crate::stores::Stores;

pub(super) use self::driver::{PlanPosition, SiteSetup, StoreDriver};

/// The ttl of most stores: short, so that many leases end within the time of the soak.
const TTL: Duration = Duration::from_secs(3);

/// The smallest ttl of object stores.
const OBJECT_TTL: Duration = Duration::from_secs(10);

/// Names of the stores, each with its start function, in the order of the soak.
pub(super) const SITES: &[(&str, Start)] = &[
    ("file", |setup| Ok(file(setup))),
    ("server", server),
    ("postgres", lease_rows),
    ("advisory", advisory),
    ("nats", nats),
    ("s3", |_| object("moto", "TENURE_TEST_S3", "s3")),
    ("az", |_| object("azurite", "TENURE_TEST_AZURE", "az")),
    ("jobs", jobs),
];

/// Stores that are left out, each with the reason.
pub(super) const SKIPPED: &[(&str, &str)] =
    &[("gs", "the emulator of Google's store is part of the library's tests, not a program")];

/// Stores whose upgrade must follow the order in the book, each with the reason: all participants first, then the
/// schema, and no roll-back after that.
pub(super) const FORWARD_ONLY: &[(&str, &str)] = &[
    (
        "advisory",
        "versions before the table tenure_incarnation take the timeline for the epoch of tokens",
    ),
    (
        "jobs",
        "versions before the table tenure_incarnation take the timeline for the epoch of tokens",
    ),
];

pub(super) type Start = fn(&SiteSetup<'_>) -> Result<Site>;

/// A name that is contended for.
pub(super) struct Lane {
    pub(super) name: &'static str,
    pub(super) url: String,
    /// Holders at a time: 1 for a lock, more for a semaphore.
    pub(super) limit: usize,
}

/// A running store.
pub(super) struct Site {
    /// The names that are contended for; for jobs one lane, named after the table.
    pub(super) lanes: Vec<Lane>,
    pub(super) ttl: Duration,
    /// A hold ends at its deadline; false for the file store.
    pub(super) leased: bool,
    /// The lanes are queues of jobs.
    pub(super) jobs: bool,
    /// `tenure acquire` can leave a detached hold on this store.
    pub(super) detached: bool,
    pub(super) environment: Vec<(&'static str, String)>,
    pub(super) driver: Box<dyn StoreDriver>,
}

/// Driver for stores whose server is never restarted; keeps the server running.
struct NoRestarts {
    _stores: Option<Stores>,
}

impl StoreDriver for NoRestarts {
    fn poll(&mut self, _: &Programs, _: &PlanPosition) -> Result<()> {
        Ok(())
    }

    fn restart(&mut self, _: &Programs, _: Version, _: bool) -> Result<()> {
        Ok(())
    }

    fn about(&self) -> String {
        "not restarted".to_owned()
    }
}

fn lock(name: &'static str, url: &str) -> Lane {
    Lane { name, url: url.to_owned(), limit: 1 }
}

fn pool(name: &'static str, url: &str) -> Lane {
    Lane { name, url: url.to_owned(), limit: 2 }
}

fn file(setup: &SiteSetup<'_>) -> Site {
    let url = format!("file:{}", setup.folder.join("locks").display());
    Site {
        lanes: vec![lock("one", &url), lock("two", &url), pool("pool", &url)],
        ttl: TTL,
        leased: false,
        jobs: false,
        detached: false,
        environment: Vec::new(),
        driver: Box::new(NoRestarts { _stores: None }),
    }
}

fn server(setup: &SiteSetup<'_>) -> Result<Site> {
    let server = ServerDriver::start(setup)?;
    let url = server.url();
    Ok(Site {
        lanes: vec![lock("one", &url), lock("two", &url), pool("pool", &url)],
        ttl: TTL,
        leased: true,
        jobs: false,
        detached: true,
        environment: Vec::new(),
        driver: Box::new(server),
    })
}

fn lease_rows(setup: &SiteSetup<'_>) -> Result<Site> {
    let postgres = PostgresDriver::start(setup, Duration::ZERO)?;
    let url = postgres.url();
    let schema = ["schema", "--apply", "--locks", "--store", &url].map(str::to_owned);
    Ok(Site {
        lanes: vec![lock("one", &url), lock("two", &url), pool("pool", &url)],
        ttl: TTL,
        leased: true,
        jobs: false,
        detached: true,
        environment: Vec::new(),
        driver: Box::new(postgres.with_schema(setup.programs, schema.to_vec())?),
    })
}

fn advisory(setup: &SiteSetup<'_>) -> Result<Site> {
    // A restart frees all holds. A stopped holder does not notice it, and its command runs until the deadline. So the
    // server stays down for longer than that: otherwise the next holder's command would overlap.
    let postgres = PostgresDriver::start(setup, TTL)?;
    let url = postgres.url().replace("postgres://", "postgres+advisory://");
    let counted = format!("{url}?terms=upgrade_terms");
    let schema = ["schema", "--apply", "--store", &counted].map(str::to_owned);
    Ok(Site {
        lanes: vec![lock("one", &url), lock("two", &url), lock("counted", &counted)],
        ttl: TTL,
        leased: true,
        jobs: false,
        detached: false,
        environment: Vec::new(),
        driver: Box::new(postgres.with_schema(setup.programs, schema.to_vec())?),
    })
}

fn nats(_: &SiteSetup<'_>) -> Result<Site> {
    let stores = Stores::start_some(|name| name == "nats")?;
    let url = format!("{}/upgrade?replicas=1", variable(&stores, "TENURE_TEST_NATS")?);
    let fair = format!("{url}&fair=true");
    Ok(Site {
        lanes: vec![lock("one", &url), lock("fair", &fair), pool("pool", &url)],
        ttl: TTL,
        leased: true,
        jobs: false,
        detached: true,
        environment: Vec::new(),
        driver: Box::new(NoRestarts { _stores: Some(stores) }),
    })
}

fn object(service: &str, endpoint: &str, scheme: &str) -> Result<Site> {
    let stores = Stores::start_some(|name| name == service)?;
    let url = format!("{scheme}://locks/upgrade?endpoint={}", variable(&stores, endpoint)?);
    Ok(Site {
        // Four lanes: a lane whose holder was killed is idle for a lease and a margin, which is long here.
        lanes: vec![lock("one", &url), lock("two", &url), lock("three", &url), lock("four", &url)],
        ttl: OBJECT_TTL,
        leased: true,
        jobs: false,
        detached: true,
        environment: stores.environment().to_vec(),
        driver: Box::new(NoRestarts { _stores: Some(stores) }),
    })
}

fn jobs(setup: &SiteSetup<'_>) -> Result<Site> {
    const TABLE: &str = "upgrade_jobs";
    let postgres = PostgresDriver::start(setup, Duration::ZERO)?;
    let url = postgres.url();
    let schema = ["schema", "--apply", "--queue", TABLE, "--store", &url].map(str::to_owned);
    let postgres = postgres.with_schema(setup.programs, schema.to_vec())?;
    Ok(Site {
        lanes: vec![lock(TABLE, &url)],
        ttl: TTL,
        leased: true,
        jobs: true,
        detached: false,
        environment: Vec::new(),
        driver: Box::new(postgres.with_jobs(TABLE)),
    })
}

fn variable(stores: &Stores, name: &str) -> Result<String> {
    let found = stores.environment().iter().find(|(known, _)| *known == name);
    found.map(|(_, value)| value.clone()).with_context(|| format!("{name} is not set"))
}
