//! Metrics, recorded with the facade `metrics`. Names and labels are stable.
//!
//! Without the feature `metrics` every function here does nothing. The number of label values is bounded: stores are
//! labelled by kind, locks by the class that the program sets, elections by name up to a limit. The name of a lock is
//! never a label.

use std::time::Duration;

use crate::{ErrorKind, Loss};

/// Returns the label value for an attempt to acquire that failed with this kind of error.
pub(crate) fn outcome(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Held | ErrorKind::Contention => "held",
        ErrorKind::Timeout => "timeout",
        ErrorKind::Unavailable => "unavailable",
        ErrorKind::Unknown => "unknown",
        ErrorKind::Lost => "lost",
        _ => "error",
    }
}

/// Returns the label value for the cause of a loss.
pub(crate) fn reason(loss: Loss) -> &'static str {
    match loss {
        Loss::Expired => "expired",
        Loss::Taken => "taken",
        Loss::Evicted => "evicted",
        Loss::Disconnected => "disconnected",
        Loss::MaxHold => "max_hold",
        Loss::ClockJump => "clock_jump",
        Loss::Cancelled => "cancelled",
        _ => "other",
    }
}

/// Outage of a store in the metrics, which ends when this is dropped.
pub(crate) struct StoreAway(Box<str>);

impl StoreAway {
    /// Counts an outage of the store with this URL or scheme.
    pub(crate) fn new(store: &str) -> Self {
        store_away(store, true);
        Self(store.into())
    }
}

impl Drop for StoreAway {
    fn drop(&mut self) {
        store_away(&self.0, false);
    }
}

#[cfg(feature = "metrics")]
use on::store_away;
#[cfg(feature = "metrics")]
pub use on::{Kind, METRICS, Metric, describe, refresh};
#[cfg(feature = "metrics")]
pub(crate) use on::{Labels, leader_changed, leads};
#[cfg(all(feature = "metrics", feature = "jobs"))]
pub(crate) use on::{job_reclaimed, job_run, jobs};

#[cfg(feature = "metrics")]
mod on {
    use std::collections::{BTreeMap, BTreeSet};
    use std::sync::MutexGuard;

    use metrics::{
        counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
    };
    use tenure_core::{Key, Time};

    use super::Duration;
    use crate::Clock;
    use crate::mutex::Mutex;

    /// Maximum number of label values for names of classes, elections and queues.
    const MAX_LABEL_NAMES: usize = 100;

