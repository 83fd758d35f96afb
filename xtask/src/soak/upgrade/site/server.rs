//! The lock server, restarted repeatedly as either version on one data directory.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::net::TcpStream;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use tenure_core::Random;

use super::super::build::Programs;
use super::super::log::Version;
use super::super::plan::Phase;
use super::{PlanPosition, SiteSetup, StoreDriver};
use crate::command::Group;
use crate::stores::{port, wait_until};

/// Maximum of the mean time between two restarts.
const MAX_RESTART_INTERVAL: Duration = Duration::from_secs(6);

/// Maximum downtime of the server.
const MAX_DOWNTIME_MS: u64 = 800;

pub(super) struct ServerDriver {
    group: Option<Group>,
    version: Version,
    port: u16,
    folder: PathBuf,
    random: Random,
    /// Mean time between two restarts; `None` if the server restarts only to change its version.
    interval: Option<Duration>,
    next: Instant,
    /// Phases in which the server changed its version; used only without an `interval`.
    changed: BTreeSet<Phase>,
    starts: [usize; 2],
    clean: usize,
    killed: usize,
    failures: Vec<String>,
}

impl ServerDriver {
    /// Starts the old version on an empty data directory.
    pub(super) fn start(setup: &SiteSetup<'_>) -> Result<Self> {
        let interval = setup.restarts.then(|| MAX_RESTART_INTERVAL.min(setup.share / 3));
        let mut server = Self {
            group: None,
            version: Version::Old,
            port: port::below_ephemeral_range()?,
            folder: setup.folder.to_owned(),
            random: setup.random.clone(),
            interval,
            next: Instant::now(),
            changed: BTreeSet::new(),
            starts: [0; 2],
            clean: 0,
            killed: 0,
            failures: Vec::new(),
        };
        server.serve(setup.programs, Version::Old)?;
        server.schedule();
        Ok(server)
    }

    pub(super) fn url(&self) -> String {
        format!("tenure://127.0.0.1:{}", self.port)
    }

    fn serve(&mut self, programs: &Programs, version: Version) -> Result<()> {
        let file = File::options().create(true).append(true).open(self.log());
        let file = file.context("opening the server's log")?;
        let mut serve = programs.tenure(version);
        serve.args(["serve", "--port", &self.port.to_string(), "--shutdown-timeout", "1s"]);
        serve.arg("--data-dir").arg(self.folder.join("data"));
        serve.stdout(file.try_clone().context("sharing the server's log")?).stderr(file);
        let mut group = Group::spawn(&mut serve, Signal::SIGTERM)?;
        let answers = || TcpStream::connect(("127.0.0.1", self.port)).is_ok();
        wait_until(&mut group, answers)
            .with_context(|| format!("starting the {version} server; {}", self.log_tail()))?;
        self.group = Some(group);
        self.version = version;
        self.starts[usize::from(version == Version::New)] += 1;
        Ok(())
    }

    /// Records a failure if the server ended by itself. True if it did.
    fn check_ended(&mut self) -> Result<bool> {
        let Some(group) = &mut self.group else { return Ok(false) };
        let Some(status) = group.ended()? else { return Ok(false) };
        self.group = None;
        let version = self.version;
        let text = format!("the {version} server ended by itself: {status}; {}", self.log_tail());
        self.failures.push(text);
        Ok(true)
    }

    fn log(&self) -> PathBuf {
        self.folder.join("server.log")
    }

    fn log_tail(&self) -> String {
        let text = fs::read_to_string(self.log()).unwrap_or_default();
        let lines: Vec<_> = text.lines().collect();
        let last = &lines[lines.len().saturating_sub(5)..];
        format!("its log ends: {}", last.join(" | "))
    }

    fn schedule(&mut self) {
        if let Some(interval) = self.interval {
            self.next = Instant::now() + interval.mul_f64(0.5 + self.random.unit());
        }
    }
}

impl StoreDriver for ServerDriver {
    fn poll(&mut self, programs: &Programs, now: &PlanPosition) -> Result<()> {
        let wanted = now.plan.server(now.time, self.version);
        let due = match self.interval {
            Some(_) => Instant::now() >= self.next,
            None => wanted != self.version && now.progress > 0.4 && self.changed.insert(now.phase),
        };
        if !due && !self.check_ended()? {
            return Ok(());
        }
        let kill = self.random.chance(0.5);
        self.restart(programs, wanted, kill)
    }

    fn restart(&mut self, programs: &Programs, version: Version, kill: bool) -> Result<()> {
        self.check_ended()?;
        if let Some(group) = self.group.take() {
            if kill {
                let process = Pid::from_raw(group.pid().cast_signed());
                signal::kill(process, Signal::SIGKILL).context("killing the server")?;
                self.killed += 1;
            } else {
                self.clean += 1;
            }
            // Sends SIGTERM, which only matters if the server was not killed, and waits for its end.
            drop(group);
        }
        thread::sleep(Duration::from_millis(self.random.below(MAX_DOWNTIME_MS)));
        self.serve(programs, version)?;
        self.schedule();
        Ok(())
    }

    fn about(&self) -> String {
        let Self { starts: [old, new], clean, killed, .. } = self;
        format!("started {old} times as old, {new} as new; {clean} clean stops, {killed} kills")
    }

    fn failures(&self) -> &[String] {
        &self.failures
    }
}
