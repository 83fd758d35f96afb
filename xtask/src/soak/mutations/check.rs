//! Checks: tests or seeds that are to notice a mutation, built and run in the scratch copy.

use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use nix::sys::signal::Signal;
use serde::Deserialize;

use crate::command::Group;
use crate::stores::Cluster;
use crate::{interrupt, repo};

/// Longest build of one check.
const BUILD_LIMIT: Duration = Duration::from_secs(40 * 60);
/// Longest run of a check on the unchanged code.
pub(super) const BASELINE_LIMIT: Duration = Duration::from_secs(30 * 60);
/// Interval at which the output of a check is read.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Lines of output that an error shows.
const SHOWN_LINES: usize = 40;
/// Threads on which the seeds run.
const SEED_THREADS: &str = "2";
/// Test targets that need a feature of their package.
const FEATURES: &[(&str, &str, &str)] = &[
    ("tenure", "fork", "postgres"),
    ("tenure", "object", "object"),
    ("tenure", PG_SCHEDULES, "jobs"),
];
/// Test target of statements in seeded order. It starts PostgreSQL servers of its own.
const PG_SCHEDULES: &str = "pg_schedules";
/// First seed and number of seeds of [`PG_SCHEDULES`].
const PG_SCHEDULES_SEEDS: &str = "0 200";

/// A check. Its exit code says if the code is right.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum MutationCheck {
    /// Tests of one target: an integration test, or the unit tests (`lib`).
    Tests { package: String, target: String },
    /// The first seeds of a simulator.
    Seeds { world: SimulatedWorld, count: u32 },
}

/// A simulator of `tenure-sim`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum SimulatedWorld {
    /// The shipped library and server.
    #[default]
    Product,
    /// The pure core on models of the stores.
    Rules,
}

impl SimulatedWorld {
    /// Example of `tenure-sim` that runs its seeds.
    fn example(self) -> &'static str {
        match self {
            Self::Product => "product",
            Self::Rules => "soak",
        }
    }
}

impl MutationCheck {
    /// Parses `PACKAGE/TARGET`.
    pub(super) fn parse(text: &str) -> Result<Self> {
        match text.split_once('/') {
            Some((package, target)) if !package.is_empty() && !target.is_empty() => {
                Ok(Self::Tests { package: package.to_owned(), target: target.to_owned() })
            }
            _ => bail!("{text:?} is not a check: give PACKAGE/TARGET, such as tenure-core/lib"),
        }
    }

    /// False for a check that needs a program which this machine lacks.
    pub(super) fn is_available(&self) -> bool {
        !self.needs_postgres() || Cluster::programs().is_some()
    }

    fn needs_postgres(&self) -> bool {
        matches!(self, Self::Tests { target, .. } if target == PG_SCHEDULES)
    }

    /// Environment that the check needs.
    fn environment(&self) -> Vec<(&'static str, OsString)> {
        let programs = Cluster::programs().filter(|_| self.needs_postgres());
        programs.map_or_else(Vec::new, |programs| {
            vec![
                ("TENURE_TEST_POSTGRES_BIN", programs.into_os_string()),
                ("TENURE_SOAK_POSTGRES", PG_SCHEDULES_SEEDS.into()),
            ]
        })
    }

    /// Arguments of cargo that build the check and do not run it.
    fn build_arguments(&self) -> Vec<String> {
        match self {
            Self::Tests { .. } => [self.run_arguments(), vec!["--no-run".to_owned()]].concat(),
            Self::Seeds { world, .. } => {
                let words = ["build", "--locked", "--release", "--package", "tenure-sim"];
                let example = ["--example", world.example()];
                words.into_iter().chain(example).map(str::to_owned).collect()
            }
        }
    }

