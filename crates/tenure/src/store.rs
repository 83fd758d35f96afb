//! The store traits: the contract that every store implements.
//!
//! A store keeps holds, and answers one request per call. It has no timers, no retries and no knowledge of guards: the
//! state machines of `tenure-core` decide when to claim, renew and release. The same acquire loop and the same keeper
//! drive those machines on every store, and the same suite, `tenure::conformance`, tests every store.
//!
//! To add a store, implement [`Store`] and [`Hold`], and [`Place`] if the store has a queue. The new store must pass
//! `tenure::conformance`.
//!
//! # Terms
//!
//! - A *key* names a lock, or a semaphore with several slots. Locks and semaphores are two *key spaces*: the lock `a`
//!   and the semaphore `a` are independent.
//! - A *hold* is what a store grants: the possession of a lock, or of one slot, by its *holder*. A *guard* is the value
//!   that represents a hold in the code of the caller.
//! - A *claim* asks a store for a hold. It may be sent several times, under one id. A *grant* is the answer that makes
//!   the claimant the holder.
//! - A *waiter* is a claimant that has no grant yet.
//! - A *place* is the position of a claim in the queue of a key.
//! - The *lease* is the time that a hold lasts without a renewal. The *ttl* is the lease that was requested.
//! - A *session* is the connection or process on which a hold depends. Not every store has sessions.
//! - The *deadline* is the instant from which the holder itself considers the hold lost. It is earlier than the end of
//!   the lease at the store.
//! - The *fencing token* is a public number that grows with every grant of a key. The *handle* is a secret: any process
//!   that has it can renew and release the hold.
//! - A *hand-off request* informs a holder that a waiter has asked for the lock.
//! - The *acquire loop* is the task that claims a key. The *keeper* is the task that renews and releases a hold.

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

