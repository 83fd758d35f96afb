//! Measures the cost of scraping a server's metrics for the clients that lock.

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
/// Time that a scrape may take.
const SCRAPE_TIMEOUT: Duration = Duration::from_secs(5);
/// Number of successive scrapes for the cost of one.
const SCRAPES_IN_A_ROW: u64 = 2_000;

/// Size of the load, and scrape interval.
#[derive(Clone, Debug, clap::Args)]
pub struct ScrapeOptions {
    /// Address of the server's metrics: HOST:PORT
    #[arg(long)]
    pub http: String,
    /// Connections that lock
    #[arg(long, default_value_t = 100)]
    pub conns: usize,
    /// Keys held meanwhile
    #[arg(long, default_value_t = 10_000)]
    pub keys: usize,
    /// Seconds from one scrape to the next
    #[arg(long, default_value_t = 0.1)]
    pub every: f64,
    /// Number of comparisons with and without scrapes
    #[arg(long, default_value_t = 11)]
    pub turns: usize,
    #[command(flatten)]
    #[expect(missing_docs, reason = "clap would print it as the text of the group")]
    pub span: Span,
}

/// Results of the load.
#[derive(Debug, Serialize)]
pub struct ScrapeOutcome {
    /// Connections.
    pub conns: usize,
    /// Held keys.
    pub keys: usize,
    /// Size of the metrics.
    pub bytes: usize,
    /// Time of a scrape without other load.
    pub scrape: Percentiles,
    /// CPU time of the server per scrape.
    pub server_cpu_us_each: Option<f64>,
    /// CPU time of the server for scrapes at this interval, in percent of one core.
    pub percent: Option<f64>,
    /// Ratio of the rates with and without scrapes: median of all comparisons.
    pub rate_ratio: f64,
}

/// Runs the load.
///
/// # Errors
///
/// A reply is wrong, or the metrics cannot be read.
pub fn run(target: &Target, options: &ScrapeOptions) -> Result<ScrapeOutcome> {
    let http = wire::resolve(&options.http)?;
    let mut held = BulkHolds::connect(target, 1)?;
    held.acquire("scraped", options.keys)?;
    let honest = cycle::CycleOptions { conns: options.conns, span: options.span };
    let mut ratios = Vec::new();
    for turn in 0..options.turns.max(1) {
        // The order alternates, so that a drift of the machine affects both sides equally.
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

/// Rate of a load beside a thread that scrapes or, for comparison, is idle. System calls of a process with two threads
/// cost more, so the idle thread is needed for a fair comparison.
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

/// Reads the metrics as Prometheus does, and returns the length of the response.
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
