//! What goes into the table and what comes out of it.

use std::fmt;
use std::time::Duration;

use super::bytes::KeyBytes;
use crate::{LockToken, Time};

/// Makes the token of each grant.
///
/// The numbers must grow strictly, over restarts too; whoever supplies them knows where the last one is written down.
/// The secrets must not be guessable. Any `FnMut() -> LockToken` will do.
pub trait Mint {
    /// The next token.
    fn mint(&mut self) -> LockToken;
}

impl<F: FnMut() -> LockToken> Mint for F {
    fn mint(&mut self) -> LockToken {
        self()
    }
}

/// The limits of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableConfig {
    /// How many keys may be in use at once, over both spaces. Idle keys do not count. At most 2³⁰.
    pub max_keys: usize,
    /// How many may wait for one key.
    pub max_waiters_per_key: usize,
    /// How long a key that nobody uses is remembered.
    pub max_idle: Duration,
    /// How many keys that nobody uses are remembered; beyond that the longest unused one goes. At most 2³⁰.
    pub max_idle_keys: usize,
    /// Whether holders are told when somebody begins to wait for them: [`Event::Wanted`].
    pub notify_holders: bool,
}

impl Default for TableConfig {
    /// Ten million keys, a million waiters a key, and 16,384 idle keys for a minute.
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

/// Somebody who can hold and wait: a connection, a task. Given out by [`LockTable::connect`](super::LockTable::connect)
/// and never used again after it disconnected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner {
    pub(super) serial: u64,
    pub(super) slot: u32,
}

impl Owner {
    /// A number that no other owner of this table has or had.
    pub const fn id(self) -> u64 {
        self.serial
    }

    /// A small number that no other owner has as long as this one is connected: where its driver may keep it in a list.
    pub const fn index(self) -> usize {
        self.slot as usize
    }
}

/// A place in a queue, or a two-phase claim. Never used again after it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PlaceId {
    pub(super) serial: u64,
    pub(super) slot: u32,
}

impl PlaceId {
    /// A number that no other place of this table has or had.
    pub const fn id(self) -> u64 {
        self.serial
    }
}

/// One of the two worlds of keys: the same bytes are another key in the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum KeySpace {
    /// Keys held by one, or by many that share.
    Lock,
    /// Keys with a number of slots.
    Semaphore,
}

/// How a key is to be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// By nobody else.
    Exclusive,
    /// Together with others that share it.
    Shared,
    /// As one of `limit` slots; a limit of 0 counts as 1.
    Slot {
        /// How many hold the key at most. The first to use the key fixes it for as long as the key has holders or
        /// waiters.
        limit: u32,
    },
}

impl Mode {
    /// Where keys of this mode live.
    pub const fn space(self) -> KeySpace {
        match self {
            Self::Exclusive | Self::Shared => KeySpace::Lock,
            Self::Slot { .. } => KeySpace::Semaphore,
        }
    }
}

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableClaim {
    /// Who will hold it.
    pub owner: Owner,
    /// How.
    pub mode: Mode,
    /// How long a grant lasts unless renewed; counted in nanoseconds, so at most about 584 years.
    pub lease: Duration,
    /// Whether to wait in the queue where it cannot be granted at once. [`LockTable::enqueue`](super::LockTable::enqueue)
    /// waits in any case.
    pub queue: bool,
}

/// An operation to come, as far as it matters to [`LockTable::look_ahead`](super::LockTable::look_ahead).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpcomingOp<'a> {
    /// The space of its key.
    pub space: KeySpace,
    /// Its key.
    pub key: &'a [u8],
    /// Whether it is a [`renew`](super::LockTable::renew), which needs less than the others: no hold begins or ends.
    pub is_renewal: bool,
}

/// A hold, fresh from the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Proves the hold; its number fences.
    pub token: LockToken,
    /// How long it lasts unless renewed.
    pub lease: Duration,
    /// When it is over unless renewed.
    pub ends: Time,
    /// How many wait behind it.
    pub waiters: u32,
}

/// The answer to [`LockTable::ask`](super::LockTable::ask).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimAnswer {
    /// Held from now on.
    Granted(Grant),
    /// Waiting; [`Event::Granted`] will name this place.
    Queued(PlaceId),
    /// Held by another, and the question was not to wait.
    Contended,
    /// Neither granted nor waiting.
    Refused(Refusal),
}

/// The answer to [`LockTable::enqueue`](super::LockTable::enqueue).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enqueued {
    /// Held from now on, and still to be redeemed.
    Granted(Grant),
    /// Waiting.
    Queued(PlaceId),
    /// This owner has a claim on this key already that it has not redeemed.
    AlreadyEnqueued,
    /// Neither granted nor waiting.
    Refused(Refusal),
}

/// The answer to [`LockTable::redeem`](super::LockTable::redeem).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Redeemed {
    /// Held, with a lease that begins now; the claim is settled.
    Granted(Grant),
    /// Still waiting.
    Waiting(PlaceId),
    /// It was granted, and the grant ended before it was redeemed. Said once: the claim is settled.
    LeaseExpired,
    /// There is no such claim.
    NotEnqueued,
}

