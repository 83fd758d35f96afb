//! `cargo xtask soak upgrade`: an earlier version and this one on every store, one after the other and together.
//!
//! Contenders are real processes of either version, which are killed, stopped and replaced over the course of an upgrade
//! and of a roll-back. Their commands write to one log when they run, and a judge reads it: no two commands at a time under one
//! name, and tokens that grow from one command to the next, whichever versions granted them.

mod build;
pub(crate) mod child;
mod crossing;
mod crowd;
mod family;
mod judge;
mod log;
mod plan;
mod seat;
mod site;

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, bail};
use clap::Parser as _;
use tenure_core::Random;

use self::build::{Programs, Source};
use self::crowd::Seen;
use self::judge::Violation;
use self::log::{Turn, Version};
use self::plan::{Phase, Plan};
use self::site::{LEFT_OUT, SITES, Scene, Site, Start};
use crate::interrupt;
use crate::stores::Folder;

/// How many violations of a store are printed.
const MAX_SHOWN: usize = 10;

/// Run an earlier version and this one on every store, one after the other and together, with kills.
#[derive(clap::Parser)]
#[command(name = "cargo xtask soak upgrade", bin_name = "cargo xtask soak upgrade")]
struct Arguments {
    /// The earlier version: a commit of this repository
    #[arg(long, value_name = "COMMIT", default_value = "c03480b")]
    from: String,
    /// Take this program as the earlier version
    #[arg(long, value_name = "PROGRAM", conflicts_with = "from")]
    old_program: Option<PathBuf>,
    /// Take this program as the new version, and not the one that is built here
    #[arg(long, value_name = "PROGRAM")]
    new_program: Option<PathBuf>,
    /// Only this store; can be repeated
    #[arg(long, value_name = "STORE", value_parser = SITES.iter().map(|(name, _)| *name).collect::<Vec<_>>())]
    only: Vec<String>,
    /// How long each store takes
    #[arg(long, default_value_t = 3.0)]
    minutes: f64,
    /// The seed of all choices; the time of day by default
    #[arg(long)]
    seed: Option<u64>,
    /// Leave out the roll-back: once upgraded, no server is started as the earlier version
    #[arg(long)]
    forward_only: bool,
    /// Do not crash or restart the servers of stores, but for a lock server that changes its version
    #[arg(long)]
    no_restarts: bool,
    /// Build without optimisation
    #[arg(long)]
    debug: bool,
}

