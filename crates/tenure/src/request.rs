//! What a user asks of a lock, and the ways to get it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tenure_core::Key;
use tenure_core::acquire::{Acquire, AcquireOptions};
use tenure_core::key::KeyError;
use tenure_core::lease::{Lease, LeaseTerms};
use tenure_core::retry::{ExponentialBackoff, Retry};
use tokio::runtime::Handle as Runtime;
use tokio::sync::{oneshot, watch};

use crate::acquire::{AcquireTask, Caller};
use crate::guard::{Guard, HoldCallbacks};
use crate::pending::Pending;
use crate::store::{Claim, Mode, QueueKind, Store, unsupported};
use crate::telemetry::Labels;
use crate::{Clock, Error, ErrorKind, Result, identity};

/// How a lock is to be acquired and kept. Made by [`Client::lock`](crate::Client::lock) and
/// [`Client::semaphore`](crate::Client::semaphore).
///
/// Settings that cannot be kept (a bad key, a ttl too short for its own renewal) are refused when the lock is asked
/// for, with the values that conflict.
///
/// ```
/// use std::time::Duration;
/// use tenure::ErrorKind;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// # let client = tenure::Client::connect("memory:").await?;
/// let guard = client
///     .lock("reports/nightly")
///     .ttl(Duration::from_secs(30)) // a holder that falls silent is followed after this
///     .timeout(Duration::from_secs(10)) // how long to wait for another holder
///     .note("build 42") // for `tenure status`
///     .acquire()
///     .await?;
///
/// let refused = client.lock("reports/nightly").try_acquire().await.unwrap_err();
/// assert_eq!(refused.kind(), ErrorKind::Held);
/// guard.release().await?;
///
/// // Two of three slots, and readers that share a lock.
/// let (first, second) = (client.semaphore("gpu", 3).acquire().await?, client.semaphore("gpu", 3).acquire().await?);
/// let (one, other) = (client.lock("book").shared().acquire().await?, client.lock("book").shared().acquire().await?);
/// # drop((first, second, one, other));
/// # Ok(()) }
/// ```
#[must_use = "a request does nothing until it is acquired"]
#[expect(clippy::struct_excessive_bools, reason = "each is asked for by itself")]
pub struct LockRequest {
    store: Arc<dyn Store>,
    clock: Clock,
    /// Goes with the task, for [`Client::idle`](crate::Client::idle).
    at_work: Option<watch::Receiver<()>>,
    key: Result<Key, KeyError>,
    kind: RequestKind,
    terms: LeaseTerms,
    timeout: Option<Duration>,
    retry: Option<Box<dyn Retry>>,
    id: Option<String>,
    note: Option<String>,
    class: Option<String>,
    fair: bool,
    fail_if_contended: bool,
    detached: bool,
    fail_fast: bool,
    callbacks: HoldCallbacks,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum RequestKind {
    Lock { shared: bool },
    Semaphore { slots: u32 },
}

/// How long a hold lasts unless renewed, if the user does not say.
const DEFAULT_TTL: Duration = Duration::from_secs(15);
/// How often to claim on a store that pushes changes, in case one got lost.
const CLAIM_BACKSTOP_INTERVAL: Duration = Duration::from_secs(1);
/// The pauses between claims on a store that does not push.
const DEFAULT_CLAIM_BACKOFF: ExponentialBackoff = ExponentialBackoff {
    base: Duration::from_millis(50),
    max: Duration::from_secs(1),
    multiplier: 2.0,
    jitter: 0.5,
};

impl LockRequest {
    pub(crate) fn new(
        store: Arc<dyn Store>,
        clock: Clock,
        key: Result<Key, KeyError>,
        kind: RequestKind,
    ) -> Self {
        Self {
            store,
            clock,
            at_work: None,
            key,
            kind,
            terms: LeaseTerms::new(DEFAULT_TTL),
            timeout: None,
            retry: None,
            id: None,
            note: None,
            class: None,
            fair: false,
            fail_if_contended: false,
            detached: false,
            fail_fast: false,
            callbacks: HoldCallbacks::default(),
        }
    }

    /// Lets the client know as long as something is done for this request.
    pub(crate) fn counted(mut self, at_work: watch::Receiver<()>) -> Self {
        self.at_work = Some(at_work);
        self
    }

