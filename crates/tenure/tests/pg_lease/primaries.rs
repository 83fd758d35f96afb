//! Two primaries among the listed servers: a promoted standby, and the former primary that is still up or up again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tenure::jobs::{CheckpointClaim, Checkpoints, NewJob, Options, Queue, Schema as JobSchema};
use tenure::store::FindingLevel;
use tenure::{Client, ErrorKind, PgAdvisoryStore};

use crate::link::{Link, Mode};
use crate::server::Server;
use crate::support::{Schema, TTL, until, with_schema};

/// Settings that list all these servers.
pub(crate) fn listing(servers: &[&Server]) -> String {
    let list: Vec<_> = servers.iter().map(|it| format!("127.0.0.1:{}", it.port)).collect();
    format!("postgres://postgres@{}/postgres", list.join(","))
}

pub(crate) fn sessions(url: &str) -> Client {
    Client::with_store(Arc::new(PgAdvisoryStore::open(url).unwrap()))
}

fn rows(schema: &Schema, url: &str) -> Client {
    Client::with_store(Arc::new(tenure::PgLeaseStore::open(&schema.url_at(url)).unwrap()))
}

/// Waits until a standby has everything that was committed on its primary.
pub(crate) async fn caught_up(primary: &Server, standby: &Server) {
    let flushed = primary.sql("SELECT pg_current_wal_flush_lsn()");
    let sql = format!("SELECT pg_last_wal_replay_lsn() >= '{flushed}'");
    until("a standby that has all of it", async || standby.sql(&sql) == "t").await;
}

/// Participants that take turns at one key, and a record of their turns. Panics if two hold it at the same time.
struct Turns {
    ttl: Duration,
    holder: Mutex<Option<usize>>,
    log: Mutex<Vec<(Instant, usize)>>,
    stop: AtomicBool,
}

impl Turns {
    fn new(ttl: Duration) -> Arc<Self> {
        let (holder, log) = (Mutex::default(), Mutex::default());
        Arc::new(Self { ttl, holder, log, stop: AtomicBool::new(false) })
    }

    /// Takes part until it is stopped: holds the key until the hold is lost.
    async fn take_part(self: Arc<Self>, number: usize, client: Client) {
        while !self.stop.load(Ordering::Relaxed) {
            let claiming =
                client.lock("key").ttl(self.ttl).timeout(Duration::from_secs(1)).acquire();
            let Ok(guard) = claiming.await else { continue };
            let other = self.holder.lock().unwrap().replace(number);
            assert_eq!(other, None, "{number} and another hold the key");
            self.log.lock().unwrap().push((Instant::now(), number));
            let mut is_lost = false;
            while !self.stop.load(Ordering::Relaxed) && !is_lost {
                is_lost = tokio::time::timeout(TTL / 20, guard.lost()).await.is_ok();
            }
            assert_eq!(self.holder.lock().unwrap().take(), Some(number));
        }
    }

    fn turns(&self) -> usize {
        self.log.lock().unwrap().len()
    }

    /// Time from `since` to the first turn after it.
    async fn next_turn_after(&self, since: Instant) -> Duration {
        let next = || self.log.lock().unwrap().iter().find(|(at, _)| *at > since).map(|it| it.0);
        until("the next turn", async || next().is_some()).await;
        next().unwrap() - since
    }
}

/// Runs three participants on these clients, and `fault` once one of them has the key.
async fn with_participants(
    clients: Vec<Client>,
    ttl: Duration,
    fault: impl AsyncFnOnce(&Turns) -> (),
) {
    let turns = Turns::new(ttl);
    let mut tasks = tokio::task::JoinSet::new();
    for (number, client) in clients.into_iter().enumerate() {
        tasks.spawn(Arc::clone(&turns).take_part(number, client));
    }
    until("a first turn", async || turns.turns() > 0).await;
    fault(&turns).await;
    turns.stop.store(true, Ordering::Relaxed);
    while let Some(ended) = tasks.join_next().await {
        ended.expect("no two at the same time");
    }
}

