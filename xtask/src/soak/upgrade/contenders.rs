//! The contenders on one store during an upgrade.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use tenure_core::Random;

use super::build::Programs;
use super::judge::{Completion, Violation};
use super::log::{self, Log, Version};
use super::plan::Plan;
use super::process_slot::{Ended, Fault, ProcessSlot};
use super::site::{Lane, PlanPosition, Site, StoreDriver};
use crate::{command, interrupt};

/// Contenders per name: three, so that two are left while one is down.
const SLOTS_PER_LANE: usize = 3;

/// Workers per job queue.
const WORKERS: usize = 4;

const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Interval at which the log is read.
const LOG_READ_INTERVAL: Duration = Duration::from_millis(50);

/// Time that all contenders get to end after the last phase.
const STOP_WITHIN: Duration = Duration::from_secs(20);

/// Time within which the remaining jobs must be completed.
const DRAIN_WITHIN: Duration = Duration::from_secs(120);

/// Result of the soak of one store.
pub(super) struct SoakRecord {
    pub(super) log: Log,
    /// Start of the soak, in nanoseconds of the log's clock.
    pub(super) began: u64,
    pub(super) completions: Vec<Completion>,
    pub(super) faults: BTreeMap<Fault, usize>,
    /// Violations that were found outside the log.
    pub(super) violations: Vec<Violation>,
    /// Number of errors and the last error, per version.
    pub(super) errors: BTreeMap<Version, (usize, String)>,
}

/// Runs contenders and server through all phases.
pub(super) fn run(
    site: &mut Site,
    programs: &Programs,
    plan: Plan,
    folder: &Path,
    random: Random,
) -> Result<SoakRecord> {
    let path = folder.join("log");
    let log = Log::create(&path)?;
    let count = if site.jobs { WORKERS } else { site.lanes.len() * SLOTS_PER_LANE };
    let record = SoakRecord {
        log,
        began: log::now()?,
        completions: Vec::new(),
        faults: BTreeMap::new(),
        violations: Vec::new(),
        errors: BTreeMap::new(),
    };
    let began = Instant::now();
    let over = AtomicBool::new(false);
    let Site { lanes, ttl, leased, jobs, environment, driver, .. } = site;
    let mut contenders = Contenders {
        lanes,
        ttl: *ttl,
        leased: *leased,
        jobs: *jobs,
        environment,
        programs,
        plan,
        folder,
        path: &path,
        slots: (0..count).map(ProcessSlot::new).collect(),
        random,
        began,
        next_fault: began,
        next_read: began,
        record,
    };
    thread::scope(|scope| {
        let store_thread = scope.spawn(|| drive_store(&mut **driver, programs, plan, began, &over));
        let driven = contenders.drive(&over);
        over.store(true, Ordering::Relaxed);
        let store_result = store_thread.join();
        let store_result =
            store_result.map_err(|_| anyhow::anyhow!("the driver of the store panicked"))?;
        // Reported in addition to the violations that were found until then.
        if let Err(error) = store_result {
            contenders
                .record
                .violations
                .push(Violation::Other(format!("the soak was cut short: {error:#}")));
        }
        driven
    })?;
    contenders.drain()?;
    contenders.record.log.read()?;
    Ok(contenders.record)
}

/// Polls the store's driver until the soak is over.
fn drive_store(
    driver: &mut dyn StoreDriver,
    programs: &Programs,
    plan: Plan,
    began: Instant,
    over: &AtomicBool,
) -> Result<()> {
    while !over.load(Ordering::Relaxed) && !interrupt::requested() {
        let time = began.elapsed();
        let Some((phase, progress)) = plan.at(time) else { break };
        let polled = driver.poll(programs, &PlanPosition { phase, progress, time, plan });
        if polled.is_err() {
            // Without its server the soak shows nothing more.
            over.store(true, Ordering::Relaxed);
            return polled;
        }
        thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

struct Contenders<'a> {
    lanes: &'a [Lane],
    ttl: Duration,
    leased: bool,
    jobs: bool,
    environment: &'a [(&'static str, String)],
    programs: &'a Programs,
    plan: Plan,
    folder: &'a Path,
    /// Path of the log.
    path: &'a Path,
    slots: Vec<ProcessSlot>,
    random: Random,
    began: Instant,
    next_fault: Instant,
    next_read: Instant,
    record: SoakRecord,
}

