//! The kind of a run, as its seed draws it.

use std::time::Duration;

use tenure_core::Random;

use crate::locks::below;
use crate::protocol::{is_question, short};

/// Operations that clients do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Work {
    Locks,
    Jobs,
    /// Locks on sessions.
    Sessions,
}

/// Rare order of statements that a run makes likely.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Emphasis {
    /// Claims of jobs get no answer, and the cleanup after them arrives late.
    LateCleanup,
    /// A lease ends long before its worker sends the next heartbeat.
    LateHeartbeats,
}

/// A fail-over in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Promotion {
    /// Of a standby that has every acknowledged write.
    Synchronous,
    /// Of a standby that was cut off: only the order of tokens is promised.
    Lossy { cut_off: bool },
}

/// Everything that a seed decides before its run.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) work: Work,
    pub(crate) clients: usize,
    pub(crate) operations: usize,
    /// Connections of clients survive the server, as behind a pooler.
    pub(crate) pooled: bool,
    /// Commits are acknowledged before they are on disk, unless a statement asks for more.
    pub(crate) lazy: bool,
    /// Weight of a fault of one connection, beside 4 for a statement that passes.
    pub(crate) connection_faults: f64,
    /// Weight of a step that lets time pass.
    pub(crate) skips: f64,
    pub(crate) crashes: u32,
    /// Workers renew their leases by a timer.
    pub(crate) heartbeats: bool,
    pub(crate) promotion: Option<Promotion>,
    pub(crate) emphasis: Option<Emphasis>,
}

/// Weights of the faults of a statement and of its reply, beside 4 for a statement or a reply that passes.
pub(crate) struct FaultWeights {
    pub(crate) cut: f64,
    pub(crate) delay: f64,
    pub(crate) reply_cut: f64,
}

impl Plan {
    pub(crate) fn draw(seed: u64) -> Self {
        let mut random = Random::new(seed);
        // Consecutive seeds are spread by the first draw.
        let random = &mut Random::new(random.bits());
        let promotion = match random.unit() {
            ..0.06 => Some(Promotion::Synchronous),
            ..0.13 => Some(Promotion::Lossy { cut_off: false }),
            _ => None,
        };
        let work = match random.unit() {
            ..0.35 => Work::Locks,
            ..0.75 => Work::Jobs,
            _ => Work::Sessions,
        };
        let emphasis = match random.unit() {
            _ if work != Work::Jobs => None,
            ..0.3 => Some(Emphasis::LateCleanup),
            ..0.5 => Some(Emphasis::LateHeartbeats),
            _ => None,
        };
        let pooled = match (work, promotion) {
            (Work::Sessions, _) => 0.2,
            // Only a connection that outlives its server meets the next one with an old epoch.
            (_, Some(Promotion::Lossy { .. })) => 0.8,
            _ => 0.4,
        };
        let plan = Self {
            seed,
            work,
            clients: 2 + below(random, 3),
            operations: 6 + below(random, 14),
            pooled: random.chance(pooled),
            // A commit that does not wait for the standby may be lost with the primary.
            lazy: random.chance(0.5) && promotion.is_none(),
            connection_faults: [0.0, 0.15, 0.5, 0.5][below(random, 4)],
            skips: [0.1, 0.5, 1.5][below(random, 3)],
            crashes: u32::from(random.chance(0.3)) + u32::from(random.chance(0.1)),
            heartbeats: random.chance(0.5) || emphasis == Some(Emphasis::LateHeartbeats),
            promotion,
            emphasis,
        };
        // Neither a crash nor the end of a lease may come between the claims and the late cleanup.
        match emphasis {
            Some(Emphasis::LateCleanup) => {
                Self { skips: 0.02, crashes: 0, clients: 2, operations: 20, ..plan }
            }
            // A hold must last until another client gets the lock: most holds end with their sessions.
            None if work == Work::Sessions => Self { skips: plan.skips / 5.0, ..plan },
            _ => plan,
        }
    }

    pub(crate) fn faults(&self, sql: &str) -> FaultWeights {
        // Most faults go to statements that may write: a lost question is asked again, and changes nothing.
        let base = self.connection_faults * if is_question(sql) { 0.1 } else { 1.0 };
        let weights = FaultWeights { cut: base, delay: base, reply_cut: 2.0 * base };
        match (self.emphasis, &*short(sql)) {
            (Some(Emphasis::LateCleanup), "claim job") => {
                FaultWeights { reply_cut: 2.0, ..weights }
            }
            (Some(Emphasis::LateCleanup), "clean up") => FaultWeights { delay: 6.0, ..weights },
            _ => weights,
        }
    }

    /// Weight of a heartbeat that is answered.
    pub(crate) fn heartbeat_weight(&self) -> f64 {
        if self.emphasis == Some(Emphasis::LateHeartbeats) { 0.2 } else { 1.5 }
    }

    /// Weight of the arrival of a request whose client has given up.
    pub(crate) fn late_weight(&self, sql: &str, client_holds: bool) -> f64 {
        match (self.emphasis, &*short(sql)) {
            // After the next claim of the same worker.
            (Some(Emphasis::LateCleanup), "clean up") if client_holds => 3.0,
            (Some(Emphasis::LateCleanup), "clean up") => 0.05,
            _ => 0.7,
        }
    }

    /// True if the queue for a lock on sessions has one place. Such a run takes up to a minute: waiters that stand by
    /// poll in real time.
    pub(crate) fn has_short_queue(&self) -> bool {
        self.seed.is_multiple_of(5)
    }

    /// True if locks on sessions count their terms in a table.
    pub(crate) fn counts_terms(&self) -> bool {
        self.seed.is_multiple_of(2)
    }

    /// Name of the run's schema.
    pub(crate) fn schema(&self) -> String {
        format!("run_{}", self.seed)
    }

    /// SQL that ages all leases; `None` if the rows have none.
    pub(crate) fn aging(&self, span: Duration) -> Option<String> {
        let (schema, seconds) = (self.schema(), span.as_secs());
        Some(match self.work {
            Work::Sessions => return None,
            Work::Jobs => format!(
                "UPDATE {schema}.jobs SET locked_until = locked_until - interval '{seconds} s' \
                 WHERE locked_until IS NOT NULL"
            ),
            Work::Locks => {
                let earlier =
                    |name: &str| format!("'{name}', (e->>'{name}')::int8 - {}", span.as_micros());
                format!(
                    "UPDATE {schema}.locks SET locked_until = locked_until - interval '{seconds} s', \
                         granted_at = granted_at - interval '{seconds} s', \
                         holders = (SELECT jsonb_agg(e || jsonb_build_object({}, {})) \
                             FROM jsonb_array_elements(holders) AS e) \
                     WHERE holders IS NULL OR jsonb_array_length(holders) > 0",
                    earlier("until"),
                    earlier("granted")
                )
            }
        })
    }
}
