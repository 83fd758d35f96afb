//! `cargo xtask soak upgrade`: an earlier version and this one on every store, one after the other and together.
//!
//! Contenders are real processes of either version. They are killed, stopped and replaced during an upgrade and a
//! roll-back. Their commands append to one log while they run, and a judge checks it: under a name at most one command
//! runs at a time, and tokens grow from one command to the next, whichever version granted them.

mod build;
pub(crate) mod child;
mod contenders;
mod crossing;
mod judge;
mod log;
mod plan;
mod process_slot;
mod process_tree;
mod site;

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, bail};
use clap::Parser as _;
use tenure_core::Random;

use self::build::{Programs, Source};
use self::contenders::SoakRecord;
use self::judge::{Violation, ViolationKind};
use self::log::{Turn, Version};
use self::plan::{Phase, Plan};
use self::site::{FORWARD_ONLY, SITES, SKIPPED, Site, SiteSetup, Start};
use crate::interrupt;
use crate::stores::Folder;

/// Maximum number of violations of one kind that are printed per store.
const MAX_SHOWN: usize = 8;

/// Run an earlier version and this one on every store, one after the other and together, with kills.
#[derive(clap::Parser)]
#[expect(clippy::struct_excessive_bools, reason = "flags are independent of each other")]
#[command(name = "cargo xtask soak upgrade", bin_name = "cargo xtask soak upgrade")]
struct UpgradeArgs {
    /// The earlier version: a commit of this repository
    #[arg(long, value_name = "COMMIT", default_value = "c03480b")]
    from: String,
    /// Use this program as the earlier version
    #[arg(long, value_name = "PROGRAM", conflicts_with = "from")]
    old_program: Option<PathBuf>,
    /// Use this program as the new version, instead of building the present tree
    #[arg(long, value_name = "PROGRAM")]
    new_program: Option<PathBuf>,
    /// Only this store; can be repeated
    #[arg(long, value_name = "STORE", value_parser = SITES.iter().map(|(name, _)| *name).collect::<Vec<_>>())]
    only: Vec<String>,
    /// Minutes per store
    #[arg(long, default_value_t = 3.0)]
    minutes: f64,
    /// Seed of all random choices; the time of day by default
    #[arg(long)]
    seed: Option<u64>,
    /// Leave out the roll-back: once upgraded, no server is started as the earlier version
    #[arg(long)]
    forward_only: bool,
    /// Apply the new version's schema when only the new version runs, not during the switch
    #[arg(long)]
    schema_last: bool,
    /// Do not crash or restart the servers of stores, except to change the version of a lock server
    #[arg(long)]
    no_restarts: bool,
    /// Build without optimisation
    #[arg(long)]
    debug: bool,
}

pub(super) fn run(rest: &[String]) -> Result<()> {
    let name = "cargo xtask soak upgrade".to_owned();
    let arguments = match UpgradeArgs::try_parse_from(std::iter::once(&name).chain(rest)) {
        Ok(arguments) => arguments,
        Err(error) => error.exit(),
    };
    let length = Duration::try_from_secs_f64(arguments.minutes * 60.0).context("--minutes")?;
    let seed = arguments.seed.map_or_else(seed_by_clock, Ok)?;
    Folder::sweep("upgrade");
    let folder = Folder::create("upgrade")?;
    let old = match &arguments.old_program {
        Some(program) => Source::Program(program),
        None => Source::Commit(&arguments.from),
    };
    let new = arguments.new_program.as_deref().map_or(Source::Tree, Source::Program);
    let programs = Programs::prepare(folder.path(), &old, &new, arguments.debug)?;
    println!("{}", programs.about);
    println!("seed {seed}, {:.1} min per store", arguments.minutes);
    for (name, why) in SKIPPED {
        println!("{name}: left out: {why}");
    }
    let mut random = Random::new(seed);
    let mut lines = Vec::new();
    let mut wrong = Vec::new();
    for (name, start) in SITES {
        let random = Random::new(random.bits());
        if !arguments.only.is_empty() && !arguments.only.iter().any(|only| only == name) {
            continue;
        }
        if interrupt::requested() {
            bail!("interrupted");
        }
        println!("{name}");
        let one_way = FORWARD_ONLY.iter().find(|(site, _)| site == name);
        if let Some((_, why)) = one_way {
            println!("  the schema is applied last, and there is no roll-back: {why}");
        }
        let forward_only = arguments.forward_only || one_way.is_some();
        let schema_last = arguments.schema_last || one_way.is_some();
        let place = folder.path().join(name);
        std::fs::create_dir(&place).context("creating a folder for a store")?;
        let plan = Plan::new(length, forward_only);
        let schema_in = if schema_last { Phase::New } else { Phase::Switch };
        let course = StoreSoak {
            arguments: &arguments,
            programs: &programs,
            plan,
            schema_in,
            forward_only,
            folder: &place,
        };
        match course.soak(*start, random).with_context(|| format!("the soak of {name}")) {
            Ok(outcome) => {
                println!("{}", outcome.text);
                lines.push(format!("{name:<9} {}", outcome.line));
                wrong.extend(outcome.wrong.then_some(*name));
            }
            // A failure on one store does not stop the soak of the others; an interrupt does.
            Err(error) if interrupt::requested() => return Err(error),
            Err(error) => {
                println!("  FAILED: {error:#}");
                lines.push(format!("{name:<9} FAILED: {error:#}"));
                wrong.push(name);
            }
        }
    }
    println!("{}; seed {seed}\n{}", programs.about, lines.join("\n"));
    if !wrong.is_empty() {
        bail!("the upgrade is not safe, or was not shown to be, on: {}", wrong.join(", "));
    }
    Ok(())
}