/// Number of trials of each kind. More than one prints figures: `TENURE_TEST_TRIALS=20`, with `--nocapture`.
fn trials() -> usize {
    std::env::var("TENURE_TEST_TRIALS").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

fn print_times(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let (median, most) = (times[times.len() / 2], times[times.len() - 1]);
    println!("{what}: {} trials, median {median:.2?}, longest {most:.2?}", times.len());
}

/// Clients of each kind of lock, each with the list of servers in another order.
fn clients(schema: &Schema, kind: &str, first: &Server, second: &Server) -> Vec<Client> {
    [[first, second], [second, first], [first, second]]
        .map(|servers| match kind {
            "sessions" => sessions(&listing(&servers)),
            _ => rows(schema, &listing(&servers)),
        })
        .into()
}

#[test]
fn a_key_has_one_holder_while_the_old_primary_is_still_up() {
    for kind in ["sessions", "rows"] {
        let mut times = Vec::new();
        for _ in 0..trials() {
            let Some(first) = Server::start() else { return };
            let (told, tell) = std::sync::mpsc::channel();
            with_schema(&first.url(), async move |schema| {
                let second = first.standby();
                caught_up(&first, &second).await;
                let clients = clients(&schema, kind, &first, &second);
                // A busy machine must not make the hold of a row expire meanwhile.
                let ttl = if kind == "rows" { 3 * TTL } else { TTL };
                with_participants(clients, ttl, async |turns| {
                    let before = turns.turns();
                    let promoted = Instant::now();
                    second.promote();
                    if kind == "sessions" {
                        told.send(turns.next_turn_after(promoted).await).unwrap();
                        // Every hold is now at the new primary.
                        let held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2 \
                                    AND granted";
                        until("no hold at the old primary", async || first.sql(held) == "0").await;
                        assert_eq!(second.sql(held), "1");
                    } else {
                        // The row is at the new primary, too: the holder goes on there.
                        let renewed = format!(
                            "SELECT locked_until > clock_timestamp() FROM {}.locks", schema.name
                        );
                        until("no lease at the old primary", async || first.sql(&renewed) == "f").await;
                        assert_eq!(second.sql(&renewed), "t");
                        assert_eq!(turns.turns(), before, "the hold was not lost");
                        told.send(promoted.elapsed()).unwrap();
                    }
                })
                .await;
                drop((first, second));
            });
            times.extend(tell.try_iter());
        }
        print_times(&format!("standby promoted, old primary still up, {kind}"), times);
    }
}

#[test]
fn a_key_has_one_holder_when_the_old_primary_comes_back() {
    for kind in ["sessions", "rows"] {
        let mut times: Vec<(Duration, Duration)> = Vec::new();
        for _ in 0..trials() {
            let Some(mut first) = Server::start() else { return };
            let (told, tell) = std::sync::mpsc::channel();
            with_schema(&first.url(), async move |schema| {
                let second = first.standby();
                caught_up(&first, &second).await;
                let clients = clients(&schema, kind, &first, &second);
                with_participants(clients, TTL, async |turns| {
                    let killed = Instant::now();
                    first.down();
                    second.promote();
                    let promoting = killed.elapsed();
                    if kind == "sessions" {
                        let turn = turns.next_turn_after(killed).await;
                        told.send((turn, turn.saturating_sub(promoting))).unwrap();
                    } else {
                        let held = format!(
                            "SELECT count(*) FROM {}.locks WHERE locked_until > clock_timestamp()",
                            schema.name
                        );
                        until("a hold at the new primary", async || second.sql(&held) == "1").await;
                    }
                    first.up();
                    // Long enough for each participant to claim at the old primary, if it would.
                    tokio::time::sleep(2 * TTL).await;
                    let held = match kind {
                        "sessions" => {
                            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'".to_owned()
                        }
                        _ => format!(
                            "SELECT count(*) FROM {}.locks WHERE locked_until > clock_timestamp()",
                            schema.name
                        ),
                    };
                    assert_eq!(first.sql(&held), "0", "the old primary grants nothing");
                })
                .await;
                drop((first, second));
            });
            times.extend(tell.try_iter());
        }
        if !times.is_empty() {
            let (since_kill, since_promotion) = times.into_iter().unzip();
            print_times("primary killed, standby promoted, time since the kill", since_kill);
            print_times("the same, time since the end of the promotion", since_promotion);
        }
    }
}

#[test]
fn a_hold_at_the_old_primary_alone_keeps_the_key_from_others() {
    let Some(first) = Server::start() else { return };
    with_schema(&first.url(), async move |schema| {
        for table in [
            JobSchema::of_queue(&format!("{}.jobs", schema.name)),
            JobSchema::of_checkpoints(&format!("{}.chunks", schema.name)),
        ] {
            table.unwrap().apply(&first.url()).await.unwrap();
        }
        let jobs = format!("{}.jobs", schema.name);
        let chunks = format!("{}.chunks", schema.name);
        let lease = Options::default().lease(Duration::from_secs(60));
        let alone = Queue::connect_with(&first.url(), &jobs, lease).await.unwrap();
        for payload in ["1", "2"] {
            alone.enqueue(NewJob::json(payload).unwrap()).await.unwrap();
        }
        let second = first.standby();
        caught_up(&first, &second).await;
        second.promote();
        // These know the old primary only, so nothing tells them of the other.
        let row = rows(&schema, &first.url()).lock("key").acquire().await.unwrap();
        let reader = rows(&schema, &first.url()).lock("read").shared().acquire().await.unwrap();
        let session = sessions(&first.url()).lock("key").acquire().await.unwrap();
        let job = alone.claim().await.unwrap().expect("the first job");
        let old_chunks = Checkpoints::connect_with(&first.url(), &chunks, lease).await.unwrap();
        let CheckpointClaim::Granted(chunk) = old_chunks.claim("matrix", "chunk").await.unwrap()
        else {
            panic!("it is free")
        };

        let url = listing(&[&first, &second]);
        let (by_rows, by_sessions) = (rows(&schema, &url), sessions(&url));
        let queue = Queue::connect_with(&url, &jobs, lease).await.unwrap();
        let checkpoints = Checkpoints::connect_with(&url, &chunks, lease).await.unwrap();
        for client in [&by_rows, &by_sessions] {
            let refused = client.lock("key").try_acquire().await;
            let error = refused.expect_err("it is held at the old primary");
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
            assert!(error.to_string().contains("(timeline 1)"), "{error}");
        }
        by_rows.lock("read").shared().acquire().await.unwrap().release().await.unwrap();
        by_rows.lock("read").try_acquire().await.expect_err("a reader has it");
        let next = queue.claim().await.unwrap().expect("a job that no worker has");
        assert_ne!(next.id(), job.id(), "a worker at the old primary has it");
        assert!(queue.claim().await.unwrap().is_none(), "a worker at the old primary has it");
        next.complete().await.unwrap();
        checkpoints.claim("matrix", "chunk").await.expect_err("a worker has it");
        let attempts = format!("SELECT attempts FROM {jobs} WHERE completed_at IS NULL");
        assert_eq!(second.sql(&attempts), "0", "no attempt was used");

        row.release().await.unwrap();
        reader.release().await.unwrap();
        session.release().await.unwrap();
        job.release().await.unwrap();
        chunk.release().await.unwrap();
        for client in [&by_rows, &by_sessions] {
            client.lock("key").acquire().await.unwrap().release().await.unwrap();
        }
        by_rows.lock("read").acquire().await.unwrap().release().await.unwrap();
        until("the job that is free now", async || match queue.claim().await.unwrap() {
            Some(job) => job.complete().await.is_ok(),
            None => false,
        })
        .await;
        let CheckpointClaim::Granted(chunk) = checkpoints.claim("matrix", "chunk").await.unwrap()
        else {
            panic!("it is free")
        };
        chunk.release().await.unwrap();
        let found = by_rows.store().examine(TTL).await;
        let servers = found.iter().find(|it| it.what == "listed servers").expect("of two");
        assert_eq!(servers.level, FindingLevel::Warning, "{servers:?}");
        drop((first, second));
    });
}

#[test]
fn of_two_primaries_of_one_timeline_neither_grants_until_one_is_gone() {
    let Some(mut first) = Server::start() else { return };
    with_schema(&first.url(), async move |schema| {
        let jobs = format!("{}.jobs", schema.name);
        JobSchema::of_queue(&jobs).unwrap().apply(&first.url()).await.unwrap();
        let (second, mut third) = (first.standby(), first.standby());
        for standby in [&second, &third] {
            caught_up(&first, standby).await;
        }
        first.down();
        second.promote();
        let url = listing(&[&first, &second, &third]);
        let (by_rows, by_sessions) = (rows(&schema, &url), sessions(&url));
        let queue = Queue::connect(&url, &jobs).await.unwrap();
        // To these, the third is the first that they could use.
        let url = listing(&[&third, &second, &first]);
        let (also_rows, also_sessions) = (rows(&schema, &url), sessions(&url));
        let mut held = Vec::new();
        for (nth, client) in [&by_rows, &by_sessions, &also_rows, &also_sessions].iter().enumerate()
        {
            let key = format!("before {nth}");
            held.push(client.lock(key).ttl(TTL).acquire().await.unwrap());
        }
        third.promote();
        queue.enqueue(NewJob::json("1").unwrap()).await.unwrap();
        for client in [&by_rows, &by_sessions] {
            // A long ttl, so that a busy machine does not take an answer for missing.
            let error =
                client.lock("key").ttl(10 * TTL).try_acquire().await.expect_err("neither grants");
            let text = error.to_string();
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
            for server in [&second, &third] {
                assert!(text.contains(&format!(":{} (timeline 2)", server.port)), "{text}");
            }
            let found = client.store().examine(TTL).await;
            let servers = found.iter().find(|it| it.what == "listed servers").expect("of three");
            assert_eq!(servers.level, FindingLevel::Failed, "{servers:?}");
            assert!(servers.detail.contains(&format!(":{}", third.port)), "{servers:?}");
        }
        assert!(queue.claim().await.is_err(), "neither grants");
        // What was granted before goes on.
        tokio::time::sleep(2 * TTL).await;
        for guard in &held {
            assert!(guard.is_held(), "{guard:?}");
        }
        third.down();
        for client in [&by_rows, &by_sessions] {
            client.lock("key").ttl(TTL).acquire().await.unwrap().release().await.unwrap();
        }
        until("a job", async || queue.claim().await.is_ok_and(|job| job.is_some())).await;
        drop((first, second, third));
    });
}

#[test]
fn two_holders_at_primaries_of_one_timeline_that_see_each_other_both_end() {
    let Some(mut first) = Server::start() else { return };
    with_schema(&first.url(), async move |schema| {
        let (second, third) = (first.standby(), first.standby());
        for standby in [&second, &third] {
            caught_up(&first, standby).await;
        }
        first.down();
        second.promote();
        third.promote();
        // Another process that knows the third only.
        let row = rows(&schema, &third.url()).lock("key").ttl(TTL).acquire().await.unwrap();
        let session = sessions(&third.url()).lock("key").ttl(TTL).acquire().await.unwrap();
        let link = Link::to(&third.url()).await;
        link.set(Mode::Cut);
        let far = link.url.rsplit_once(':').unwrap().1;
        let url = format!("postgres://postgres@127.0.0.1:{},127.0.0.1:{far}", second.port);
        let by_rows = rows(&schema, &url).lock("key").ttl(TTL).acquire().await.unwrap();
        let by_sessions = sessions(&url).lock("key").ttl(TTL).acquire().await.unwrap();
        link.set(Mode::Open);
        for guard in [&by_rows, &by_sessions] {
            tokio::time::timeout(2 * TTL, guard.lost()).await.expect("it is held there, too");
        }
        row.release().await.unwrap();
        session.release().await.unwrap();
        drop((first, second, third));
    });
}