    /// How long a hold lasts unless renewed; 15 s by default. A holder that dies keeps others out for this long on stores
    /// that cannot notice its death.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.terms.ttl = ttl;
        self
    }

    /// How long to wait for the lock; without it, for ever.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Shares the lock with others that share it: readers beside each other, writers alone.
    pub fn shared(mut self) -> Self {
        if let RequestKind::Lock { shared } = &mut self.kind {
            *shared = true;
        }
        self
    }

    /// Whether the hold is renewed until the guard is dropped; on by default. Without it the hold is lost with its ttl.
    pub fn keep_alive(mut self, on: bool) -> Self {
        self.terms.keep_alive = on.then_some(3);
        self
    }

    /// How many times per ttl the hold is renewed: 3 by default, at least 2, and not more often than every 5 ms.
    pub fn keep_alive_factor(mut self, factor: u32) -> Self {
        self.terms.keep_alive = Some(factor);
        self
    }

    /// The longest time to hold: after it the hold is lost, however well renewals go.
    pub fn max_hold(mut self, max: Duration) -> Self {
        self.terms.max_hold = Some(max);
        self
    }

    /// The time that the protected work needs to stop: [`Guard::ending`] resolves that long before the deadline.
    pub fn stop_grace(mut self, time: Duration) -> Self {
        self.terms.stop_grace = time;
        self
    }

    /// The pauses between claims where the store has no queue, and after errors. Pauses of 50 ms to 1 s by default.
    pub fn retry(mut self, retry: impl Retry + 'static) -> Self {
        self.retry = Some(Box::new(retry));
        self
    }

    /// Who we are to others; `host:pid:nonce` by default. It should be unique.
    pub fn id(mut self, id: impl Into<String>) -> Self {
        self.id = Some(id.into());
        self
    }

    /// A text for others to read beside the holder's name.
    pub fn note(mut self, note: impl Into<String>) -> Self {
        self.note = Some(note.into());
        self
    }

    /// What this lock is called in metrics, together with others of its class; `lock`, `shared` or `semaphore` by default.
    /// A program has a few classes: beyond a hundred they are counted as `other`.
    pub fn class(mut self, class: impl Into<String>) -> Self {
        self.class = Some(class.into());
        self
    }

    /// Asks for a queue in order of arrival on a store that has none by default.
    pub fn fair(mut self) -> Self {
        self.fair = true;
        self
    }

    /// Waits only where nobody else does, on a store with one place to wait in: where that is taken, or gets lost to
    /// another, the answer is `Contention` at once. Without it who comes third waits for the place as well.
    pub fn fail_if_contended(mut self) -> Self {
        self.fail_if_contended = true;
        self
    }

    /// Asks for a hold that outlives this process until its ttl ends, unless released.
    pub fn detached(mut self) -> Self {
        self.detached = true;
        self
    }

    /// Calls `f` once, on a task of its own, when somebody waits for the lock.
    pub fn on_handoff_requested(mut self, f: impl Fn() + Send + Sync + 'static) -> Self {
        self.callbacks.handoff_requested.push(Arc::new(f));
        self
    }

    /// Calls `f`, on a task of its own, with the error of every renewal that failed. The hold is still ours until
    /// [`Guard::lost`] says otherwise.
    pub fn on_renewal_error(mut self, f: impl Fn(&Error) + Send + Sync + 'static) -> Self {
        self.callbacks.renewal_error.push(Arc::new(move |error| f(error)));
        self
    }

    /// The same, for somebody who keeps the errors.
    pub(crate) fn on_renewal_error_shared(
        mut self,
        f: impl Fn(&Arc<Error>) + Send + Sync + 'static,
    ) -> Self {
        self.callbacks.renewal_error.push(Arc::new(f));
        self
    }

    /// Ends the acquire with the first request that fails, instead of trying again. What may be held nevertheless is
    /// given back in the background.
    pub(crate) fn fail_fast(mut self) -> Self {
        self.fail_fast = true;
        self
    }

    /// Says whether the request could be sent, without sending it.
    pub(crate) fn check(self) -> Result<()> {
        self.prepare(false, None).map(drop)
    }

