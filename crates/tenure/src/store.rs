//! What a store is: where holds live.
//!
//! A store answers one question at a time and decides nothing else: it has no timers, no retries and no knowledge of
//! guards. The machines of `tenure-core` decide, one acquire loop and one keeper drive them, and one suite
//! (`tenure::conformance`) checks every store. To add a store, implement [`Store`], [`Place`] and [`Hold`] in one file
//! and pass the suite.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
pub use examine::{Finding, FindingLevel};
pub use tenure_core::acquire::LeaseStart;
pub use tenure_core::keeper::Loss;
pub use tenure_core::table::{KeySpace, Mode};
use tenure_core::{FencingToken, Key};

use crate::{Error, ErrorKind, Result};

pub mod examine;
#[cfg(all(unix, feature = "file"))]
pub mod file;
pub mod memory;
#[cfg(feature = "nats")]
pub mod nats;
#[cfg(feature = "object")]
pub mod object;
#[cfg(feature = "postgres")]
pub(crate) mod pg;
#[cfg(feature = "postgres")]
pub mod pg_advisory;
#[cfg(feature = "postgres")]
pub mod pg_lease;
#[cfg(feature = "server")]
pub mod server;

/// Where holds live. `Display` names it as a URL without secrets.
///
/// What every method promises:
///
/// - It makes one attempt, within `limit` where it has one, and never retries by itself.
/// - `limit` is kept *inside*: the future is polled to its end, because cutting it off could tear a write.
/// - An error says whether the request can have landed: [`ErrorKind::Unknown`] if it may have,
///   [`ErrorKind::Unavailable`] only if it surely did not.
/// - The requests of one claim reach the store in the order in which they were made, or never: a claim that lands after
///   its own abandon would be held by nobody. A write that names its version is safe by itself; others need one
///   connection per claim, or the end of the old connection before the claim is sent on a new one.
/// - A renewal or release names the hold by token, version or session, never only by the id of its claim.
/// - What the store cannot do answers [`ErrorKind::Unsupported`] and is absent from its [`Capabilities`].
#[async_trait]
pub trait Store: fmt::Debug + fmt::Display + Send + Sync + 'static {
    /// What this store can do. Never changes over its life.
    fn capabilities(&self) -> Capabilities;

    /// What people should know who use a store for the first time; `None` where it was there before.
    fn first_use(&self) -> Option<String> {
        None
    }

    /// The longest ttl that the store keeps; `None` where it has no limit of its own.
    fn max_ttl(&self) -> Option<Duration> {
        None
    }

    /// Where words are kept without a process, on stores whose holds are not; `None` on the others.
    fn durable_notes(&self) -> Option<&dyn DurableNotes> {
        None
    }

    /// Asks once for a hold. Repeating a claim of the same [`id`](Claim::id) is the same claim: what an earlier sending
    /// got, a grant or a place, is answered again.
    async fn claim(&self, claim: &Claim, limit: Duration) -> Result<Answer>;

    /// A hold that another process was granted, by its handle.
    async fn resume(&self, key: &Key, handle: &Handle) -> Result<Box<dyn Hold>>;

    /// Resolves when [`inspect`](Self::inspect) would show another [`Seen`] than `since`. May never resolve, where the
    /// store cannot push or the news got lost. Dropping it is safe at any time.
    async fn changed(&self, key: &Key, space: KeySpace, since: Version) -> Result<()>;

    /// Who holds the key and who waits, in order.
    async fn inspect(&self, key: &Key, space: KeySpace) -> Result<KeyState>;

    /// The keys in use that begin with `prefix` and come after `after`, in order, as many as the store gives at once.
    async fn list(
        &self,
        space: KeySpace,
        prefix: &str,
        after: Option<&str>,
    ) -> Result<Vec<KeyState>>;

    /// Breaks a hold by hand. Refused with [`ErrorKind::NotHeld`] unless `token` is that of the hold to break.
    async fn evict(&self, key: &Key, token: FencingToken, reason: &str) -> Result<()>;

    /// What happened to a key of late, the oldest first, as far as the store remembers it. Few do.
    async fn history(&self, key: &Key, _space: KeySpace) -> Result<Vec<HistoryEvent>> {
        let message = "this store does not remember what happened: tenure serve --history does";
        Err(Error::new(ErrorKind::Unsupported, message).on(key).at(self))
    }

    /// Looks at itself: whether it can be reached, whether what it needs is there, what it promises. Leaves nothing
    /// behind, and ends within about `limit`.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing that does not end by itself.
    async fn examine(&self, limit: Duration) -> Vec<Finding> {
        examine::basics(self, limit).await
    }

    /// Removes what locks leave behind that were released longer ago than this; how many.
    async fn clean(&self, _older_than: Duration) -> Result<u64> {
        Ok(0)
    }

    /// Lets go of what the store itself keeps open. Holds are the business of their keepers.
    async fn close(&self);
}