/// Store of holds: grants them, renews them, and ends those of dead holders.
///
/// `Display` prints the store as a URL without secrets.
///
/// # Contract of every method
///
/// - **One attempt.** A method makes one attempt and does not retry. The acquire loop and the keeper retry.
/// - **The store enforces the limit.** A method that takes a `limit` returns within it. The caller polls the future to
///   completion and never wraps it in a timeout: a future that is dropped early could leave a half-written request on a
///   connection. A future may be dropped early only if the *Cancel safety* section of its method says so, or if the
///   runtime shuts down.
/// - **The kind of an error says whether the request can have taken effect.** See *Errors* below.
/// - **The requests of one claim take effect in the order in which they were made, or never.** If a claim took effect
///   after its own [`abandon`](Place::abandon), the store would keep a hold that no process uses. A conditional write
///   that names the expected version prevents this. A store without conditional writes uses one connection per claim,
///   or closes the old connection before it sends the claim on a new one.
/// - **A renewal or release names its hold** by token, session or version of the stored record. The id of the claim
///   alone is not enough: it does not distinguish this hold from an earlier or later hold of the same claim.
/// - **An operation that the store lacks** fails with [`ErrorKind::Unsupported`]. The [`Capabilities`] of the store do
///   not list it.
///
/// # Errors
///
/// The acquire loop and the keeper react to the kind of an error, not to its message:
///
/// - `Unknown`, `Timeout`: the request may have taken effect. A claim is repeated until its outcome is known.
/// - `NotHeld`, `Lost`: the hold has ended, or never existed. The keeper reports a loss, unless an earlier release may
///   have ended the hold.
/// - `Denied`, `Invalid`, `Misconfigured`, `Unsupported`, `Contention`, `Shutdown`: the request had no effect. The same
///   claim would fail again, so it is not retried: the acquisition fails.
/// - `Unavailable` and every other kind: the request had no effect, and a retry may succeed. A claim is repeated.
///
/// The keeper retries after any kind but `NotHeld` and `Lost`: a renewal until the deadline, and a release until the
/// lease has ended.
///
/// Never report `Unavailable` if the request may have taken effect. The acquire loop would not know of the grant, and
/// the key would be blocked until the lease of that grant ends.
#[async_trait]
pub trait Store: fmt::Debug + fmt::Display + Send + Sync + 'static {
    /// Capabilities of this store. They never change during the lifetime of the store. No I/O.
    fn capabilities(&self) -> Capabilities;

    /// Notice for the user if the storage of this store, such as a directory or bucket, was created just now; `None` if
    /// it existed before, or if there is nothing to say. No I/O.
    fn creation_notice(&self) -> Option<String> {
        None
    }

    /// Longest ttl that the store accepts; `None` if the store sets no limit of its own. No I/O.
    fn max_ttl(&self) -> Option<Duration> {
        None
    }

    /// Durable key/value storage, on stores whose holds end with the process of the holder; `None` if this store has no
    /// such storage. No I/O.
    ///
    /// A store whose holds can outlive their process ([`Capabilities::detached`]) needs no such storage: there, a hold
    /// itself is a durable record.
    fn durable_notes(&self) -> Option<&dyn DurableNotes> {
        None
    }

    /// Requests a hold, in one attempt.
    ///
    /// On [`Answer::Granted`] the caller holds the key from now on. On [`Answer::Queued`] the claim has a place in the
    /// queue. On [`Answer::Contended`] the store kept nothing for the claim.
    ///
    /// A claim is identified by its [`id`](Claim::id). A repeated claim never obtains a second hold: the store returns
    /// what an earlier attempt obtained, either the place, or the grant with the same token.
    ///
    /// After a failure with `Unknown`, the acquire loop repeats the claim to find out its outcome. If the answer is a
    /// grant, the acquire loop confirms it by a renewal and counts the lease from that renewal, because the lease of
    /// the grant may have begun with the earlier attempt.
    ///
    /// Costs one round trip if a server decides on the grant. Costs a read and a conditional write if the client
    /// decides.
    ///
    /// # Errors
    ///
    /// `Unknown` if the claim may have taken effect. `Unsupported` for a mode or an option that the store lacks.
    /// `Invalid` for a ttl above [`max_ttl`](Self::max_ttl), or if the semaphore is in use with another number of
    /// slots. `Contention` as described at [`Claim::fail_if_contended`].
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: after a drop the claim may be granted or queued. To clean up, repeat the claim and release the
    /// result. Otherwise the hold or place ends with its lease or session.
    async fn claim(&self, claim: &Claim, limit: Duration) -> Result<Answer>;

    /// Returns the hold that `handle` belongs to, so that this process can renew and release a hold of another process.
    ///
    /// Changes nothing at the store. Costs at most one read. A store may skip that read: if the hold has ended, the
    /// first renewal or release then fails with `NotHeld`.
    ///
    /// # Errors
    ///
    /// `Invalid` if the handle was not made by this kind of store. `NotHeld` if the hold has ended. `Unsupported`
    /// without [`Capabilities::detached`].
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time.
    async fn resume(&self, key: &Key, handle: &Handle) -> Result<Box<dyn Hold>>;

    /// Waits until [`inspect`](Self::inspect) would return a [`Version`] other than `since`.
    ///
    /// Never resolves without such a change, and may not resolve after one: the store may be unable to push
    /// ([`Capabilities::push`]), or a notification may be lost. The caller must poll as a backstop.
    ///
    /// # Errors
    ///
    /// `Unavailable` if the subscription cannot be made or ends. A store that cannot push fails with `Unsupported`, or
    /// its future never resolves.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time. A change between two calls is not missed: the next call compares with `since` first.
    async fn changed(&self, key: &Key, space: KeySpace, since: Version) -> Result<()>;

    /// Returns the holders of a key, in the order of their grants, and its waiters, the next in line first.
    ///
    /// A key that was never used is a free key: no holders, no waiters. A store may cap the number of holders and
    /// waiters that it shows. Changes nothing at the store.
    ///
    /// # Errors
    ///
    /// `Unavailable` if the store does not answer within its own request timeout.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time.
    async fn inspect(&self, key: &Key, space: KeySpace) -> Result<KeyState>;

    /// Returns one page of the keys in use that begin with `prefix` and sort after `after`, in ascending order.
    ///
    /// The store chooses the page size. An empty page means that no more keys follow. For the next page, pass the last
    /// key of this page as `after`. A key is in use while it is held; a store may also list keys that only have
    /// waiters. [`KeyState::waiters`] may be empty here although the key has waiters: use [`inspect`](Self::inspect).
    ///
    /// Reads every key of the page, and on some stores every key of the store.
    ///
    /// # Errors
    ///
    /// `Unsupported` without [`Capabilities::list`]. `Unavailable` if the store does not answer.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time.
    async fn list(
        &self,
        space: KeySpace,
        prefix: &str,
        after: Option<&str>,
    ) -> Result<Vec<KeyState>>;

    /// Breaks the hold that has the fencing token `token` on a key, in either key space. For operators.
    ///
    /// On success the hold has ended at the store. The holder learns of the loss by [`Hold::event`], or by its next
    /// renewal on a store that does not push. Until then two processes can believe that they hold the key; the fencing
    /// token distinguishes them. `reason` is for logs and the history.
    ///
    /// # Errors
    ///
    /// `NotHeld` if no hold of the key has this token: nothing was changed. `Contention` if concurrent writes prevented
    /// the change: try again. `Unknown` if the outcome is unknown. `Unsupported` without [`Capabilities::evict`].
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: after a drop the hold may have been broken.
    async fn evict(&self, key: &Key, token: FencingToken, reason: &str) -> Result<()>;

    /// Returns the recent events of a key, oldest first, as far back as the store keeps them.
    ///
    /// # Errors
    ///
    /// `Unsupported` on most stores: only a lock server that was started with `--history` keeps events.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time.
    async fn history(&self, key: &Key, _space: KeySpace) -> Result<Vec<HistoryEvent>> {
        let message = "this store keeps no history: use a lock server started with --history";
        Err(Error::new(ErrorKind::Unsupported, message).on(key).at(self))
    }

    /// Diagnoses the store: checks that it answers and meets its requirements, and describes its guarantees.
    ///
    /// Returns within about `limit`. A failure is a [`Finding`], not an error. The diagnosis removes the test data that
    /// it writes.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time: no lock is affected. Test data that was not removed yet expires on its own, except
    /// test objects in an object store, which stay.
    async fn examine(&self, limit: Duration) -> Vec<Finding> {
        examine::basics(self, limit).await
    }

    /// Removes the data that is still stored for locks that were released at least `older_than` ago. Returns the number
    /// of removed objects.
    ///
    /// Most stores keep no such data and return 0. Never removes a lock that is held or has waiters. Fencing tokens
    /// never decrease because of a removal. Reads every key of the store.
    ///
    /// # Errors
    ///
    /// The first error ends the run. The objects removed before the error stay removed; run it again.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time: each removal is complete by itself.
    async fn clean(&self, _older_than: Duration) -> Result<u64> {
        Ok(0)
    }

    /// Closes the connections and files that the store itself keeps open.
    ///
    /// Does not release holds: each hold keeps its connection until its keeper has ended. New requests may fail with
    /// [`ErrorKind::Shutdown`] afterwards.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time. What is still open is closed when the store is dropped.
    async fn close(&self);
}