fn seed_by_clock() -> Result<u64> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    Ok(now.context("the clock is before 1970")?.as_secs())
}

/// The soak of one store.
struct StoreSoak<'a> {
    arguments: &'a UpgradeArgs,
    programs: &'a Programs,
    plan: Plan,
    /// The phase in which the new version applies its schema.
    schema_in: Phase,
    /// No roll-back takes place.
    forward_only: bool,
    folder: &'a std::path::Path,
}

/// Report on one store.
struct StoreReport {
    text: String,
    line: String,
    wrong: bool,
}

impl StoreSoak<'_> {
    fn soak(&self, start: Start, mut random: Random) -> Result<StoreReport> {
        let setup = SiteSetup {
            folder: self.folder,
            programs: self.programs,
            random: Random::new(random.bits()),
            share: Duration::from_secs_f64(self.arguments.minutes * 60.0 / 6.0),
            restarts: !self.arguments.no_restarts,
            schema_in: self.schema_in,
        };
        let mut site = start(&setup).context("starting it")?;
        let mut record = contenders::run(&mut site, self.programs, self.plan, self.folder, random)?;
        if site.detached {
            let crossing = crossing::check(&mut site, self.programs, self.forward_only);
            let failed = |error| vec![Violation::Other(format!("the crossing failed: {error:#}"))];
            record.violations.extend(crossing.unwrap_or_else(failed));
        }
        // Failures of the server come first: they explain the violations after them.
        let troubles = site.driver.failures().iter().cloned().map(Violation::Other);
        record.violations.splice(..0, troubles);
        Ok(self.report(&site, &record))
    }

    fn report(&self, site: &Site, record: &SoakRecord) -> StoreReport {
        let limit = |name: &str| {
            site.lanes.iter().find(|lane| lane.name == name).map_or(1, |lane| lane.limit)
        };
        // Times since the start of the soak are easier to read than times since boot.
        let since = |at: u64| at.saturating_sub(record.began);
        let turns: Vec<Turn> = record
            .log
            .turns()
            .map(|turn| Turn { begin: since(turn.begin), last: since(turn.last), ..turn.clone() })
            .collect();
        let hand_overs = judge::hand_overs(&turns);
        let mut violations = judge::violations(&turns, &record.completions, limit);
        violations.extend(record.violations.iter().cloned());
        let mut lines = self.phases(&turns, &hand_overs, &mut violations);
        let faults: Vec<_> = record
            .faults
            .iter()
            .map(|(fault, count)| format!("{} {count}", fault.name()))
            .collect();
        lines.push(format!("faults    {}", faults.join(", ")));
        lines.push(format!("server    {}", site.driver.about()));
        lines.extend(record.errors.iter().map(|(version, (count, last))| {
            format!("{count} processes of {version} ended with an error, the last: {last}")
        }));
        let line = format!(
            "turns {} old {} new, hand-overs {} old->new {} new->old, faults {}, \
             longest gap {:.1} s, {}",
            judge::count(&turns, Version::Old),
            judge::count(&turns, Version::New),
            judge::count(hand_overs.iter().copied(), Version::New),
            judge::count(hand_overs.iter().copied(), Version::Old),
            record.faults.values().sum::<usize>(),
            Duration::from_nanos(judge::longest_gap(&turns)).as_secs_f64(),
            verdict(&violations),
        );
        lines.push(line.clone());
        for kind in ViolationKind::ALL {
            let of_kind = violations.iter().filter(|violation| violation.kind() == kind);
            lines.extend(of_kind.take(MAX_SHOWN).map(|found| format!("VIOLATION {found}")));
        }
        StoreReport {
            text: format!("  {}", lines.join("\n  ")),
            line,
            wrong: !violations.is_empty(),
        }
    }

    /// A line for each phase. A phase in which nothing happened that could have failed is itself a violation.
    fn phases(
        &self,
        turns: &[Turn],
        hand_overs: &[&Turn],
        violations: &mut Vec<Violation>,
    ) -> Vec<String> {
        let mut lines = Vec::new();
        for phase in self.plan.phases() {
            let within = |turn: &&Turn| {
                let at = self.plan.at(Duration::from_nanos(turn.begin));
                at.is_some_and(|(now, _)| now == phase)
            };
            let turned = |version| judge::count(turns.iter().filter(within), version);
            let handed = |version| judge::count(hand_overs.iter().copied().filter(within), version);
            lines.push(format!(
                "{:<9} turns {} old {} new, hand-overs {} to new {} to old",
                phase.name(),
                turned(Version::Old),
                turned(Version::New),
                handed(Version::New),
                handed(Version::Old),
            ));
            for version in phase.needed().iter().filter(|version| handed(**version) == 0) {
                let text = format!("{}: no hand-over to {version} was seen", phase.name());
                violations.push(Violation::Other(text));
            }
            for version in phase.alone().into_iter().filter(|version| turned(*version) == 0) {
                let text = format!("{}: no turn of {version} was seen", phase.name());
                violations.push(Violation::Other(text));
            }
        }
        lines
    }
}

/// Number of violations of each kind.
fn verdict(violations: &[Violation]) -> String {
    let count = |kind| violations.iter().filter(|violation| violation.kind() == kind).count();
    let [overlaps, falling, others] = ViolationKind::ALL.map(count);
    format!("overlaps {overlaps}, falling tokens {falling}, other violations {others}")
}
