//! The kind of a run, as its seed draws it.

use std::time::Duration;

use tenure_core::Random;

use crate::locks::below;

/// Operations that clients do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    Locks,
    Jobs,
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
        // Only a connection that outlives its server meets the next one with an old epoch.
        let lossy = matches!(promotion, Some(Promotion::Lossy { .. }));
        Self {
            seed,
            work: if random.chance(0.5) { Work::Locks } else { Work::Jobs },
            clients: 2 + below(random, 3),
            operations: 6 + below(random, 14),
            pooled: random.chance(if lossy { 0.8 } else { 0.4 }),
            // A commit that does not wait for the standby may be lost with the primary.
            lazy: random.chance(0.5) && promotion.is_none(),
            connection_faults: [0.0, 0.15, 0.5, 0.5][below(random, 4)],
            skips: [0.1, 0.5, 1.5][below(random, 3)],
            crashes: u32::from(random.chance(0.3)) + u32::from(random.chance(0.1)),
            heartbeats: random.chance(0.5),
            promotion,
        }
    }

    /// Name of the run's schema.
    pub(crate) fn schema(&self) -> String {
        format!("run_{}", self.seed)
    }

    /// SQL that ages all leases.
    pub(crate) fn aging(&self, span: Duration) -> String {
        let (schema, seconds) = (self.schema(), span.as_secs());
        match self.work {
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
        }
    }
}
