//! Requests of processes that are still connected to a former primary, which is up.

use std::time::Duration;

use tenure::jobs::{CheckpointClaim, Checkpoints, NewJob, Options, Queue, Schema as JobSchema};
use tenure::{Client, ErrorKind};

use crate::link::{Link, Mode};
use crate::primaries::{caught_up, listing, sessions};
use crate::server::Server;
use crate::support::{Schema, TTL, until, with_schema};

/// Longer than the roles of the servers are relied on.
const ROLES_ARE_OLD: Duration = Duration::from_millis(1_200);

/// Names of a table of jobs and one of checkpoints, which are made here.
async fn tables(server: &Server, schema: &Schema) -> (String, String) {
    let (jobs, chunks) = (format!("{}.jobs", schema.name), format!("{}.chunks", schema.name));
    for table in [JobSchema::of_queue(&jobs), JobSchema::of_checkpoints(&chunks)] {
        table.unwrap().apply(&server.url()).await.unwrap();
    }
    (jobs, chunks)
}

#[test]
fn claims_that_an_old_primary_granted_are_withdrawn_there() {
    let Some(first) = Server::start() else { return };
    with_schema(&first.url(), async move |schema| {
        let (jobs, chunks) = tables(&first, &schema).await;
        let second = first.standby();
        let url = listing(&[&first, &second]);
        let lease = Options::default().lease(Duration::from_secs(60));
        let queue = Queue::connect_with(&url, &jobs, lease).await.unwrap();
        queue.enqueue(NewJob::json("1").unwrap()).await.unwrap();
        let checkpoints = Checkpoints::connect_with(&url, &chunks, lease).await.unwrap();
        caught_up(&first, &second).await;
        second.promote();

        // Both have an idle connection to the old primary, which grants.
        let refused = queue.claim().await.expect_err("an old primary granted it");
        assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused:?}");
        let refused = checkpoints.claim("matrix", "chunk").await.expect_err("an old primary");
        assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused:?}");
        for table in [&jobs, &chunks] {
            let free = format!("SELECT locked_by IS NULL FROM {table}");
            assert_eq!(first.sql(&free), "t", "{table}: nothing is left at the old primary");
        }
        assert_eq!(first.sql(&format!("SELECT attempts FROM {jobs}")), "0");
        queue.claim().await.unwrap().expect("free at the new primary").complete().await.unwrap();
        let claimed = checkpoints.claim("matrix", "chunk").await.unwrap();
        assert!(matches!(claimed, CheckpointClaim::Granted(_)), "{claimed:?}");
        drop((first, second));
    });
}

#[test]
fn jobs_are_enqueued_at_the_new_primary() {
    let Some(first) = Server::start() else { return };
    with_schema(&first.url(), async move |schema| {
        let (jobs, _) = tables(&first, &schema).await;
        let second = first.standby();
        let queue = Queue::connect(&listing(&[&first, &second]), &jobs).await.unwrap();
        queue.enqueue(NewJob::json("1").unwrap()).await.unwrap();
        caught_up(&first, &second).await;
        second.promote();
        tokio::time::sleep(ROLES_ARE_OLD).await;
        queue.enqueue(NewJob::json("2").unwrap()).await.unwrap();
        let count = format!("SELECT count(*) FROM {jobs}");
        assert_eq!((first.sql(&count), second.sql(&count)), ("1".to_owned(), "2".to_owned()));
        drop((first, second));
    });
}

#[test]
fn a_process_runs_a_job_once_though_the_new_primary_has_not_heard_of_its_claim() {
    let Some(first) = Server::start() else { return };
    with_schema(&first.url(), async move |schema| {
        let (jobs, chunks) = tables(&first, &schema).await;
        let second = first.standby();
        let url = listing(&[&first, &second]);
        let lease = Options::default().lease(Duration::from_secs(60));
        let queue = Queue::connect_with(&url, &jobs, lease).await.unwrap();
        let checkpoints = Checkpoints::connect_with(&url, &chunks, lease).await.unwrap();
        queue.enqueue(NewJob::json("1").unwrap()).await.unwrap();
        caught_up(&first, &second).await;
        // The link between the servers is cut, then the claims are made.
        second.sql("ALTER SYSTEM SET primary_conninfo = ''");
        second.sql("SELECT pg_reload_conf()");
        let receiving = "SELECT count(*) FROM pg_stat_wal_receiver";
        until("no replication", async || second.sql(receiving) == "0").await;
        let job = queue.claim().await.unwrap().expect("a job");
        let CheckpointClaim::Granted(chunk) = checkpoints.claim("matrix", "chunk").await.unwrap()
        else {
            panic!("it is free")
        };
        second.promote();
        tokio::time::sleep(ROLES_ARE_OLD).await;
        queue.enqueue(NewJob::json("2").unwrap()).await.unwrap();

        let claimed = queue.claim_many(2).await.unwrap();
        let ids: Vec<&str> = claimed.iter().map(|job| job.id()).collect();
        assert_eq!(ids.len(), 1, "{ids:?}");
        assert_ne!(ids[0], job.id(), "this process still runs it");
        // The next connection of the checkpoints leads to the new primary.
        first.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()",
        );
        until("a claim at the new primary", async || {
            match checkpoints.claim("matrix", "chunk").await {
                Ok(claimed) => {
                    assert!(
                        matches!(claimed, CheckpointClaim::Held { .. }),
                        "this process works on it"
                    );
                    false
                }
                Err(error) => error.to_string().contains("this process still holds the chunk"),
            }
        })
        .await;
        drop((job, chunk, claimed));
        drop((first, second));
    });
}

/// The other listed server does not answer, so each renewal waits for it. Meanwhile the session of the lock is ended,
/// and the next holder is granted.
#[test]
fn the_end_of_a_session_is_noticed_while_another_server_is_asked() {
    let Some(server) = Server::start() else { return };
    with_schema(&server.url(), async move |_| {
        let link = Link::to(&server.url()).await;
        link.set(Mode::Silent);
        let silent = link.url.rsplit_once(':').unwrap().1.split_once('/').unwrap().0;
        let url =
            format!("postgres://postgres@127.0.0.1:{},127.0.0.1:{silent}/postgres", server.port);
        let (one, two): (Client, Client) = (sessions(&url), sessions(&server.url()));
        for nth in 0..12 {
            let guard = one.lock("key").ttl(TTL).acquire().await.unwrap();
            let waiting = two.lock("key").ttl(TTL).enqueue().await.unwrap();
            until("a waiter", async || two.inspect("key").await.unwrap().waiters.len() == 1).await;
            // At another moment of the renewal interval each time.
            tokio::time::sleep(TTL / 36 * nth).await;
            assert!(guard.is_held(), "round {nth}: {guard:?}");
            server.sql(
                "SELECT pg_terminate_backend(pid) FROM pg_locks \
                 WHERE locktype = 'advisory' AND granted AND objsubid = 2",
            );
            let next = waiting.wait().await.unwrap();
            assert!(!guard.is_held(), "round {nth}: two hold the lock");
            next.release().await.unwrap();
        }
    });
}