/// Place of a claim in the queue of a key.
///
/// Dropping a `Place` without [`abandon`](Self::abandon) has the effect of a crash: the claim stays in the queue until
/// the store detects that the waiter is dead.
#[async_trait]
pub trait Place: fmt::Debug + Send {
    /// Waits for the grant, for at most `limit`.
    ///
    /// [`Waited::Granted`]: the place is used up. [`Waited::StillQueued`]: the limit has passed and the claim keeps its
    /// position; call again. [`Waited::Gone`]: the place no longer exists; claim again.
    ///
    /// # Errors
    ///
    /// After an error the place or a grant may still exist: the acquire loop repeats the claim to find it.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time. The place is kept, and a grant that arrives meanwhile is returned by the next call.
    async fn wait(&mut self, limit: Duration) -> Result<Waited>;

    /// Leaves the queue, and releases a grant that has arrived meanwhile.
    ///
    /// On success the claim has neither a place nor a hold. May be repeated.
    ///
    /// # Errors
    ///
    /// `NotHeld` counts as success. After any other error the place or a grant may still exist: the acquire loop
    /// repeats the claim to find and release it.
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: after a drop the place or a grant may still exist.
    async fn abandon(&mut self, limit: Duration) -> Result<()>;
}

/// Hold that a store granted. The value owns the revision, session or connection on which the hold depends.
///
/// Dropping the value without [`release`](Self::release) or [`detach`](Self::detach) has the effect of a crash: a hold
/// that depends on a session ends with the session, any other hold with its lease.
#[async_trait]
pub trait Hold: fmt::Debug + Send {
    /// Extends the lease to `ttl` from now, or confirms that the session is alive.
    ///
    /// On success the store keeps the hold for at least `ttl`, counted from the instant at which the store received the
    /// request. The holder counts from *before* it sent the request, so that its own deadline comes first.
    ///
    /// A renewal never creates a hold and never takes one from another holder. Costs one round trip.
    ///
    /// # Errors
    ///
    /// `NotHeld` if the hold has ended or the key has another holder: the keeper reports a loss. `Lost` has the same
    /// effect. After any other error the deadline of the holder does not move, and the keeper retries until the
    /// deadline.
    ///
    /// If a renewal took effect and its answer was lost, the next renewal must not fail with `NotHeld`. A store that
    /// finds an unexpected version of the record therefore reads the record: the hold has ended only if the record has
    /// another owner.
    ///
    /// # Cancel safety
    ///
    /// A drop never ends the hold. After a drop the renewal may or may not have taken effect.
    async fn renew(&mut self, ttl: Duration, limit: Duration) -> Result<Renewed>;