/// A place in a queue. Dropping it without [`abandon`](Self::abandon) leaves it to whatever ends places of vanished
/// waiters on that store.
#[async_trait]
pub trait Place: fmt::Debug + Send {
    /// Waits for the grant, for `limit` at most.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future keeps the place; a grant that came meanwhile is answered by the next call.
    async fn wait(&mut self, limit: Duration) -> Result<Waited>;

    /// Leaves the queue, and gives back a grant that raced it.
    async fn abandon(&mut self, limit: Duration) -> Result<()>;
}

/// What the store granted. It owns the revision, session or connection that the hold lives on.
///
/// Dropping it without [`release`](Self::release) or [`leave`](Self::leave) is what a crash would be: the hold ends with
/// its session where it lives on one, and with its lease otherwise.
#[async_trait]
pub trait Hold: fmt::Debug + Send {
    /// Extends the lease, or proves that the session lives. Never creates and never steals: [`ErrorKind::NotHeld`] if it
    /// is no longer ours.
    async fn renew(&mut self, ttl: Duration, limit: Duration) -> Result<Renewed>;

    /// Whether somebody waits; asked only where [`Capabilities::handoff`] is [`Handoff::Polled`].
    async fn check_handoff(&mut self, limit: Duration) -> Result<bool>;

    /// News that the store pushes. May never resolve.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses no news.
    async fn event(&mut self) -> HoldEvent;

    /// Gives the hold back, only if it is still ours: else [`ErrorKind::NotHeld`]. May be repeated.
    async fn release(&mut self, limit: Duration) -> Result<()>;

    /// The secret that renews and releases this hold from elsewhere; `None` where it cannot outlive its process.
    fn handle(&self) -> Option<Handle>;

    /// The revision of the record that the hold lives in, where it is in a bucket whose other participants know holds by
    /// that; it changes with renewals.
    fn revision(&self) -> Option<u64> {
        None
    }

    /// Lets go without releasing: the hold lasts until its lease ends. Only called where [`handle`](Self::handle) gives
    /// one.
    fn detach(self: Box<Self>);

    /// What gives the hold back in one call that waits for nobody, so that a guard need not ask its keeper; `None` where
    /// that takes a request. It must not keep the hold by itself.
    fn release_inline(&self) -> Option<Weak<dyn ReleaseInline>> {
        None
    }

    /// What keeps the hold alive in another process, by a descriptor that is open there; `None` where there is no such
    /// thing. It must not keep the hold by itself.
    #[cfg(unix)]
    fn keep_open(&self) -> Option<Weak<dyn KeepOpen>>;
}

/// Texts that outlive their process, each under a key. Written by whoever holds the lock of that key.
#[async_trait]
pub trait DurableNotes: Send + Sync {
    /// The text under a key.
    async fn read(&self, key: &Key) -> Result<Option<String>>;

    /// Puts a text under a key, in the place of what was there. It is on the disk when this resolves.
    async fn write(&self, key: &Key, text: &str) -> Result<()>;

    /// The texts under all keys that begin so.
    async fn list(&self, prefix: &str) -> Result<Vec<String>>;
}

