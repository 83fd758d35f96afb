//! Many participants of one lock: a few of them block in the server's queue, the others stand by.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use tenure::election::Election;
use tenure::{Client, StoreOutage};
use tokio_postgres::{AsyncMessage, NoTls};

use crate::link::{Link, Mode};
use crate::network::Network;
use crate::server::Server;
use crate::services;
use crate::support::{FORMS, TTL, Worker, client, own_lock, pair, stranger, until};

/// A ttl so long that no wait is sent again during a test, with [`LONG_WAIT`].
const LONG_TTL: Duration = Duration::from_secs(120);
/// Option of a URL for waits of half that ttl.
const LONG_WAIT: &str = "wait=60000ms";

/// SQL condition that a row of `pg_locks` belongs to the lock itself.
fn of_lock(first: i32, second: i32) -> String {
    let (first, second) = (first.cast_unsigned(), second.cast_unsigned());
    format!(
        "locktype = 'advisory' AND objsubid = 2 AND classid::int8 = {first} AND objid::int8 = {second}"
    )
}

async fn count(db: &tokio_postgres::Client, sql: &str) -> i64 {
    db.query_one(&format!("SELECT count(*) FROM {sql}"), &[]).await.unwrap().get(0)
}

async fn waiters(client: &Client, key: &str) -> Vec<String> {
    let state = client.inspect(key).await.unwrap();
    state.waiters.into_iter().map(|waiter| waiter.by.unwrap().id).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_few_waiters_block_and_all_are_shown_and_served_in_order() {
    let Some(url) = services::postgres() else { return };
    for form in FORMS {
        serve_in_order(&url, form).await;
    }
}

async fn serve_in_order(plain: &str, form: &str) {
    const WAITERS: usize = 12;
    let ((key, row), url) = (own_lock(form), format!("{plain}?{form}&{LONG_WAIT}"));
    let (ours, db) = (client(&url), stranger(plain).await);
    let blocked = format!("pg_locks WHERE NOT granted AND {row}");
    let guard = ours.lock(&key).ttl(LONG_TTL).acquire().await.unwrap();
    let prefix = format!("fleet {key}");
    let (mut expected, mut served) = (Vec::new(), Vec::new());
    let (granted, mut grants) = tokio::sync::mpsc::unbounded_channel();
    for nth in 0..WAITERS {
        let (id, granted) = (format!("{prefix}-{nth}"), granted.clone());
        let request = client(&url).lock(&key).id(&id).ttl(LONG_TTL);
        expected.push(id.clone());
        tokio::spawn(async move {
            assert!(granted.send((id, request.acquire().await.unwrap())).is_ok());
        });
        until("one more waiter", async || waiters(&ours, &key).await == expected).await;
    }
    until("four block, the others stand by", async || count(&db, &blocked).await == 4).await;
    let listed = ours.list("").await.unwrap();
    let state = listed.iter().find(|state| state.key.as_str() == key).unwrap();
    assert_eq!(state.waiters.len(), WAITERS, "{state:?}");
    assert_eq!(state.holders.len(), 1, "{state:?}");
    let sessions = format!("pg_stat_activity WHERE application_name LIKE '{prefix}%'");
    let each = i64::try_from(WAITERS).unwrap();
    until("one session each", async || count(&db, &sessions).await == each).await;
    guard.release().await.unwrap();
    while served.len() < WAITERS {
        let (id, guard) = grants.recv().await.unwrap();
        served.push(id);
        // Reserves that are called at once may overtake each other on their way into the queue.
        let next = i64::try_from((WAITERS - served.len()).min(4)).unwrap();
        until("a full queue", async || count(&db, &blocked).await == next).await;
        guard.release().await.unwrap();
    }
    assert_eq!(served, expected);
    let left = format!("pg_locks WHERE {row}");
    until("a free lock", async || count(&db, &left).await == 0).await;
}

/// Holders of a lock, as they count each other.
#[derive(Clone, Default)]
struct Visits {
    inside: Arc<AtomicU32>,
    entered: Arc<AtomicU32>,
}

impl Visits {
    async fn visit(&self) {
        assert_eq!(self.inside.fetch_add(1, Ordering::SeqCst), 0, "two are inside at once");
        tokio::task::yield_now().await;
        self.inside.fetch_sub(1, Ordering::SeqCst);
        self.entered.fetch_add(1, Ordering::SeqCst);
    }
}

/// Waiters that contend for a lock.
struct Crowd {
    url: String,
    key: String,
    visits: Visits,
    tasks: tokio::task::JoinSet<()>,
}

impl Crowd {
    fn new(url: &str, key: &str) -> Self {
        let (tasks, visits) = (tokio::task::JoinSet::new(), Visits::default());
        Self { url: url.to_owned(), key: key.to_owned(), visits, tasks }
    }

    /// Adds a waiter of ours, with a store of its own, which takes the lock `rounds` times.
    fn add(&mut self, options: &str, rounds: u32) {
        let (key, visits) = (self.key.clone(), self.visits.clone());
        let client = client(&format!("{}{options}", self.url));
        self.tasks.spawn(async move {
            for _ in 0..rounds {
                let guard = client.lock(&key).ttl(LONG_TTL).acquire().await.unwrap();
                visits.visit().await;
                guard.release().await.unwrap();
            }
        });
    }

    /// Adds a waiter that knows SQL and nothing else.
    async fn add_stranger(&mut self, rounds: u32) {
        let (db, visits) = (stranger(&self.url).await, self.visits.clone());
        let sql = |call: &str| format!("SELECT pg_advisory_{call}({})", self.key);
        let (lock, unlock) = (sql("lock"), sql("unlock"));
        self.tasks.spawn(async move {
            for _ in 0..rounds {
                db.execute(&lock, &[]).await.unwrap();
                visits.visit().await;
                db.execute(&unlock, &[]).await.unwrap();
            }
        });
    }

    /// Waits until all have done their rounds. Returns their number.
    async fn ends(mut self) -> u32 {
        let all = async { while self.tasks.join_next().await.transpose().unwrap().is_some() {} };
        tokio::time::timeout(Duration::from_secs(120), all).await.expect("no waiter is forgotten");
        self.visits.entered.load(Ordering::SeqCst)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mixed_crowd_is_served() {
    let Some(server) = Server::start() else { return };
    for form in FORMS {
        let mut crowd = Crowd::new(&server.url(), &own_lock(form).0);
        for nth in 0..24 {
            let more = ["", "&queue=1", "&queue=2", "&wait=3ms"][nth % 4];
            crowd.add(&format!("?{form}{more}"), 20);
        }
        for _ in 0..3 {
            crowd.add_stranger(20).await;
        }
        assert_eq!(crowd.ends().await, 27 * 20, "{form}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn waiters_whose_sessions_are_ended_are_not_waited_for() {
    let Some(server) = Server::start() else { return };
    let (key, first, second) = pair();
    let mut crowd = Crowd::new(&server.url(), &key);
    (0..20).for_each(|_| crowd.add("", 15));
    let (db, over) = (stranger(&server.url()).await, Arc::new(AtomicBool::new(false)));
    let stop = Arc::clone(&over);
    // The sessions that wait for this lock, in the queue or standing by, but never a holder's.
    let sql = format!(
        "SELECT pg_terminate_backend(pid) FROM (SELECT pid FROM pg_locks WHERE locktype = 'advisory' EXCEPT \
         SELECT pid FROM pg_locks WHERE granted AND {}) AS waiting ORDER BY random() LIMIT 1",
        of_lock(first, second)
    );
    let ended = tokio::spawn(async move {
        let mut ended = 0;
        while !stop.load(Ordering::SeqCst) {
            ended += db.execute(&sql, &[]).await.unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        ended
    });
    assert_eq!(crowd.ends().await, 20 * 15);
    over.store(true, Ordering::SeqCst);
    assert!(ended.await.unwrap() > 10, "sessions were ended");
}

/// The election that leads under a token larger than `after`.
async fn leader(fleet: &[Election], after: Option<tenure::FencingToken>) -> tenure::FencingToken {
    let leads = || {
        let leading = fleet.iter().filter(|election| election.is_leader());
        leading.filter_map(Election::fencing_token).find(|token| Some(*token) > after)
    };
    until("the next leader", async || leads().is_some()).await;
    leads().or(after).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fleet_survives_the_end_of_any_of_its_sessions() {
    const FOLLOWERS: usize = 40;
    let Some(server) = Server::start() else { return };
    let (key, first, second) = pair();
    let (db, observer) = (stranger(&server.url()).await, client(&server.url()));
    let mut fleet = Vec::new();
    for _ in 0..=FOLLOWERS {
        fleet.push(client(&server.url()).election(&key).ttl(TTL * 2).start().await.unwrap());
    }
    let lock = of_lock(first, second);
    let held = format!("pid IN (SELECT pid FROM pg_locks WHERE granted AND {lock})");
    let queued = format!("pid IN (SELECT pid FROM pg_locks WHERE NOT granted AND {lock})");
    let in_reserve = format!("NOT {held} AND NOT {queued}");
    let mut last = leader(&fleet, None).await;
    for round in 0..12 {
        let all = format!("{held} OR {queued}");
        let faults = [
            &held,
            &format!(
                "{held} OR pid = (SELECT max(pid) FROM pg_locks WHERE NOT granted AND {lock})"
            ),
            &format!("{held} OR {in_reserve} AND random() < 0.5"),
            &all,
        ];
        until("a full queue", async || {
            let waiting = waiters(&observer, &key).await.len();
            let blocked = count(&db, &format!("pg_locks WHERE NOT granted AND {lock}")).await;
            waiting == FOLLOWERS && blocked <= 4 && blocked > 0
        })
        .await;
        let sql = format!(
            "SELECT pg_terminate_backend(pid) FROM (SELECT DISTINCT pid FROM pg_locks \
             WHERE locktype = 'advisory') AS fleet WHERE {}",
            faults[round % 4]
        );
        assert!(db.execute(&sql, &[]).await.unwrap() > 0, "{sql}");
        last = leader(&fleet, Some(last)).await;
    }
    for election in fleet {
        election.shutdown(None).await.unwrap();
    }
}

/// A waiter, by its id, and the process of its session.
struct NamedWaiter {
    task: tokio::task::JoinHandle<tenure::Guard>,
    pid: i32,
}

/// Waiters of a lock, in the order of their arrival. The first is in the queue, the others stand by.
async fn line_up(url: &str, key: &str, ids: &[&str]) -> Vec<NamedWaiter> {
    let mut line = Vec::new();
    extend_line(&mut line, url, key, ids).await;
    line
}

/// Adds waiters to the end of the line.
async fn extend_line(line: &mut Vec<NamedWaiter>, url: &str, key: &str, ids: &[&str]) {
    let (observer, db) = (client(url), stranger(url).await);
    for id in ids {
        let id = format!("{id} {key}");
        let waits = client(&format!("{url}?queue=1&{LONG_WAIT}"));
        let request = waits.lock(key).id(&id).ttl(LONG_TTL);
        let task = tokio::spawn(async move { request.acquire().await.unwrap() });
        until("a waiter", async || waiters(&observer, key).await.contains(&id)).await;
        let sql = "SELECT pid FROM pg_stat_activity WHERE application_name = $1";
        let pid = db.query_one(sql, &[&id]).await.unwrap().get(0);
        line.push(NamedWaiter { task, pid });
    }
}

/// Tickets of 400 reserves that are not there, held by one session, and newer than that of the reserve of process `pid`.
/// A reserve that finds so many polls every 100 s.
async fn absent_reserves(url: &str, pid: i32) -> tokio_postgres::Client {
    let db = stranger(url).await;
    let sql = "SELECT count(*) FILTER (WHERE pg_try_advisory_lock_shared( \
                   (classid::int8 << 32) | ((objid::int8 + 100000 + nth) & 4294967295))) \
               FROM pg_locks, generate_series(1, 400) AS nth \
               WHERE pid = $1 AND locktype = 'advisory' AND objsubid = 1";
    assert_eq!(db.query_one(sql, &[&pid]).await.unwrap().get::<_, i64>(0), 400);
    db
}

#[tokio::test(flavor = "multi_thread")]
async fn reserves_are_called_in_the_order_of_arrival() {
    let Some(url) = services::postgres() else { return };
    let (key, ..) = pair();
    let guard = client(&url).lock(&key).ttl(LONG_TTL).acquire().await.unwrap();
    let mut line = line_up(&url, &key, &["one", "two"]).await;
    let _absent = absent_reserves(&url, line[1].pid).await;
    // These poll so rarely that only a call can be in time.
    extend_line(&mut line, &url, &key, &["three", "four"]).await;
    let (db, mut connection) = tokio_postgres::connect(&url, NoTls).await.unwrap();
    let (sender, mut notifications) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Some(Ok(message)) = poll_fn(|context| connection.poll_message(context)).await {
            if let AsyncMessage::Notification(notification) = message {
                sender.send(notification.channel().to_owned()).unwrap();
            }
        }
    });
    let channel = |waiter: &NamedWaiter| format!("tenure_reserve_{}", waiter.pid);
    for waiter in &line {
        db.batch_execute(&format!("LISTEN {}", channel(waiter))).await.unwrap();
    }
    guard.release().await.unwrap();
    for (nth, waiter) in line.into_iter().enumerate() {
        if nth > 0 {
            // A poll may have repeated the call of another.
            let called = async { while notifications.recv().await.unwrap() != channel(&waiter) {} };
            tokio::time::timeout(Duration::from_secs(20), called).await.expect("a call");
        }
        let granted = tokio::time::timeout(Duration::from_secs(20), waiter.task).await;
        granted.expect("the lock, after a call").unwrap().release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reserve_that_does_not_react_holds_nothing_up() {
    let Some(url) = services::postgres() else { return };
    let (key, ..) = pair();
    let guard = client(&url).lock(&key).ttl(LONG_TTL).acquire().await.unwrap();
    let mut line = line_up(&url, &key, &["queued", "frozen", "last"]).await;
    // A session without a client takes over the ticket of the second.
    let frozen = stranger(&url).await;
    let sql = "SELECT pg_try_advisory_lock_shared(classid::int8 << 32 | objid::int8) FROM pg_locks \
               WHERE pid = $1 AND locktype = 'advisory' AND objsubid = 1";
    assert!(frozen.query_one(sql, &[&line[1].pid]).await.unwrap().get::<_, bool>(0));
    for gone in line.drain(..2) {
        gone.task.abort();
    }
    let blocked = format!("pg_locks WHERE pid = {} AND NOT granted", line[0].pid);
    until("the last in the queue", async || count(&frozen, &blocked).await == 1).await;
    guard.release().await.unwrap();
    let last = tokio::time::timeout(Duration::from_secs(60), line.remove(0).task).await;
    last.expect("the lock").unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_server_is_noticed_in_the_queue_and_in_reserve() {
    const WAIT_TTL: Duration = Duration::from_secs(4);
    let Some(url) = services::postgres() else { return };
    let (key, ..) = pair();
    let holder = client(&url).lock(&key).ttl(TTL).acquire().await.unwrap();
    let link = Link::to(&url).await;
    let mut noticed = Vec::new();
    for nth in 1..=2 {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let sender = std::sync::Mutex::new(Some(sender));
        let request = client(&format!("{}?queue=1", link.url)).lock(&key).ttl(WAIT_TTL);
        let request = request.on_outage(move |outage| {
            let sender = sender.lock().unwrap().take();
            if let (StoreOutage::Away { .. }, Some(sender)) = (outage, sender) {
                sender.send(Instant::now()).unwrap();
            }
        });
        noticed.push((tokio::spawn(request.acquire()), receiver));
        let direct = client(&url);
        until("a waiter", async || waiters(&direct, &key).await.len() == nth).await;
    }
    link.set(Mode::Silent);
    let begun = Instant::now();
    for (waiting, away) in noticed {
        let took = away.await.unwrap() - begun;
        // The outage of a store is reported up to two seconds after its first sign.
        assert!(took < WAIT_TTL + Duration::from_secs(3), "noticed after {took:?}");
        waiting.abort();
    }
    holder.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reserve_of_a_large_fleet_notices_that_the_server_is_cut_off() {
    let Some(url) = services::postgres() else { return };
    let Some(network) = Network::make("a reserve that is cut off") else { return };
    let (key, ..) = pair();
    let guard = client(&url).lock(&key).ttl(LONG_TTL).acquire().await.unwrap();
    let waiting = line_up(&url, &key, &["queued", "stands by"]).await;
    let _absent = absent_reserves(&url, waiting[1].pid).await;
    let link = Link::at(&network.address, &url).await;
    let worker = Worker::start_in(&network, &format!("{}?queue=1", link.url), "follow", &key);
    let observer = client(&url);
    until("it stands by", async || waiters(&observer, &key).await.len() == 403).await;
    network.set("down");
    let begun = Instant::now();
    worker.tells("error").await;
    // Keepalive counts whole seconds: 1 s of silence, and 3 probes.
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(4) + TTL, "{took:?}: {}", worker.told());
    guard.release().await.unwrap();
    for waiter in waiting {
        waiter.task.abort();
    }
}