    /// Description of a metric.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[non_exhaustive]
    pub struct Metric {
        /// Name.
        pub name: &'static str,
        /// Type.
        pub kind: Kind,
        /// Names of its labels, in alphabetical order.
        pub labels: &'static [&'static str],
        /// Help text.
        pub help: &'static str,
    }

    /// Type of a metric.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum Kind {
        /// Value that only grows.
        Counter,
        /// Value that rises and falls.
        Gauge,
        /// Distribution of values.
        Histogram,
    }

    /// All metrics of the library. Names and labels are stable.
    pub const METRICS: &[Metric] = &[
        Metric {
            name: "tenure_acquire_total",
            kind: Kind::Counter,
            labels: &["class", "outcome", "store"],
            help: "Attempts to acquire, by how they ended.",
        },
        Metric {
            name: "tenure_acquire_wait_seconds",
            kind: Kind::Histogram,
            labels: &["class", "store"],
            help: "Time from the request to the guard.",
        },
        Metric {
            name: "tenure_hold_seconds",
            kind: Kind::Histogram,
            labels: &["class", "store"],
            help: "Duration of holds that have ended.",
        },
        Metric {
            name: "tenure_held",
            kind: Kind::Gauge,
            labels: &["class", "store"],
            help: "Holds at this moment.",
        },
        Metric {
            name: "tenure_waiting",
            kind: Kind::Gauge,
            labels: &["class", "store"],
            help: "Requests that are waiting at this moment.",
        },
        Metric {
            name: "tenure_waiting_oldest_seconds",
            kind: Kind::Gauge,
            labels: &["class", "store"],
            help: "Age of the oldest waiting request.",
        },
        Metric {
            name: "tenure_renew_total",
            kind: Kind::Counter,
            labels: &["outcome", "store"],
            help: "Renewals, by how they ended.",
        },
        Metric {
            name: "tenure_lease_margin_seconds",
            kind: Kind::Histogram,
            labels: &["class", "store"],
            help: "Time until the deadline at each renewal: small before a hold is lost.",
        },
        Metric {
            name: "tenure_lost_total",
            kind: Kind::Counter,
            labels: &["reason", "store"],
            help: "Holds that ended without a release.",
        },
        Metric {
            name: "tenure_leader",
            kind: Kind::Gauge,
            labels: &["election"],
            help: "1 while this process leads the election.",
        },
        Metric {
            name: "tenure_leader_transitions_total",
            kind: Kind::Counter,
            labels: &["election"],
            help: "Terms that began or ended here.",
        },
        Metric {
            name: "leader_election_master_status",
            kind: Kind::Gauge,
            labels: &["name"],
            help: "1 while this process leads.",
        },
        Metric {
            name: "tenure_jobs",
            kind: Kind::Gauge,
            labels: &["queue", "state"],
            help: "Jobs of a queue in a state.",
        },
        Metric {
            name: "tenure_job_reclaimed_total",
            kind: Kind::Counter,
            labels: &["queue"],
            help: "Jobs taken over from a dead worker.",
        },
        Metric {
            name: "tenure_job_run_seconds",
            kind: Kind::Histogram,
            labels: &["outcome", "queue"],
            help: "Duration of job attempts, by how they ended.",
        },
        Metric {
            name: "tenure_store_op_seconds",
            kind: Kind::Histogram,
            labels: &["op", "store"],
            help: "Requests to the store, by their kind.",
        },
        Metric {
            name: "tenure_store_away",
            kind: Kind::Gauge,
            labels: &["store"],
            help: "Requests, elections and job queues whose store is away at this moment.",
        },
        Metric {
            name: "tenure_store_outages_total",
            kind: Kind::Counter,
            labels: &["store"],
            help: "Outages of the store that were reported.",
        },
        Metric {
            name: "tenure_build_info",
            kind: Kind::Gauge,
            labels: &["version"],
            help: "1, with the version as a label.",
        },
    ];

    /// Registers the help text of each metric and the version of the library. Call it once, after the exporter is
    /// installed.
    pub fn describe() {
        for Metric { name, kind, help, .. } in METRICS {
            match kind {
                Kind::Counter => describe_counter!(*name, *help),
                Kind::Gauge => describe_gauge!(*name, *help),
                Kind::Histogram => describe_histogram!(*name, *help),
            }
        }
        gauge!("tenure_build_info", "version" => env!("CARGO_PKG_VERSION")).set(1.0);
    }

    /// Updates the metric that changes with time alone: the age of the oldest waiting request.
    ///
    /// Call it before each scrape; otherwise the value is as of the last wait that ended.
    pub fn refresh() {
        let now = Clock::system().now();
        for ((store, class), waits) in &*waits() {
            let oldest = waits.first().map_or(Duration::ZERO, |(since, _)| now.since(*since));
            gauge!("tenure_waiting_oldest_seconds", "store" => *store, "class" => class.clone())
                .set(oldest.as_secs_f64());
        }
    }

    /// Sets the number of jobs of a queue in a state; `None` if the number is unknown.
    #[cfg(feature = "jobs")]
    pub(crate) fn jobs(queue: &str, state: tenure_core::jobs::JobState, number: Option<u64>) {
        let state = state.to_string().to_lowercase();
        #[expect(clippy::cast_precision_loss, reason = "no queue has 2^53 jobs")]
        let number = number.map_or(f64::NAN, |number| number as f64);
        gauge!("tenure_jobs", "queue" => bounded(queue), "state" => state).set(number);
    }

    /// Counts jobs that were taken over from dead workers.
    #[cfg(feature = "jobs")]
    pub(crate) fn job_reclaimed(queue: &str, number: u64) {
        counter!("tenure_job_reclaimed_total", "queue" => bounded(queue)).increment(number);
    }

    /// Records an attempt of a job that has ended.
    #[cfg(feature = "jobs")]
    pub(crate) fn job_run(queue: &str, outcome: &'static str, took: Duration) {
        histogram!("tenure_job_run_seconds", "queue" => bounded(queue), "outcome" => outcome)
            .record(took.as_secs_f64());
    }

    /// Waits in progress by store and class, oldest first.
    type Waits = BTreeMap<(&'static str, String), BTreeSet<(Time, u64)>>;

    fn waits() -> MutexGuard<'static, Waits> {
        static WAITS: Mutex<Waits> = Mutex::new(BTreeMap::new());
        WAITS.lock()
    }

    /// Returns the name as a label value, or `other` once there are [`MAX_LABEL_NAMES`] names.
    pub(crate) fn bounded(name: &str) -> String {
        static KNOWN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
        let mut known = KNOWN.lock();
        if known.contains(name) || known.len() < MAX_LABEL_NAMES {
            known.insert(name.to_owned());
            return name.to_owned();
        }
        "other".to_owned()
    }

    /// Returns the label value for the kind of store, from its URL or scheme.
    fn kind(store: &str) -> &'static str {
        const KNOWN: [(&str, &str); 11] = [
            ("memory", "memory"),
            ("file", "file"),
            ("tenure", "server"),
            ("tenures", "server"),
            ("postgres", "postgres"),
            ("postgresql", "postgres"),
            ("postgres+advisory", "postgres_advisory"),
            ("nats", "nats"),
            ("gs", "object"),
            ("s3", "object"),
            ("az", "object"),
        ];
        let scheme = store.split(':').next().unwrap_or_default();
        KNOWN.iter().find(|(known, _)| *known == scheme).map_or("other", |(_, kind)| kind)
    }

    /// Labels of the metrics of a lock.
    #[derive(Clone, Debug)]
    pub(crate) struct Labels {
        pub(crate) store: &'static str,
        pub(crate) class: String,
    }

    impl Labels {
        pub(crate) fn new(store: &dyn crate::Store, class: &str) -> Self {
            Self { store: kind(&store.to_string()), class: bounded(class) }
        }

        pub(crate) fn op(&self, op: &'static str, took: Duration) {
            histogram!("tenure_store_op_seconds", "store" => self.store, "op" => op)
                .record(took.as_secs_f64());
        }

        pub(crate) fn renewed(&self, outcome: &'static str, left: Option<Duration>) {
            counter!("tenure_renew_total", "store" => self.store, "outcome" => outcome)
                .increment(1);
            if let Some(left) = left {
                histogram!("tenure_lease_margin_seconds", "store" => self.store, "class" => self.class.clone())
                    .record(left.as_secs_f64());
            }
        }

        pub(crate) fn lost(&self, reason: &'static str) {
            counter!("tenure_lost_total", "store" => self.store, "reason" => reason).increment(1);
        }

        pub(crate) fn held(&self) {
            gauge!("tenure_held", "store" => self.store, "class" => self.class.clone())
                .increment(1.0);
        }

        pub(crate) fn ended(&self, held: Duration) {
            gauge!("tenure_held", "store" => self.store, "class" => self.class.clone())
                .decrement(1.0);
            histogram!("tenure_hold_seconds", "store" => self.store, "class" => self.class.clone())
                .record(held.as_secs_f64());
        }

        pub(crate) fn waits(&self, since: Time) -> Wait {
            static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
            let id = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            gauge!("tenure_waiting", "store" => self.store, "class" => self.class.clone())
                .increment(1.0);
            let of = (self.store, self.class.clone());
            waits().entry(of).or_default().insert((since, id));
            Wait { labels: self.clone(), since, id }
        }
    }

    /// Wait in progress. It ends when this is dropped.
    pub(crate) struct Wait {
        labels: Labels,
        since: Time,
        id: u64,
    }

    impl Wait {
        pub(crate) fn over(self, outcome: &'static str, now: Time) {
            let Labels { store, class } = &self.labels;
            counter!("tenure_acquire_total", "store" => *store, "class" => class.clone(), "outcome" => outcome)
                .increment(1);
            histogram!("tenure_acquire_wait_seconds", "store" => *store, "class" => class.clone())
                .record(now.since(self.since).as_secs_f64());
        }
    }

    impl Drop for Wait {
        fn drop(&mut self) {
            let Labels { store, class } = &self.labels;
            gauge!("tenure_waiting", "store" => *store, "class" => class.clone()).decrement(1.0);
            if let Some(waits) = waits().get_mut(&(*store, class.clone())) {
                waits.remove(&(self.since, self.id));
            }
            refresh();
        }
    }

    /// Counts an outage of the store with this URL or scheme, or its end.
    pub(crate) fn store_away(store: &str, away: bool) {
        let store = kind(store);
        let stores = gauge!("tenure_store_away", "store" => store);
        if away {
            counter!("tenure_store_outages_total", "store" => store).increment(1);
            stores.increment(1.0);
        } else {
            stores.decrement(1.0);
        }
    }

    pub(crate) fn leads(election: &Key, leads: bool) {
        let (name, value) = (bounded(election.as_str()), if leads { 1.0 } else { 0.0 });
        gauge!("tenure_leader", "election" => name.clone()).set(value);
        gauge!("leader_election_master_status", "name" => name).set(value);
    }

    pub(crate) fn leader_changed(election: &Key, leads: bool) {
        let name = bounded(election.as_str());
        counter!("tenure_leader_transitions_total", "election" => name).increment(1);
        self::leads(election, leads);
    }
}

