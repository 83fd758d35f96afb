//! Other stores on the status page. The program that starts the server implements [`WatchedStore`]; this module decides
//! when a store is inspected: only while a page shows it, one inspection at a time, with a pause that grows with the
//! duration of an inspection.

use std::fmt::Debug;
use std::pin::Pin;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use tenure_core::jobs::QueueRates;

use crate::mutex::Mutex;
use crate::units::millis;

/// Minimum pause between two inspections of a store.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);
/// Ratio of the pause after an inspection to the inspection's duration.
const PAUSE_FACTOR: u32 = 9;
/// Time that an inspection, or a request about a job, may take.
pub(super) const INSPECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of characters of an error and of a payload in a list of jobs. A view is sent to every page, several
/// times per second; the whole texts are shown with the job.
const MAX_LISTED_ERROR: usize = 300;
const MAX_LISTED_PAYLOAD: usize = 120;

/// Future of an inspection: a view of the store, or the reason for its failure.
pub type InspectFuture<'a> = Pin<Box<dyn Future<Output = Result<StoreView, String>> + Send + 'a>>;

/// Future of a request about one job.
pub type JobFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, JobError>> + Send + 'a>>;

/// A store that the page shows beside the server's own keys.
pub trait WatchedStore: Debug + Send + Sync + 'static {
    /// Address of the store, without secrets.
    fn name(&self) -> String;

    /// Inspects the store. Called on the thread that serves the page, one inspection after the other; the future is
    /// dropped if it takes too long. The page shows the error text, which must not contain secrets.
    fn inspect(&self) -> InspectFuture<'_>;

    /// Single jobs of the store; `None` if it is no queue.
    fn jobs(&self) -> Option<&dyn WatchedJobs> {
        None
    }
}

/// Single jobs of a watched queue, for an operator. The futures are dropped if they take too long.
pub trait WatchedJobs: Send + Sync {
    /// Reads a job, with its whole payload and error; `None` if there is no such job.
    fn show<'a>(&'a self, id: &'a str) -> JobFuture<'a, Option<JobView>>;

    /// Makes a failed or delayed job available at once, with all its attempts.
    fn retry<'a>(&'a self, id: &'a str) -> JobFuture<'a, ()>;

    /// Marks an open job as failed, for this reason.
    fn cancel<'a>(&'a self, id: &'a str, reason: &'a str) -> JobFuture<'a, ()>;
}

/// Reason why a request about a job failed. The page shows the text, which must not contain secrets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobError {
    /// The queue refused the request, and nothing was changed: the job is in another state, or the id is invalid.
    Refused(String),
    /// The queue cannot be reached, or did not answer: a change was made or not.
    Failed(String),
}

/// View of a store.
#[derive(Clone, Debug, PartialEq)]
pub enum StoreView {
    /// Locks, elections and semaphores.
    Holds {
        /// The names in use.
        names: Vec<NameView>,
        /// True if there are more names than listed.
        more: bool,
    },
    /// A queue of jobs.
    Jobs(QueueView),
}

/// A queue of jobs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct QueueView {
    /// Number of jobs per state.
    pub counts: Vec<(String, u64)>,
    /// States whose number is an estimate.
    pub estimated: Vec<String>,
    /// States of which there may be more jobs.
    pub at_least: Vec<String>,
    /// Reason of the pause, empty if none was given; `None` if the queue is not paused.
    pub paused: Option<String>,
    /// Age of the oldest available job.
    pub oldest: Option<Duration>,
    /// Jobs completed and failed per second; `None` before there are two readings to compare.
    pub rates: Option<QueueRates>,
    /// Claimed jobs.
    pub running: Vec<JobView>,
    /// Jobs that failed last.
    pub failed: Vec<JobView>,
}

/// A name with holders or waiters.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NameView {
    /// The name.
    pub name: String,
    /// Kind of the name: a lock or a semaphore.
    pub kind: &'static str,
    /// Holders.
    pub holders: Vec<HolderView>,
    /// Number of waiters.
    pub waiting: usize,
    /// Age of the oldest waiter.
    pub oldest_wait: Option<Duration>,
}

/// A holder of a name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HolderView {
    /// Identity; empty if unknown.
    pub id: String,
    /// Host of the holder.
    pub host: String,
    /// Process id of the holder.
    pub pid: u32,
    /// Free text that the holder gave.
    pub note: String,
    /// Fencing token.
    pub token: String,
    /// Time since the grant.
    pub held: Option<Duration>,
    /// Time until the lease ends; `None` if there is no lease.
    pub left: Option<Duration>,
}

