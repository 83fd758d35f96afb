//! Inputs and outputs of the table.

use std::fmt;
use std::time::Duration;

use super::bytes::KeyBytes;
use crate::{LockToken, Time};

/// Source of the token of each grant.
///
/// The numbers must grow strictly, also across restarts, so the implementation must know the last number that was
/// persisted. The secrets must not be guessable. Any `FnMut() -> LockToken` implements this trait.
pub trait Mint {
    /// Returns the next token.
    fn mint(&mut self) -> LockToken;
}

impl<F: FnMut() -> LockToken> Mint for F {
    fn mint(&mut self) -> LockToken {
        self()
    }
}

/// Limits of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableConfig {
    /// Most keys in use at a time, over both key spaces. Idle keys do not count. At most 2³⁰.
    pub max_keys: usize,
    /// Most waiters per key.
    pub max_waiters_per_key: usize,
    /// Time for which an idle key is remembered.
    pub max_idle: Duration,
    /// Most idle keys that are remembered; beyond that the longest idle key is dropped. At most 2³⁰.
    pub max_idle_keys: usize,
    /// Notify holders when a first waiter joins the queue: [`TableEvent::HandoffRequested`].
    pub notify_holders: bool,
}

impl Default for TableConfig {
    /// Ten million keys, a million waiters per key, and 16,384 idle keys for a minute.
    fn default() -> Self {
        Self {
            max_keys: 10_000_000,
            max_waiters_per_key: 1_000_000,
            max_idle: Duration::from_secs(60),
            max_idle_keys: 16_384,
            notify_holders: false,
        }
    }
}

/// Identity that can hold and wait, such as a connection or a task. [`LockTable::connect`](super::LockTable::connect)
/// creates it; it is not reused after it disconnects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner {
    pub(super) serial: u64,
    pub(super) slot: u32,
}

impl Owner {
    /// Number that is unique among all owners this table ever had.
    pub const fn id(self) -> u64 {
        self.serial
    }

    /// Small number that is unique among connected owners: an index for the driver's own list.
    pub const fn index(self) -> usize {
        self.slot as usize
    }
}

/// Identifier of a place in a queue or of a two-phase claim. It is not reused after the place ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PlaceId {
    pub(super) serial: u64,
    pub(super) slot: u32,
}

impl PlaceId {
    /// Number that is unique among all places this table ever had.
    pub const fn id(self) -> u64 {
        self.serial
    }
}

/// Namespace of a key: the same bytes name different keys in the two spaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum KeySpace {
    /// Keys with one exclusive holder or several shared holders.
    Lock,
    /// Keys with a number of slots.
    Semaphore,
}

/// Kind of hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// No other holder.
    Exclusive,
    /// Together with other shared holders.
    Shared,
    /// One of `limit` slots; a limit of 0 counts as 1.
    Slot {
        /// Most holders of the key. The first claim sets it for as long as the key has holders or waiters.
        limit: u32,
    },
}

impl Mode {
    /// Key space of this mode.
    pub const fn space(self) -> KeySpace {
        match self {
            Self::Exclusive | Self::Shared => KeySpace::Lock,
            Self::Slot { .. } => KeySpace::Semaphore,
        }
    }

    /// The same mode with a limit of at least 1.
    pub(super) const fn normalized(self) -> Self {
        match self {
            Self::Slot { limit: 0 } => Self::Slot { limit: 1 },
            mode => mode,
        }
    }
}

/// Claim on a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableClaim {
    /// Owner of the future hold.
    pub owner: Owner,
    /// Kind of hold.
    pub mode: Mode,
    /// Time that a grant lasts unless renewed; counted in nanoseconds, so at most about 584 years.
    pub lease: Duration,
    /// Wait in the queue if the claim cannot be granted at once. [`LockTable::enqueue`](super::LockTable::enqueue)
    /// always waits.
    pub queue: bool,
}

/// Description of a coming operation for [`LockTable::prefetch`](super::LockTable::prefetch).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpcomingOp<'a> {
    /// Space of the key.
    pub space: KeySpace,
    /// Key of the operation.
    pub key: &'a [u8],
    /// True for a [`renew`](super::LockTable::renew). It touches less memory than other operations, because no hold
    /// begins or ends.
    pub is_renewal: bool,
}