impl Contenders<'_> {
    fn drive(&mut self, over: &AtomicBool) -> Result<()> {
        let mut phase = None;
        while !over.load(Ordering::Relaxed) {
            if interrupt::requested() {
                bail!("interrupted");
            }
            let time = self.began.elapsed();
            let Some((now, _)) = self.plan.at(time) else { break };
            if phase.replace(now) != Some(now) {
                let turns = self.record.log.turns().count();
                println!("  {:>5.1} s  {:<9} {turns} turns so far", time.as_secs_f64(), now.name());
            }
            for number in 0..self.slots.len() {
                self.update_slot(number, time)?;
            }
            self.inject_fault();
            if Instant::now() >= self.next_read {
                self.record.log.read()?;
                self.next_read = Instant::now() + LOG_READ_INTERVAL;
            }
            thread::sleep(POLL_INTERVAL);
        }
        self.stop_all()
    }

    /// Updates one slot: records a process that ended, kills one that hangs, replaces one of another version, and
    /// starts the next.
    fn update_slot(&mut self, number: usize, time: Duration) -> Result<()> {
        let count = self.slots.len();
        let slot = &mut self.slots[number];
        self.record.violations.extend(slot.resume_if_due(self.leased));
        if let Some(ended) = slot.ended()? {
            record_end(&mut self.record, ended);
        }
        if let Some(text) = slot.hangs() {
            self.record.violations.push(Violation::Other(text));
            slot.inject(Fault::KillAll, Duration::ZERO);
        }
        let wanted = self.plan.client(time, (number, count), self.jobs);
        if let Some(wanted) = wanted {
            // A deployment terminates processes; sometimes the machine crashes instead.
            let with = if self.random.chance(0.2) { Fault::KillAll } else { Fault::Term };
            if slot.replace(wanted, with) && with == Fault::KillAll {
                *self.record.faults.entry(with).or_default() += 1;
            }
        }
        if slot.is_free() {
            let version = wanted.unwrap_or_else(|| {
                if self.random.chance(0.5) { Version::Old } else { Version::New }
            });
            let by = slot.next_by();
            let (command, longest) = self.command(number, version, &by);
            self.slots[number].start(command, version, self.folder, longest)?;
        }
        Ok(())
    }

    /// Injects a fault when one is due, more often into a process whose command runs.
    fn inject_fault(&mut self) {
        if Instant::now() < self.next_fault {
            return;
        }
        // A killed holder of a lease blocks its name for a ttl, and a blocked name shows nothing: leased locks get the
        // fewest faults. A job queue always has other jobs, and only jobs that a fault leaves behind are handed over.
        let pause = match (self.leased, self.jobs) {
            (true, false) => self.ttl / 2,
            (true, true) => self.ttl / 4,
            (false, _) => self.ttl / 5,
        };
        self.next_fault = Instant::now() + pause.mul_f64(0.5 + self.random.unit());
        let healthy: Vec<usize> =
            self.slots.iter().filter(|slot| slot.is_healthy()).map(|slot| slot.number).collect();
        let runs = |number: &&usize| {
            let by = self.slots[**number].by();
            by.is_some_and(|by| self.record.log.open_turns(by).next().is_some())
        };
        let running: Vec<usize> = healthy.iter().filter(runs).copied().collect();
        let chosen =
            if self.random.chance(0.75) && !running.is_empty() { running } else { healthy };
        let index = self.random.below(chosen.len() as u64);
        let Some(number) = usize::try_from(index).ok().and_then(|index| chosen.get(index)) else {
            return;
        };
        let fault = Fault::draw(&mut self.random);
        let stop = self.ttl.mul_f64(1.2 + self.random.unit() * 0.6);
        self.slots[*number].inject(fault, stop);
        *self.record.faults.entry(fault).or_default() += 1;
    }

    /// The command of a slot, and the time after which it hangs.
    fn command(&mut self, slot: usize, version: Version, by: &str) -> (Command, Option<Duration>) {
        let lane = &self.lanes[slot % self.lanes.len()];
        let ttl = format!("{}ms", self.ttl.as_millis());
        let mut tenure = self.programs.tenure(version);
        tenure.envs(self.environment.iter().cloned());
        let text = |duration: Duration| duration.as_millis().to_string();
        let (hold, spread, longest) = if self.jobs {
            tenure.args(["work", lane.name, "--store", &lane.url, "--json", "-c", "3"]);
            tenure.args(["--lease", &ttl, "--grace", "500ms"]);
            tenure.args(["--retry-base", "100ms", "--retry-max", "500ms"]);
            (Duration::from_millis(20), self.ttl, None)
        } else {
            let wait = (self.ttl * 4).max(Duration::from_secs(20));
            tenure.args(["run", lane.name, "--store", &lane.url, "--quiet", "--ttl", &ttl]);
            tenure.args(["--wait", &format!("{}s", wait.as_secs())]);
            if lane.limit > 1 {
                tenure.args(["--limit", &lane.limit.to_string()]);
            }
            // Most holds are short; some outlast the ttl and must be renewed.
            let hold = if self.random.chance(0.12) {
                self.ttl.mul_f64(1.1 + self.random.unit() / 2.0)
            } else {
                Duration::from_millis(10 + self.random.below(400))
            };
            (hold, Duration::ZERO, Some(wait + hold + Duration::from_secs(60)))
        };
        tenure.arg("--").arg(&self.programs.child).arg("upgrade-child").arg(self.path);
        tenure.args([by, &version.to_string(), &text(hold), &text(spread)]);
        if self.random.chance(0.25) {
            tenure.arg("--stubborn");
        }
        (tenure, longest)
    }

    /// Terminates all contenders; those that do not end in time are killed.
    fn stop_all(&mut self) -> Result<()> {
        for slot in &mut self.slots {
            slot.terminate(self.leased);
        }
        let deadline = Instant::now() + STOP_WITHIN;
        while self.slots.iter().any(|slot| slot.by().is_some()) && Instant::now() < deadline {
            for slot in &mut self.slots {
                if let Some(ended) = slot.ended()? {
                    record_end(&mut self.record, ended);
                }
            }
            thread::sleep(POLL_INTERVAL);
        }
        let left: Vec<_> =
            self.slots.drain(..).filter_map(|slot| slot.by().map(str::to_owned)).collect();
        if !left.is_empty() {
            let text =
                format!("{} did not end within {} s", left.join(", "), STOP_WITHIN.as_secs());
            self.record.violations.push(Violation::Other(text));
        }
        Ok(())
    }

    /// Runs the remaining jobs and checks that every job is completed.
    fn drain(&mut self) -> Result<()> {
        if !self.jobs {
            return Ok(());
        }
        let deadline = Instant::now() + DRAIN_WITHIN;
        let mut slot = ProcessSlot::new(WORKERS);
        loop {
            // `--until-empty` does not wait for jobs of a killed worker, which can be claimed when their lease
            // ends: hence the loop.
            self.work_until_empty(&mut slot)?;
            let (completed, others) = self.listed()?;
            if others.is_empty() {
                println!("  {completed} jobs completed");
                return Ok(());
            }
            if Instant::now() >= deadline {
                let left = others.into_iter();
                let left =
                    left.map(|job| Violation::Other(format!("a job was not completed: {job}")));
                self.record.violations.extend(left);
                return Ok(());
            }
            thread::sleep(self.ttl / 10);
        }
    }

    fn work_until_empty(&mut self, slot: &mut ProcessSlot) -> Result<()> {
        let lane = &self.lanes[0];
        let mut work = self.programs.tenure(Version::New);
        work.args(["work", lane.name, "--store", &lane.url, "--json", "--until-empty", "-c", "8"]);
        work.args(["--lease", "3s", "--retry-base", "100ms", "--retry-max", "500ms"]);
        work.arg("--").arg(&self.programs.child).arg("upgrade-child").arg(self.path);
        work.args([&*slot.next_by(), "new", "1", "50"]);
        slot.start(work, Version::New, self.folder, Some(DRAIN_WITHIN))?;
        while slot.by().is_some() {
            if let Some(ended) = slot.ended()? {
                record_end(&mut self.record, ended);
            }
            if interrupt::requested() {
                bail!("interrupted");
            }
            if slot.hangs().is_some() {
                bail!("jobs are left after {} s", DRAIN_WITHIN.as_secs());
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// The number of completed jobs, and the lines of the other jobs.
    fn listed(&self) -> Result<(usize, Vec<String>)> {
        let lane = &self.lanes[0];
        let mut list = self.programs.tenure(Version::New);
        list.args(["job", "ls", lane.name, "--store", &lane.url, "--json", "--limit", "1000000"]);
        let printed = command::stdout(&mut list)?;
        let mut completed = 0;
        let mut others = Vec::new();
        for line in printed.lines() {
            let job: Value = serde_json::from_str(line).context("parsing the output of job ls")?;
            if job["state"] == "COMPLETED" {
                completed += 1;
            } else {
                others.push(line.to_owned());
            }
        }
        Ok((completed, others))
    }
}

fn record_end(record: &mut SoakRecord, ended: Ended) {
    record.completions.extend(ended.completions);
    if let Some(error) = ended.error {
        let (count, last) = record.errors.entry(ended.version).or_default();
        *count += 1;
        *last = error;
    }
}
