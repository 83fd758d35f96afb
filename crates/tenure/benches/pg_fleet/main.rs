//! Large fleets on one advisory lock of PostgreSQL: `cargo xtask bench fleet`.
//!
//! Each participant has a store of its own, and so its own connections, as separate processes would have.

mod cpu;

use std::env;
use std::time::{Duration, Instant};

use tenure::{Client, Election};
use tokio::sync::mpsc;
use tokio_postgres::{Client as Database, NoTls};

use cpu::ServerCpu;

const SIZES: [usize; 4] = [10, 50, 100, 500];
/// Ttl of all participants: the default of `tenure lead`.
const TTL: Duration = Duration::from_secs(15);
/// Time after which sessions that a start needed are closed, and the server has counted their statements.
const SETTLED_AFTER: Duration = Duration::from_secs(12);
/// Connections beyond one per participant that are not a miss.
const SPARE_CONNECTIONS: usize = 5;
/// Pause between two ends of the leader's session: the queue is full again by then.
const KILL_PAUSE: Duration = Duration::from_millis(500);
const KEY: (i32, i32) = (77, 500);

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    let Ok(server) = env::var("TENURE_TEST_POSTGRES") else {
        println!("no server: run `cargo xtask bench fleet`");
        return Ok(());
    };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(measure(&server, env::args().any(|argument| argument == "--quick")))
}

/// Figures of one size.
struct Figures {
    followers: usize,
    /// CPU time of the server per second.
    cpu: f64,
    statements: f64,
    connections: usize,
    blocked: usize,
    start: Duration,
    take_overs: Vec<Duration>,
}

impl Figures {
    fn percentile(&self, percent: usize) -> Duration {
        self.take_overs[(self.take_overs.len() * percent / 100).min(self.take_overs.len() - 1)]
    }
}

async fn measure(server: &str, quick: bool) -> Result<()> {
    let (span, kills) =
        if quick { (Duration::from_secs(8), 5) } else { (Duration::from_secs(30), 20) };
    println!(
        "ttl {TTL:?}, CPU of the server over {span:?}, {kills} ends of the leader's session\n"
    );
    println!(
        "{:>9} {:>11} {:>12} {:>11} {:>8} {:>8} {:>10} {:>10}",
        "followers", "server CPU", "statements/s", "connections", "blocked", "start", "p50", "p95"
    );
    let mut all = Vec::new();
    for followers in SIZES {
        let figures = Fleet::start(server, followers).await?.measure(span, kills).await?;
        println!(
            "{followers:>9} {:>9.2} % {:>12.1} {:>11} {:>8} {:>8.1?} {:>10.1?} {:>10.1?}",
            figures.cpu * 100.0,
            figures.statements,
            figures.connections,
            figures.blocked,
            figures.start,
            figures.percentile(50),
            figures.percentile(95),
        );
        all.push(figures);
    }
    judge(&all)
}

/// Compares the figures with the limits that the store promises. An error if one is missed.
fn judge(all: &[Figures]) -> Result<()> {
    let of = |followers| all.iter().find(|figures| figures.followers == followers);
    let (Some(few), Some(some), Some(many)) = (of(10), of(50), of(500)) else { return Ok(()) };
    let cpu = many.cpu / some.cpu;
    let take_over = many.percentile(50).as_secs_f64() / few.percentile(50).as_secs_f64();
    let spare = many.connections.saturating_sub(many.followers + 1);
    let lines = [
        (format!("CPU of 500 against 50 followers: {cpu:.1}, at most 2"), cpu <= 2.0),
        (format!("p50 of 500 against 10 followers: {take_over:.1}, at most 2"), take_over <= 2.0),
        (
            format!(
                "connections of 500 followers and their leader beyond 501: {spare}, at most {SPARE_CONNECTIONS}"
            ),
            spare <= SPARE_CONNECTIONS,
        ),
    ];
    println!();
    for (line, kept) in &lines {
        println!("{line}{}", if *kept { "" } else { " MISSED" });
    }
    if lines.iter().all(|(_, kept)| *kept) { Ok(()) } else { Err("a limit was missed".into()) }
}

