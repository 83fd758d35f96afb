//! A thousand running jobs: few statements, and updates that touch no index.

use std::time::{Duration, Instant};

use tenure::jobs::Options;

use crate::services;
use crate::support::{Scene, fill, with_scene};

const JOBS: usize = 1_000;
const LEASE: Duration = Duration::from_secs(10);
const INTERVALS: u32 = 4;

#[test]
fn a_thousand_running_jobs_heartbeat_in_a_few_statements_most_of_which_touch_no_index() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let db = scene.connect().await;
        db.batch_execute(COUNT).await.unwrap();
        let queue = scene.queue_with(Options::default().lease(LEASE)).await;
        fill(&queue, JOBS).await;
        // By and by, over an interval: nothing makes them due together.
        let mut guards = Vec::new();
        while guards.len() < JOBS {
            guards.extend(queue.claim_many(50).await.unwrap());
            tokio::time::sleep(LEASE / 5 / 20).await;
        }
        let (before, begun) = (figures(&db, &scene).await.0, Instant::now());
        tokio::time::sleep(LEASE / 5 * INTERVALS).await;
        let intervals = begun.elapsed().as_secs_f64() / (LEASE / 5).as_secs_f64();
        let statements = figures(&db, &scene).await.0 - before;
        let held = guards.iter().filter(|guard| guard.is_held()).count();
        assert_eq!(held, JOBS, "none was lost");
        #[expect(clippy::cast_precision_loss, reason = "a few")]
        let per_interval = statements as f64 / intervals;
        // The server's figures come late. A claim moves its row to another index: the rest are heartbeats.
        let (mut heartbeats, mut hot, late) = (0, 0, Instant::now());
        while heartbeats < 3_000 && late.elapsed() < Duration::from_secs(30) {
            tokio::time::sleep(Duration::from_millis(200)).await;
            let (_, updates, touched_none) = figures(&db, &scene).await;
            (heartbeats, hot) = (updates - 1_000, touched_none);
        }
        println!(
            "{per_interval:.1} statements an interval; {hot} of {heartbeats} heartbeats were HOT"
        );
        assert!(per_interval <= 10.0, "{per_interval} statements an interval");
        assert!(heartbeats >= 3_000, "{heartbeats} heartbeats");
        assert!(hot * 100 >= heartbeats * 70, "{hot} of {heartbeats} were HOT");
        assert!(queue.complete_many(guards).await.unwrap().is_empty());
    });
}

/// Counts statements that update.
const COUNT: &str = "
    CREATE TABLE updates (n serial);
    CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS
        $$BEGIN EXECUTE format('INSERT INTO %I.updates DEFAULT VALUES', TG_TABLE_SCHEMA); RETURN NULL; END$$;
    CREATE TRIGGER note AFTER UPDATE OF locked_until ON sync_jobs FOR EACH STATEMENT EXECUTE FUNCTION note();";

/// Statements, updated rows, and those of them that touched no index.
async fn figures(db: &tokio_postgres::Client, scene: &Scene) -> (i64, i64, i64) {
    let sql = "SELECT (SELECT count(*) FROM updates), n_tup_upd, n_tup_hot_upd
               FROM pg_stat_user_tables WHERE schemaname = $1 AND relname = 'sync_jobs'";
    let row = db.query_one(sql, &[&&*scene.schema]).await.unwrap();
    (row.get(0), row.get(1), row.get(2))
}
