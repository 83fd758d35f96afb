//! The traits that a store implements.

use std::fmt;
use std::sync::Weak;
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::acquire::LeaseStart;
use tenure_core::table::KeySpace;
use tenure_core::{FencingToken, Key};

use super::capabilities::Capabilities;
use super::finding::Finding;
use super::request::{Claim, Contended, Handle, HoldEvent, Renewed};
use super::view::{HistoryEvent, KeyState, Version};
use crate::{Error, ErrorKind, Result};

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
///   or makes sure that the server no longer acts for the old connection before it sends the claim on a new one. To
///   close the socket is not enough: the server may still read a request that has arrived.
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
    /// it existed before, or if there is nothing to say. No I/O. Default: `None`.
    fn creation_notice(&self) -> Option<String> {
        None
    }

    /// Longest ttl that the store accepts; `None` if the store sets no limit of its own: the client refuses more than
    /// 366 days in any case. No I/O. Default: `None`.
    fn max_ttl(&self) -> Option<Duration> {
        None
    }

    /// Checks that the store can name a lock by this key, beyond the rules for every [`Key`]. No I/O. Default: it can.
    ///
    /// # Errors
    ///
    /// `Invalid`, with the reason. A claim of the key would fail in the same way.
    fn check_key(&self, _key: &Key) -> Result<()> {
        Ok(())
    }

    /// Durable key/value storage, on stores whose holds end with the process of the holder; `None` if this store has no
    /// such storage. No I/O.
    ///
    /// A store whose holds can outlive their process ([`Capabilities::detached`]) needs no such storage: there, a hold
    /// itself is a durable record. Default: `None`.
    fn durable_notes(&self) -> Option<&dyn DurableNotes> {
        None
    }

    /// Requests a hold, in one attempt.
    ///
    /// On [`Answer::Granted`] the caller holds the key from now on. On [`Answer::Queued`] the claim has a place in the
    /// queue. On [`Answer::Contended`] the claim has neither; the store may keep a mark that shows it as a waiter, until
    /// [`withdraw`](Self::withdraw).
    ///
    /// A claim is identified by its [`id`](Claim::id). A repeated claim never obtains a second hold: the store returns
    /// what an earlier attempt obtained, either the place, or the grant with the same token. It may renew the lease of
    /// that grant, but need not. Once the hold or place of an earlier attempt has ended, the claim is a new one, and its
    /// grant has a new token.
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

    /// Removes the mark that a claim with [`queue`](Claim::queue) left when it was answered with [`Answer::Contended`].
    ///
    /// Called at the end of an acquisition with such an answer, whether it was granted in the end or not. A process that
    /// is killed does not call it, so a mark must expire on its own. A store without a queue marks waiting claims to
    /// show them, and to tell the holder that one waits ([`Handoff::OnRenewal`](super::Handoff::OnRenewal)). Default:
    /// nothing.
    ///
    /// # Errors
    ///
    /// An error has no consequence: the mark expires.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time: the mark expires.
    async fn withdraw(&self, _claim: &Claim, _limit: Duration) -> Result<()> {
        Ok(())
    }

    /// Returns the hold that `handle` belongs to, so that this process can renew and release a hold of another process.
    ///
    /// Changes nothing at the store. Costs at most one read. A store may skip that read: if the hold has ended, the
    /// first renewal or release then fails with `NotHeld`.
    ///
    /// A handle proves the ownership of a hold: the fencing token, which is public, is not enough to resume it.
    ///
    /// Default: fails with `Unsupported`.
    ///
    /// # Errors
    ///
    /// `Invalid` if the handle was not made by this kind of store. `NotHeld` if the hold has ended. `Unsupported`
    /// without [`Capabilities::detached`].
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time.
    async fn resume(&self, key: &Key, _handle: &Handle) -> Result<Box<dyn Hold>> {
        Err(unsupported(self, "hand a hold to another process").on(key))
    }

    /// Waits until [`inspect`](Self::inspect) would return a [`Version`] other than `since`.
    ///
    /// Never resolves without such a change, and may not resolve after one: the store may be unable to push
    /// ([`Capabilities::push`]), or a notification may be lost. The caller must poll as a backstop.
    ///
    /// Default: never resolves.
    ///
    /// # Errors
    ///
    /// `Unavailable` if the subscription cannot be made or ends. A store that cannot push fails with `Unsupported`, or
    /// its future never resolves.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time. A change between two calls is not missed: the next call compares with `since` first.
    async fn changed(&self, _key: &Key, _space: KeySpace, _since: Version) -> Result<()> {
        std::future::pending().await
    }

    /// Returns the holders of a key, in the order of their grants, and its waiters, the next in line first.
    ///
    /// A key that was never used is a free key: no holders, no waiters. A store may cap the number of holders and
    /// waiters that it shows. A store without semaphores shows every semaphore as free. Changes nothing at the store.
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
    /// Default: fails with `Unsupported`.
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
        _space: KeySpace,
        _prefix: &str,
        _after: Option<&str>,
    ) -> Result<Vec<KeyState>> {
        Err(unsupported(self, "list its keys"))
    }

    /// Breaks the hold that has the fencing token `token` on a key, in either key space. For operators.
    ///
    /// On success the hold has ended at the store. The holder learns of the loss by [`Hold::event`], or by its next
    /// renewal on a store that does not push. Until then two processes can believe that they hold the key; the fencing
    /// token distinguishes them. `reason` is for logs and the history.
    ///
    /// The token alone tells the lock from the semaphore of the same key. So grants of the two should have different
    /// tokens, for example from one counter per key: otherwise an eviction may break the other hold.
    ///
    /// Default: fails with `Unsupported`.
    ///
    /// # Errors
    ///
    /// `NotHeld` if no hold of the key has this token: nothing was changed. `Contention` if concurrent writes prevented
    /// the change: try again. `Unknown` if the outcome is unknown. `Unsupported` without [`Capabilities::evict`].
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: after a drop the hold may have been broken.
    async fn evict(&self, key: &Key, _token: FencingToken, _reason: &str) -> Result<()> {
        Err(unsupported(self, "break a hold").on(key))
    }

    /// Returns the recent events of a key, oldest first, as far back as the store keeps them. Default: fails with
    /// `Unsupported`.
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

    /// Checks that the store meets its requirements, beyond those that apply to every store.
    ///
    /// [`Client::examine`](crate::Client::examine) calls this if the store answers. Before that it checks how quickly the
    /// store answers, and describes its guarantees by its [`Capabilities`].
    ///
    /// Returns within about `limit`. A failure is a [`Finding`], not an error. The diagnosis removes the test data that
    /// it writes.
    ///
    /// Default: no findings.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time: no lock is affected. Test data that was not removed yet expires on its own, except
    /// test objects in an object store, which stay.
    async fn examine(&self, _limit: Duration) -> Vec<Finding> {
        Vec::new()
    }

    /// Removes the data that is still stored for locks that were released at least `older_than` ago. Returns the number
    /// of removed objects.
    ///
    /// Most stores keep no such data and return 0. Never removes a lock that is held or has waiters. Fencing tokens
    /// never decrease because of a removal. Reads every key of the store. Default: removes nothing and returns 0.
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
    /// [`ErrorKind::Shutdown`] afterwards. Default: does nothing.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time. What is still open is closed when the store is dropped.
    async fn close(&self) {}
}