/// Gives a hold back in one call.
pub trait ReleaseInline: Send + Sync {
    /// Gives the hold back, as [`Hold::release`] does; whether it was still ours. What the hold is asked after that
    /// answers [`ErrorKind::NotHeld`]. Called in the process that was granted it.
    fn release_now(&self) -> bool;
}

/// Gives out descriptors that a hold lives on.
#[cfg(unix)]
pub trait KeepOpen: Send + Sync {
    /// A descriptor, closed on exec, that keeps the hold as long as it is open in any process, unless the holder releases
    /// it. Closing it, or ending, is all that is needed to let go.
    ///
    /// # Errors
    ///
    /// What the system says; also where the hold has ended.
    fn keep_open(&self) -> std::io::Result<std::os::fd::OwnedFd>;
}

/// What a store can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each ability is there or not by itself")]
pub struct Capabilities {
    /// Who comes next.
    pub queue: QueueKind,
    /// What ends the hold of a holder that is gone.
    pub liveness: Liveness,
    /// Whether [`Store::changed`] is told of changes by the store.
    pub push: bool,
    /// How a holder learns that somebody waits.
    pub handoff: Handoff,
    /// Whether several can share a lock ([`Mode::Shared`]).
    pub shared: bool,
    /// Whether a key can have several slots ([`Mode::Slot`]).
    pub semaphore: bool,
    /// Whether a hold can outlive the process that claimed it.
    pub detached: bool,
    /// Whether keys can be listed.
    pub list: bool,
    /// Whether who holds and who waits is shown, by name and with the token; else only how many.
    pub names: bool,
    /// Whether a hold can be broken by hand.
    pub evict: bool,
    /// Whether the fencing token of every grant of a key is larger than that of the grant before. If not, every hold has
    /// [`FencingToken::NONE`].
    pub ordered_tokens: bool,
    /// The smallest ttl that the store can keep.
    pub min_ttl: Duration,
}

/// Who comes next on a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueKind {
    /// Whoever came first.
    Fifo,
    /// The one waiter that there can be.
    Single,
    /// Whoever is quickest.
    None,
}

/// What ends the hold of a holder that is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// The end of its lease.
    Lease,
    /// The end of its session: of its connection or process.
    Session,
    /// Whichever is first.
    Both,
}

/// How a holder learns that somebody waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handoff {
    /// It does not.
    None,
    /// The store pushes it, by [`Hold::event`].
    Pushed,
    /// The holder asks, by [`Hold::look`].
    Polled {
        /// How often.
        every: Duration,
    },
}

/// A request for a hold.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is asked for by itself")]
pub struct Claim {
    /// Names this claim over all its sendings.
    pub id: u128,
    /// What to hold.
    pub key: Key,
    /// How to hold it.
    pub mode: Mode,
    /// How long a hold lasts unless renewed.
    pub ttl: Duration,
    /// Who asks.
    pub by: Arc<Identity>,
    /// Take a place in the queue where it is held. Where a place of this claim exists already it is answered either way.
    pub queue: bool,
    /// Wait only where nobody else does: answer [`ErrorKind::Contention`] where the one place is taken. Only asked of stores
    /// with [`Queue::Single`].
    pub fail_if_contended: bool,
    /// Ask for a queue in order of arrival on a store that has none by default.
    pub fair: bool,
    /// The hold is to outlive the process.
    pub detached: bool,
}

/// Who holds or waits, for people to read. It proves nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Unique among all participants; `host:pid:nonce` unless given.
    pub id: String,
    /// The host.
    pub host: String,
    /// The process.
    pub pid: u32,
    /// Whatever the user wants others to read.
    pub note: String,
}

impl Identity {
    /// Who this process is to others, unless a request says otherwise.
    ///
    /// # Errors
    ///
    /// `Unavailable` where the system has no randomness to make it unique.
    pub fn of_process() -> Result<Arc<Self>> {
        crate::identity::of_process()
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.id)?;
        if self.note.is_empty() { Ok(()) } else { write!(f, " ({})", self.note) }
    }
}

