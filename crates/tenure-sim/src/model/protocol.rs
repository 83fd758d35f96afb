//! Requests and replies between the clients and the store of the small world, and the unit of its time.

use std::time::Duration;

/// Length of a tick.
pub(super) const TICK: Duration = Duration::from_secs(1);

/// Content of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Body {
    /// A claim. Each acquire of a client makes a new one.
    Claim {
        want: u8,
    },
    Renew {
        token: u64,
    },
    Release {
        token: u64,
    },
    Granted {
        token: u64,
    },
    Queued,
    Renewed,
    Refused,
    Released,
}

impl Body {
    pub(super) fn is_request(self) -> bool {
        matches!(self, Self::Claim { .. } | Self::Renew { .. } | Self::Release { .. })
    }
}

/// Effects of a client's step on the rest of the world.
#[derive(Debug, Default)]
pub(super) struct StepEffects {
    pub(super) sent: Vec<Body>,
    pub(super) handed_out: Option<u64>,
}
