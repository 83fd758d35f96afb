//! `cargo xtask bench server`: compares our lock server with a bare echo server, under every load, in one run.
//!
//! The loads are interleaved: each load runs on every server before the next load, and the whole sequence is repeated.
//! So a slow minute of the machine affects the figures of every server.

mod page;
mod plan;
mod table;
mod target;

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use clap::Parser as _;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use self::plan::{LoadStep, Size};
use self::table::Measured;
use self::target::{Contender, Peer, Target};
use crate::command::{self, Group};
use crate::repo;
use crate::stores::Folder;

/// Measure the lock server against a bare echo.
#[derive(clap::Parser)]
#[expect(clippy::struct_excessive_bools, reason = "flags are independent of each other")]
#[command(name = "cargo xtask bench server", bin_name = "cargo xtask bench server")]
struct ServerBenchArgs {
    /// One repetition of small loads
    #[arg(long)]
    quick: bool,
    /// Number of repetitions of all loads; figures are medians
    #[arg(long)]
    repetitions: Option<usize>,
    /// Append the result of every load to this file, one JSON object per line
    #[arg(long, value_name = "PATH")]
    json: Option<PathBuf>,
    /// Write the table into docs/benchmarks.md
    #[arg(long, conflicts_with_all = ["only", "without_server"])]
    page: bool,
    /// Another running server, as NAME=HOST:PORT:PID; can be repeated
    #[arg(long = "peer", value_name = "PEER")]
    peers: Vec<Peer>,
    /// Do not check that the peers' fencing tokens grow
    #[arg(long)]
    unfenced_peers: bool,
    /// Only the loads whose name or command contains this text; can be repeated
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Do not measure our own server
    #[arg(long)]
    without_server: bool,
    /// Measure this program instead of building the present tree
    #[arg(long, value_name = "PROGRAM")]
    server: Option<PathBuf>,
    /// Cores on which the loads that measure rates run, and their servers
    #[arg(long, value_enum, default_value_t = Cores::One)]
    cores: Cores,
}

/// Cores of a load and its server. The kernel's own choice changes from load to load, and the rate with it, by half and
/// more.
#[derive(Clone, Copy, clap::ValueEnum)]
enum Cores {
    /// Load and server share one core: the rate includes the cost of both, and varies least
    One,
    /// Load and server have a core each
    Two,
    /// The kernel's choice
    Free,
}

impl Cores {
    fn pin(self) -> Option<&'static str> {
        match self {
            Self::One => Some("0,0"),
            Self::Two => Some("0,1"),
            Self::Free => None,
        }
    }

    fn about(self) -> &'static str {
        match self {
            Self::One => "load and server on one core",
            Self::Two => "load and server on a core each",
            Self::Free => "cores as the kernel chose",
        }
    }
}

pub(super) fn run(rest: &[String]) -> Result<()> {
    let name = "cargo xtask bench server".to_owned();
    let arguments = match ServerBenchArgs::try_parse_from(std::iter::once(&name).chain(rest)) {
        Ok(arguments) => arguments,
        Err(error) => error.exit(),
    };
    Folder::sweep("bench");
    let mut bench = Bench::prepare(arguments)?;
    let outcome = bench.measure();
    bench.report(outcome.is_ok())?;
    outcome
}

struct Bench {
    arguments: ServerBenchArgs,
    load: PathBuf,
    steps: Vec<LoadStep>,
    // Dropped in this order: the servers before the folder they run in.
    contenders: Vec<Contender>,
    folder: Folder,
    json: Option<File>,
    measured: Vec<Measured>,
}

impl Bench {
    fn prepare(arguments: ServerBenchArgs) -> Result<Self> {
        let release = build(&arguments)?;
        let load = release.join("tenure-load");
        let mut contenders = vec![Contender::echo(load.clone())];
        if !arguments.without_server {
            let ours = arguments.server.clone().unwrap_or_else(|| release.join("tenure"));
            let ours = ours.canonicalize().with_context(|| format!("no {}", ours.display()))?;
            contenders.push(Contender::ours(ours));
        }
        contenders.extend(arguments.peers.iter().cloned().map(Contender::peer));
        let json = arguments.json.as_ref().map(|path| {
            let file = File::options().create(true).append(true).open(path);
            file.with_context(|| format!("opening {}", path.display()))
        });
        let size = if arguments.quick { Size::QUICK } else { Size::FULL };
        Ok(Self {
            load,
            steps: plan::steps(size),
            contenders,
            folder: Folder::create("bench")?,
            json: json.transpose()?,
            measured: Vec::new(),
            arguments,
        })
    }

    /// Runs all loads, also after a load that failed. A failure of a peer is printed, but does not fail the bench.
    fn measure(&mut self) -> Result<()> {
        let mut wrong = 0;
        for repetition in 0..self.repetitions() {
            for step in 0..self.steps.len() {
                if self.is_wanted(&self.steps[step]) {
                    wrong += self.measure_step(repetition, step)?;
                }
            }
        }
        if wrong > 0 {
            bail!("{wrong} loads ended with an error");
        }
        Ok(())
    }

