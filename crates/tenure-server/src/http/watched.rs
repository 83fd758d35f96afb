//! Other stores on the status page. The program that starts the server implements [`WatchedStore`]; this module decides
//! when a store is inspected: only while a page shows it, one inspection at a time, with a pause that grows with the
//! duration of an inspection.

use std::fmt::Debug;
use std::pin::Pin;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::mutex::Mutex;
use crate::units::millis;

/// Minimum pause between two inspections of a store.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);
/// Ratio of the pause after an inspection to the inspection's duration.
const PAUSE_FACTOR: u32 = 9;
/// Time that an inspection may take.
const INSPECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Future of an inspection: a view of the store, or the reason for its failure.
pub type InspectFuture<'a> = Pin<Box<dyn Future<Output = Result<StoreView, String>> + Send + 'a>>;

/// A store that the page shows beside the server's own keys.
pub trait WatchedStore: Debug + Send + Sync + 'static {
    /// Address of the store, without secrets.
    fn name(&self) -> String;

    /// Inspects the store. Called on the thread that serves the page, one inspection after the other; the future is
    /// dropped if it takes too long. The page shows the error text, which must not contain secrets.
    fn inspect(&self) -> InspectFuture<'_>;
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
    Jobs {
        /// Number of jobs per state.
        counts: Vec<(String, u64)>,
        /// Claimed jobs.
        running: Vec<JobView>,
        /// Jobs that failed last.
        failed: Vec<JobView>,
    },
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
    /// Number of the present or last attempt.
    pub attempt: i32,
    /// Maximum number of attempts.
    pub max_attempts: Option<i32>,
    /// Worker that runs the job.
    pub worker: Option<String>,
    /// Time until the lease ends.
    pub left: Option<Duration>,
    /// Error of the last attempt.
    pub error: Option<String>,
}

/// A watched store with its latest view, shared by all pages.
#[derive(Debug)]
pub(super) struct StoreMonitor {
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

impl StoreMonitor {
    pub(super) fn new(store: Box<dyn WatchedStore>) -> Self {
        let cache = ViewCache { refreshing: false, next: Instant::now(), last: None };
        Self { store, cache: Mutex::new(cache) }
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
        value["store"] = self.store.name().into();
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
        StoreView::Jobs { counts, running, failed } => json!({
            "counts": counts,
            "running": running.iter().map(job_json).collect::<Vec<_>>(),
            "failed": failed.iter().map(job_json).collect::<Vec<_>>(),
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

fn job_json(view: &JobView) -> Value {
    let JobView { id, attempt, max_attempts, worker, left, error } = view;
    json!({
        "id": id, "attempt": attempt, "most": max_attempts, "worker": worker, "left_ms": left.map(millis), "error": error,
    })
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
        (Arc::new(StoreMonitor::new(store)), inspections)
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
}
