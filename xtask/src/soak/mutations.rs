//! `cargo xtask soak mutations`: wrong changes of the code, each of which a test or a seed must notice.
//!
//! The list in `xtask/mutations` has the mistakes that would hurt. Each is applied to a scratch copy of the repository,
//! built, and checked until the first check fails. A change that no check notices is a gap of the tests: write the
//! missing test, or give the reason for which the change has no effect.
//!
//! Some mutations must be found by seeds as well as by tests: their seeds are run in any case.

mod check;
mod list;
mod tree;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Parser as _;

use self::check::{BASELINE_LIMIT, CheckResult, MutationCheck, Runner};
use self::list::Mutation;
use self::tree::ScratchTree;
use crate::{interrupt, repo};

/// Time that a check gets in addition to three times its duration on the unchanged code.
const LIMIT_SLACK: Duration = Duration::from_secs(60);

/// Apply each mutation of the list to a copy of the code, and report those that no check notices.
#[derive(clap::Parser)]
#[command(name = "cargo xtask soak mutations --", bin_name = "cargo xtask soak mutations --")]
struct MutationsArgs {
    /// Only this mutation; can be repeated
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Only the mutations of this area; can be repeated
    #[arg(long, value_name = "AREA")]
    area: Vec<String>,
    /// Only the seeds of the simulators, without the tests
    #[arg(long)]
    seeds: bool,
    /// Print the mutations and apply none
    #[arg(long)]
    list: bool,
}

pub(super) fn run(rest: &[String]) -> Result<()> {
    let name = "cargo xtask soak mutations --".to_owned();
    let arguments = match MutationsArgs::try_parse_from(std::iter::once(&name).chain(rest)) {
        Ok(arguments) => arguments,
        Err(error) => error.exit(),
    };
    let all = list::read()?;
    // The whole list, whatever was chosen: an outdated mutation must not stay hidden.
    let faults = list::faults(&all, repo::root());
    if !faults.is_empty() {
        bail!("errors of the list:\n{}", faults.join("\n"));
    }
    let chosen = without_missing_checks(choose(all, &arguments)?);
    if arguments.list {
        for Mutation { area, name, wrong, .. } in &chosen {
            println!("{area:<8} {name:<44} {wrong}");
        }
        return Ok(());
    }
    let folder = repo::target()?.join("mutations");
    let tree = ScratchTree::copy(repo::root(), &folder.join("tree"))?;
    let runner = Runner::new(&folder);
    let limits = baseline(&chosen, &runner)?;
    let mut verdicts = Vec::new();
    for mutation in chosen {
        let began = Instant::now();
        let verdict = judge(&mutation, &tree, &runner, &limits)?;
        let seconds = began.elapsed().as_secs_f64();
        println!("{}", line(&mutation, &verdict, seconds));
        verdicts.push((mutation, verdict));
    }
    println!("\n{}", summary(&verdicts));
    let wrong = verdicts.iter().filter(|(_, verdict)| !verdict.is_right()).count();
    if wrong > 0 {
        bail!("{wrong} mutations survived without a reason, or are errors of the list");
    }
    Ok(())
}

/// The mutations that the arguments select.
fn choose(all: Vec<Mutation>, arguments: &MutationsArgs) -> Result<Vec<Mutation>> {
    let MutationsArgs { only, area, seeds, .. } = arguments;
    if let Some(unknown) = only.iter().find(|name| all.iter().all(|known| known.name != **name)) {
        bail!("unknown mutation {unknown:?}: see --list");
    }
    if let Some(unknown) = area.iter().find(|area| all.iter().all(|known| known.area != **area)) {
        bail!("unknown area {unknown:?}: see --list");
    }
    let mut chosen = all;
    chosen.retain(|mutation| {
        (only.is_empty() || only.contains(&mutation.name))
            && (area.is_empty() || area.contains(&mutation.area))
    });
    if *seeds {
        for mutation in &mut chosen {
            mutation.checks.retain(|check| matches!(check, MutationCheck::Seeds { .. }));
        }
        chosen.retain(|mutation| !mutation.checks.is_empty());
    }
    Ok(chosen)
}

/// Removes the checks that this machine cannot run, and the mutations without any other check.
fn without_missing_checks(mut chosen: Vec<Mutation>) -> Vec<Mutation> {
    let mut missing = BTreeSet::new();
    for mutation in &mut chosen {
        mutation.checks.retain(|check| {
            let available = check.is_available();
            if !available {
                missing.insert(check.to_string());
            }
            available
        });
    }
    for check in missing {
        println!("left out: {check}, because PostgreSQL is not installed (cargo xtask setup)");
    }
    chosen.retain(|mutation| !mutation.checks.is_empty());
    chosen
}