    /// Runs one load on every server in turn; returns the number of failures on our own servers.
    fn measure_step(&mut self, repetition: usize, step: usize) -> Result<usize> {
        let mut wrong = 0;
        println!("{}/{}  {}", repetition + 1, self.repetitions(), self.steps[step].name);
        for round in 0..self.steps[step].rounds {
            let at = (repetition, round);
            for number in 0..self.contenders.len() {
                let contender = &self.contenders[number];
                let no_echo = contender.is_echo() && self.steps[step].echo.is_none();
                if no_echo || (contender.is_peer() && self.steps[step].http) {
                    continue;
                }
                let counts = !contender.is_peer();
                if let Err(error) = self.measure_contender(at, step, number)? {
                    eprintln!("  {error:#}");
                    wrong += usize::from(counts);
                }
            }
        }
        Ok(wrong)
    }

    /// Runs one load on one server. The outer error is a failure of the bench, the inner error a failure of the load.
    fn measure_contender(
        &mut self,
        at: (usize, usize),
        step: usize,
        number: usize,
    ) -> Result<Result<()>> {
        let contender = &mut self.contenders[number];
        let name = contender.name.clone();
        let unfenced_peer = contender.is_peer() && self.arguments.unfenced_peers;
        let is_echo = contender.is_echo();
        let unfenced = is_echo || unfenced_peer;
        let folder = self.folder.path();
        let fresh;
        let http = self.steps[step].http;
        let target = if self.steps[step].fresh || http {
            fresh = contender.fresh(folder, http)?;
            &fresh
        } else {
            contender.steady(folder)?
        };
        let echo = self.steps[step].echo.as_ref().filter(|_| is_echo);
        let load = echo.unwrap_or(&self.steps[step].load);
        let pin = if self.steps[step].fresh { None } else { self.arguments.cores.pin() };
        let found = match run_load(&self.load, load, target, unfenced, pin, self.folder.path())? {
            Ok(found) => found,
            Err(error) => return Ok(Err(error.context(format!("{name}, {}", load.join(" "))))),
        };
        if let Some(file) = &mut self.json {
            let (name, step) = (&name, &self.steps[step].name);
            let (repetition, round) = at;
            let line = json!({
                "target": name, "repetition": repetition, "round": round, "step": step,
                "load_average": load_average(), "found": found,
            });
            writeln!(file, "{line}").context("writing a JSON line")?;
        }
        self.measured.push(Measured { step, contender: name, at, found });
        Ok(Ok(()))
    }

    /// Prints the table. Writes the page only after a complete run.
    fn report(&self, whole: bool) -> Result<()> {
        let peers = self.contenders.iter().filter(|contender| contender.is_peer());
        let peers: Vec<_> = peers.map(|contender| contender.name.clone()).collect();
        let rows = table::rows(&self.steps, &self.measured, &peers);
        println!("\n{}", table::text(&rows, &peers));
        if self.arguments.page && whole {
            let (count, cores) = (self.repetitions(), self.arguments.cores.about());
            let quick = if self.arguments.quick { ", small loads" } else { "" };
            page::write(&rows, &peers, &format!("Repetitions: {count}; rates: {cores}{quick}."))?;
        }
        Ok(())
    }

    fn repetitions(&self) -> usize {
        self.arguments.repetitions.unwrap_or(if self.arguments.quick { 1 } else { 3 })
    }

    fn is_wanted(&self, step: &LoadStep) -> bool {
        let texts = [&step.name, &step.load.join(" ")];
        let only = &self.arguments.only;
        only.is_empty() || only.iter().any(|part| texts.iter().any(|text| text.contains(part)))
    }
}

/// Load average of the last minute: figures from a busy machine are doubtful.
fn load_average() -> Option<f64> {
    fs::read_to_string("/proc/loadavg").ok()?.split(' ').next()?.parse().ok()
}

/// Builds the programs and returns their folder.
fn build(arguments: &ServerBenchArgs) -> Result<PathBuf> {
    let mut cargo = repo::cargo(["build", "--quiet", "--release", "--package", "tenure-load"]);
    if !arguments.without_server && arguments.server.is_none() {
        cargo.args(["--package", "tenure-cli"]);
    }
    command::show(&mut cargo)?;
    Ok(repo::target()?.join("release"))
}

/// Runs the load to its end. The outer error is a failure of the bench or an interrupt, the inner error the load's own
/// message.
fn run_load(
    program: &Path,
    load: &[String],
    target: &Target,
    unfenced: bool,
    pin: Option<&str>,
    folder: &Path,
) -> Result<Result<Value>> {
    let (out, err) = (folder.join("found"), folder.join("error"));
    let mut command = Command::new(program);
    command.args(load).args(["--json", "--addr", &target.address]);
    command.args(["--pid", &target.pid.to_string()]);
    command.args(target.http.iter().flat_map(|http| ["--http", http]));
    command.args(unfenced.then_some("--unfenced"));
    command.args(pin.map(|cores| ["--pin", cores]).into_iter().flatten());
    command.stdout(File::create(&out).context("creating a file for figures")?);
    command.stderr(File::create(&err).context("creating a file for errors")?);
    let Some(status) = Group::spawn(&mut command, Signal::SIGTERM)?.wait()? else {
        bail!("interrupted");
    };
    if !status.success() {
        let message = fs::read_to_string(&err).context("reading the error")?;
        return Ok(Err(anyhow::anyhow!("{}", message.trim_end())));
    }
    let text = fs::read_to_string(&out).context("reading the figures")?;
    Ok(Ok(serde_json::from_str(&text).with_context(|| format!("no figures in {text:?}"))?))
}