/// Place of a claim in the queue of a key.
///
/// While its process lives, a waiter has a call of [`wait`](Self::wait) in flight nearly all the time: the acquire loop
/// calls it again at once after [`Waited::StillQueued`], and repeats the claim soon after an error. The `limit` is at most
/// 30 s, so the call itself must keep the place alive, if a place is kept by renewals.
///
/// A silent place, without such a call, ends after about the ttl of its claim or with its session. Until then it may
/// block the queue, which the conformance suite accepts for twice the ttl and five seconds. A place that ends sooner than
/// after a second or so loses its position after an error: the acquire loop pauses before it repeats the claim.
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
    /// On success the claim has neither a place nor a hold: other clients see that at once, or within about a second if
    /// the store ends a session for it. May be repeated.
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
    /// A renewal never creates a hold and never takes one from another holder. If the lease has ended, the store may
    /// accept the renewal only as long as no other claim was granted since; it may also refuse it. Costs one round trip.
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
    /// Called only if [`Capabilities::handoff`] is [`Handoff::Polled`](super::Handoff::Polled), once per interval. Costs about one read.
    /// Default: `false`.
    ///
    /// # Errors
    ///
    /// An error has no consequence: the keeper asks again after the next interval.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time.
    async fn check_handoff(&mut self, _limit: Duration) -> Result<bool> {
        Ok(false)
    }

    /// Waits for an event that the store pushes to the holder. May never resolve.
    ///
    /// A store that detects the end of a hold without a request, for example by a closed connection, must report that
    /// end here at once. Default: never resolves.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time. No event is missed: the next call returns it.
    async fn event(&mut self) -> HoldEvent {
        std::future::pending().await
    }

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
    /// Default: `None`.
    fn handle(&self) -> Option<Handle> {
        None
    }

    /// Revision of the record that represents the hold, on NATS; `None` on other stores.
    ///
    /// Every renewal changes the revision. Other programs that use the same bucket without tenure identify a hold by
    /// its revision. Default: `None`.
    fn revision(&self) -> Option<u64> {
        None
    }

    /// Lets the hold outlive this value, which is dropped afterwards: the hold lasts until its lease ends. Called only
    /// if [`handle`](Self::handle) returns a handle. Resolves when the store has confirmed it. Default: fails with
    /// `Unsupported`.
    ///
    /// # Errors
    ///
    /// `NotHeld` if the hold has ended. `Unknown` if the store gave no clear answer within `limit`: the hold may end
    /// with this value. After any other error the hold ends with this value.
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: after a drop the hold may outlive this value or end with it.
    async fn detach(&mut self, _limit: Duration) -> Result<()> {
        let message = "a hold of this store cannot outlive its process";
        Err(Error::new(ErrorKind::Unsupported, message))
    }

    /// Inline release of this hold, so that a guard need not wait for its keeper; `None` if a release takes a request.
    ///
    /// The reference is weak, so that it cannot delay the end of the hold when this value is dropped. Default: `None`.
    fn release_inline(&self) -> Option<Weak<dyn ReleaseInline>> {
        None
    }

    /// Source of descriptors that keep this hold alive from another process; `None` if the hold does not depend on a
    /// descriptor.
    ///
    /// The reference is weak, so that it cannot delay the end of the hold when this value is dropped. Default: `None`.
    #[cfg(unix)]
    fn keep_open(&self) -> Option<Weak<dyn KeepOpen>> {
        None
    }
}