    /// Returns true if a hand-off was requested: a waiter has asked for the lock.
    ///
    /// Called only if [`Capabilities::handoff`] is [`Handoff::Polled`], once per interval. Costs about one read.
    ///
    /// # Errors
    ///
    /// An error has no consequence: the keeper asks again after the next interval.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time.
    async fn check_handoff(&mut self, limit: Duration) -> Result<bool>;

    /// Waits for an event that the store pushes to the holder. May never resolve.
    ///
    /// A store that detects the end of a hold without a request, for example by a closed connection, must report that
    /// end here at once.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time. No event is missed: the next call returns it.
    async fn event(&mut self) -> HoldEvent;

    /// Releases this hold, and never the hold of another holder.
    ///
    /// On success the key is free, or the next waiter holds it already. May be repeated: the keeper repeats the release
    /// after every error but `NotHeld` and `Lost`, until the lease has ended.
    ///
    /// # Errors
    ///
    /// `NotHeld` if the hold had ended before: nothing was changed. If an earlier attempt had an unknown outcome, the
    /// keeper concludes from `NotHeld` that the earlier attempt released the hold.
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: after a drop the hold may have been released.
    async fn release(&mut self, limit: Duration) -> Result<()>;

    /// Secret that lets another process renew and release this hold; `None` if the hold cannot outlive its process.
    fn handle(&self) -> Option<Handle>;

    /// Revision of the record that represents the hold, on NATS; `None` on other stores.
    ///
    /// Every renewal changes the revision. Other programs that use the same bucket without tenure identify a hold by
    /// its revision.
    fn revision(&self) -> Option<u64> {
        None
    }

    /// Lets the hold outlive this value, which is dropped afterwards: the hold lasts until its lease ends. Called only
    /// if [`handle`](Self::handle) returns a handle. Resolves when the store has confirmed it.
    ///
    /// # Errors
    ///
    /// `NotHeld` if the hold has ended. `Unknown` if the store gave no clear answer within `limit`: the hold may end
    /// with this value. After any other error the hold ends with this value.
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: after a drop the hold may outlive this value or end with it.
    async fn detach(&mut self, limit: Duration) -> Result<()>;

