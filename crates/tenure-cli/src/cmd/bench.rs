//! `tenure bench`: loads a store and prints rates and percentiles.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use clap::Args;
use hdrhistogram::Histogram;
use serde_json::{Value, json};
use tenure::{Client, Key, Result};
use tokio::task::JoinSet;

use crate::args::store::StoreUrl;
use crate::args::value::{duration, duration_or_zero};
use crate::exit::{self, Exit};

#[derive(Args)]
#[command(after_help = exit::BENCH)]
pub(crate) struct Bench {
    #[command(flatten)]
    pub(crate) store: StoreUrl,
    /// Number of concurrent clients that acquire and release
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    clients: u32,
    /// Number of locks that the clients share; by default one per client; 1 for full contention
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    keys: Option<u32>,
    /// Duration of the test
    #[arg(long = "for", value_name = "DURATION", default_value = "5s", value_parser = duration)]
    span: Duration,
    /// Time that each hold is kept
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = duration_or_zero)]
    hold: Duration,
    /// Time that a hold lasts unless renewed
    #[arg(long, value_name = "DURATION", default_value = "15s", value_parser = duration)]
    ttl: Duration,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Bench) -> Exit {
    super::on_runtime(async {
        match load(arguments).await {
            Ok(result) => {
                let text = if arguments.json {
                    format!("{}\n", result.json(arguments))
                } else {
                    result.table(arguments)
                };
                super::print(text.as_bytes())
            }
            Err(error) => super::report_error(&error),
        }
    })
}

/// Measurements of all clients.
struct BenchResult {
    acquire: Histogram<u64>,
    release: Histogram<u64>,
    /// Rounds of the client with the fewest rounds, and of the client with the most.
    min_rounds: u64,
    max_rounds: u64,
    elapsed: Duration,
}

async fn load(arguments: &Bench) -> Result<BenchResult> {
    let client = arguments.store.connect().await?;
    let keys = arguments.keys.unwrap_or(arguments.clients);
    let started = Instant::now();
    let until = started + arguments.span;
    let mut clients = JoinSet::new();
    for number in 0..arguments.clients {
        let name = format!("tenure-bench/{}/{}", std::process::id(), number % keys);
        let key: Key = name.parse().map_err(tenure::Error::from)?;
        clients.spawn(run_client(client.clone(), key, arguments.ttl, arguments.hold, until));
    }
    let mut all = BenchResult {
        acquire: histogram(),
        release: histogram(),
        min_rounds: u64::MAX,
        max_rounds: 0,
        elapsed: Duration::ZERO,
    };
    while let Some(joined) = clients.join_next().await {
        let (acquire, release) = joined.expect("a client of the bench does not panic")?;
        all.min_rounds = all.min_rounds.min(acquire.len());
        all.max_rounds = all.max_rounds.max(acquire.len());
        // Addition fails only if the bounds differ; `histogram` gives all the same.
        all.acquire += acquire;
        all.release += release;
    }
    all.elapsed = started.elapsed();
    Ok(all)
}

/// Acquires and releases until the time is up.
async fn run_client(
    client: Client,
    key: Key,
    ttl: Duration,
    hold: Duration,
    until: Instant,
) -> Result<(Histogram<u64>, Histogram<u64>)> {
    let (mut acquire, mut release) = (histogram(), histogram());
    loop {
        let requested = Instant::now();
        if requested >= until {
            return Ok((acquire, release));
        }
        let guard = client.lock(&key).ttl(ttl).acquire().await?;
        acquire.saturating_record(micros(requested.elapsed()));
        if !hold.is_zero() {
            tokio::time::sleep(hold).await;
        }
        let requested = Instant::now();
        guard.release().await?;
        release.saturating_record(micros(requested.elapsed()));
    }
}

/// A histogram of microseconds, from 1 µs to 1 h, with three significant digits.
fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 3_600_000_000, 3).expect("these bounds are good")
}

fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX).max(1)
}

const QUANTILES: [(&str, f64); 4] = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)];

impl BenchResult {
    #[expect(clippy::cast_precision_loss, reason = "for display only")]
    fn rate(&self) -> f64 {
        self.acquire.len() as f64 / self.elapsed.as_secs_f64()
    }

    fn table(&self, arguments: &Bench) -> String {
        let keys = arguments.keys.unwrap_or(arguments.clients);
        let mut text = format!(
            "{} clients, {keys} locks, {:.1} s: {:.0} rounds (acquire and release) per second; {} to {} rounds per client\n\nmicroseconds",
            arguments.clients,
            self.elapsed.as_secs_f64(),
            self.rate(),
            self.min_rounds,
            self.max_rounds
        );
        for (name, _) in QUANTILES {
            let _ = write!(text, "{name:>10}");
        }
        for (name, times) in [("acquire", &self.acquire), ("release", &self.release)] {
            let _ = write!(text, "\n{name:<12}");
            for (_, point) in QUANTILES {
                let _ = write!(text, "{:>10}", times.value_at_quantile(point));
            }
        }
        text.push('\n');
        text
    }

    fn json(&self, arguments: &Bench) -> Value {
        let times = |times: &Histogram<u64>| -> Value {
            QUANTILES
                .iter()
                .map(|(name, point)| {
                    (format!("{name}_us"), Value::from(times.value_at_quantile(*point)))
                })
                .collect()
        };
        json!({
            "clients": arguments.clients,
            "locks": arguments.keys.unwrap_or(arguments.clients),
            "seconds": self.elapsed.as_secs_f64(),
            "rounds": self.acquire.len(),
            "rounds_per_s": self.rate(),
            "fewest": self.min_rounds,
            "most": self.max_rounds,
            "acquire": times(&self.acquire),
            "release": times(&self.release),
        })
    }
}
