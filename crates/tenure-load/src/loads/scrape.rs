//! What reading a server's metrics costs those who lock.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;

use super::Span;
use super::cycle::{self, Shape};
use crate::bulk::BulkHolds;
use crate::figures::{self, Percentiles, Times};
use crate::{Target, wire};

const UNCONTENDED: Shape = Shape { hot: false, two_phase: false };
/// How long a scrape may take.
const SCRAPE_TIMEOUT: Duration = Duration::from_secs(5);
/// Scrapes in a row, to see what each costs.
const SCRAPES_IN_A_ROW: u64 = 2_000;

/// Who locks, and how often the metrics are read.
#[derive(Clone, Debug, clap::Args)]
pub struct ScrapeOptions {
    /// Where the server has its metrics: HOST:PORT
    #[arg(long)]
    pub http: String,
    /// Connections that lock
    #[arg(long, default_value_t = 100)]
    pub conns: usize,
    /// Keys that somebody holds meanwhile
    #[arg(long, default_value_t = 10_000)]
    pub keys: usize,
    /// Seconds from one scrape to the next
    #[arg(long, default_value_t = 0.1)]
    pub every: f64,
    /// How often both are measured, one after the other
    #[arg(long, default_value_t = 11)]
    pub turns: usize,
    #[command(flatten)]
    #[expect(missing_docs, reason = "clap would print it as the text of the group")]
    pub span: Span,
}

/// What was found.
#[derive(Debug, Serialize)]
pub struct ScrapeOutcome {
    /// Connections.
    pub conns: usize,
    /// Held keys.
    pub keys: usize,
    /// The size of what is read.
    pub bytes: usize,
    /// How long a scrape takes while nobody locks.
    pub scrape: Percentiles,
    /// The server's processor time for one.
    pub server_cpu_us_each: Option<f64>,
    /// The same as a part of the time, in hundredths, where the metrics are read so often.
    pub percent: Option<f64>,
    /// What was left of the rate: the median of all turns.
    pub rate_ratio: f64,
}

/// Runs it.
///
/// # Errors
///
/// On a wrong reply, and where the metrics cannot be read.
pub fn run(target: &Target, options: &ScrapeOptions) -> Result<ScrapeOutcome> {
    let http = wire::resolve(&options.http)?;
    let mut held = BulkHolds::connect(target, 1)?;
    held.acquire("scraped", options.keys)?;
    let honest = cycle::CycleOptions { conns: options.conns, span: options.span };
    let mut ratios = Vec::new();
    for turn in 0..options.turns.max(1) {
        // Who goes first takes turns as well.
        let first = turn % 2 == 0;
        let rate = |scraped| {
            rate_with_scraper(http, options, scraped, || cycle::run(target, honest, UNCONTENDED))
        };
        let (one, other) = (rate(first)?, rate(!first)?);
        ratios.push(if first { one / other } else { other / one });
    }
    ratios.sort_by(f64::total_cmp);
    let (mut times, mut bytes) = (Times::default(), 0);
    let before = target.process.map(crate::process::Process::cpu).transpose()?;
    for _ in 0..SCRAPES_IN_A_ROW {
        let began = Instant::now();
        bytes = scrape(http)?;
        times.add(began.elapsed());
    }
    let after = target.process.map(crate::process::Process::cpu).transpose()?;
    let cpu = after.zip(before).and_then(|(after, before)| {
        figures::micros_each(after.saturating_sub(before), SCRAPES_IN_A_ROW)
    });
    Ok(ScrapeOutcome {
        conns: options.conns,
        keys: options.keys,
        bytes,
        scrape: times.percentiles(),
        server_cpu_us_each: cpu,
        percent: cpu.map(|cpu| figures::rounded(cpu / options.every / 1e4)),
        rate_ratio: figures::rounded(ratios[ratios.len() / 2]),
    })
}

/// The rate of a load beside a thread that reads the metrics, or has nothing to do: a process of two threads pays more for
/// its calls to the system than one of one.
fn rate_with_scraper(
    http: SocketAddr,
    options: &ScrapeOptions,
    scraped: bool,
    load: impl FnOnce() -> Result<cycle::CycleOutcome>,
) -> Result<f64> {
    let (stop, stopped) = mpsc::channel::<()>();
    let every = Duration::from_secs_f64(options.every);
    let reader = thread::spawn(move || -> Result<()> {
        loop {
            if scraped {
                scrape(http)?;
            }
            match stopped.recv_timeout(every) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
    });
    let found = load();
    drop(stop);
    reader.join().map_err(|_| anyhow::anyhow!("the reader of the metrics panicked"))??;
    Ok(found?.pairs_per_s)
}

/// Reads the metrics as Prometheus does, and returns how long they are.
fn scrape(http: SocketAddr) -> Result<usize> {
    let tried = || format!("reading the metrics at {http}");
    let mut stream = TcpStream::connect_timeout(&http, SCRAPE_TIMEOUT).with_context(tried)?;
    stream.set_read_timeout(Some(SCRAPE_TIMEOUT)).with_context(tried)?;
    let request = format!("GET /metrics HTTP/1.1\r\nHost: {http}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).with_context(tried)?;
    let mut text = String::new();
    stream.read_to_string(&mut text).with_context(tried)?;
    let status = text.lines().next().unwrap_or_default();
    ensure!(status.ends_with("200 OK"), "{}: {status}", tried());
    Ok(text.len())
}