    /// Inline release of this hold, so that a guard need not wait for its keeper; `None` if a release takes a request.
    ///
    /// The reference is weak, so that it cannot delay the end of the hold when this value is dropped.
    fn release_inline(&self) -> Option<Weak<dyn ReleaseInline>> {
        None
    }

    /// Source of descriptors that keep this hold alive from another process; `None` if the hold does not depend on a
    /// descriptor.
    ///
    /// The reference is weak, so that it cannot delay the end of the hold when this value is dropped.
    #[cfg(unix)]
    fn keep_open(&self) -> Option<Weak<dyn KeepOpen>>;
}

/// Durable key/value storage for stores whose holds end with the process of the holder.
///
/// A note is a short text under a key. The writer must hold the lock of that key; reading needs no lock. If the storage
/// fails, a method returns the error of the storage, such as `Denied`.
#[async_trait]
pub trait DurableNotes: Send + Sync {
    /// Returns the note under a key, if there is a note.
    async fn read(&self, key: &Key) -> Result<Option<String>>;

    /// Replaces the note under a key.
    ///
    /// The note is on disk when the future resolves. A reader sees the complete old note or the complete new note.
    /// After an error, either of the two may be there.
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: after a drop either the old note or the new note is there.
    async fn write(&self, key: &Key, text: &str) -> Result<()>;

    /// Returns the notes under all keys that begin with `prefix`, in no particular order.
    async fn list(&self, prefix: &str) -> Result<Vec<String>>;
}

/// Release of a hold in one synchronous call, without a request to a server.
pub trait ReleaseInline: Send + Sync {
    /// Releases the hold, as [`Hold::release`] does. Returns false if the hold had ended before.
    ///
    /// Later renewals and releases of the hold fail with [`ErrorKind::NotHeld`]. Called only in the process that the
    /// hold was granted to, never in a forked copy.
    fn release_now(&self) -> bool;
}

/// Source of descriptors that keep a hold alive.
#[cfg(unix)]
pub trait KeepOpen: Send + Sync {
    /// Returns a descriptor on which the session of the hold depends. It is closed on exec.
    ///
    /// While any process has the descriptor open, the hold does not end with the death of the holder.
    ///
    /// The hold ends when the holder releases it, or when every process has closed its descriptor or exited. A hold
    /// with a lease also ends with its lease, unless it is renewed.
    ///
    /// # Errors
    ///
    /// The error of the operating system. An error of any kind if the hold has ended.
    fn keep_open(&self) -> std::io::Result<std::os::fd::OwnedFd>;
}

/// Capabilities of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each capability is independent of the others")]
pub struct Capabilities {
    /// Order in which waiters are granted a key.
    pub queue: QueueKind,
    /// Event that ends the hold of a dead holder.
    pub liveness: Liveness,
    /// True if the store pushes changes, so that [`Store::changed`] resolves without polling.
    pub push: bool,
    /// Way in which a holder learns of a hand-off request.
    pub handoff: Handoff,
    /// True if several holders can share a lock ([`Mode::Shared`]).
    pub shared: bool,
    /// True if a key can have several slots ([`Mode::Slot`]).
    pub semaphore: bool,
    /// True if a hold can outlive the process that claimed it.
    pub detached: bool,
    /// True if keys can be listed ([`Store::list`]).
    pub list: bool,
    /// True if holders and waiters are shown with their identities and tokens. If false, only their number is known.
    pub identities: bool,
    /// True if an operator can break a hold ([`Store::evict`]).
    pub evict: bool,
    /// True if every grant of a key has a larger fencing token than the grant before. If false, every hold has
    /// [`FencingToken::NONE`].
    pub ordered_tokens: bool,
    /// Shortest ttl that the store accepts. [`Store::max_ttl`] is the longest.
    pub min_ttl: Duration,
}

/// Order in which a store grants a key to its waiters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueKind {
    /// First come, first served.
    Fifo,
    /// One place: its waiter is granted the key next, and all other claims compete for the place.
    Single,
    /// No queue: the first claim after a release is granted.
    None,
}

/// Event that ends the hold of a dead holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// The end of the lease.
    Lease,
    /// The end of the session: of the connection or process of the holder.
    Session,
    /// The end of the session or of the lease, whichever comes first.
    Both,
}