    fn run_arguments(&self) -> Vec<String> {
        let words: Vec<&str> = match self {
            Self::Tests { package, target } => {
                let base = ["test", "--locked", "--package", package];
                let target = match &**target {
                    "lib" => vec!["--lib"],
                    name => vec!["--test", name],
                };
                let feature = FEATURES.iter().find(|(of, needed_by, _)| {
                    of == package && target.last().is_some_and(|last| last == needed_by)
                });
                let feature = feature.map(|(.., feature)| ["--features", feature]);
                base.into_iter().chain(target).chain(feature.into_iter().flatten()).collect()
            }
            Self::Seeds { world, count } => {
                let base = ["run", "--locked", "--release", "--package", "tenure-sim"];
                let count = count.to_string();
                let seeds = ["--", "0", &count, SEED_THREADS];
                return base
                    .into_iter()
                    .chain(["--example", world.example()])
                    .chain(seeds)
                    .map(str::to_owned)
                    .collect();
            }
        };
        words.into_iter().map(str::to_owned).collect()
    }
}

impl fmt::Display for MutationCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tests { package, target } => write!(f, "{package}/{target}"),
            Self::Seeds { world: SimulatedWorld::Product, count } => write!(f, "{count} seeds"),
            Self::Seeds { world: SimulatedWorld::Rules, count } => {
                write!(f, "{count} seeds of the rules")
            }
        }
    }
}

/// Result of a check.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum CheckResult {
    Passed,
    /// It failed: the name of the first failed test, or a description.
    Failed(String),
    /// It did not end in time.
    Hung(Duration),
}

/// Builds and runs checks in a scratch copy of the repository.
pub(super) struct Runner {
    tree: PathBuf,
    target: PathBuf,
    log: PathBuf,
}

impl Runner {
    /// `folder` contains the copy (`tree`) and gets everything that is built.
    pub(super) fn new(folder: &Path) -> Self {
        let [tree, target, log] = ["tree", "build", "log"].map(|name| folder.join(name));
        Self { tree, target, log }
    }

    /// Builds a check. The inner error is the output of the compiler.
    pub(super) fn build(&self, check: &MutationCheck) -> Result<Result<(), String>> {
        let end = self.cargo(self.command(&check.build_arguments()), BUILD_LIMIT, false)?;
        Ok(match end {
            CargoEnd::Exited(status) if status.success() => Ok(()),
            CargoEnd::Exited(_) => Err(self.last_lines()?),
            CargoEnd::TestFailed(_) | CargoEnd::TimedOut => {
                Err(format!("the build did not end within {BUILD_LIMIT:?}\n{}", self.last_lines()?))
            }
        })
    }

    /// Runs a check that was built. A failure, or a run that does not end, counts only if it happens again: a busy
    /// machine can make a test with real time fail, which would hide a mutation that nothing notices.
    pub(super) fn run(&self, check: &MutationCheck, limit: Duration) -> Result<CheckResult> {
        match self.run_once(check, limit)? {
            CheckResult::Failed(_) | CheckResult::Hung(_) => self.run_once(check, limit),
            CheckResult::Passed => Ok(CheckResult::Passed),
        }
    }

    /// Runs a check. A failed test ends it: the other tests of the target need not end.
    fn run_once(&self, check: &MutationCheck, limit: Duration) -> Result<CheckResult> {
        let watch = matches!(check, MutationCheck::Tests { .. });
        let mut cargo = self.command(&check.run_arguments());
        cargo.envs(check.environment());
        Ok(match self.cargo(cargo, limit, watch)? {
            CargoEnd::Exited(status) if status.success() => CheckResult::Passed,
            CargoEnd::Exited(status) => {
                let output = self.output()?;
                let last = output.lines().rfind(|line| !line.trim().is_empty());
                CheckResult::Failed(
                    failed_test(&output).unwrap_or_else(|| {
                        format!("{status}: {}", last.unwrap_or("no output").trim())
                    }),
                )
            }
            CargoEnd::TestFailed(name) => CheckResult::Failed(name),
            CargoEnd::TimedOut => CheckResult::Hung(limit),
        })
    }

    /// The end of the last command's output.
    pub(super) fn last_lines(&self) -> Result<String> {
        let output = self.output()?;
        let lines = output.lines().collect::<Vec<_>>();
        Ok(lines[lines.len().saturating_sub(SHOWN_LINES)..].join("\n"))
    }