/// Runs each check once on the unchanged code, and returns the time limits for the changed code.
///
/// A check that fails here would notice every mutation.
fn baseline(chosen: &[Mutation], runner: &Runner) -> Result<BTreeMap<MutationCheck, Duration>> {
    let checks: BTreeSet<&MutationCheck> =
        chosen.iter().flat_map(|mutation| &mutation.checks).collect();
    let mut limits = BTreeMap::new();
    for check in checks {
        if let Err(output) = runner.build(check)? {
            bail!("{check} does not build without a mutation:\n{output}");
        }
        let began = Instant::now();
        let result = runner.run(check, BASELINE_LIMIT)?;
        if result != CheckResult::Passed {
            let output = runner.last_lines()?;
            bail!("{check} does not pass without a mutation: {result:?}\n{output}");
        }
        let took = began.elapsed();
        println!("unchanged {check:<24} passes in {:.1} s", took.as_secs_f64());
        limits.insert(check.clone(), took * 3 + LIMIT_SLACK);
    }
    Ok(limits)
}

/// Result of one mutation.
#[derive(Debug)]
enum Verdict {
    /// A check noticed it: the check, and the test that failed.
    Noticed(MutationCheck, String),
    Survived,
    /// An error of the list: it does not compile.
    Broken(String),
    /// A check noticed it, although the list gives a reason for which none can.
    Outdated(MutationCheck, String),
    /// No check noticed it, for the reason that the list gives.
    Explained,
    /// The seeds of a simulator did not find it, although they must.
    MissedBySeeds(MutationCheck),
}

impl Verdict {
    fn is_right(&self) -> bool {
        matches!(self, Self::Noticed(..) | Self::Explained)
    }
}

fn judge(
    mutation: &Mutation,
    tree: &ScratchTree,
    runner: &Runner,
    limits: &BTreeMap<MutationCheck, Duration>,
) -> Result<Verdict> {
    let _applied = tree.apply(mutation)?;
    let mut first = None;
    for check in &mutation.checks {
        let required = mutation.must_be_found_by(check);
        if first.is_some() && !required {
            continue;
        }
        if interrupt::requested() {
            bail!("interrupted");
        }
        if let Err(output) = runner.build(check)? {
            return Ok(Verdict::Broken(output));
        }
        let limit = limits.get(check).copied().unwrap_or(BASELINE_LIMIT);
        let noticed = match runner.run(check, limit)? {
            CheckResult::Passed if required => return Ok(Verdict::MissedBySeeds(check.clone())),
            CheckResult::Passed => continue,
            CheckResult::Failed(test) => test,
            CheckResult::Hung(limit) => format!("no end within {:.0} s", limit.as_secs_f64()),
        };
        first.get_or_insert((check.clone(), noticed));
    }
    Ok(match (first, mutation.survives.is_none()) {
        (Some((check, noticed)), true) => Verdict::Noticed(check, noticed),
        (Some((check, noticed)), false) => Verdict::Outdated(check, noticed),
        (None, true) => Verdict::Survived,
        (None, false) => Verdict::Explained,
    })
}

fn line(mutation: &Mutation, verdict: &Verdict, seconds: f64) -> String {
    let Mutation { name, wrong, survives, .. } = mutation;
    match verdict {
        Verdict::Noticed(check, test) => {
            format!("noticed   {name}: {check} {test} ({seconds:.0} s)")
        }
        Verdict::Survived => format!("SURVIVED  {name}: {wrong} ({seconds:.0} s)"),
        Verdict::MissedBySeeds(check) => {
            format!("SURVIVED  {name}: {check} did not find it ({seconds:.0} s)")
        }
        Verdict::Explained => {
            format!("survives  {name}: {} ({seconds:.0} s)", survives.as_deref().unwrap_or(wrong))
        }
        Verdict::Outdated(check, test) => format!(
            "ERROR     {name}: {check} {test} noticed it, so the reason for which it survives is outdated"
        ),
        Verdict::Broken(output) => format!("ERROR     {name}: it does not compile\n{output}"),
    }
}