/// A job.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct JobView {
    /// Id of the job.
    pub id: String,
    /// State of the job.
    pub state: String,
    /// True if the state allows a retry.
    pub can_retry: bool,
    /// True if the state allows a cancellation.
    pub can_cancel: bool,
    /// Priority: higher is claimed first.
    pub priority: i64,
    /// Number of the present or last attempt.
    pub attempt: i32,
    /// Maximum number of attempts.
    pub max_attempts: Option<i32>,
    /// Fencing token of the last claim.
    pub token: i64,
    /// Worker that runs the job.
    pub worker: Option<String>,
    /// Shortest time for which this claim has been seen; `None` if no worker runs the job.
    pub running_for: Option<Duration>,
    /// Time until the lease ends, or the delay.
    pub left: Option<Duration>,
    /// Last progress that the worker reported.
    pub progress: Option<String>,
    /// Time at which the job was enqueued.
    pub created_at: Option<SystemTime>,
    /// Time at which the job was completed.
    pub completed_at: Option<SystemTime>,
    /// Time at which the job was marked as failed.
    pub failed_at: Option<SystemTime>,
    /// Unique key, if the job has one.
    pub unique_key: Option<String>,
    /// Error of the last attempt.
    pub error: Option<String>,
    /// Payload as JSON text.
    pub payload: Option<String>,
}

/// A watched store with its latest view, shared by all pages.
#[derive(Debug)]
pub(super) struct StoreMonitor {
    /// Address of the store, unique among the monitors.
    name: String,
    store: Box<dyn WatchedStore>,
    cache: Mutex<ViewCache>,
}

#[derive(Debug)]
struct ViewCache {
    /// True while an inspection is in progress.
    refreshing: bool,
    /// Earliest time of the next inspection.
    next: Instant,
    /// End of the last inspection, and its result.
    last: Option<(Instant, Value)>,
}

/// Monitors of these stores, with unique names: a request about a job names its store, and two stores may differ only in
/// options that are not shown.
pub(super) fn monitors(stores: Vec<Box<dyn WatchedStore>>) -> Vec<Arc<StoreMonitor>> {
    let mut monitors: Vec<Arc<StoreMonitor>> = Vec::new();
    for store in stores {
        let shown = store.name();
        let mut name = shown.clone();
        let mut number = 1;
        while monitors.iter().any(|monitor| monitor.name == name) {
            number += 1;
            name = format!("{shown} ({number})");
        }
        monitors.push(Arc::new(StoreMonitor::new(name, store)));
    }
    monitors
}

impl StoreMonitor {
    fn new(name: String, store: Box<dyn WatchedStore>) -> Self {
        let cache = ViewCache { refreshing: false, next: Instant::now(), last: None };
        Self { name, store, cache: Mutex::new(cache) }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn jobs(&self) -> Option<&dyn WatchedJobs> {
        self.store.jobs()
    }

    /// Makes the next view start an inspection, after a change that the page has made.
    pub(super) fn invalidate(&self) {
        self.cache().next = Instant::now();
    }

    /// Latest view. Starts another inspection if one is due, without waiting for it: a store that does not respond must
    /// not delay the views of the other stores.
    pub(super) fn view(self: &Arc<Self>) -> Value {
        let (due, last) = {
            let mut cache = self.cache();
            let due = !cache.refreshing && Instant::now() >= cache.next;
            cache.refreshing |= due;
            (due, cache.last.clone())
        };
        if due {
            tokio::spawn(Arc::clone(self).refresh());
        }
        let (age, mut value) = match last {
            Some((at, value)) => (Some(at.elapsed()), value),
            None => (None, json!({})),
        };
        value["store"] = self.name.as_str().into();
        value["age_ms"] = age.map(millis).into();
        value
    }

    async fn refresh(self: Arc<Self>) {
        let began = Instant::now();
        let value = match tokio::time::timeout(INSPECT_TIMEOUT, self.store.inspect()).await {
            Ok(Ok(view)) => view_json(&view),
            Ok(Err(why)) => json!({ "error": why }),
            Err(_) => {
                json!({ "error": format!("no response within {} s", INSPECT_TIMEOUT.as_secs()) })
            }
        };
        let now = Instant::now();
        let next = now + REFRESH_INTERVAL.max(now.duration_since(began) * PAUSE_FACTOR);
        *self.cache() = ViewCache { refreshing: false, next, last: Some((now, value)) };
    }

    fn cache(&self) -> MutexGuard<'_, ViewCache> {
        self.cache.lock()
    }
}

fn view_json(view: &StoreView) -> Value {
    match view {
        StoreView::Holds { names, more } => {
            json!({ "names": names.iter().map(name_json).collect::<Vec<_>>(), "more": more })
        }
        StoreView::Jobs(QueueView {
            counts,
            estimated,
            at_least,
            paused,
            oldest,
            rates,
            running,
            failed,
        }) => json!({
            "counts": counts, "estimated": estimated, "at_least": at_least, "paused": paused,
            "oldest_ms": oldest.map(millis),
            "rates": rates.map(|rates| json!({ "completed": rates.completed, "failed": rates.failed })),
            "running": running.iter().map(listed_job_json).collect::<Vec<_>>(),
            "failed": failed.iter().map(listed_job_json).collect::<Vec<_>>(),
        }),
    }
}

fn name_json(view: &NameView) -> Value {
    let NameView { name, kind, holders, waiting, oldest_wait } = view;
    let holders: Vec<Value> = holders.iter().map(holder_json).collect();
    json!({
        "name": name, "kind": kind, "holders": holders, "waiting": waiting, "oldest_ms": oldest_wait.map(millis),
    })
}

