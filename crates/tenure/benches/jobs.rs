//! What jobs in rows of PostgreSQL cost: `cargo xtask bench jobs`.
//!
//! Claim and completion, one by one and in batches of a hundred, by eight workers, against `pgbench` with as many
//! connections: one by one against the plain SQL of the field, on a table of its own that has the index which that needs
//! and on ours, in batches against the same statements. In turns, on tables without and with a million completed rows.

#![expect(clippy::unwrap_used, reason = "a benchmark that cannot go on may panic")]

use std::fmt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use tenure::jobs::{Options, Queue, Schema};
use tokio_postgres::NoTls;

const WORKERS: usize = 8;
const JOBS: u32 = 100_000;
const BATCH: usize = 100;
const LEVELS: [u32; 2] = [0, 1_000_000];
const ROUNDS: usize = 5;
const SINGLE: u32 = 5_000;
const BATCHED: u32 = 100;

fn main() {
    // `cargo test` and `cargo bench` without the servers: nothing to measure.
    let Ok(url) = std::env::var("TENURE_TEST_POSTGRES") else {
        return println!("no servers: run `cargo xtask bench jobs`");
    };
    // One thread: what is waited for is the server.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.unwrap().block_on(async {
        println!("claim and completion of jobs, {WORKERS} workers, {JOBS} jobs; jobs per second");
        let mut levels = Vec::new();
        for (nth, completed) in LEVELS.into_iter().enumerate() {
            let medians = level(&url, &format!("tenure_bench_jobs_{nth}"), completed).await;
            println!("{completed} completed rows, medians: {medians}");
            println!("  {}", medians.ratios());
            levels.push(medians);
        }
        let fall = |of: fn(&Rates) -> f64| 100.0 * (1.0 - of(&levels[1]) / of(&levels[0]));
        println!(
            "from 0 to a million completed rows: one by one falls by {:.0} %, apart by {:.0} %, batches by {:.0} %",
            fall(|rates| rates.single),
            fall(|rates| rates.apart),
            fall(|rates| rates.batched)
        );
    });
}

/// Jobs per second.
#[derive(Clone, Copy)]
struct Rates {
    /// `pgbench` with the plain SQL, on a table that has no more than the index which that needs.
    plain: f64,
    /// The same on our table, as plain workers beside ours have it.
    shared: f64,
    /// Ours one by one, by workers of one process.
    single: f64,
    /// Ours one by one, where every worker has a queue and a connection of its own, as processes have.
    apart: f64,
    /// `pgbench` with our statements in batches.
    theirs: f64,
    /// Ours in batches.
    batched: f64,
}

impl Rates {
    fn median(rounds: &[Self]) -> Self {
        let of = |figure: fn(&Self) -> f64| {
            let mut figures: Vec<f64> = rounds.iter().map(figure).collect();
            figures.sort_by(f64::total_cmp);
            figures[figures.len() / 2]
        };
        Self {
            plain: of(|rates| rates.plain),
            shared: of(|rates| rates.shared),
            single: of(|rates| rates.single),
            apart: of(|rates| rates.apart),
            theirs: of(|rates| rates.theirs),
            batched: of(|rates| rates.batched),
        }
    }

    fn ratios(&self) -> String {
        let Self { plain, shared, single, apart, theirs, batched } = *self;
        format!(
            "one by one to plain SQL {:.2}, on our table {:.2}; apart {:.2}, on our table {:.2}; batches to pgbench's {:.2}, \
             to one by one {:.1}, to apart {:.1}",
            single / plain,
            single / shared,
            apart / plain,
            apart / shared,
            batched / theirs,
            batched / single,
            batched / apart
        )
    }
}

impl fmt::Display for Rates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { plain, shared, single, apart, theirs, batched } = self;
        write!(
            f,
            "pgbench plain {plain:.0}, on our table {shared:.0}; tenure {single:.0}, apart {apart:.0}; \
             pgbench batches {theirs:.0}, tenure batches {batched:.0}"
        )
    }
}

async fn level(url: &str, schema: &str, completed: u32) -> Rates {
    let (db, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(connection);
    let table = format!("{schema}.jobs");
    Schema::of_queue(&table).unwrap().apply(url).await.unwrap();
    db.batch_execute(&format!(
        "CREATE TABLE {schema}.plain (id bigserial PRIMARY KEY, priority int NOT NULL DEFAULT 0,
             created_at timestamptz NOT NULL DEFAULT clock_timestamp(), completed_at timestamptz, failed_at timestamptz,
             error_message text, locked_until timestamptz, locked_by text, payload jsonb);
         CREATE INDEX ON {schema}.plain (priority DESC, created_at) WHERE completed_at IS NULL AND failed_at IS NULL;
         INSERT INTO {schema}.plain (completed_at, payload) SELECT now(), '{{}}' FROM generate_series(1, {completed});
         INSERT INTO {schema}.jobs (completed_at, payload) SELECT now(), '{{}}' FROM generate_series(1, {completed});"
    ))
    .await
    .unwrap();
    let queue = Queue::connect_with(url, &table, Options::default().connections(WORKERS)).await;
    let together = vec![queue.unwrap(); WORKERS];
    let mut apart = Vec::new();
    for _ in 0..WORKERS {
        let options = Options::default().connections(1);
        apart.push(Queue::connect_with(url, &table, options).await.unwrap());
    }
    let scripts = [
        plain_script(schema, "plain"),
        plain_script(schema, "jobs"),
        batch_script(&together[0]).await,
    ];
    let mut rounds = Vec::new();
    for round in 1..=ROUNDS {
        refill(&db, schema).await;
        let plain = pgbench(url, &scripts[0], SINGLE).await;
        let single = ours(&together, SINGLE, 1).await;
        refill(&db, schema).await;
        let shared = pgbench(url, &scripts[1], SINGLE).await;
        refill(&db, schema).await;
        let apart = ours(&apart, SINGLE, 1).await;
        refill(&db, schema).await;
        #[expect(clippy::cast_precision_loss, reason = "a hundred")]
        let theirs = pgbench(url, &scripts[2], BATCHED).await * BATCH as f64;
        refill(&db, schema).await;
        let batched = ours(&together, BATCHED, BATCH).await;
        let rates = Rates { plain, shared, single, apart, theirs, batched };
        println!("  {completed} completed, round {round}: {rates}");
        rounds.push(rates);
    }
    for script in scripts {
        std::fs::remove_file(script).unwrap();
    }
    Rates::median(&rounds)
}

