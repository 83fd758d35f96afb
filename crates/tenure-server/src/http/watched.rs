//! Stores beside the server's own keys. Whoever starts the server knows how to look at them; here it is decided when:
//! only while a page shows them, one look at a time, with a pause that grows with what a look takes.

use std::fmt::Debug;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::now::millis;

/// How often a store is looked at, at most.
const PACE: Duration = Duration::from_secs(1);
/// A look is followed by a pause of so many times what it took.
const SHARE: u32 = 9;
/// How long a look may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// A look under way: what there is to see, or why there is nothing.
pub type Looking<'a> = Pin<Box<dyn Future<Output = Result<Sight, String>> + Send + 'a>>;

/// A store that the page shows beside the server's own keys.
pub trait Watched: Debug + Send + Sync + 'static {
    /// Where it is, without secrets.
    fn name(&self) -> String;

    /// Looks at it. Called on the thread that serves the page, one look after the other; a look that takes too long is
    /// dropped. What is said of failures is shown, and must hold no secrets.
    fn look(&self) -> Looking<'_>;
}

/// What there is to see of a store.
#[derive(Clone, Debug, PartialEq)]
pub enum Sight {
    /// Locks, leads and semaphores.
    Holds {
        /// The names in use.
        names: Vec<SeenName>,
        /// There are others.
        more: bool,
    },
    /// A queue of jobs.
    Jobs {
        /// How many are in which state.
        counts: Vec<(String, u64)>,
        /// Those that somebody has.
        running: Vec<SeenJob>,
        /// Those that were given up last.
        failed: Vec<SeenJob>,
    },
}

/// A name that is held, or waited for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SeenName {
    /// The name.
    pub name: String,
    /// What it is: a lock or a semaphore.
    pub kind: &'static str,
    /// Who has it.
    pub holders: Vec<SeenHolder>,
    /// How many wait.
    pub waiting: usize,
    /// How long the one has who waits the longest.
    pub oldest: Option<Duration>,
}

/// Who has a name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SeenHolder {
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
pub struct SeenJob {
    /// Its id.
    pub id: String,
    /// Which attempt this is, or was.
    pub attempt: i32,
    /// How many it has.
    pub most: Option<i32>,
    /// Who has it.
    pub worker: Option<String>,
    /// How much of the lease is left.
    pub left: Option<Duration>,
    /// Why its last attempt failed.
    pub error: Option<String>,
}

/// One of those stores, as the pages see it.
#[derive(Debug)]
pub(super) struct Window {
    store: Box<dyn Watched>,
    seen: Mutex<Seen>,
}

#[derive(Debug)]
struct Seen {
    /// A look is under way.
    looking: bool,
    /// When the next one may be.
    next: Instant,
    /// When the last one ended, and what it saw.
    last: Option<(Instant, Value)>,
}

impl Window {
    pub(super) fn new(store: Box<dyn Watched>) -> Self {
        let seen = Seen { looking: false, next: Instant::now(), last: None };
        Self { store, seen: Mutex::new(seen) }
    }

    /// What was seen last. Begins another look where it is time for one, and does not wait for it: a store that does not
    /// answer keeps nobody from the others.
    pub(super) fn look(self: &Arc<Self>) -> Value {
        let (due, last) = {
            let mut seen = self.seen();
            let due = !seen.looking && Instant::now() >= seen.next;
            seen.looking |= due;
            (due, seen.last.clone())
        };
        if due {
            tokio::spawn(Arc::clone(self).look_anew());
        }
        let (age, mut value) = match last {
            Some((at, value)) => (Some(at.elapsed()), value),
            None => (None, json!({})),
        };
        value["store"] = self.store.name().into();
        value["age_ms"] = age.map(millis).into();
        value
    }

    async fn look_anew(self: Arc<Self>) {
        let began = Instant::now();
        let value = match tokio::time::timeout(PATIENCE, self.store.look()).await {
            Ok(Ok(sight)) => describe(&sight),
            Ok(Err(why)) => json!({ "error": why }),
            Err(_) => json!({ "error": format!("no answer within {} s", PATIENCE.as_secs()) }),
        };
        let now = Instant::now();
        let next = now + PACE.max(now.duration_since(began) * SHARE);
        *self.seen() = Seen { looking: false, next, last: Some((now, value)) };
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn describe(sight: &Sight) -> Value {
    match sight {
        Sight::Holds { names, more } => {
            json!({ "names": names.iter().map(name).collect::<Vec<_>>(), "more": more })
        }
        Sight::Jobs { counts, running, failed } => json!({
            "counts": counts,
            "running": running.iter().map(job).collect::<Vec<_>>(),
            "failed": failed.iter().map(job).collect::<Vec<_>>(),
        }),
    }
}

fn name(seen: &SeenName) -> Value {
    let SeenName { name, kind, holders, waiting, oldest } = seen;
    let holders: Vec<Value> = holders.iter().map(holder).collect();
    json!({
        "name": name, "kind": kind, "holders": holders, "waiting": waiting, "oldest_ms": oldest.map(millis),
    })
}

fn holder(seen: &SeenHolder) -> Value {
    let SeenHolder { id, host, pid, note, token, held, left } = seen;
    let by = (!id.is_empty()).then(|| json!({ "id": id, "host": host, "pid": pid, "note": note }));
    json!({ "by": by, "token": token, "held_ms": held.map(millis), "left_ms": left.map(millis) })
}

fn job(seen: &SeenJob) -> Value {
    let SeenJob { id, attempt, most, worker, left, error } = seen;
    json!({
        "id": id, "attempt": attempt, "most": most, "worker": worker, "left_ms": left.map(millis), "error": error,
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

    impl Watched for Counted {
        fn name(&self) -> String {
            "somewhere".to_owned()
        }

        fn look(&self) -> Looking<'_> {
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

    fn window(answers: bool) -> (Arc<Window>, Arc<AtomicUsize>) {
        let looks = Arc::<AtomicUsize>::default();
        let store = Box::new(Counted { looks: Arc::clone(&looks), answers });
        (Arc::new(Window::new(store)), looks)
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
            assert_eq!(window.look()["age_ms"], Value::Null);
            for _ in 0..100 {
                window.look();
                tokio::task::yield_now().await;
            }
            assert_eq!(looks.load(Ordering::Relaxed), 1);
            let seen = window.look();
            assert_eq!(
                (&seen["store"], &seen["error"]),
                (&"somewhere".into(), &"it is down".into())
            );
            assert!(seen["age_ms"].is_u64());
        });
    }

    #[test]
    fn a_store_that_does_not_answer_holds_nobody_up_and_is_asked_once() {
        on_runtime(async {
            let (window, looks) = window(false);
            for _ in 0..100 {
                assert_eq!(window.look()["age_ms"], Value::Null);
                tokio::task::yield_now().await;
            }
            assert_eq!(looks.load(Ordering::Relaxed), 1);
        });
    }
}
