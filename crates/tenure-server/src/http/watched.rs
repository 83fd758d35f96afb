//! Stores beside the server's own keys. Whoever starts the server knows how to look at them; here it is decided when:
//! only while a page shows them, one look at a time, with a pause that grows with what a look takes.

use std::fmt::Debug;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::now::millis;

/// How often a store is looked at, at most.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);
/// A look is followed by a pause of so many times what it took.
const PAUSE_FACTOR: u32 = 9;
/// How long a look may take.
const INSPECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A look under way: what there is to see, or why there is nothing.
pub type InspectFuture<'a> = Pin<Box<dyn Future<Output = Result<StoreView, String>> + Send + 'a>>;

/// A store that the page shows beside the server's own keys.
pub trait WatchedStore: Debug + Send + Sync + 'static {
    /// Where it is, without secrets.
    fn name(&self) -> String;

    /// Looks at it. Called on the thread that serves the page, one look after the other; a look that takes too long is
    /// dropped. What is said of failures is shown, and must hold no secrets.
    fn inspect(&self) -> InspectFuture<'_>;
}

/// What there is to see of a store.
#[derive(Clone, Debug, PartialEq)]
pub enum StoreView {
    /// Locks, leads and semaphores.
    Holds {
        /// The names in use.
        names: Vec<NameView>,
        /// There are others.
        more: bool,
    },
    /// A queue of jobs.
    Jobs {
        /// How many are in which state.
        counts: Vec<(String, u64)>,
        /// Those that somebody has.
        running: Vec<JobView>,
        /// Those that were given up last.
        failed: Vec<JobView>,
    },
}

/// A name that is held, or waited for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NameView {
    /// The name.
    pub name: String,
    /// What it is: a lock or a semaphore.
    pub kind: &'static str,
    /// Who has it.
    pub holders: Vec<HolderView>,
    /// How many wait.
    pub waiting: usize,
    /// How long the one has who waits the longest.
    pub oldest_wait: Option<Duration>,
}

/// Who has a name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HolderView {
    /// Who; empty where that is not known.
    pub id: String,
    /// On which host.
    pub host: String,
    /// As which process.
    pub pid: u32,
    /// What it says of itself.
    pub note: String,
    /// The fencing token.
    pub token: String,
    /// For how long.
    pub held: Option<Duration>,
    /// How much of its lease is left; `None` where it has none.
    pub left: Option<Duration>,
}

/// A job.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct JobView {
    /// Its id.
    pub id: String,
    /// Which attempt this is, or was.
    pub attempt: i32,
    /// How many it has.
    pub max_attempts: Option<i32>,
    /// Who has it.
    pub worker: Option<String>,
    /// How much of the lease is left.
    pub left: Option<Duration>,
    /// Why its last attempt failed.
    pub error: Option<String>,
}

/// One of those stores, as the pages see it.
#[derive(Debug)]
pub(super) struct StoreMonitor {
    store: Box<dyn WatchedStore>,
    cache: Mutex<ViewCache>,
}

#[derive(Debug)]
struct ViewCache {
    /// A look is under way.
    refreshing: bool,
    /// When the next one may be.
    next: Instant,
    /// When the last one ended, and what it saw.
    last: Option<(Instant, Value)>,
}

impl StoreMonitor {
    pub(super) fn new(store: Box<dyn WatchedStore>) -> Self {
        let cache = ViewCache { refreshing: false, next: Instant::now(), last: None };
        Self { store, cache: Mutex::new(cache) }
    }

    /// What was seen last. Begins another look where it is time for one, and does not wait for it: a store that does not
    /// answer keeps nobody from the others.
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
            Ok(Ok(sight)) => view_json(&sight),
            Ok(Err(why)) => json!({ "error": why }),
            Err(_) => {
                json!({ "error": format!("no answer within {} s", INSPECT_TIMEOUT.as_secs()) })
            }
        };
        let now = Instant::now();
        let next = now + REFRESH_INTERVAL.max(now.duration_since(began) * PAUSE_FACTOR);
        *self.cache() = ViewCache { refreshing: false, next, last: Some((now, value)) };
    }

    fn cache(&self) -> MutexGuard<'_, ViewCache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn view_json(sight: &StoreView) -> Value {
    match sight {
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

fn name_json(seen: &NameView) -> Value {
    let NameView { name, kind, holders, waiting, oldest_wait } = seen;
    let holders: Vec<Value> = holders.iter().map(holder_json).collect();
    json!({
        "name": name, "kind": kind, "holders": holders, "waiting": waiting, "oldest_ms": oldest_wait.map(millis),
    })
}

fn holder_json(seen: &HolderView) -> Value {
    let HolderView { id, host, pid, note, token, held, left } = seen;
    let by = (!id.is_empty()).then(|| json!({ "id": id, "host": host, "pid": pid, "note": note }));
    json!({ "by": by, "token": token, "held_ms": held.map(millis), "left_ms": left.map(millis) })
}

fn job_json(seen: &JobView) -> Value {
    let JobView { id, attempt, max_attempts, worker, left, error } = seen;
    json!({
        "id": id, "attempt": attempt, "most": max_attempts, "worker": worker, "left_ms": left.map(millis), "error": error,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Counts how often it is looked at, and answers as it is told.
    #[derive(Debug)]
    struct Counted {
        looks: Arc<AtomicUsize>,
        answers: bool,
    }

    impl WatchedStore for Counted {
        fn name(&self) -> String {
            "somewhere".to_owned()
        }

        fn inspect(&self) -> InspectFuture<'_> {
            self.looks.fetch_add(1, Ordering::Relaxed);
            Box::pin(async move {
                if self.answers {
                    Err("it is down".to_owned())
                } else {
                    std::future::pending().await
                }
            })
        }
    }

    fn window(answers: bool) -> (Arc<StoreMonitor>, Arc<AtomicUsize>) {
        let looks = Arc::<AtomicUsize>::default();
        let store = Box::new(Counted { looks: Arc::clone(&looks), answers });
        (Arc::new(StoreMonitor::new(store)), looks)
    }

    fn on_runtime(test: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        runtime.expect("a runtime").block_on(test);
    }

    #[test]
    fn many_pages_cost_one_look_in_a_while_and_none_costs_nothing() {
        on_runtime(async {
            let (window, looks) = window(true);
            tokio::task::yield_now().await;
            assert_eq!(looks.load(Ordering::Relaxed), 0, "nobody looks");
            assert_eq!(window.view()["age_ms"], Value::Null);
            for _ in 0..100 {
                window.view();
                tokio::task::yield_now().await;
            }
            assert_eq!(looks.load(Ordering::Relaxed), 1);
            let seen = window.view();
            assert_eq!(
                (&seen["store"], &seen["error"]),
                (&"somewhere".into(), &"it is down".into())
            );
            assert!(seen["age_ms"].is_u64());
        });
    }

    #[test]
    fn unresponsive_watched_store_blocks_no_request_and_is_polled_once() {
        on_runtime(async {
            let (window, looks) = window(false);
            for _ in 0..100 {
                assert_eq!(window.view()["age_ms"], Value::Null);
                tokio::task::yield_now().await;
            }
            assert_eq!(looks.load(Ordering::Relaxed), 1);
        });
    }
}
