//! `tenure-load`: runs one load against one server and prints the results, or runs the echo server.

#![forbid(unsafe_code)]

use std::net::{Ipv4Addr, SocketAddr};
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};
use serde_json::Value;
use tenure_load::loads::cycle::{self, Shape};
use tenure_load::loads::{burst, churn, close, expiry, memory, pipeline, scrape, slowloris};
use tenure_load::process::Process;
use tenure_load::{Target, dial, echo, wire};

/// Measures lock servers, and checks every reply.
#[derive(Parser)]
struct Arguments {
    /// Address of the server
    #[arg(long, global = true, default_value = "127.0.0.1:6388")]
    addr: String,
    /// Process id of the server, to measure its CPU time and memory
    #[arg(long, global = true)]
    pid: Option<u32>,
    /// Do not check that fencing numbers grow: for the echo, and for servers older than fencing
    #[arg(long, global = true)]
    unfenced: bool,
    /// Pin the load to the first core and the server (needs --pid) to the second: `0,1`
    #[arg(long, global = true, value_delimiter = ',', num_args = 1)]
    pin: Vec<usize>,
    /// Print one JSON object instead of a table
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    load: Load,
}

#[derive(Subcommand)]
enum Load {
    /// `l` and `r` in a loop, each connection on its own key
    Uncontended(cycle::CycleOptions),
    /// `l` and `r` in a loop, all connections on one key
    Contended(cycle::CycleOptions),
    /// `e`, `w` and `r` in a loop
    TwoPhase {
        #[command(flatten)]
        options: cycle::CycleOptions,
        /// All connections on one key
        #[arg(long)]
        hot: bool,
    },
    /// Many requests in one write
    Pipeline(pipeline::PipelineOptions),
    /// Memory per idle connection
    MemIdle(memory::IdleOptions),
    /// Memory per held key
    MemHold(memory::HoldOptions),
    /// Memory per waiter, in addition to its connection
    MemWaiters(memory::WaiterOptions),
    /// Delay from the end of a lease to the grant of its waiter
    Expiry(expiry::ExpiryOptions),
    /// Delay from the close of a holder's connection to the grant of its waiter
    CloseCost(close::CloseOptions),
    /// Order of grants to clients that request a key back to back
    BurstOrder(burst::BurstOptions),
    /// Connect, `l`, `r`, close
    Churn(churn::ChurnOptions),
    /// Well-behaved clients beside thousands of silent ones
    Slowloris(slowloris::SlowlorisOptions),
    /// Clients that lock while the server's metrics are scraped
    Scraped(scrape::ScrapeOptions),
    /// Run the echo server on this loopback port until it is killed
    Echo {
        #[arg(long)]
        port: u16,
    },
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    if let Load::Echo { port } = arguments.load {
        dial::raise_file_limit_to_max()?;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        return echo::serve(address).with_context(|| format!("serving on {address}"));
    }
    let address = wire::resolve(&arguments.addr)?;
    let process = arguments.pid.map(Process);
    if let Some(core) = arguments.pin.first() {
        Process(std::process::id()).pin(*core)?;
    }
    if let (Some(core), Some(process)) = (arguments.pin.get(1), process) {
        process.pin(*core)?;
    }
    let (name, found) =
        run_load(&arguments.load, &Target { address, process, fenced: !arguments.unfenced })?;
    if arguments.json {
        let mut line = serde_json::Map::new();
        line.insert("load".to_owned(), name.into());
        line.extend(found.as_object().cloned().unwrap_or_default());
        println!("{}", Value::Object(line));
    } else {
        println!("{name}");
        table("", &found);
    }
    Ok(())
}

fn run_load(load: &Load, target: &Target) -> Result<(&'static str, Value)> {
    let own = Shape { hot: false, two_phase: false };
    let hot = Shape { hot: true, two_phase: false };
    Ok(match load {
        Load::Uncontended(options) => ("uncontended", json(cycle::run(target, *options, own))?),
        Load::Contended(options) => ("contended", json(cycle::run(target, *options, hot))?),
        Load::TwoPhase { options, hot } => {
            let shape = Shape { hot: *hot, two_phase: true };
            ("two-phase", json(cycle::run(target, *options, shape))?)
        }
        Load::Pipeline(options) => ("pipeline", json(pipeline::run(target, options))?),
        Load::MemIdle(options) => ("mem-idle", json(memory::idle(target, *options))?),
        Load::MemHold(options) => ("mem-hold", json(memory::hold(target, *options))?),
        Load::MemWaiters(options) => ("mem-waiters", json(memory::waiters(target, *options))?),
        Load::Expiry(options) => ("expiry", json(expiry::run(target, options))?),
        Load::CloseCost(options) => ("close-cost", json(close::run(target, options))?),
        Load::BurstOrder(options) => ("burst-order", json(burst::run(target, *options))?),
        Load::Churn(options) => ("churn", json(churn::run(target, *options))?),
        Load::Slowloris(options) => ("slowloris", json(slowloris::run(target, options))?),
        Load::Scraped(options) => ("scraped", json(scrape::run(target, options))?),
        Load::Echo { .. } => unreachable!("served above"),
    })
}

fn json(outcome: Result<impl serde::Serialize>) -> Result<Value> {
    Ok(serde_json::to_value(outcome?)?)
}

/// Prints one figure per line, with the figures of a group indented below its name.
fn table(indent: &str, found: &Value) {
    for (name, value) in found.as_object().into_iter().flatten() {
        match value {
            Value::Null => {}
            Value::Object(_) => {
                println!("{indent}  {name}");
                table(&format!("{indent}  "), value);
            }
            _ => println!("{indent}  {name:<28} {value:>14}"),
        }
    }
}