/// A store's answer to a claim.
#[derive(Debug)]
pub enum Answer {
    /// It is ours.
    Granted(Grant),
    /// We wait.
    Queued(Box<dyn Place>),
    /// Another holds it, and there is no place to wait in.
    Contended(Contended),
}

/// A granted hold.
#[derive(Debug)]
pub struct Grant {
    /// Grows with every grant of the key; [`FencingToken::NONE`] unless [`Capabilities::ordered_tokens`].
    pub token: FencingToken,
    /// From when the lease counts.
    pub lease_start: LeaseStart,
    /// Somebody waits already.
    pub handoff_requested: bool,
    /// How many grants of the key there were, this one included, where the store counts every one: two with nothing
    /// between them are two terms with nobody between them.
    pub grants: Option<u64>,
    /// The hold.
    pub hold: Box<dyn Hold>,
}

/// Why a claim was not granted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contended {
    /// One of those who hold it, where the store can tell.
    pub holder: Option<Identity>,
    /// What was seen of the key: [`Store::changed`] tells when that is over.
    pub version: Version,
    /// The shortest pause before the next claim.
    pub retry_after: Option<Duration>,
    /// An explanation for the caller, if the holder's name alone does not tell why.
    pub note: Option<String>,
}

/// The end of a wait.
#[derive(Debug)]
pub enum Waited {
    /// It is ours.
    Granted(Grant),
    /// The time was over; the place is kept.
    Still {
        /// How many are before us, where the store can tell.
        ahead: Option<usize>,
    },
    /// The place is gone.
    Gone,
}

/// A renewal that the store confirmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Renewed {
    /// Somebody waits, as far as the store could tell in passing.
    pub handoff_requested: bool,
}

/// News that the store pushes to a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldEvent {
    /// The hold ended.
    Lost(Loss),
    /// Somebody waits.
    HandoffRequested,
}

/// A version of what a store shows of a key: equal as long as the same hold it and the same wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Version(pub u128);

/// A key, as seen at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyState {
    /// The key.
    pub key: Key,
    /// The space that it lives in.
    pub space: KeySpace,
    /// Who holds it, in the order of their grants.
    pub holders: Vec<HolderState>,
    /// Who waits, the next one first.
    pub waiters: Vec<WaiterState>,
    /// The version of all this.
    pub version: Version,
}

/// One who holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HolderState {
    /// Who, where the store can tell.
    pub by: Option<Identity>,
    /// The fencing token of the hold; [`FencingToken::NONE`] where [`Capabilities::names`] or
    /// [`Capabilities::ordered_tokens`] is not there.
    pub token: FencingToken,
    /// How long it has been held.
    pub held_for: Option<Duration>,
    /// How long it lasts unless renewed, as the store counts.
    pub lease_left: Option<Duration>,
    /// The revision of the record that it is in, on NATS; see [`Guard::revision`](crate::Guard::revision).
    pub revision: Option<u64>,
}

/// One who waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaiterState {
    /// Who, where the store can tell.
    pub by: Option<Identity>,
    /// For how long.
    pub waited_for: Option<Duration>,
}

/// Something that happened to a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistoryEvent {
    /// When, by the store's clock on the wall.
    pub at: std::time::SystemTime,
    /// What, in one word: `waiting`, `granted`, `released`, `expired`, `broken`, `disconnected`, `abandoned`, `gave_up`.
    pub what: String,
    /// The token of the hold that it happened to; zero for who waits.
    pub token: FencingToken,
    /// Who was granted it or waits, where that can be told.
    pub by: Option<Identity>,
    /// Why it was broken.
    pub reason: Option<String>,
}

/// The secret that renews and releases a hold. Opaque text; `Debug` hides it, [`expose`](Self::expose) shows it.
#[derive(Clone, PartialEq, Eq)]
pub struct Handle(String);

impl Handle {
    /// A handle from the text that a store made of it.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The secret itself: whoever reads it can release the hold.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Handle(…)")
    }
}

/// The error for something that a store cannot do.
pub fn unsupported(store: &dyn Store, what: &str) -> Error {
    Error::new(ErrorKind::Unsupported, format!("this store cannot {what}: choose another"))
        .at(store)
}