struct Fleet {
    followers: usize,
    db: Database,
    cpu: ServerCpu,
    elections: Vec<Election>,
    /// Instants at which a participant began to lead.
    led: mpsc::UnboundedReceiver<Instant>,
    start: Duration,
}

impl Fleet {
    async fn start(server: &str, followers: usize) -> Result<Self> {
        let (db, connection) = tokio_postgres::connect(server, NoTls).await?;
        tokio::spawn(connection);
        let cpu = ServerCpu::of(db.query_one("SELECT pg_backend_pid()", &[]).await?.get(0))?;
        let (url, key) =
            (server.replacen("postgres:", "postgres+advisory:", 1), format!("{},{}", KEY.0, KEY.1));
        let (sender, led) = mpsc::unbounded_channel();
        let begun = Instant::now();
        let mut elections = Vec::new();
        for _ in 0..=followers {
            let sender = sender.clone();
            let election = Client::connect(&url).await?.election(&key).ttl(TTL);
            let election = election.on_acquired(move |_| {
                let _ = sender.send(Instant::now());
            });
            elections.push(election.start().await?);
        }
        let mut fleet = Self { followers, db, cpu, elections, led, start: Duration::ZERO };
        fleet.settle().await?;
        fleet.start = begun.elapsed();
        Ok(fleet)
    }

    async fn measure(mut self, span: Duration, kills: usize) -> Result<Figures> {
        tokio::time::sleep(SETTLED_AFTER).await;
        let sessions = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' \
                        AND pid <> pg_backend_pid()";
        let connections = self.number(sessions).await?;
        let blocked = self.number(&format!("SELECT count(*) {}", locks("NOT granted"))).await?;
        let sent = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()";
        let before = (self.number(sent).await?, self.cpu.read()?, Instant::now());
        tokio::time::sleep(span).await;
        let (seconds, cpu) = (before.2.elapsed().as_secs_f64(), self.cpu.read()?);
        // One statement is ours.
        let statements = self.number(sent).await?.saturating_sub(before.0 + 1);
        let mut take_overs = Vec::new();
        while self.led.try_recv().is_ok() {}
        for _ in 0..kills {
            take_overs.push(self.take_over().await?);
            self.settle().await?;
            tokio::time::sleep(KILL_PAUSE).await;
        }
        take_overs.sort();
        for election in &self.elections {
            election.shutdown(None).await?;
        }
        Ok(Figures {
            followers: self.followers,
            cpu: cpu.saturating_sub(before.1).as_secs_f64() / seconds,
            statements: f64::from(u32::try_from(statements)?) / seconds,
            connections,
            blocked,
            start: self.start,
            take_overs,
        })
    }

    /// Ends the leader's session. Returns the time until another participant leads.
    async fn take_over(&mut self) -> Result<Duration> {
        let begun = Instant::now();
        let holder = format!("SELECT pg_terminate_backend(pid) {}", locks("granted"));
        self.db.query_one(&holder, &[]).await?;
        let led = tokio::time::timeout(Duration::from_secs(60), self.led.recv()).await?;
        Ok(led.ok_or("no participants")? - begun)
    }

    /// Waits until all followers wait, and a few of them in the server's queue.
    async fn settle(&self) -> Result<()> {
        let fleet = format!(
            "SELECT count(DISTINCT pid) FROM pg_locks WHERE locktype = 'advisory' AND (objsubid = 1 \
             OR pid IN (SELECT pid {}) OR pid IN (SELECT pid {}))",
            locks("granted"),
            locks("NOT granted")
        );
        let blocked = format!("SELECT count(*) {}", locks("NOT granted"));
        let begun = Instant::now();
        while self.number(&fleet).await? != self.followers + 1
            || self.number(&blocked).await? < self.followers.min(3)
        {
            if begun.elapsed() > Duration::from_secs(120) {
                return Err("the fleet does not settle".into());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }

    async fn number(&self, sql: &str) -> Result<usize> {
        let row = self.db.query_one(sql, &[]).await?;
        Ok(usize::try_from(row.get::<_, i64>(0))?)
    }
}

/// SQL after SELECT: the rows of the lock in `pg_locks` that meet the condition.
fn locks(condition: &str) -> String {
    let (first, second) = KEY;
    format!(
        "FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2 AND classid = {first} AND objid = {second} \
         AND {condition}"
    )
}
