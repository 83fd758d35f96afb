//! Prepared statements that the server has forgotten, or has under our names: as behind a pooler that shares sessions.

use tenure::jobs::{Options, Queue};

use crate::services;
use crate::support::{Scene, job, with_scene, work_off};

/// Records how many statements the driver has prepared in the session, before each insert. A payload of 0 makes the
/// session forget its statements, a payload of 1 takes the names of the next ones.
const SESSION: &str = "
    CREATE TABLE seen (nth bigserial, prepared bigint);
    CREATE FUNCTION shared_session() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
    BEGIN
        INSERT INTO seen (prepared) SELECT count(*) FROM pg_prepared_statements WHERE NOT from_sql;
        IF NEW.payload = '0' THEN
            EXECUTE 'DEALLOCATE ALL';
        ELSIF NEW.payload = '1' THEN
            FOR nth IN 0..3000 LOOP
                BEGIN
                    EXECUTE format('PREPARE s%s AS SELECT 1', nth);
                EXCEPTION WHEN duplicate_prepared_statement THEN NULL;
                END;
            END LOOP;
        END IF;
        RETURN NEW;
    END $$;
    CREATE TRIGGER shared_session BEFORE INSERT ON sync_jobs FOR EACH ROW EXECUTE FUNCTION shared_session()";

async fn last_seen(db: &tokio_postgres::Client) -> i64 {
    let sql = "SELECT prepared FROM seen ORDER BY nth DESC LIMIT 1";
    db.query_one(sql, &[]).await.unwrap().get("prepared")
}

async fn one_session(scene: &Scene) -> (Queue, tokio_postgres::Client) {
    let db = scene.connect().await;
    db.batch_execute(SESSION).await.unwrap();
    let queue = scene.queue_with(Options::default().connections(1)).await;
    for _ in 0..2 {
        queue.enqueue(job("7")).await.unwrap();
    }
    assert!(last_seen(&db).await > 0, "statements are prepared on a direct connection");
    (queue, db)
}

#[test]
fn nothing_is_prepared_after_the_server_forgot_a_statement() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let (queue, db) = one_session(&scene).await;
        queue.enqueue(job("0")).await.unwrap();
        // The statement that enqueues is gone: no caller hears of it.
        queue.enqueue(job("7")).await.unwrap();
        assert_eq!(work_off(&queue).await.completed, 4);
        queue.enqueue(job("7")).await.unwrap();
        assert_eq!(last_seen(&db).await, 0, "nothing was prepared since");
    });
}

#[test]
fn nothing_is_prepared_after_a_name_was_taken() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let (queue, db) = one_session(&scene).await;
        queue.enqueue(job("1")).await.unwrap();
        assert_eq!(work_off(&queue).await.completed, 3, "by statements that were not prepared yet");
        queue.enqueue(job("0")).await.unwrap();
        queue.enqueue(job("7")).await.unwrap();
        assert_eq!(last_seen(&db).await, 0, "nothing was prepared since");
    });
}

/// In transaction mode, a session that does not know the statement is an error that no caller hears of.
#[test]
fn statements_prepared_through_a_pooler_fail_no_request() {
    let Some(url) = services::pgbouncer() else { return };
    with_scene(&url, async |scene| {
        let join = if scene.url.contains('?') { '&' } else { '?' };
        let url = format!("{}{join}prepare=on", scene.url);
        // Open transactions of others make the pooler use several sessions.
        let mut busy = Vec::new();
        for _ in 0..3 {
            let db = scene.connect().await;
            db.batch_execute("BEGIN; SELECT 1").await.unwrap();
            busy.push(db);
        }
        let queues = [
            Queue::connect(&url, &scene.table()).await.unwrap(),
            Queue::connect(&url, &scene.table()).await.unwrap(),
        ];
        for round in 0..20 {
            let queue = &queues[round % 2];
            queue.enqueue(job("7")).await.unwrap();
            if let Some(db) = busy.pop() {
                db.batch_execute("COMMIT").await.unwrap();
            }
        }
        let [first, second] = &queues;
        let (first, second) = tokio::join!(work_off(first), work_off(second));
        assert_eq!(first.completed + second.completed, 20, "{first:?} {second:?}");
    });
}