/// New hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Proof of the hold; its number is the fencing token.
    pub token: LockToken,
    /// Time that the hold lasts unless renewed.
    pub lease: Duration,
    /// End of the hold unless renewed.
    pub ends: Time,
    /// Number of waiters for the key.
    pub waiters: u32,
}

/// Answer to [`LockTable::claim`](super::LockTable::claim).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimAnswer {
    /// Held from now on.
    Granted(Grant),
    /// Waiting; [`TableEvent::Granted`] will name this place.
    Queued(PlaceId),
    /// Held by another owner, and the claim does not wait.
    Contended,
    /// Neither granted nor waiting.
    Refused(Refusal),
}

/// Answer to [`LockTable::enqueue`](super::LockTable::enqueue).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enqueued {
    /// Held from now on, and still to be redeemed.
    Granted(Grant),
    /// Waiting.
    Queued(PlaceId),
    /// The owner already has a claim on this key that it has not redeemed.
    AlreadyEnqueued,
    /// Neither granted nor waiting.
    Refused(Refusal),
}

/// Answer to [`LockTable::redeem`](super::LockTable::redeem).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Redeemed {
    /// Held, with a lease that begins now; the claim is settled.
    Granted(Grant),
    /// Still waiting.
    Waiting(PlaceId),
    /// The grant expired before it was redeemed. Reported once: the claim is settled.
    LeaseExpired,
    /// There is no such claim.
    NotEnqueued,
}

/// Reason for which a claim was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The limit of keys in use is reached.
    MaxKeys,
    /// The limit of waiters for the key is reached.
    MaxWaiters,
    /// The semaphore is in use with another limit.
    LimitMismatch,
    /// The owner has disconnected, or belongs to another table.
    UnknownOwner,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::MaxKeys => "too many keys are in use: release some, or raise the limit",
            Self::MaxWaiters => "too many waiters for this key: try later, or raise the limit",
            Self::LimitMismatch => "the semaphore is in use with another limit: use the same limit",
            Self::UnknownOwner => "the owner has disconnected",
        })
    }
}

impl std::error::Error for Refusal {}

/// The token proves no hold of this key: the hold has ended, or never existed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotHeld;

impl fmt::Display for NotHeld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not held: the hold has ended, or the token belongs to another key")
    }
}

impl std::error::Error for NotHeld {}

/// A restored hold contradicts other holds of the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestoreConflict;

impl fmt::Display for RestoreConflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a restored hold contradicts another hold of the same key")
    }
}

impl std::error::Error for RestoreConflict {}

/// Result of a renewal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Renewed {
    /// End of the hold unless renewed again.
    pub ends: Time,
    /// Number of waiters for the key.
    pub waiters: u32,
}

/// Treatment of the holds of an owner that disconnects. Its places are removed in either case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnDisconnect {
    /// The holds end, and their keys pass to the next waiters.
    Release,
    /// The holds stay without an owner until they are released by token or expire.
    KeepHolds,
}