    /// Acquires the lock, waiting for it as long as the timeout allows.
    ///
    /// # Errors
    ///
    /// `Timeout` while another held it, `Contention` where another waits and [`unless_awaited`](Self::unless_awaited) was
    /// asked for, `Unavailable` where the store could not be reached in time, `Unknown` where
    /// nothing clear was heard in time, `Lost` where it was granted and over before it could be returned, `Denied`,
    /// `Invalid` and `Unsupported` where no time would help.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the queue and gives back what was granted meanwhile, in the background.
    pub async fn acquire(self) -> Result<Guard> {
        let until = self.timeout.map(|timeout| self.clock.now() + timeout);
        let fail_fast = self.fail_fast;
        let prepared = self.prepare(false, until)?;
        prepared.acquire(fail_fast).await
    }

    /// Acquires the lock if it is free, without waiting for a holder.
    ///
    /// # Errors
    ///
    /// `Held` where another holds it, `Contention` on a store with one place to wait in
    /// ([`ErrorKind::is_held_by_another`] knows both); otherwise as [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    ///
    /// As [`acquire`](Self::acquire).
    pub async fn try_acquire(self) -> Result<Guard> {
        let fail_fast = self.fail_fast;
        let prepared = self.prepare(true, None)?;
        prepared.acquire(fail_fast).await
    }

    /// Runs `work` if the lock is free, and releases it: what came of `work`, or `None` where another holds the lock and
    /// nothing was run. `work` is dropped when the hold is lost.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
    /// let client = tenure::Client::connect("memory:").await?;
    /// let ran = client.lock("reports").try_run(async |guard| guard.fencing_token()).await?;
    /// assert!(ran.is_some(), "nobody else was at it");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// `Lost` where the hold ended before `work` did; otherwise as [`acquire`](Self::acquire). That the release had no
    /// clear answer is no error: `work` was done under the lock.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops `work` and releases the lock, in the background.
    pub async fn try_run<T>(self, work: impl AsyncFnOnce(&Guard) -> T) -> Result<Option<T>> {
        let guard = match self.try_acquire().await {
            Ok(guard) => guard,
            Err(error) if error.kind().is_held_by_another() => return Ok(None),
            Err(error) => return Err(error),
        };
        let output = guard.run(work(&guard)).await?;
        match guard.release().await {
            Err(error) if error.kind() == ErrorKind::Lost => Err(error),
            _ => Ok(Some(output)),
        }
    }

    /// Joins the queue and returns: the first of two phases, with [`Pending::wait`] as the second. The timeout counts
    /// from the second.
    ///
    /// Where the store has no queue the lock is claimed in the background. A grant that nobody has waited for yet is
    /// kept renewed until the [`Pending`] is dropped.
    ///
    /// # Errors
    ///
    /// `Invalid` and `Unsupported` for what cannot be asked; everything else is told by [`Pending::wait`].
    ///
    /// # Cancel safety
    ///
    /// As [`acquire`](Self::acquire).
    pub async fn enqueue(self) -> Result<Pending> {
        let (clock, timeout) = (self.clock.clone(), self.timeout);
        let prepared = self.prepare(false, None)?;
        let (reply, answer) = oneshot::channel();
        let (told, tell) = oneshot::channel();
        let (placed, arrived) = oneshot::channel();
        let (key, store) = (prepared.claim.key.clone(), Arc::clone(&prepared.store));
        prepared.spawn(Caller::enqueued(reply, tell, placed))?;
        arrived.await.map_err(|_| shut_down_error(&key).at(&store))?;
        Ok(Pending::new(key, store, clock, timeout, answer, told))
    }

