//! The hold that a command runs under: a lock, the leadership of an election, or a job.

use std::future::pending;
use std::os::fd::OwnedFd;
use std::time::Duration;

use tenure::election::{Ended, Leadership};
use tenure::jobs::Job;
use tenure::{FencingToken, Guard, LockGuards, Loss};

use crate::guardian::protocol;

/// Variable with the revision of the hold's record when the command is started.
pub(crate) const REVISION_VARIABLE: &str = "TENURE_REVISION";

/// Variable with the tokens of all locks as JSON, if there are several.
pub(crate) const TOKENS_VARIABLE: &str = "TENURE_TOKENS";

/// Maximum number of locks that one command holds.
pub(crate) const MAX_LOCKS: usize = 16;

/// A hold of any kind.
#[derive(Clone, Copy)]
pub(crate) enum Hold<'a> {
    /// A lock; `tenure once` releases it.
    Lock(&'a Guard),
    /// The lock of `tenure run`, and all that it holds together with it.
    Locks { first: &'a Guard, all: &'a LockGuards },
    /// The leadership; the election releases it.
    Lead(&'a Leadership),
    /// A job; its worker completes or releases it.
    Job(&'a Job),
}

/// The end of a hold without a release.
pub(crate) struct LostHold {
    pub(crate) reason: String,
    /// Another holder may start at any moment: the command must be killed at once. False for a cancelled job, which no
    /// worker can claim before an operator retries it.
    pub(crate) urgent: bool,
}

impl<'a> Hold<'a> {
    pub(crate) fn token(self) -> FencingToken {
        match self {
            Self::Lock(guard) | Self::Locks { first: guard, .. } => guard.fencing_token(),
            Self::Lead(leadership) => leadership.fencing_token(),
            Self::Job(job) => job.fencing_token(),
        }
    }

    /// The revision of the record, on stores that have one.
    pub(crate) fn revision(self) -> Option<u64> {
        match self {
            Self::Lock(guard) | Self::Locks { first: guard, .. } => guard.revision(),
            Self::Lead(leadership) => leadership.revision(),
            Self::Job(_) => None,
        }
    }

    pub(crate) fn remaining(self) -> Duration {
        match self {
            Self::Lock(guard) => guard.remaining(),
            Self::Locks { all, .. } => all.remaining(),
            Self::Lead(leadership) => leadership.remaining(),
            Self::Job(job) => job.remaining(),
        }
    }

    pub(crate) fn is_held(self) -> bool {
        !self.remaining().is_zero()
    }

    /// Deadline of the hold on the clock that the guardian reads; `None` if the hold has no lease.
    pub(crate) fn deadline_nanos(self) -> Option<u64> {
        // The clock is read before `remaining`: time that passes between the two makes the deadline earlier, never
        // later.
        let now = protocol::boottime_nanos();
        match self.remaining() {
            Duration::MAX => None,
            left => Some(now.saturating_add(u64::try_from(left.as_nanos()).unwrap_or(u64::MAX))),
        }
    }

    /// Descriptors that keep the hold as long as any process has them open, on stores that have them.
    pub(crate) fn keep_open(self) -> tenure::Result<Vec<OwnedFd>> {
        let mut descriptors = Vec::new();
        match self {
            Self::Lock(guard) => descriptors.extend(guard.keep_open()?),
            Self::Locks { all, .. } => {
                for guard in all {
                    descriptors.extend(guard.keep_open()?);
                }
            }
            Self::Lead(leadership) => descriptors.extend(leadership.keep_open()?),
            Self::Job(_) => {}
        }
        Ok(descriptors)
    }

    /// Locks that are held beside the first one.
    pub(crate) fn others(self) -> impl Iterator<Item = &'a Guard> {
        let (first, all) = match self {
            Self::Locks { first, all } => (Some(first), Some(all)),
            _ => (None, None),
        };
        let all = all.into_iter().flatten();
        all.filter(move |guard| first.is_none_or(|first| first.key() != guard.key()))
    }

    /// Resolves when the hold has ended, with the reason.
    pub(crate) async fn lost(self) -> LostHold {
        let reason = match self {
            Self::Lock(guard) => guard.lost().await.reason.to_string(),
            Self::Locks { first, all } => {
                let lost = all.lost().await;
                if lost.key == *first.key() {
                    lost.reason.to_string()
                } else {
                    format!("{} was lost: {}", lost.key, lost.reason)
                }
            }
            Self::Lead(leadership) => match leadership.ended().await {
                Ended::Lost(lost) => lost.reason.to_string(),
                Ended::Released => "the leadership was released".to_owned(),
                ended => ended.to_string(),
            },
            Self::Job(job) => {
                let loss = job.lost().await;
                return LostHold { reason: loss.to_string(), urgent: loss != Loss::Cancelled };
            }
        };
        LostHold { reason, urgent: true }
    }

    /// Resolves when it is time to stop the command.
    pub(crate) async fn ending(self) {
        match self {
            Self::Lock(guard) => guard.ending().await,
            Self::Locks { all, .. } => all.ending().await,
            Self::Lead(leadership) => leadership.ending().await,
            Self::Job(job) => job.ending().await,
        }
    }

    /// Resolves when the command has completed its job itself. Never resolves for other holds.
    pub(crate) async fn completed(self) {
        match self {
            Self::Job(job) => job.completed().await,
            _ => pending().await,
        }
    }

    /// Resolves when a hand-off is requested. Never resolves for a job.
    pub(crate) async fn handoff_requested(self) {
        match self {
            Self::Lock(guard) => guard.handoff_requested().await,
            Self::Locks { all, .. } => all.handoff_requested().await,
            Self::Lead(leadership) => leadership.handoff_requested().await,
            Self::Job(_) => pending().await,
        }
    }
}
