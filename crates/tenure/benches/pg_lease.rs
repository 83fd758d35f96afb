//! What lease rows of PostgreSQL cost: `cargo xtask bench postgres-lease`.
//!
//! - Pairs of acquire and release, each task on a lock of its own, against the same two statements sent by `pgbench`
//!   over as many connections, in turns.
//! - From a release to the next holder, with PgBouncer in transaction mode between both and the server, and without.
//! - A thousand holds of one process: its connections, and its renewals per interval.

#![expect(clippy::unwrap_used, reason = "a benchmark that cannot go on may panic")]

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tenure::{Client, PgLeaseStore};
use tokio_postgres::NoTls;

const TASKS: usize = 4;
const ROUNDS: usize = 5;
const ROUND: Duration = Duration::from_secs(3);
const HANDOFFS: usize = 200;
const HOLDS: usize = 1_000;
const HOLD_TTL: Duration = Duration::from_secs(6);

fn main() {
    // `cargo test` and `cargo bench` without the servers: nothing to measure.
    let (Ok(direct), Ok(pooled)) =
        (std::env::var("TENURE_TEST_POSTGRES"), std::env::var("TENURE_TEST_PGBOUNCER"))
    else {
        return println!("no servers: run `cargo xtask bench postgres-lease`");
    };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.unwrap().block_on(async {
        let table = "table=tenure_bench.locks";
        let (direct, pooled) = (format!("{direct}?{table}"), format!("{pooled}?{table}"));
        PgLeaseStore::open(&direct).unwrap().apply_schema().await.unwrap();
        pairs(&direct).await;
        for (url, how) in [(&pooled, "through PgBouncer (transaction mode)"), (&direct, "direct")] {
            hand_off(url, how).await;
        }
        crowd(&direct).await;
    });
}

async fn pairs(url: &str) {
    println!("pairs of acquire and release per second, {TASKS} at a time on {TASKS} connections");
    let script = script(url).await;
    // The rows that pgbench updates.
    let client = Client::connect(url).await.unwrap();
    for nth in 0..TASKS {
        let guard = client.lock(format!("client {nth}")).acquire().await.unwrap();
        guard.release().await.unwrap();
    }
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let pgbench = tokio::task::spawn_blocking({
            let (url, script) = (url.to_owned(), script.clone());
            move || pgbench(&url, &script)
        });
        theirs.push(pgbench.await.unwrap());
        ours.push(through_the_store(url).await);
        println!("  round {}: pgbench {:.0}, tenure {:.0}", round + 1, theirs[round], ours[round]);
    }
    std::fs::remove_file(script).unwrap();
    let (ours, theirs) = (median(&mut ours), median(&mut theirs));
    println!("  medians: pgbench {theirs:.0}, tenure {ours:.0}, ratio {:.2}\n", ours / theirs);
}

async fn through_the_store(url: &str) -> f64 {
    let client = Client::connect(url).await.unwrap();
    let end = Instant::now() + ROUND;
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..TASKS {
        let client = client.clone();
        tasks.spawn(async move {
            let (key, mut pairs) = (format!("task {task}"), 0_u32);
            while Instant::now() < end {
                let guard = client.lock(&key).acquire().await.unwrap();
                guard.release().await.unwrap();
                pairs += 1;
            }
            f64::from(pairs)
        });
    }
    let pairs: f64 = tasks.join_all().await.into_iter().sum();
    pairs / ROUND.as_secs_f64()
}

/// The variables of the script: what pgbench sends as parameters, as we do.
const VARIABLES: [(&str, &str); 9] = [
    ("claim", "\\x01"),
    ("secret", "\\x02"),
    ("ttl", "15000000"),
    ("id", "bench"),
    ("host", "host"),
    ("pid", "1"),
    ("note", "-"),
    ("zero", "0"),
    ("far", "2305843009213693951"),
];

/// The two statements as a script of pgbench: the same text, with its variables and their types for the parameters.
async fn script(url: &str) -> PathBuf {
    let store = PgLeaseStore::open(url).unwrap();
    let [claim, release] = store.statements().await.unwrap();
    let key = ("'client ' || :client_id", "text");
    let far = (":far", "int8");
    let values = [
        key,
        (":claim", "bytea"),
        (":secret", "bytea"),
        (":ttl", "int8"),
        (":id", "text"),
        (":host", "text"),
        (":pid", "int8"),
        (":note", "text"),
        (":zero", "int8"),
        far,
        far,
        far,
        (":zero", "int8"),
    ];
    let claim = with_values(&claim, &values);
    let values = [(":zero", "int2"), key, (":won_number", "int8"), (":secret", "bytea")];
    let release = with_values(&release, &values);
    let path = std::env::temp_dir().join(format!("tenure-pgbench-{}.sql", std::process::id()));
    let text = format!("{claim} \\gset won_\n{release};\n");
    std::fs::write(&path, text).unwrap();
    path
}