    fn prepare(self, try_once: bool, until: Option<tenure_core::Time>) -> Result<Prepared> {
        let store = self.store;
        let key = self.key.map_err(|error| Error::from(error).at(&store))?;
        let at = |error: Error| error.on(&key).at(&store);
        let invalid = |message: String| at(Error::new(ErrorKind::Invalid, message));
        let can = store.capabilities();
        let mode = match self.kind {
            RequestKind::Semaphore { slots: 0 } => {
                return Err(invalid(
                    "a semaphore of 0 slots can never be held: give at least 1".into(),
                ));
            }
            RequestKind::Semaphore { .. } if !can.semaphore => {
                return Err(unsupported(&*store, "keep semaphores").on(&key));
            }
            RequestKind::Semaphore { slots } => Mode::Slot { limit: slots },
            RequestKind::Lock { shared: true } if !can.shared => {
                return Err(unsupported(&*store, "share a lock").on(&key));
            }
            RequestKind::Lock { shared: true } => Mode::Shared,
            RequestKind::Lock { shared: false } => Mode::Exclusive,
        };
        if self.detached && !can.detached {
            return Err(unsupported(&*store, "keep a hold without its process").on(&key));
        }
        if self.fail_if_contended && can.queue != QueueKind::Single {
            return Err(unsupported(&*store, "tell whether another waits").on(&key));
        }
        let terms = LeaseTerms { min_ttl: can.min_ttl, ..self.terms };
        let lease = Lease::new(terms).map_err(|error| invalid(error.to_string()))?;
        let (mut by, id) = identity::of_claim().map_err(at)?;
        if let Some(id) = &self.id {
            Arc::make_mut(&mut by).id = identity::checked_text("holder's id", id).map_err(at)?;
        }
        if let Some(note) = &self.note {
            Arc::make_mut(&mut by).note = identity::checked_text("note", note).map_err(at)?;
        }
        let claim = Claim {
            id,
            key: key.clone(),
            mode,
            ttl: lease.ttl(),
            by,
            queue: !try_once,
            fail_if_contended: self.fail_if_contended,
            fair: self.fair,
            detached: self.detached,
        };
        let terms = AcquireOptions {
            lease,
            try_once,
            until,
            retry: self.retry.unwrap_or_else(|| Box::new(DEFAULT_CLAIM_BACKOFF)),
            backstop: can.push.then_some(CLAIM_BACKSTOP_INTERVAL),
            #[expect(
                clippy::cast_possible_truncation,
                reason = "both halves are wanted: the process, and which of its claims it is"
            )]
            seed: (id >> 64) as u64 ^ id as u64,
        };
        let class = self.class.as_deref().unwrap_or(match mode {
            Mode::Exclusive => "lock",
            Mode::Shared => "shared",
            Mode::Slot { .. } => "semaphore",
        });
        let labels = Labels::new(&*store, class);
        let (clock, at_work, callbacks) = (self.clock, self.at_work, self.callbacks);
        Ok(Prepared { store, clock, at_work, claim, lease, terms, callbacks, labels })
    }
}

impl fmt::Debug for LockRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockRequest")
            .field("key", &self.key)
            .field("store", &self.store)
            .field("kind", &self.kind)
            .field("terms", &self.terms)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

/// A request that can be sent.
struct Prepared {
    store: Arc<dyn Store>,
    clock: Clock,
    at_work: Option<watch::Receiver<()>>,
    claim: Claim,
    lease: Lease,
    terms: AcquireOptions,
    callbacks: HoldCallbacks,
    labels: Labels,
}

impl Prepared {
    async fn acquire(self, fail_fast: bool) -> Result<Guard> {
        let (key, store) = (self.claim.key.clone(), Arc::clone(&self.store));
        let (reply, answer) = oneshot::channel();
        self.spawn(Caller::waiting(reply, fail_fast))?;
        answer.await.unwrap_or_else(|_| Err(shut_down_error(&key).at(&store)))?.ensure_held()
    }

    /// Starts the task that owns the acquisition, and then the hold.
    fn spawn(self, caller: Caller) -> Result<()> {
        let runtime = Runtime::try_current().map_err(|error| {
            let message = "a lock needs a tokio runtime to be kept: call it from within one";
            Error::new(ErrorKind::Invalid, message).on(&self.claim.key).because(error)
        })?;
        let machine = Acquire::new(self.terms, self.clock.now());
        let Self { store, clock, at_work, claim, lease, callbacks, labels, .. } = self;
        let task = AcquireTask { store, clock, claim, lease, callbacks, caller, machine, labels };
        runtime.spawn(async move {
            task.run().await;
            drop(at_work);
        });
        Ok(())
    }
}

/// The error for a task that ended without a word.
pub(crate) fn shut_down_error(key: &Key) -> Error {
    let message =
        "the task that kept the lock has ended: its runtime was shut down, or it panicked";
    Error::new(ErrorKind::Shutdown, message).on(key)
}
