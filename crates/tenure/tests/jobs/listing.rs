//! Lists of jobs, the newest first.

use tenure::jobs::{JobState, Queue};

use crate::services;
use crate::support::{fill, job, with_scene};

/// All ids of the list, read in pages of `limit`.
async fn pages(queue: &Queue, state: Option<JobState>, limit: usize) -> Vec<String> {
    let mut ids: Vec<String> = Vec::new();
    loop {
        let page = queue.list(state, ids.last().map(String::as_str), limit).await.unwrap();
        if page.is_empty() {
            return ids;
        }
        assert!(page.len() <= limit);
        ids.extend(page.into_iter().map(|job| job.id));
    }
}

#[test]
fn jobs_are_listed_newest_first_and_in_pages() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let queue = scene.queue().await;
        // Of two digits and one: the order of numbers is not that of texts.
        let mut ids = fill(&queue, 12).await;
        ids.reverse();
        assert_eq!(pages(&queue, None, 5).await, ids);
        let last = queue.claim().await.unwrap().unwrap();
        last.complete().await.unwrap();
        assert_eq!(pages(&queue, Some(JobState::Available), 4).await, ids[..11]);
        assert_eq!(pages(&queue, Some(JobState::Completed), 4).await, ids[11..]);
    });
}

#[test]
fn random_ids_are_listed_by_time_if_an_index_has_it_and_by_id_otherwise() {
    let Some(url) = services::postgres() else { return };
    with_scene(&url, async |scene| {
        let db = scene.connect().await;
        let uuid = "ALTER TABLE sync_jobs ALTER id DROP IDENTITY;
            ALTER TABLE sync_jobs ALTER id TYPE uuid USING gen_random_uuid()";
        db.batch_execute(uuid).await.unwrap();
        let queue = scene.queue().await;
        let mut ids: Vec<String> = Vec::new();
        for nth in 0..10 {
            ids.push(queue.enqueue(job(&nth.to_string())).await.unwrap().id);
        }
        ids.reverse();
        let mut by_id = ids.clone();
        by_id.sort_by(|a, b| b.cmp(a));
        assert_eq!(pages(&queue, None, 3).await, by_id);
        db.batch_execute("CREATE INDEX ON sync_jobs (created_at)").await.unwrap();
        assert_eq!(pages(&queue, None, 3).await, ids);
        // A job without a time would be on no page.
        db.batch_execute("ALTER TABLE sync_jobs ALTER created_at DROP NOT NULL").await.unwrap();
        assert_eq!(pages(&queue, None, 3).await, by_id);
    });
}