fn with_values(sql: &str, values: &[(&str, &str)]) -> String {
    let mut sql = sql.to_owned();
    // From the last: `$1` is also the beginning of `$13`.
    for (at, (value, kind)) in values.iter().enumerate().rev() {
        sql = sql.replace(&format!("${}", at + 1), &format!("({value})::{kind}"));
    }
    sql
}

fn pgbench(url: &str, script: &PathBuf) -> f64 {
    let programs = PathBuf::from(std::env::var_os("TENURE_TEST_POSTGRES_BIN").unwrap());
    let (server, _) = url.split_once('?').unwrap();
    let mut pgbench = Command::new(programs.join("pgbench"));
    pgbench.args(["--no-vacuum", "--protocol=extended", "--jobs=1"]);
    pgbench.args([&format!("--client={TASKS}"), &format!("--time={}", ROUND.as_secs())]);
    for (name, value) in VARIABLES {
        pgbench.args(["--define", &format!("{name}={value}")]);
    }
    let output = pgbench.arg("--file").arg(script).arg(server).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let failed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}{failed}");
    let rate = text.lines().find_map(|line| line.strip_prefix("tps = "));
    let rate = rate.and_then(|rest| rest.split(' ').next()?.parse().ok());
    rate.unwrap_or_else(|| panic!("{text}{failed}"))
}

async fn hand_off(url: &str, how: &str) {
    let clients = [Client::connect(url).await.unwrap(), Client::connect(url).await.unwrap()];
    let mut took = Vec::new();
    let mut guard = clients[0].lock("hand-off").acquire().await.unwrap();
    for round in 0..HANDOFFS {
        let next = &clients[(round + 1) % 2];
        let waiting = tokio::spawn(next.lock("hand-off").acquire());
        // At no fixed distance from the waiter's own looks.
        let held = 20 + u64::from(getrandom::u32().unwrap() % 100);
        tokio::time::sleep(Duration::from_millis(held)).await;
        let begun = Instant::now();
        guard.release().await.unwrap();
        guard = waiting.await.unwrap().unwrap();
        took.push(begun.elapsed().as_secs_f64() * 1e3);
    }
    guard.release().await.unwrap();
    took.sort_by(f64::total_cmp);
    let at = |share: usize| took[(took.len() * share / 100).min(took.len() - 1)];
    println!(
        "hand-off {how}: p50 {:.1} ms, p90 {:.1} ms, p99 {:.1} ms ({HANDOFFS})",
        at(50),
        at(90),
        at(99)
    );
}

async fn crowd(url: &str) {
    let (server, _) = url.split_once('?').unwrap();
    let (db, connection) = tokio_postgres::connect(server, NoTls).await.unwrap();
    tokio::spawn(connection);
    let count = "CREATE TABLE tenure_bench.updates (n serial);
         CREATE FUNCTION tenure_bench.note() RETURNS trigger LANGUAGE plpgsql AS
             'BEGIN INSERT INTO tenure_bench.updates DEFAULT VALUES; RETURN NULL; END';
         CREATE TRIGGER note AFTER UPDATE ON tenure_bench.locks
             FOR EACH STATEMENT EXECUTE FUNCTION tenure_bench.note();";
    let client = Client::connect(&format!("{url}&application_name=crowd")).await.unwrap();
    let mut guards = Vec::new();
    for nth in 0..HOLDS {
        guards.push(client.lock(format!("crowd {nth}")).ttl(HOLD_TTL).acquire().await.unwrap());
        if nth % 200 == 0 {
            tokio::time::sleep(HOLD_TTL / 15).await;
        }
    }
    db.batch_execute(count).await.unwrap();
    tokio::time::sleep(HOLD_TTL * 2).await;
    let updates = "SELECT count(*) FROM tenure_bench.updates";
    let updates: i64 = db.query_one(updates, &[]).await.unwrap().get(0);
    let connections = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'crowd'";
    let connections: i64 = db.query_one(connections, &[]).await.unwrap().get(0);
    let lost = guards.iter().filter(|guard| !guard.is_held()).count();
    println!(
        "\n{HOLDS} holds of one process: {connections} connections, {updates} renewals in 6 intervals, {lost} lost"
    );
    drop(guards);
    let client = Arc::new(client);
    client.idle().await;
}

fn median(figures: &mut [f64]) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}