/// Change of the table. Every change of a holder or waiter has its event, also if the caller learns of it from the
/// answer. Only [`LockTable::restore`](super::LockTable::restore) has none: it repeats changes of an earlier table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TableEvent {
    /// A claim was granted the key, at once or from the queue. A claim of
    /// [`LockTable::enqueue`](super::LockTable::enqueue) is still to be redeemed.
    Granted {
        /// Place in the queue that ends with this grant; `None` if the claim was granted at once.
        place: Option<PlaceId>,
        /// New holder.
        owner: Owner,
        /// Space of the key.
        space: KeySpace,
        /// Granted key.
        key: KeyBytes,
        /// Kind of hold.
        mode: Mode,
        /// New hold.
        grant: Grant,
    },
    /// A hold was renewed, or a two-phase grant was redeemed.
    Renewed {
        /// Space of the key.
        space: KeySpace,
        /// Key of the hold.
        key: KeyBytes,
        /// Token of the hold.
        token: LockToken,
        /// Time that the hold lasts from now on unless renewed again.
        lease: Duration,
        /// End of the hold unless renewed again.
        ends: Time,
    },
    /// A hold lost its owner: it lasts until it is released or its lease ends.
    Detached {
        /// Space of the key.
        space: KeySpace,
        /// Key of the hold.
        key: KeyBytes,
        /// Token of the hold.
        token: LockToken,
    },
    /// A hold ended.
    Ended {
        /// Cause of the end.
        how: Ending,
        /// Former holder; `None` if the hold no longer had an owner.
        owner: Option<Owner>,
        /// Space of the key.
        space: KeySpace,
        /// Key of the hold.
        key: KeyBytes,
        /// Token of the ended hold.
        token: LockToken,
    },
    /// A claim joined the end of the queue.
    Queued {
        /// Place in the queue.
        place: PlaceId,
        /// Owner of the place.
        owner: Owner,
        /// Space of the key.
        space: KeySpace,
        /// Key of the queue.
        key: KeyBytes,
        /// Kind of hold that is claimed.
        mode: Mode,
    },
    /// A claim left the queue without a grant.
    Left {
        /// Place that ended.
        place: PlaceId,
        /// Owner of the place.
        owner: Owner,
        /// Space of the key.
        space: KeySpace,
        /// Key of the queue.
        key: KeyBytes,
    },
    /// A waiter joined the empty queue of a held key. Sent to every holder of a lock. For a semaphore it is sent only
    /// to the holder with the oldest grant, since one slot is enough. Only if [`TableConfig::notify_holders`] is set.
    HandoffRequested {
        /// Holder that is asked to hand off.
        owner: Owner,
        /// Space of the key.
        space: KeySpace,
        /// Contended key.
        key: KeyBytes,
        /// Token of the hold that is asked for.
        token: LockToken,
    },
}

/// Cause of the end of a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The holder released it.
    Released,
    /// The lease expired.
    Expired,
    /// An operator ended the hold.
    Evicted,
    /// The owner disconnected.
    Disconnected,
    /// The hold was granted to a two-phase claim that was abandoned.
    Abandoned,
}

/// Holder of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Fencing number of the hold.
    pub number: u64,
    /// Kind of hold.
    pub mode: Mode,
    /// Owner of the hold; `None` if the hold has none.
    pub owner: Option<Owner>,
    /// Time of the grant.
    pub granted: Time,
    /// Length of the lease.
    pub lease: Duration,
    /// End of the hold unless renewed.
    pub ends: Time,
}

/// Hold with everything that [`LockTable::restore`](super::LockTable::restore) needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HoldSnapshot<'a> {
    /// Key of the hold.
    pub key: &'a [u8],
    /// Kind of hold.
    pub mode: Mode,
    /// Proof of the hold.
    pub token: LockToken,
    /// End of the hold unless renewed.
    pub ends: Time,
    /// Owner of the hold; `None` if the hold has none.
    pub owner: Option<Owner>,
}

/// Waiter for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiter {
    /// Place in the queue.
    pub place: PlaceId,
    /// Owner of the place.
    pub owner: Owner,
    /// Kind of hold that is claimed.
    pub mode: Mode,
    /// Time at which the wait began.
    pub since: Time,
}

/// Summary of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Summarized key.
    pub key: KeyBytes,
    /// Slots of a semaphore; `None` for a lock.
    pub limit: Option<u32>,
    /// Number of holders.
    pub holders: u32,
    /// Number of waiters.
    pub waiters: u32,
    /// Holder with the oldest grant.
    pub first: Option<Holder>,
    /// Time since which the key is idle; `None` while it is in use.
    pub idle_since: Option<Time>,
}

/// Key with its holders and waiters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// Summary. It also counts the holders and waiters that exceed the limit of the lists below.
    pub summary: Summary,
    /// Holders, in the order of their grants.
    pub holders: Vec<Holder>,
    /// Waiters, in the order of the queue.
    pub waiters: Vec<Waiter>,
}

/// Sizes of a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableSizes {
    /// Keys in use: with holders, waiters, or two-phase claims whose owner has not yet learned that the grant expired.
    pub keys: usize,
    /// Idle keys that are remembered.
    pub idle_keys: usize,
    /// Holds.
    pub holds: usize,
    /// Places in queues.
    pub waiters: usize,
    /// Owners.
    pub owners: usize,
}
