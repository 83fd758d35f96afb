//! Ablation: disables one rule at a time, in a setup in which the rule matters.

use std::ops::Range;

use tenure_core::Rules;

use crate::{Faults, Setup, StoreKind, Violation, simulate};

/// A rule, and a setup in which its absence causes a breach.
#[derive(Clone, Copy, Debug)]
pub struct Ablation {
    /// Name of the field of [`Rules`].
    pub rule: &'static str,
    /// All rules except this one.
    pub without: Rules,
    /// Setup, with all rules.
    pub setup: Setup,
}

impl Ablation {
    /// Ablations of all rules, in the order of [`Rules`].
    pub fn all() -> Vec<Self> {
        use StoreKind::{Bucket, ServerClock, Session, Stream};
        let all = Rules::ALL;
        // The network is reliable; clients are stopped for a long time.
        let calm = Faults { lose: 0.0, delay_spike: 0.0, hang: 0.0, refuse: 0.0, ..Faults::MIXED };
        let stops = Faults { mean_fault_interval: 2.0, max_fault_duration: 3.0, ..calm };
        // Half of all messages are delayed by nearly the time limit of a request.
        let slow = Faults { delay_spike: 0.5, max_delay_spike: 0.24, ..stops };
        // A read that hangs on its way is answered after the store has received the last renewal before a partition.
        let hanging = Faults {
            hang: 0.9,
            delay_spike: 0.1,
            max_delay_spike: 1.5,
            delay: 0.01,
            mean_fault_interval: 1.5,
            max_fault_duration: 1.5,
            partition: 200,
            ..calm
        };
        let of = |rule, store, without, faults| {
            let setup = Setup { keys: 1, faults, ..Setup::new(store) };
            Self { rule, without, setup }
        };
        vec![
            of("count_from_request", ServerClock, Rules { count_from_request: false, ..all }, slow),
            of("keep_margin", ServerClock, Rules { keep_margin: false, ..all }, stops),
            of(
                "count_suspended_time",
                ServerClock,
                Rules { count_suspended_time: false, ..all },
                stops,
            ),
            of(
                "validity_is_a_deadline",
                ServerClock,
                Rules { validity_is_a_deadline: false, ..all },
                stops,
            ),
            of(
                "lost_by_timer",
                ServerClock,
                Rules { lost_by_timer: false, ..all },
                Faults { hang: 0.3, lose: 0.2, ..calm },
            ),
            of(
                "only_clear_answers_extend",
                ServerClock,
                Rules { only_clear_answers_extend: false, ..all },
                Faults { partition: 30, ..stops },
            ),
            of(
                "confirm_waited_grants",
                ServerClock,
                Rules { confirm_waited_grants: false, ..all },
                Faults { max_delay_spike: 0.6, ..slow },
            ),
            of(
                "count_from_last_look",
                Bucket,
                Rules { count_from_last_look: false, ..all },
                Faults { mean_fault_interval: 1.0, ..stops },
            ),
            of(
                "release_late_grants",
                ServerClock,
                Rules { release_late_grants: false, ..all },
                stops,
            ),
            of(
                "take_over_by_observation",
                Stream,
                Rules { take_over_by_observation: false, ..all },
                calm,
            ),
            of("observe_from_reply", Stream, Rules { observe_from_reply: false, ..all }, hanging),
            of(
                "compare_store_clocks",
                Bucket,
                Rules { compare_store_clocks: false, ..all },
                Faults { partition: 30, ..stops },
            ),
            of(
                "distrust_store_clocks",
                Stream,
                Rules { distrust_store_clocks: false, ..all },
                Faults { restart: 3.0, ..calm },
            ),
            of(
                "lost_on_broken_connection",
                Session,
                Rules { lost_on_broken_connection: false, ..all },
                Faults { disconnect: 9, ..calm },
            ),
            of(
                "renewal_names_version",
                Stream,
                Rules { renewal_names_version: false, ..all },
                Faults { delay_spike: 0.2, max_delay_spike: 2.0, ..stops },
            ),
        ]
    }

    /// First breach among these seeds without the rule.
    pub fn broken(&self, seeds: Range<u64>) -> Option<Box<Violation>> {
        first(&Setup { rules: self.without, ..self.setup }, seeds)
    }

    /// First breach among these seeds with all rules: there must be none.
    pub fn broken_with_all_rules(&self, seeds: Range<u64>) -> Option<Box<Violation>> {
        first(&self.setup, seeds)
    }
}

fn first(setup: &Setup, mut seeds: Range<u64>) -> Option<Box<Violation>> {
    seeds.find_map(|seed| simulate(seed, setup).err())
}