/// Answer of a store to a claim.
#[derive(Debug)]
#[non_exhaustive]
pub enum Answer {
    /// The claim was granted.
    Granted(Grant),
    /// The claim has a place in the queue.
    Queued(Box<dyn Place>),
    /// Another holder has the key, and the claim has no place in the queue. Also the answer if a conditional write lost
    /// to another claim, even if the key is free again: the acquire loop tries again.
    Contended(Contended),
}

/// Granted hold.
#[derive(Debug)]
#[non_exhaustive]
pub struct Grant {
    /// Fencing token, larger than that of every earlier grant of the key; [`FencingToken::NONE`] without
    /// [`Capabilities::ordered_tokens`].
    pub token: FencingToken,
    /// Instant from which the lease counts.
    pub lease_start: LeaseStart,
    /// True if a waiter has already asked for the lock.
    pub handoff_requested: bool,
    /// Number of grants of the key so far, including this one; `None` on stores that do not count every grant. The store
    /// counts, over all clients: a counter in the client would miss the grants of other processes.
    ///
    /// If two grants have consecutive numbers, there was no grant between them. An election concludes from this that no
    /// other leader came between two of its terms.
    pub grants: Option<u64>,
    /// The hold.
    pub hold: Box<dyn Hold>,
}

impl Grant {
    /// Creates a grant whose lease counts from its request, on a key that no other waiter has asked for.
    pub fn new(token: FencingToken, hold: Box<dyn Hold>) -> Self {
        let lease_start = LeaseStart::FromRequest;
        Self { token, lease_start, handoff_requested: false, grants: None, hold }
    }
}

/// Result of a wait in the queue.
#[derive(Debug)]
#[non_exhaustive]
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

/// Returns the error for an operation that a store does not support; `what` completes "this store cannot …".
pub fn unsupported(store: &(impl fmt::Display + ?Sized), what: &str) -> Error {
    Error::new(ErrorKind::Unsupported, format!("this store cannot {what}: use another store"))
        .at(store)
}
