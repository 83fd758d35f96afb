//! What is counted and measured, by the facade `metrics`: names and labels that stay.
//!
//! Without the feature `metrics` every function here does nothing. Labels are bounded: stores by their kind, locks by the
//! class that a program gives them, elections by name up to a number. No name of a lock is ever a label.

use std::time::Duration;

use crate::{ErrorKind, Loss};

/// How an attempt to acquire ended, for a label.
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

/// Why a hold was lost, for a label.
pub(crate) fn reason(loss: Loss) -> &'static str {
    match loss {
        Loss::Expired => "expired",
        Loss::Taken => "taken",
        Loss::Evicted => "evicted",
        Loss::Disconnected => "disconnected",
        Loss::MaxHold => "max_hold",
        Loss::ClockJump => "clock_jump",
        _ => "other",
    }
}

#[cfg(feature = "metrics")]
pub use on::{Kind, METRICS, Metric, describe, refresh};
#[cfg(feature = "metrics")]
pub(crate) use on::{Labels, leader_changed, leads};
#[cfg(all(feature = "metrics", feature = "jobs"))]
pub(crate) use on::{job_reclaimed, jobs};

#[cfg(feature = "metrics")]
mod on {
    use std::collections::{BTreeMap, BTreeSet};
    use std::sync::{Mutex, MutexGuard, PoisonError};

    use metrics::{
        counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
    };
    use tenure_core::{Key, Time};

    use super::Duration;
    use crate::Clock;

    /// The most elections and queues that have a label of their own.
    const MAX_LABEL_NAMES: usize = 100;

    /// One thing that is counted or measured.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Metric {
        /// What it is called.
        pub name: &'static str,
        /// How it behaves.
        pub kind: Kind,
        /// What its series are told apart by, in alphabetical order.
        pub labels: &'static [&'static str],
        /// What it says.
        pub help: &'static str,
    }

    /// How a number behaves.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Kind {
        /// Only grows.
        Counter,
        /// Comes and goes.
        Gauge,
        /// How many of what size.
        Histogram,
    }

    /// All that the library records. Names and labels stay.
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
            help: "From the request to the guard.",
        },
        Metric {
            name: "tenure_hold_seconds",
            kind: Kind::Histogram,
            labels: &["class", "store"],
            help: "How long holds lasted that have ended.",
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
            help: "Requests that wait at this moment.",
        },
        Metric {
            name: "tenure_waiting_oldest_seconds",
            kind: Kind::Gauge,
            labels: &["class", "store"],
            help: "How long the oldest of them has waited.",
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
            help: "Time left when a renewal landed: small before a hold is lost.",
        },
        Metric {
            name: "tenure_lost_total",
            kind: Kind::Counter,
            labels: &["reason", "store"],
            help: "Holds that ended against our will.",
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
            name: "tenure_store_op_seconds",
            kind: Kind::Histogram,
            labels: &["op", "store"],
            help: "Requests to the store, by their kind.",
        },
        Metric {
            name: "tenure_build_info",
            kind: Kind::Gauge,
            labels: &["version"],
            help: "1, with the version as a label.",
        },
    ];

    /// Tells the exporter what each name means, and which version this is. To be called once, when the exporter is there.
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

    /// Brings up to date what changes by itself: how long the oldest wait has lasted. To be called before an exporter is
    /// read; without it that is as of the last request that came or went.
    pub fn refresh() {
        let now = Clock::system().now();
        for ((store, class), waits) in &*waits() {
            let oldest = waits.first().map_or(Duration::ZERO, |(since, _)| now.since(*since));
            gauge!("tenure_waiting_oldest_seconds", "store" => *store, "class" => class.clone())
                .set(oldest.as_secs_f64());
        }
    }

    /// How many jobs of a queue are in a state; `None` where that is not known.
    #[cfg(feature = "jobs")]
    pub(crate) fn jobs(queue: &str, state: tenure_core::jobs::JobState, number: Option<u64>) {
        let state = state.to_string().to_lowercase();
        #[expect(clippy::cast_precision_loss, reason = "nobody has so many jobs")]
        let number = number.map_or(f64::NAN, |number| number as f64);
        gauge!("tenure_jobs", "queue" => bounded(queue), "state" => state).set(number);
    }

    /// So many jobs were taken over from workers that are gone.
    #[cfg(feature = "jobs")]
    pub(crate) fn job_reclaimed(queue: &str, number: u64) {
        counter!("tenure_job_reclaimed_total", "queue" => bounded(queue)).increment(number);
    }

    /// The waits under way, the oldest first.
    type Waits = BTreeMap<(&'static str, String), BTreeSet<(Time, u64)>>;

    fn waits() -> MutexGuard<'static, Waits> {
        static WAITS: Mutex<Waits> = Mutex::new(BTreeMap::new());
        WAITS.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A name as a label, as long as there are not too many of them.
    pub(crate) fn bounded(name: &str) -> String {
        static KNOWN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if known.contains(name) || known.len() < MAX_LABEL_NAMES {
            known.insert(name.to_owned());
            return name.to_owned();
        }
        "other".to_owned()
    }

    /// The kind of store, for a label.
    fn kind(store: &dyn crate::Store) -> &'static str {
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
        let text = store.to_string();
        let scheme = text.split(':').next().unwrap_or_default();
        KNOWN.iter().find(|(known, _)| *known == scheme).map_or("other", |(_, kind)| kind)
    }

    /// What the metrics of a lock are labelled with.
    #[derive(Clone, Debug)]
    pub(crate) struct Labels {
        pub(crate) store: &'static str,
        pub(crate) class: String,
    }

    impl Labels {
        pub(crate) fn new(store: &dyn crate::Store, class: &str) -> Self {
            Self { store: kind(store), class: bounded(class) }
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

    /// A wait under way. It is over when this is dropped.
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

#[cfg(all(feature = "jobs", not(feature = "metrics")))]
pub(crate) use off::job_reclaimed;
#[cfg(not(feature = "metrics"))]
pub(crate) use off::{Labels, leader_changed, leads};

/// The same, without a facade to tell.
#[cfg(not(feature = "metrics"))]
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

    pub(crate) fn leads(_: &Key, _: bool) {}
    pub(crate) fn leader_changed(_: &Key, _: bool) {}
    #[cfg(feature = "jobs")]
    pub(crate) fn job_reclaimed(_: &str, _: u64) {}
}

#[cfg(all(test, feature = "metrics", feature = "jobs"))]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::{Mutex, PoisonError};

    use metrics::{
        Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit,
    };
    use tenure_core::Time;

    use super::on::bounded;
    use super::*;
    use crate::MemoryStore;

    #[test]
    fn labels_do_not_grow_for_ever() {
        let labels: BTreeSet<String> =
            (0..1_000).map(|number| bounded(&format!("election-{number}"))).collect();
        assert!(labels.len() <= 101, "{}", labels.len());
        assert!(labels.contains("other"));
        assert_eq!(bounded("election-0"), "election-0", "what had a label keeps it");
    }

    /// A kind, a name, its labels.
    type Row = (String, String, Vec<String>);

    /// Writes down what is recorded.
    #[derive(Default)]
    struct TestRecorder(Mutex<BTreeSet<Row>>);

    impl TestRecorder {
        fn note(&self, kind: Kind, key: &Key) {
            let mut labels: Vec<_> = key.labels().map(|label| label.key().to_owned()).collect();
            labels.sort();
            let row = (format!("{kind:?}"), key.name().to_owned(), labels);
            self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(row);
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
        });
        let recorded = listener.0.into_inner().expect("nobody panicked");
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