/// Way in which a holder learns of a hand-off request: a waiter has asked for the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handoff {
    /// A holder does not learn of the request.
    None,
    /// The store pushes the request ([`Hold::event`]).
    Pushed,
    /// The holder polls ([`Hold::check_handoff`]).
    Polled {
        /// Polling interval.
        every: Duration,
    },
}

/// Request for a hold.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each option is independent of the others")]
pub struct Claim {
    /// Identity of this claim, the same for every attempt. Unique across processes, and not a secret.
    pub id: u128,
    /// Key to hold.
    pub key: Key,
    /// Mode of the hold.
    pub mode: Mode,
    /// Requested lease: time that the hold lasts unless renewed.
    pub ttl: Duration,
    /// Identity of the claimant.
    pub by: Arc<Identity>,
    /// Take a place in the queue if the key is held. If false, no new place is taken; a place that an earlier attempt
    /// of this claim took is still returned.
    pub queue: bool,
    /// Fail with [`ErrorKind::Contention`] if another claim has the only place in the queue. Set only for stores with
    /// [`QueueKind::Single`].
    pub fail_if_contended: bool,
    /// Use a first-come-first-served queue, on a store that has such a queue only on request. Other stores ignore this.
    pub fair: bool,
    /// The hold must be able to outlive the process. Needs [`Capabilities::detached`].
    pub detached: bool,
}

/// Identity of a holder or waiter, for display. It proves nothing.
///
/// `Display` prints it as `tenure status` does: `web-2 (pid 311): build 42`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Id that is unique among all holders and waiters; `host:pid:nonce` by default.
    pub id: String,
    /// Host name.
    pub host: String,
    /// Process id; 0 if unknown.
    pub pid: u32,
    /// Free text of the user, such as a build number.
    pub note: String,
}

impl Identity {
    /// Returns the identity of this process: the default identity of its requests.
    ///
    /// # Errors
    ///
    /// `Unavailable` if the system cannot supply the random bytes that make it unique.
    pub fn of_process() -> Result<Arc<Self>> {
        crate::identity::of_process()
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, host, pid, note } = self;
        // A default id repeats host and pid, and its nonce means nothing to a reader.
        let name = if id.starts_with(&format!("{host}:{pid}:")) { host } else { id };
        f.write_str(&without_control_chars(name))?;
        if *pid != 0 {
            write!(f, " (pid {pid})")?;
        }
        if note.is_empty() { Ok(()) } else { write!(f, ": {}", without_control_chars(note)) }
    }
}

/// Text of another process, made safe for a terminal: control characters could move the cursor.
fn without_control_chars(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

/// Answer of a store to a claim.
#[derive(Debug)]
pub enum Answer {
    /// The claim was granted.
    Granted(Grant),
    /// The claim has a place in the queue.
    Queued(Box<dyn Place>),
    /// Another holder has the key, and the claim has no place in the queue.
    Contended(Contended),
}

/// Granted hold.
#[derive(Debug)]
pub struct Grant {
    /// Fencing token, larger than that of every earlier grant of the key; [`FencingToken::NONE`] without
    /// [`Capabilities::ordered_tokens`].
    pub token: FencingToken,
    /// Instant from which the lease counts.
    pub lease_start: LeaseStart,
    /// True if a waiter has already asked for the lock.
    pub handoff_requested: bool,
    /// Number of grants of the key so far, including this one; `None` on stores that do not count every grant.
    ///
    /// If two grants have consecutive numbers, there was no grant between them. An election concludes from this that no
    /// other leader came between two of its terms.
    pub grants: Option<u64>,
    /// The hold.
    pub hold: Box<dyn Hold>,
}

/// Reason why a claim was not granted: another holder has the key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contended {
    /// One of the holders, if the store knows it.
    pub holder: Option<Identity>,
    /// Version of the key at the time of the answer: [`Store::changed`] resolves when the key has another version.
    pub version: Version,
    /// Minimum pause before the next claim.
    pub retry_after: Option<Duration>,
    /// Explanation for the caller, if the name of the holder does not explain the answer.
    pub note: Option<String>,
}