    fn output(&self) -> Result<String> {
        let bytes = fs::read(&self.log).context("reading the output of cargo")?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Runs cargo in a group of its own, with its output in the log. With `watch`, the first failed test ends it.
    fn cargo(&self, mut cargo: Command, limit: Duration, watch: bool) -> Result<CargoEnd> {
        let log = File::create(&self.log).context("creating the log of a check")?;
        cargo.stdout(log.try_clone().context("sharing the log")?).stderr(log);
        let deadline = Instant::now() + limit;
        let mut group = Group::spawn(&mut cargo, Signal::SIGTERM)?;
        loop {
            if interrupt::requested() {
                bail!("interrupted");
            }
            if let Some(status) = group.ended()? {
                return Ok(CargoEnd::Exited(status));
            }
            if watch && let Some(name) = failed_test(&self.output()?) {
                return Ok(CargoEnd::TestFailed(name));
            }
            if Instant::now() >= deadline {
                return Ok(CargoEnd::TimedOut);
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    fn command(&self, arguments: &[String]) -> Command {
        let mut cargo = repo::cargo([]);
        cargo.args(arguments).current_dir(&self.tree).env("CARGO_TARGET_DIR", &self.target);
        // No check reads debug information, and without it the builds are faster.
        cargo.env("CARGO_PROFILE_DEV_DEBUG", "0").env("CARGO_TERM_COLOR", "never");
        // Tests that need a running store are skipped: a store would make them slow, and not more strict. The check of
        // statements in seeded order gets what it needs afterwards.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("TENURE_") {
                cargo.env_remove(name);
            }
        }
        cargo
    }
}

/// End of a cargo command.
enum CargoEnd {
    Exited(ExitStatus),
    TestFailed(String),
    TimedOut,
}

/// Name of the first failed test in the output of a test program.
fn failed_test(output: &str) -> Option<String> {
    output.lines().find_map(|line| {
        let name = line.strip_prefix("test ")?.strip_suffix(" ... FAILED")?;
        Some(name.strip_suffix(" - should panic").unwrap_or(name).to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(check: &str) -> String {
        MutationCheck::parse(check).unwrap().run_arguments().join(" ")
    }

    #[test]
    fn a_check_names_its_package_and_target() {
        assert_eq!(words("tenure-core/lib"), "test --locked --package tenure-core --lib");
        assert_eq!(words("tenure/guard"), "test --locked --package tenure --test guard");
        assert_eq!(
            words("tenure/object"),
            "test --locked --package tenure --test object --features object"
        );
        assert_eq!(
            words("tenure/pg_schedules"),
            "test --locked --package tenure --test pg_schedules --features jobs"
        );
        assert!(MutationCheck::parse("tenure").is_err());
        assert!(MutationCheck::parse("tenure/").is_err());
    }

    #[test]
    fn only_the_schedules_get_a_server() {
        let names = |check: &str| {
            let environment = MutationCheck::parse(check).unwrap().environment();
            environment.into_iter().map(|(name, _)| name).collect::<Vec<_>>()
        };
        assert!(names("tenure/guard").is_empty());
        let found = Cluster::programs().is_some();
        assert_eq!(names("tenure/pg_schedules").contains(&"TENURE_TEST_POSTGRES_BIN"), found);
        assert_eq!(MutationCheck::parse("tenure/pg_schedules").unwrap().is_available(), found);
    }

    #[test]
    fn seeds_run_a_simulator() {
        for (world, example) in
            [(SimulatedWorld::Product, "product"), (SimulatedWorld::Rules, "soak")]
        {
            let check = MutationCheck::Seeds { world, count: 1000 };
            let run = check.run_arguments().join(" ");
            let end = format!("--package tenure-sim --example {example} -- 0 1000 2");
            assert!(run.ends_with(&end), "{run}");
            let build = check.build_arguments().join(" ");
            assert!(build.starts_with("build") && build.ends_with(example), "{build}");
        }
    }

    #[test]
    fn the_first_failed_test_is_named() {
        let output =
            "running 3 tests\ntest a::one ... ok\ntest b::two ... FAILED\ntest c ... FAILED\n";
        assert_eq!(failed_test(output).as_deref(), Some("b::two"));
        assert_eq!(failed_test("test a ... ok\ntest b ... ignored\n"), None);
    }
}