/// A table with a row per area, and the survivors.
fn summary(verdicts: &[(Mutation, Verdict)]) -> String {
    let mut areas: BTreeMap<&str, [usize; 5]> = BTreeMap::new();
    for (mutation, verdict) in verdicts {
        let column = match verdict {
            Verdict::Noticed(MutationCheck::Tests { .. }, _) => 0,
            Verdict::Noticed(MutationCheck::Seeds { .. }, _) => 1,
            Verdict::Explained => 2,
            Verdict::Survived | Verdict::MissedBySeeds(_) => 3,
            Verdict::Broken(_) | Verdict::Outdated(..) => 4,
        };
        areas.entry(&mutation.area).or_default()[column] += 1;
    }
    let row = |name: &str, counts: &[usize; 5]| {
        let [tests, seeds, explained, survived, errors] = counts;
        let all = counts.iter().sum::<usize>();
        format!(
            "{name:<10} {all:>9} {tests:>9} {seeds:>9} {explained:>9} {survived:>9} {errors:>9}"
        )
    };
    let mut lines = vec![format!(
        "{:<10} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}",
        "area", "mutations", "by tests", "by seeds", "explained", "SURVIVED", "errors"
    )];
    lines.extend(areas.iter().map(|(area, counts)| row(area, counts)));
    let total = areas.values().fold([0; 5], |mut total, counts| {
        total.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        total
    });
    lines.push(row("all", &total));
    let left = verdicts.iter().filter(|(_, verdict)| !matches!(verdict, Verdict::Noticed(..)));
    lines.extend(left.map(|(mutation, verdict)| {
        let text = match verdict {
            Verdict::Explained => mutation.survives.as_deref().unwrap_or_default(),
            Verdict::Broken(_) => "does not compile",
            Verdict::Outdated(..) => "is noticed: remove its reason",
            Verdict::MissedBySeeds(_) => "SURVIVED its seeds, which must find it",
            _ => "SURVIVED",
        };
        format!("{}: {}: {text}", mutation.name, mutation.wrong)
    }));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::check::SimulatedWorld;
    use super::*;

    const TEN_SEEDS: MutationCheck =
        MutationCheck::Seeds { world: SimulatedWorld::Product, count: 10 };

    fn mutation(area: &str, name: &str, survives: Option<&str>) -> Mutation {
        Mutation {
            area: area.to_owned(),
            name: name.to_owned(),
            wrong: "it is wrong".to_owned(),
            file: String::new(),
            edits: Vec::new(),
            checks: vec![MutationCheck::parse("tenure-core/lib").unwrap(), TEN_SEEDS],
            survives: survives.map(str::to_owned),
        }
    }

    fn arguments(words: &str) -> MutationsArgs {
        MutationsArgs::parse_from(std::iter::once("mutations").chain(words.split_whitespace()))
    }

    fn chosen(words: &str) -> Vec<String> {
        let all = vec![mutation("core", "one", None), mutation("engine", "two", None)];
        let chosen = choose(all, &arguments(words)).unwrap();
        chosen.into_iter().map(|mutation| mutation.name).collect()
    }

    #[test]
    fn mutations_are_chosen_by_name_and_area() {
        assert_eq!(chosen(""), ["one", "two"]);
        assert_eq!(chosen("--only two"), ["two"]);
        assert_eq!(chosen("--area core"), ["one"]);
        assert!(chosen("--area core --only two").is_empty());
        assert!(choose(vec![mutation("core", "one", None)], &arguments("--only three")).is_err());
        assert!(choose(vec![mutation("core", "one", None)], &arguments("--area none")).is_err());
    }

    #[test]
    fn seeds_alone_leave_the_tests_out() {
        let mut without = mutation("core", "one", None);
        without.checks.pop();
        let all = vec![without, mutation("core", "two", None)];
        let chosen = choose(all, &arguments("--seeds")).unwrap();
        assert_eq!(chosen.len(), 1);
        assert_eq!(chosen[0].checks, [TEN_SEEDS]);
    }

    #[test]
    fn a_summary_counts_by_area_and_names_what_is_left() {
        let verdicts = [
            (mutation("core", "one", None), Verdict::Noticed(TEN_SEEDS, "x".to_owned())),
            (mutation("core", "two", None), Verdict::Survived),
            (mutation("engine", "three", Some("it is equal")), Verdict::Explained),
        ];
        let text = summary(&verdicts);
        let rows: Vec<Vec<&str>> =
            text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[1], ["core", "2", "0", "1", "0", "1", "0"]);
        assert_eq!(rows[2], ["engine", "1", "0", "0", "1", "0", "0"]);
        assert_eq!(rows[3], ["all", "3", "0", "1", "1", "1", "0"]);
        assert!(text.contains("two: it is wrong: SURVIVED"), "{text}");
        assert!(text.contains("three: it is wrong: it is equal"), "{text}");
        assert!(!text.contains("one: "), "{text}");
    }
}
