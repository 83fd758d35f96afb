//! PostgreSQL, with tables that the old version created and the new version takes over; it crashes once per phase.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::Result;
use tenure_core::Random;

use super::super::build::Programs;
use super::super::log::Version;
use super::super::plan::Phase;
use super::{PlanPosition, SiteSetup, StoreDriver};
use crate::command;
use crate::stores::{Cluster, port};

/// Maximum downtime of the server, in addition to the minimum that the store requires.
const MAX_DOWNTIME_MS: u64 = 800;

/// Interval at which jobs are added.
const FEED_INTERVAL: Duration = Duration::from_millis(250);

/// Progress of the phase at which the server crashes.
const CRASH_AT: f64 = 0.6;

pub(super) struct PostgresDriver {
    cluster: Cluster,
    random: Random,
    restarts: bool,
    /// Minimum downtime of a crash.
    down: Duration,
    schema: Vec<String>,
    /// The phase in which the new version applies its schema, and the progress of the phase at that time: the first new
    /// clients find the old schema.
    apply_in: Phase,
    apply_at: f64,
    applied: bool,
    crashed: BTreeSet<Phase>,
    feed: Option<JobFeed>,
}

/// Adds jobs with either version.
struct JobFeed {
    table: &'static str,
    next: Instant,
    added: [usize; 2],
}

impl PostgresDriver {
    pub(super) fn start(setup: &SiteSetup<'_>, down: Duration) -> Result<Self> {
        Cluster::ensure()?;
        let cluster = Cluster::start(setup.folder, port::below_ephemeral_range)?;
        let mut random = setup.random.clone();
        let apply_at = random.unit() / 2.0;
        Ok(Self {
            cluster,
            random,
            restarts: setup.restarts,
            down,
            schema: Vec::new(),
            apply_in: setup.schema_in,
            apply_at,
            applied: false,
            crashed: BTreeSet::new(),
            feed: None,
        })
    }

    pub(super) fn url(&self) -> String {
        self.cluster.url()
    }

    /// Creates the tables with the old version.
    pub(super) fn with_schema(mut self, programs: &Programs, schema: Vec<String>) -> Result<Self> {
        command::succeed(programs.tenure(Version::Old).args(&schema))?;
        self.schema = schema;
        Ok(self)
    }

    pub(super) fn with_jobs(mut self, table: &'static str) -> Self {
        self.feed = Some(JobFeed { table, next: Instant::now(), added: [0; 2] });
        self
    }

    fn add_job_if_due(&mut self, programs: &Programs, phase: Phase) -> Result<()> {
        let url = self.url();
        let Some(feed) = &mut self.feed else { return Ok(()) };
        if Instant::now() < feed.next {
            return Ok(());
        }
        let either = Version::BOTH[usize::from(self.random.chance(0.5))];
        let version = phase.alone().unwrap_or(either);
        let mut add = programs.tenure(version);
        add.args(["job", "add", feed.table, "--max-attempts", "1000", "--store", &url]);
        command::succeed(&mut add)?;
        feed.added[usize::from(version == Version::New)] += 1;
        feed.next = Instant::now() + FEED_INTERVAL;
        Ok(())
    }
}

impl StoreDriver for PostgresDriver {
    fn poll(&mut self, programs: &Programs, now: &PlanPosition) -> Result<()> {
        if now.phase == self.apply_in && now.progress >= self.apply_at && !self.applied {
            command::succeed(programs.tenure(Version::New).args(&self.schema))?;
            self.applied = true;
        }
        if self.restarts && now.progress >= CRASH_AT && self.crashed.insert(now.phase) {
            let more = Duration::from_millis(self.random.below(MAX_DOWNTIME_MS));
            self.cluster.crash(self.down + more)?;
        }
        self.add_job_if_due(programs, now.phase)
    }

    fn restart(&mut self, _: &Programs, _: Version, _: bool) -> Result<()> {
        Ok(())
    }

    fn about(&self) -> String {
        let crashes = self.crashed.len();
        let jobs = self.feed.as_ref().map(|feed| {
            let [old, new] = feed.added;
            format!("; {old} jobs added by old, {new} by new")
        });
        format!("crashed {crashes} times{}", jobs.unwrap_or_default())
    }
}