/// As many jobs to be claimed as in the beginning, in both tables, and statistics that say so.
async fn refill(db: &tokio_postgres::Client, schema: &str) {
    for table in ["jobs", "plain"] {
        let name = format!("{schema}.{table}");
        let open = format!("SELECT count(*) FROM {name} WHERE completed_at IS NULL");
        let open: i64 = db.query_one(&open, &[]).await.unwrap().get(0);
        let missing = i64::from(JOBS) - open;
        let fill = format!(
            "INSERT INTO {name} (payload) SELECT '{{\"n\": 1}}' FROM generate_series(1, {missing}); \
             DELETE FROM {name} WHERE id IN (SELECT id FROM {name} WHERE completed_at > now() - interval '1 hour' \
                 AND payload <> '{{}}');"
        );
        db.batch_execute(&fill).await.unwrap();
        db.batch_execute(&format!("VACUUM ANALYZE {name}")).await.unwrap();
    }
}

async fn ours(queues: &[Queue], count: u32, batch: usize) -> f64 {
    let begun = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for queue in queues {
        let queue = queue.clone();
        tasks.spawn(async move {
            let mut done = 0_u32;
            for _ in 0..count {
                if batch == 1 {
                    let job = queue.claim().await.unwrap().expect("there are more");
                    job.complete().await.unwrap();
                    done += 1;
                } else {
                    let jobs = queue.claim_many(batch).await.unwrap();
                    done += u32::try_from(jobs.len()).unwrap();
                    assert!(queue.complete_many(jobs).await.unwrap().is_empty());
                }
            }
            f64::from(done)
        });
    }
    let done: f64 = tasks.join_all().await.into_iter().sum();
    done / begun.elapsed().as_secs_f64()
}

fn plain_script(schema: &str, table: &str) -> PathBuf {
    let table = format!("{schema}.{table}");
    write(
        &table,
        &format!(
            "UPDATE {table} SET locked_until = NOW() + INTERVAL '5 minutes', locked_by = 'worker ' || :client_id \
             WHERE id = (SELECT id FROM {table} WHERE completed_at IS NULL AND failed_at IS NULL \
             AND (locked_until IS NULL OR locked_until <= NOW()) ORDER BY priority DESC, created_at ASC \
             FOR UPDATE SKIP LOCKED LIMIT 1) RETURNING id, payload \\gset\n\
             UPDATE {table} SET completed_at = NOW(), locked_until = NULL, locked_by = NULL WHERE id = :id;\n"
        ),
    )
}

/// Our own statements, with pgbench's variables for their parameters; what was claimed comes back as two arrays.
async fn batch_script(queue: &Queue) -> PathBuf {
    let [claim, _, complete] = queue.statements().await.unwrap();
    let worker = "('bench ' || :client_id)";
    let claim = claim
        .replace("$1", worker)
        .replace("$2::int8", "300000000::int8")
        .replace("$3::int8", &format!("{BATCH}::int8"));
    let complete = complete
        .replace("$1", "(:claimed_ids)")
        .replace("$2", "(:claimed_tokens)")
        .replace("$3", worker);
    let text = format!(
        "WITH claimed (now, id, token, attempts, most, priority, created, payload, timeline) AS ({claim}) \
         SELECT array_agg(id) AS ids, array_agg(token) AS tokens, max(length(payload)) AS payload FROM claimed \
         \\gset claimed_\n\
         WITH done (now, id) AS ({complete}) SELECT count(id) AS completed FROM done \\gset\n"
    );
    write("batches", &text)
}

fn write(name: &str, text: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("tenure-pgbench-{}-{name}", std::process::id()));
    std::fs::write(&path, text).unwrap();
    path
}

/// Transactions of the script per second, with statements that are prepared once.
async fn pgbench(url: &str, script: &PathBuf, count: u32) -> f64 {
    let programs = PathBuf::from(std::env::var_os("TENURE_TEST_POSTGRES_BIN").unwrap());
    let mut pgbench = Command::new(programs.join("pgbench"));
    pgbench.args(["--no-vacuum", "--protocol=prepared", "--jobs=2"]);
    pgbench.args([&format!("--client={WORKERS}"), &format!("--transactions={count}")]);
    pgbench.arg("--file").arg(script).arg(url);
    let output = tokio::task::spawn_blocking(move || pgbench.output().unwrap()).await.unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let failed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}{failed}");
    let rate = text.lines().find_map(|line| line.strip_prefix("tps = "));
    let rate = rate.and_then(|rest| rest.split(' ').next()?.parse().ok());
    rate.unwrap_or_else(|| panic!("{text}{failed}"))
}