/// Why a claim was turned away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// As many keys as allowed are in use.
    MaxKeys,
    /// As many as allowed wait for the key.
    MaxWaiters,
    /// The semaphore is in use with another limit.
    LimitMismatch,
    /// The owner has disconnected, or is none of this table's.
    UnknownOwner,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::MaxKeys => "too many keys are in use: release some, or raise the limit",
            Self::MaxWaiters => "too many wait for this key: try later, or raise the limit",
            Self::LimitMismatch => "the semaphore is in use with another limit: ask with the same",
            Self::UnknownOwner => "the owner has disconnected",
        })
    }
}

impl std::error::Error for Refusal {}

/// The token proves no hold of this key: it has ended, or never was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotHeld;

impl fmt::Display for NotHeld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not held: the hold has ended, or the token belongs to another key")
    }
}

impl std::error::Error for NotHeld {}

/// A hold that was read back contradicts those that are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestoreConflict;

impl fmt::Display for RestoreConflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a restored hold contradicts another one of the same key")
    }
}

impl std::error::Error for RestoreConflict {}

/// A hold goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Renewed {
    /// When it is over unless renewed again.
    pub ends: Time,
    /// How many wait behind it.
    pub waiters: u32,
}

/// What becomes of the holds of an owner that disconnects. Its places go in either case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnDisconnect {
    /// They end, and pass to the next waiters.
    Release,
    /// They stay without an owner until they are released by token or their lease is over.
    KeepHolds,
}

/// What happened beside the answer to an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TableEvent {
    /// A waiter's turn came. A place of [`LockTable::ask`](super::LockTable::ask) is gone with this; a claim of
    /// [`LockTable::enqueue`](super::LockTable::enqueue) is still to be redeemed.
    Granted {
        /// Whose turn it was.
        place: PlaceId,
        /// Who holds now.
        owner: Owner,
        /// The space of the key.
        space: KeySpace,
        /// The key.
        key: KeyBytes,
        /// How it is held.
        mode: Mode,
        /// What it holds.
        grant: Grant,
    },
    /// A hold ended otherwise than by [`LockTable::release`](super::LockTable::release).
    Ended {
        /// Why.
        how: Ending,
        /// Who held it; `None` where it had no owner any more.
        owner: Option<Owner>,
        /// The space of the key.
        space: KeySpace,
        /// The key.
        key: KeyBytes,
        /// What proved it.
        token: LockToken,
    },
    /// Somebody began to wait for a key that nobody waited for. Told to every holder of a lock, and to the longest holder
    /// of a semaphore, since one slot is enough; only where [`Config::tell_holders`] is set.
    HandoffRequested {
        /// Who holds it.
        owner: Owner,
        /// The space of the key.
        space: KeySpace,
        /// The key.
        key: KeyBytes,
        /// The hold that is wanted.
        token: LockToken,
    },
}

/// Why a hold ended that was not released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Its lease was over.
    Expired,
    /// Somebody broke it by hand.
    Evicted,
    /// Its owner disconnected.
    Disconnected,
    /// It was granted to a two-phase claim that was abandoned.
    Abandoned,
}

/// One who holds a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The fencing number of the hold.
    pub number: u64,
    /// How it is held.
    pub mode: Mode,
    /// Who holds it; `None` where the owner is gone.
    pub owner: Option<Owner>,
    /// Since when.
    pub granted: Time,
    /// How long the lease is.
    pub lease: Duration,
    /// When it is over unless renewed.
    pub ends: Time,
}

/// A hold with all that [`LockTable::restore`](super::LockTable::restore) needs to put it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HoldSnapshot<'a> {
    /// The key.
    pub key: &'a [u8],
    /// How it is held.
    pub mode: Mode,
    /// What proves it.
    pub token: LockToken,
    /// When it is over unless renewed.
    pub ends: Time,
    /// Who holds it; `None` where the owner is gone.
    pub owner: Option<Owner>,
}

/// One who waits for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiter {
    /// Its place.
    pub place: PlaceId,
    /// Who waits.
    pub owner: Owner,
    /// How it wants to hold the key.
    pub mode: Mode,
    /// Since when it waits.
    pub since: Time,
}

/// A key in few words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// The key.
    pub key: KeyBytes,
    /// How many slots it has; `None` for a lock.
    pub limit: Option<u32>,
    /// How many hold it.
    pub holders: u32,
    /// How many wait for it.
    pub waiters: u32,
    /// Who has held it longest.
    pub first: Option<Holder>,
    /// Since when nobody has used it; `None` while somebody does.
    pub idle_since: Option<Time>,
}

/// A key with its holders and waiters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// The numbers, which count also those that did not fit below.
    pub summary: Summary,
    /// Who holds it, in the order of their grants.
    pub holders: Vec<Holder>,
    /// Who waits for it, the next one first.
    pub waiters: Vec<Waiter>,
}

/// How much a table holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableSizes {
    /// Keys in use: those with holders, waiters, or an owner that has not yet heard that its grant ran out.
    pub keys: usize,
    /// Keys remembered though nobody uses them.
    pub idle_keys: usize,
    /// Holds.
    pub holds: usize,
    /// Places in queues.
    pub waiters: usize,
    /// Owners.
    pub owners: usize,
}
