//! Elections on advisory locks of PostgreSQL: how soon another leads after a fault, and whether two ever do.
//!
//! Every participant is a process, this program again. It writes down when it leads, until when it may, and when it has
//! ended, all on the monotonic clock of the host, which they share.

mod network;
mod participant;

use std::env;
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tenure::{Client, PgAdvisoryStore};
use tokio_postgres::NoTls;

use network::{Link, Namespaces};
use participant::{Participant, follow, now, participate};

const TTL: Duration = Duration::from_secs(3);
const URL: &str = "TENURE_BENCH_URL";
const KEY: &str = "TENURE_BENCH_KEY";
const FOLLOWERS: &str = "TENURE_BENCH_FOLLOWERS";

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    match (env::var(URL), env::var(FOLLOWERS)) {
        (Ok(url), Ok(many)) => runtime.block_on(follow(&url, many.parse()?)),
        (Ok(url), _) => runtime.block_on(participate(&url)),
        _ => {
            let Ok(server) = env::var("TENURE_TEST_POSTGRES") else {
                println!("run it by `cargo xtask bench postgres`");
                return Ok(());
            };
            let quick = env::args().any(|argument| argument == "--quick");
            runtime.block_on(measure(&server, quick))
        }
    }
}

/// What came of one fault.
struct Trial {
    /// From the fault to the next leader.
    took: Duration,
    /// From the end of the one in its own eyes to the beginning of the other; negative: two led.
    gap: i128,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    Kill,
    Terminate,
    Stop,
    Silence,
    LinkDown,
}

async fn measure(server: &str, quick: bool) -> Result<()> {
    let url = server.replacen("postgres:", "postgres+advisory:", 1);
    let (many, few) = if quick { (3, 2) } else { (20, 12) };
    println!("3 participants, ttl {TTL:?}, no options but that\n");
    println!(
        "{:<38} {:>6} {:>9} {:>9} {:>9} {:>12} {:>8}",
        "fault", "trials", "p50", "max", "min", "shortest gap", "overlaps"
    );
    for (name, fault, trials) in [
        ("SIGKILL of the leader", Fault::Kill, many),
        ("pg_terminate_backend of its session", Fault::Terminate, many),
        ("SIGSTOP of the leader", Fault::Stop, few),
        ("its link falls silent", Fault::Silence, few),
        ("its network interface goes down", Fault::LinkDown, few),
    ] {
        match run(&url, server, fault, trials).await {
            Ok(trials) => report(name, fault, &trials),
            Err(error) => println!("{name:<38} skipped: {error}"),
        }
    }
    idle(&url, server, quick).await
}

async fn run(url: &str, server: &str, fault: Fault, trials: usize) -> Result<Vec<Trial>> {
    let mut random = [0; 4];
    getrandom::fill(&mut random)?;
    let (first, second) = (i32::from_be_bytes(random), 7);
    let key = format!("{first},{second}");
    let (db, connection) = tokio_postgres::connect(server, NoTls).await?;
    tokio::spawn(connection);
    let namespaces = if fault == Fault::LinkDown { Some(Namespaces::make(3)?) } else { None };
    let mut participants = Vec::new();
    for nth in 0..3 {
        let link = match (fault, &namespaces) {
            (Fault::Silence, _) => Some(Link::to(server, "127.0.0.1").await?),
            (_, Some(_)) => Some(Link::to(server, &Namespaces::near(nth)).await?),
            _ => None,
        };
        let within = namespaces.as_ref().map_or_else(Vec::new, |_| Namespaces::within(nth));
        participants.push(Participant::start(url, &key, link, &within)?);
    }
    let mut done = Vec::new();
    for _ in 0..trials {
        let leader = leader(&participants, None).await?;
        // Both others wait in the queue.
        until("the followers", async || {
            let sql = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted \
                       AND classid::int8 = $1";
            let waiting = db.query_one(sql, &[&i64::from(first.cast_unsigned())]).await;
            waiting.is_ok_and(|row| row.get::<_, i64>(0) == 2)
        })
        .await?;
        // At any moment of its renewal.
        tokio::time::sleep(Duration::from_millis(u64::from(random[0]) * 7 % 1_000)).await;
        random[0] = random[0].wrapping_mul(37).wrapping_add(11);
        let begun = now();
        let victim = &mut participants[leader];
        match fault {
            Fault::Kill => victim.signal("-KILL")?,
            Fault::Stop => victim.signal("-STOP")?,
            Fault::Silence => victim.link.as_ref().ok_or("no link")?.silence(true),
            Fault::LinkDown => Namespaces::set(leader, "down")?,
            Fault::Terminate => {
                let sql = "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted \
                           AND classid::int8 = $1";
                db.query_one(sql, &[&i64::from(first.cast_unsigned())]).await?;
            }
        }
        let killed_at = now();
        let next = self::leader(&participants, Some((leader, begun))).await?;
        let leads = participants[next].told().leads.unwrap_or_default();
        let victim = &mut participants[leader];
        if fault == Fault::Terminate {
            until("the word of the victim", async || victim.told().ended.is_some()).await?;
        }
        let over = if fault == Fault::Kill { killed_at } else { victim.told().over() };
        done.push(Trial {
            took: Duration::from_nanos(u64::try_from(leads - begun)?),
            gap: leads - over,
        });
        match fault {
            Fault::Kill => victim.again()?,
            Fault::Stop => victim.signal("-CONT")?,
            Fault::Silence => victim.link.as_ref().ok_or("no link")?.silence(false),
            Fault::LinkDown => Namespaces::set(leader, "up")?,
            Fault::Terminate => {}
        }
        if fault != Fault::Kill {
            until("the word of the victim", async || victim.told().ended.is_some()).await?;
        }
    }
    Ok(done)
}

