//! Requirements of cases: a case is skipped if the store or the harness lacks one.

use std::time::Duration;

use crate::store::{Capabilities, Handoff, Liveness, QueueKind};

/// Requirement of a case.
#[derive(Clone, Copy, Debug)]
pub(super) struct Need {
    /// The requirement, as the table of cases names it.
    pub(super) what: &'static str,
    /// Reason for skipping the case without it.
    pub(super) missing: &'static str,
    is_met: fn(&Capabilities) -> bool,
}

impl Need {
    pub(super) fn is_met(&self, can: &Capabilities) -> bool {
        (self.is_met)(can)
    }
}

pub(super) const LEASE: Need = Need {
    what: "`liveness`: not `Session`",
    missing: "holds have no lease, they end with their session",
    is_met: |can| can.liveness != Liveness::Session,
};

pub(super) const PUSH: Need =
    Need { what: "`push`", missing: "the store cannot push", is_met: |can| can.push };

pub(super) const EVICT: Need =
    Need { what: "`evict`", missing: "the store cannot break a hold", is_met: |can| can.evict };

pub(super) const IDENTITIES: Need = Need {
    what: "`identities`",
    missing: "the store does not show the names of holders",
    is_met: |can| can.identities,
};

pub(super) const LIST: Need =
    Need { what: "`list`", missing: "the store cannot list keys", is_met: |can| can.list };

pub(super) const FIFO: Need = Need {
    what: "`queue`: `Fifo`",
    missing: "the store has no FIFO queue",
    is_met: |can| can.queue == QueueKind::Fifo,
};

pub(super) const QUEUE: Need = Need {
    what: "`queue`: not `None`",
    missing: "the store has no queue",
    is_met: |can| can.queue != QueueKind::None,
};

pub(super) const HANDOFF: Need = Need {
    what: "`handoff`: not `None`",
    missing: "the store does not notify holders of waiters",
    is_met: |can| can.handoff != Handoff::None,
};

pub(super) const SHARED: Need =
    Need { what: "`shared`", missing: "the store has no shared locks", is_met: |can| can.shared };

pub(super) const SEMAPHORE: Need = Need {
    what: "`semaphore`",
    missing: "the store has no semaphores",
    is_met: |can| can.semaphore,
};

pub(super) const MIN_TTL: Need = Need {
    what: "`min_ttl` above 1 ms",
    missing: "the store has no minimum ttl",
    is_met: |can| can.min_ttl > Duration::from_millis(1),
};

pub(super) const DETACHED: Need = Need {
    what: "`detached`",
    missing: "a hold cannot outlive its process",
    is_met: |can| can.detached,
};

/// Requirements that only the harness, or a grant, can answer: the case itself checks them while it runs.
pub(super) const RESTART: Need =
    Need { what: "`Harness::restart`", missing: "there is nothing to restart", is_met: |_| true };

pub(super) const WORKER: Need = Need {
    what: "`Harness::worker`",
    missing: "the harness starts no processes",
    is_met: |_| true,
};

pub(super) const GRANTS: Need = Need {
    what: "`Grant::grants`",
    missing: "the store does not count its grants",
    is_met: |_| true,
};