/// Result of a wait in the queue.
#[derive(Debug)]
pub enum Waited {
    /// The claim was granted.
    Granted(Grant),
    /// The wait timed out; the place is kept.
    StillQueued {
        /// Number of waiters ahead of this place, if the store knows it.
        ahead: Option<usize>,
    },
    /// The place no longer exists.
    Gone,
}

/// Renewal that the store confirmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Renewed {
    /// True if the answer to the renewal shows that a waiter has asked for the lock. No extra request is made for this.
    pub handoff_requested: bool,
}

/// Event that a store pushes to a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldEvent {
    /// The hold ended.
    Lost(Loss),
    /// A waiter has asked for the lock.
    HandoffRequested,
}

/// Version of the state of a key: equal as long as [`Store::inspect`] shows the same holders and waiters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Version(pub u128);

/// State of a key at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyState {
    /// The key.
    pub key: Key,
    /// Key space of the key.
    pub space: KeySpace,
    /// Holders, in the order of their grants.
    pub holders: Vec<HolderState>,
    /// Waiters, the next in line first.
    pub waiters: Vec<WaiterState>,
    /// Version of this state.
    pub version: Version,
}

/// Holder of a key, as shown by [`Store::inspect`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HolderState {
    /// Identity of the holder, if the store knows it.
    pub by: Option<Identity>,
    /// Fencing token of the hold; [`FencingToken::NONE`] without [`Capabilities::identities`] or
    /// [`Capabilities::ordered_tokens`].
    pub token: FencingToken,
    /// Time since the grant.
    pub held_for: Option<Duration>,
    /// Time until the lease ends unless it is renewed, by the store's clock.
    pub lease_left: Option<Duration>,
    /// Revision of the record that represents the hold, on NATS; see [`Guard::revision`](crate::Guard::revision).
    pub revision: Option<u64>,
}

/// Waiter for a key, as shown by [`Store::inspect`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaiterState {
    /// Identity of the waiter, if the store knows it.
    pub by: Option<Identity>,
    /// Time since the waiter joined the queue.
    pub waited_for: Option<Duration>,
}

/// Event in the history of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistoryEvent {
    /// Time of the event, by the store's wall clock.
    pub at: std::time::SystemTime,
    /// Kind of event: `waiting`, `granted`, `released`, `expired`, `broken`, `disconnected`, `handoff_requested`,
    /// `abandoned` (a claim was abandoned after its grant), `gave_up` (a waiter left the queue or timed out).
    pub kind: String,
    /// Fencing token of the hold concerned; [`FencingToken::NONE`] for an event of a waiter.
    pub token: FencingToken,
    /// Identity of the holder or waiter concerned, if the store knows it.
    pub by: Option<Identity>,
    /// Reason that the operator gave for breaking the hold, or for the hand-off request.
    pub reason: Option<String>,
}

/// Secret with which any process can renew and release a hold. Opaque text: `Debug` hides it, and
/// [`expose`](Self::expose) returns it.
#[derive(Clone, PartialEq, Eq)]
pub struct Handle(String);

impl Handle {
    /// Creates a handle from text that [`expose`](Self::expose) returned.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Returns the secret itself: any process that has it can renew and release the hold.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Handle(…)")
    }
}

/// Returns the error for an operation that a store does not support; `what` completes "this store cannot …".
pub fn unsupported(store: &dyn Store, what: &str) -> Error {
    Error::new(ErrorKind::Unsupported, format!("this store cannot {what}: use another store"))
        .at(store)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity_is_displayed_without_nonce_and_control_characters() {
        let mut by = Identity {
            id: "web-2:311:00af".into(),
            host: "web-2".into(),
            pid: 311,
            note: String::new(),
        };
        assert_eq!(by.to_string(), "web-2 (pid 311)");
        by.id = "deployer\x1b[2J".into();
        by.note = "v42".into();
        assert_eq!(by.to_string(), "deployer[2J (pid 311): v42");
    }
}