/// Waits for a leader; with `but`, for another participant that became leader after that time.
async fn leader(participants: &[Participant], but: Option<(usize, i128)>) -> Result<usize> {
    let begun = Instant::now();
    loop {
        let found = participants.iter().enumerate().find(|(nth, participant)| match but {
            Some((but, since)) => {
                *nth != but && participant.told().leads.is_some_and(|at| at > since)
            }
            None => participant.leads(),
        });
        if let Some((nth, _)) = found {
            return Ok(nth);
        }
        if begun.elapsed() > Duration::from_secs(60) {
            return Err("nobody leads".into());
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

async fn until(what: &str, condition: impl AsyncFn() -> bool) -> Result<()> {
    let begun = Instant::now();
    while !condition().await {
        if begun.elapsed() > Duration::from_secs(60) {
            return Err(format!("{what} did not come about").into());
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

fn report(name: &str, fault: Fault, trials: &[Trial]) {
    let mut took: Vec<_> = trials.iter().map(|trial| trial.took).collect();
    took.sort();
    let (min, p50, max) = (took[0], took[took.len() / 2], took[took.len() - 1]);
    let shortest = trials.iter().map(|trial| trial.gap).min().unwrap_or_default();
    let overlaps = trials.iter().filter(|trial| trial.gap < 0).count();
    let mut gap = String::from("-");
    if fault != Fault::Kill {
        gap.clear();
        let (whole, rest) = (shortest / 1_000_000, shortest.abs() % 1_000_000 / 10_000);
        let _ = write!(gap, "{whole}.{rest:02}ms");
    }
    let soon = match fault {
        Fault::Kill => p50 <= Duration::from_millis(50) && max <= Duration::from_millis(500),
        Fault::Terminate => true,
        Fault::Stop | Fault::Silence | Fault::LinkDown => max <= TTL + Duration::from_millis(500),
    };
    let kept = if soon && overlaps == 0 { "" } else { " MISSED" };
    println!(
        "{name:<38} {:>6} {p50:>9.1?} {max:>9.1?} {min:>9.1?} {gap:>12} {overlaps:>8}{kept}",
        trials.len()
    );
}

/// What many followers cost while nothing happens.
async fn idle(url: &str, server: &str, quick: bool) -> Result<()> {
    let (db, connection) = tokio_postgres::connect(server, NoTls).await?;
    tokio::spawn(connection);
    let key = "77,77";
    let leading = Client::with_store(Arc::new(PgAdvisoryStore::open(url)?));
    let election = leading.election(key).start().await?;
    election.wait_for_leadership(None).await?;
    let mut followers = Command::new(env::current_exe()?)
        .env(URL, url)
        .env(KEY, key)
        .env(FOLLOWERS, "100")
        .stdout(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    BufReader::new(followers.stdout.take().ok_or("no stdout")?).read_line(&mut line)?;
    // What was opened to begin with is closed by now.
    tokio::time::sleep(Duration::from_secs(12)).await;
    let span = Duration::from_secs(if quick { 16 } else { 60 });
    let sessions = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' \
                    AND pid <> pg_backend_pid()";
    let sessions = number(&db, sessions).await?;
    let transactions = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()";
    let before = number(&db, transactions).await?;
    let (begun, mut oldest, mut asked) = (Instant::now(), 0.0_f64, 1.0);
    while begun.elapsed() < span {
        let sql = "SELECT coalesce(max(extract(epoch FROM clock_timestamp() - query_start)), 0)::float8 \
                   FROM pg_stat_activity WHERE backend_xmin IS NOT NULL AND pid <> pg_backend_pid()";
        oldest = oldest.max(number(&db, sql).await?);
        asked += 1.0;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    // Every statement is a transaction of its own.
    let rate = (number(&db, transactions).await? - before - asked) / begun.elapsed().as_secs_f64();
    followers.kill()?;
    followers.wait()?;
    election.shutdown(None).await?;
    println!(
        "\n100 idle followers: {rate:.1} round trips/s together{}, {sessions} sessions with the leader's; VACUUM held back by \
         {oldest:.1} s at most",
        if rate <= 10.0 { "" } else { " (MISSED)" }
    );
    Ok(())
}

/// The number that one message answers.
async fn number(db: &tokio_postgres::Client, sql: &str) -> Result<f64> {
    for message in db.simple_query(sql).await? {
        if let tokio_postgres::SimpleQueryMessage::Row(row) = message {
            return Ok(row.get(0).ok_or("nothing")?.parse()?);
        }
    }
    Err("no row".into())
}