#[cfg(not(feature = "metrics"))]
use off::store_away;
#[cfg(not(feature = "metrics"))]
pub(crate) use off::{Labels, leader_changed, leads};
#[cfg(all(feature = "jobs", not(feature = "metrics")))]
pub(crate) use off::{job_reclaimed, job_run};

/// The same functions without the feature `metrics`: they do nothing.
#[cfg(not(feature = "metrics"))]
#[expect(clippy::unused_self, reason = "the signatures are those of the feature `metrics`")]
mod off {
    use tenure_core::{Key, Time};

    use super::Duration;

    #[derive(Clone, Debug)]
    pub(crate) struct Labels;

    impl Labels {
        pub(crate) fn new(_: &dyn crate::Store, _: &str) -> Self {
            Self
        }
        pub(crate) fn op(&self, _: &'static str, _: Duration) {}
        pub(crate) fn renewed(&self, _: &'static str, _: Option<Duration>) {}
        pub(crate) fn lost(&self, _: &'static str) {}
        pub(crate) fn held(&self) {}
        pub(crate) fn ended(&self, _: Duration) {}
        pub(crate) fn waits(&self, _: Time) -> Wait {
            Wait
        }
    }

    pub(crate) struct Wait;

    impl Wait {
        pub(crate) fn over(self, _: &'static str, _: Time) {}
    }

    pub(crate) fn store_away(_: &str, _: bool) {}
    pub(crate) fn leads(_: &Key, _: bool) {}
    pub(crate) fn leader_changed(_: &Key, _: bool) {}
    #[cfg(feature = "jobs")]
    pub(crate) fn job_reclaimed(_: &str, _: u64) {}
    #[cfg(feature = "jobs")]
    pub(crate) fn job_run(_: &str, _: &'static str, _: Duration) {}
}

#[cfg(all(test, feature = "metrics", feature = "jobs"))]
mod tests {
    use std::collections::BTreeSet;

    use metrics::{
        Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit,
    };
    use tenure_core::Time;

    use super::on::bounded;
    use super::*;
    use crate::MemoryStore;
    use crate::mutex::Mutex;

    #[test]
    fn labels_do_not_grow_for_ever() {
        let labels: BTreeSet<String> =
            (0..1_000).map(|number| bounded(&format!("election-{number}"))).collect();
        assert!(labels.len() <= 101, "{}", labels.len());
        assert!(labels.contains("other"));
        assert_eq!(bounded("election-0"), "election-0", "what had a label keeps it");
    }

    /// Type, name and labels of a recorded metric.
    type Row = (String, String, Vec<String>);

    /// Recorder that keeps the metrics recorded.
    #[derive(Default)]
    struct TestRecorder(Mutex<BTreeSet<Row>>);

    impl TestRecorder {
        fn note(&self, kind: Kind, key: &Key) {
            let mut labels: Vec<_> = key.labels().map(|label| label.key().to_owned()).collect();
            labels.sort();
            let row = (format!("{kind:?}"), key.name().to_owned(), labels);
            self.0.lock().insert(row);
        }
    }

    impl Recorder for TestRecorder {
        fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
            self.note(Kind::Counter, key);
            Counter::noop()
        }

        fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
            self.note(Kind::Gauge, key);
            Gauge::noop()
        }

        fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
            self.note(Kind::Histogram, key);
            Histogram::noop()
        }
    }

    #[test]
    fn recorded_metrics_match_the_metrics_table() {
        let listener = TestRecorder::default();
        metrics::with_local_recorder(&listener, || {
            describe();
            let labels = Labels::new(&MemoryStore::new(), "lock");
            labels.op("claim", Duration::ZERO);
            labels.waits(Time::ZERO).over(outcome(ErrorKind::Held), Time::ZERO);
            labels.held();
            labels.renewed("ok", Some(Duration::ZERO));
            labels.lost(reason(Loss::Expired));
            labels.ended(Duration::ZERO);
            let election = tenure_core::Key::new("demo").expect("a good name");
            leads(&election, false);
            leader_changed(&election, true);
            jobs("queue", tenure_core::jobs::JobState::Failed, Some(1));
            job_reclaimed("queue", 1);
            job_run("queue", "completed", Duration::ZERO);
            drop(StoreAway::new("tenure://locks.example"));
        });
        let recorded = std::mem::take(&mut *listener.0.lock());
        let table: BTreeSet<Row> = METRICS
            .iter()
            .map(|metric| {
                let labels = metric.labels.iter().map(|label| (*label).to_owned()).collect();
                (format!("{:?}", metric.kind), metric.name.to_owned(), labels)
            })
            .collect();
        assert_eq!(recorded, table);
    }
}