fn holder_json(view: &HolderView) -> Value {
    let HolderView { id, host, pid, note, token, held, left } = view;
    let by = (!id.is_empty()).then(|| json!({ "id": id, "host": host, "pid": pid, "note": note }));
    json!({ "by": by, "token": token, "held_ms": held.map(millis), "left_ms": left.map(millis) })
}

/// A job with its whole texts.
pub(super) fn job_json(view: &JobView) -> Value {
    let at = |time: Option<SystemTime>| {
        time.and_then(|time| time.duration_since(UNIX_EPOCH).ok()).map(millis)
    };
    json!({
        "id": view.id,
        "state": view.state,
        "can_retry": view.can_retry,
        "can_cancel": view.can_cancel,
        "priority": view.priority,
        "attempt": view.attempt,
        "most": view.max_attempts,
        "token": view.token.to_string(),
        "worker": view.worker,
        "running_ms": view.running_for.map(millis),
        "left_ms": view.left.map(millis),
        "progress": view.progress,
        "created_at": at(view.created_at),
        "completed_at": at(view.completed_at),
        "failed_at": at(view.failed_at),
        "key": view.unique_key,
        "error": view.error,
        "payload": view.payload,
    })
}

/// A job in a list: its texts are cut.
fn listed_job_json(view: &JobView) -> Value {
    let mut job = job_json(view);
    for (field, limit) in [
        ("error", MAX_LISTED_ERROR),
        ("payload", MAX_LISTED_PAYLOAD),
        ("progress", MAX_LISTED_PAYLOAD),
    ] {
        if let Some(text) = job[field].as_str() {
            job[field] = cut(text, limit).into();
        }
    }
    job
}

/// The first `limit` characters of a text, with an ellipsis if there are more.
fn cut(text: &str, limit: usize) -> String {
    match text.char_indices().nth(limit) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// A store that counts its inspections. They fail at once, or never end.
    #[derive(Debug)]
    struct CountingStore {
        inspections: Arc<AtomicUsize>,
        responds: bool,
    }

    impl WatchedStore for CountingStore {
        fn name(&self) -> String {
            "somewhere".to_owned()
        }

        fn inspect(&self) -> InspectFuture<'_> {
            self.inspections.fetch_add(1, Ordering::Relaxed);
            Box::pin(async move {
                if self.responds {
                    Err("it is down".to_owned())
                } else {
                    std::future::pending().await
                }
            })
        }
    }

    fn monitor(responds: bool) -> (Arc<StoreMonitor>, Arc<AtomicUsize>) {
        let inspections = Arc::<AtomicUsize>::default();
        let store = Box::new(CountingStore { inspections: Arc::clone(&inspections), responds });
        (monitors(vec![store]).remove(0), inspections)
    }

    fn on_runtime(test: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        runtime.expect("a runtime").block_on(test);
    }

    #[test]
    fn many_pages_share_one_inspection_per_interval() {
        on_runtime(async {
            let (monitor, inspections) = monitor(true);
            tokio::task::yield_now().await;
            assert_eq!(inspections.load(Ordering::Relaxed), 0, "no page is open");
            assert_eq!(monitor.view()["age_ms"], Value::Null);
            for _ in 0..100 {
                monitor.view();
                tokio::task::yield_now().await;
            }
            assert_eq!(inspections.load(Ordering::Relaxed), 1);
            let view = monitor.view();
            assert_eq!(
                (&view["store"], &view["error"]),
                (&"somewhere".into(), &"it is down".into())
            );
            assert!(view["age_ms"].is_u64());
        });
    }

    #[test]
    fn unresponsive_watched_store_blocks_no_request_and_is_polled_once() {
        on_runtime(async {
            let (monitor, inspections) = monitor(false);
            for _ in 0..100 {
                assert_eq!(monitor.view()["age_ms"], Value::Null);
                tokio::task::yield_now().await;
            }
            assert_eq!(inspections.load(Ordering::Relaxed), 1);
        });
    }

    #[test]
    fn stores_of_one_address_have_names_of_their_own() {
        let store = || -> Box<dyn WatchedStore> {
            Box::new(CountingStore { inspections: Arc::default(), responds: true })
        };
        let monitors = monitors(vec![store(), store(), store()]);
        let names: Vec<&str> = monitors.iter().map(|monitor| monitor.name()).collect();
        assert_eq!(names, ["somewhere", "somewhere (2)", "somewhere (3)"]);
    }

    #[test]
    fn long_texts_are_cut_in_lists_only() {
        let long = "é".repeat(1_000);
        let view =
            JobView { error: Some(long.clone()), payload: Some("7".into()), ..JobView::default() };
        let listed = listed_job_json(&view);
        assert_eq!(listed["error"].as_str().unwrap().chars().count(), MAX_LISTED_ERROR + 1);
        assert_eq!(listed["payload"], "7");
        assert_eq!(job_json(&view)["error"], long);
    }
}