pub(super) fn run(rest: &[String]) -> Result<()> {
    let name = "cargo xtask soak upgrade".to_owned();
    let arguments = match Arguments::try_parse_from(std::iter::once(&name).chain(rest)) {
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
    for (name, why) in LEFT_OUT {
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
        let place = folder.path().join(name);
        std::fs::create_dir(&place).context("creating a folder for a store")?;
        let plan = Plan::new(length, arguments.forward_only);
        let course = Course { arguments: &arguments, programs: &programs, plan, folder: &place };
        match course.soak(*start, random).with_context(|| format!("the soak of {name}")) {
            Ok(outcome) => {
                println!("{}", outcome.text);
                lines.push(format!("{name:<9} {}", outcome.line));
                wrong.extend(outcome.wrong.then_some(*name));
            }
            // The other stores are still worth to be tried, unless they are not wanted.
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
struct Course<'a> {
    arguments: &'a Arguments,
    programs: &'a Programs,
    plan: Plan,
    folder: &'a std::path::Path,
}

/// What is told of one store.
struct Outcome {
    text: String,
    line: String,
    wrong: bool,
}

impl Course<'_> {
    fn soak(&self, start: Start, mut random: Random) -> Result<Outcome> {
        let scene = Scene {
            folder: self.folder,
            programs: self.programs,
            random: Random::new(random.bits()),
            share: Duration::from_secs_f64(self.arguments.minutes * 60.0 / 6.0),
            restarts: !self.arguments.no_restarts,
        };
        let mut site = start(&scene).context("starting it")?;
        let mut seen = crowd::run(&mut site, self.programs, self.plan, self.folder, random)?;
        if site.detached {
            let crossing = crossing::check(&mut site, self.programs, self.arguments.forward_only)?;
            seen.violations.extend(crossing);
        }
        Ok(self.report(&site, &seen))
    }

    fn report(&self, site: &Site, seen: &Seen) -> Outcome {
        let limit = |name: &str| {
            site.lanes.iter().find(|lane| lane.name == name).map_or(1, |lane| lane.limit)
        };
        let turns: Vec<&Turn> = seen.log.turns().collect();
        let mut violations = judge::violations(turns.iter().copied(), &seen.completions, limit);
        violations.extend(seen.violations.iter().cloned());
        let hand_overs = judge::hand_overs(turns.iter().copied());
        let mut text = String::new();
        for phase in self.plan.phases() {
            let within = |turn: &&&Turn| self.phase_of(seen, turn) == Some(phase);
            let (turns, hand_overs): (Vec<_>, Vec<_>) =
                (turns.iter().filter(within).collect(), hand_overs.iter().filter(within).collect());
            let count =
                |turns: &[&&Turn], version| judge::count(turns.iter().map(|turn| **turn), version);
            text += &format!(
                "  {:<9} turns {} old {} new, hand-overs {} to new {} to old\n",
                phase.name(),
                count(&turns, Version::Old),
                count(&turns, Version::New),
                count(&hand_overs, Version::New),
                count(&hand_overs, Version::Old),
            );
            for version in phase.needed() {
                if count(&hand_overs, *version) == 0 {
                    let told = format!("{}: no hand-over to {version} was seen", phase.name());
                    violations.push(Violation::Other(told));
                }
            }
            let alone = match phase {
                Phase::Old => Some(Version::Old),
                Phase::New => Some(Version::New),
                _ => None,
            };
            if alone.is_some_and(|version| count(&turns, version) == 0) {
                violations.push(Violation::Other(format!("{}: no turn was seen", phase.name())));
            }
        }
        let faults: Vec<_> =
            seen.faults.iter().map(|(fault, count)| format!("{} {count}", fault.name())).collect();
        text +=
            &format!("  faults    {}\n  server    {}\n", faults.join(", "), site.keeper.about());
        for (version, (count, last)) in &seen.complaints {
            text += &format!(
                "  {count} processes of {version} ended with an error, the last: {last}\n"
            );
        }
        let is_overlap = |violation: &&Violation| matches!(violation, Violation::Overlap { .. });
        let is_falling = |violation: &&Violation| matches!(violation, Violation::Falling { .. });
        let overlaps = violations.iter().filter(is_overlap).count();
        let falling = violations.iter().filter(is_falling).count();
        let others = violations.len() - overlaps - falling;
        let count = |version| judge::count(turns.iter().copied(), version);
        let over = |version| judge::count(hand_overs.iter().copied(), version);
        let line = format!(
            "turns {} old {} new, hand-overs {} old->new {} new->old, faults {}, longest gap {:.1} s, \
             overlaps {overlaps}, falling tokens {falling}, other violations {others}",
            count(Version::Old),
            count(Version::New),
            over(Version::New),
            over(Version::Old),
            seen.faults.values().sum::<usize>(),
            Duration::from_nanos(judge::longest_gap(turns.iter().copied())).as_secs_f64(),
        );
        text += &format!("  {line}");
        for violation in violations.iter().take(MAX_SHOWN) {
            text += &format!("\n  VIOLATION {violation}");
        }
        if violations.len() > MAX_SHOWN {
            text += &format!("\n  and {} more", violations.len() - MAX_SHOWN);
        }
        Outcome { text, line, wrong: !violations.is_empty() }
    }

    fn phase_of(&self, seen: &Seen, turn: &Turn) -> Option<Phase> {
        let time = Duration::from_nanos(turn.begin.saturating_sub(seen.began));
        self.plan.at(time).map(|(phase, _)| phase)
    }
}
