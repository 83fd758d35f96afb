//! The request for a lock: its settings, and the methods that send it.

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
use crate::outage::{OutageCallbacks, OutageMonitor, StoreOutage};
use crate::pending::Pending;
use crate::store::{Claim, Mode, QueueKind, Store, unsupported};
use crate::telemetry::Labels;
use crate::{Clock, Error, ErrorKind, Result, identity};

/// Request for a lock, with settings for the acquisition and for the hold. Made by
/// [`Client::lock`](crate::Client::lock) and [`Client::semaphore`](crate::Client::semaphore).
///
/// Invalid settings (a bad key, or a ttl that is too short for renewals) fail when the request is sent. The error names
/// the values that conflict.
///
/// ```
/// use std::time::Duration;
/// use tenure::ErrorKind;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// # let client = tenure::Client::connect("memory:").await?;
/// let guard = client
///     .lock("reports/nightly")
///     .ttl(Duration::from_secs(30)) // without renewals, the hold ends after this time
///     .timeout(Duration::from_secs(10)) // maximum time to wait for the lock
///     .note("build 42") // shown by `tenure status`
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
#[expect(clippy::struct_excessive_bools, reason = "each option is independent of the others")]
pub struct LockRequest {
    store: Arc<dyn Store>,
    clock: Clock,
    /// Dropped when the task of this request ends: [`Client::idle`](crate::Client::idle) waits until then.
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
    fail_on_error: bool,
    callbacks: HoldCallbacks,
    on_outage: OutageCallbacks,
    /// Shared with other requests, instead of one for this request.
    monitor: Option<OutageMonitor>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum RequestKind {
    Lock { shared: bool },
    Semaphore { slots: u32, shared: bool },
}

/// Default ttl of a hold.
const DEFAULT_TTL: Duration = Duration::from_secs(15);
/// Interval between claims on a store that pushes changes, in case a notification is lost.
const CLAIM_BACKSTOP_INTERVAL: Duration = Duration::from_secs(1);
/// Default pauses between claims on a store that does not push.
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
            fail_on_error: false,
            callbacks: HoldCallbacks::default(),
            on_outage: OutageCallbacks::default(),
            monitor: None,
        }
    }

    /// Makes [`Client::idle`](crate::Client::idle) wait for the task of this request.
    pub(crate) fn tracked_by(mut self, at_work: watch::Receiver<()>) -> Self {
        self.at_work = Some(at_work);
        self
    }

    /// Key of the lock; `None` if the key is invalid, which fails when the request is sent.
    pub fn key(&self) -> Option<&Key> {
        self.key.as_ref().ok()
    }

    /// Sets the ttl: the time that the hold lasts without a renewal; 15 s by default.
    ///
    /// On a store that cannot detect the death of a holder, the lock of a dead holder stays held for the ttl.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.terms.ttl = ttl;
        self
    }

    /// Sets the maximum time to wait for the lock. Without a timeout, [`acquire`](Self::acquire) waits forever.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Requests a shared hold. Several shared holders (readers) can hold the lock together; an exclusive holder (a
    /// writer) holds it alone. `Invalid` for a semaphore: each of its slots has one holder.
    pub fn shared(mut self) -> Self {
        match &mut self.kind {
            RequestKind::Lock { shared } | RequestKind::Semaphore { shared, .. } => *shared = true,
        }
        self
    }

    /// Turns renewal on or off; on by default. Without renewal the hold is lost when its ttl has passed.
    pub fn keep_alive(mut self, on: bool) -> Self {
        self.terms.keep_alive = on.then_some(3);
        self
    }

    /// Sets the number of renewals per ttl: 3 by default, at least 2, and at most one per 5 ms.
    pub fn keep_alive_factor(mut self, factor: u32) -> Self {
        self.terms.keep_alive = Some(factor);
        self
    }

    /// Limits the total time of the hold: after `max` the hold is lost, even if every renewal succeeds.
    pub fn max_hold(mut self, max: Duration) -> Self {
        self.terms.max_hold = Some(max);
        self
    }

    /// Sets the time that the protected work needs to stop: [`Guard::ending`] resolves this long before the deadline.
    pub fn stop_grace(mut self, time: Duration) -> Self {
        self.terms.stop_grace = time;
        self
    }

    /// Sets the strategy for the pauses between claims, which apply on a store without a queue and after errors. The
    /// default is exponential backoff with jitter, from 50 ms to 1 s.
    pub fn retry(mut self, retry: impl Retry + 'static) -> Self {
        self.retry = Some(Box::new(retry));
        self
    }

    /// Sets the id under which this holder is shown; `host:pid:nonce` by default. The id should be unique.
    pub fn id(mut self, id: impl Into<String>) -> Self {
        self.id = Some(id.into());
        self
    }

    /// Sets a text that is shown next to the holder's name.
    pub fn note(mut self, note: impl Into<String>) -> Self {
        self.note = Some(note.into());
        self
    }

    /// Sets the class label of this lock in metrics; `lock`, `shared` or `semaphore` by default.
    ///
    /// Locks of one class share their metrics. Use few classes: beyond a hundred, new classes are counted as `other`.
    pub fn class(mut self, class: impl Into<String>) -> Self {
        self.class = Some(class.into());
        self
    }

    /// Requests a first-come-first-served queue, on a store that has such a queue only on request.
    pub fn fair(mut self) -> Self {
        self.fair = true;
        self
    }

    /// Fails with `Contention` instead of waiting for the only place in the queue: at once if the place is taken, and
    /// later if the place is lost to another waiter.
    ///
    /// For stores with one place ([`QueueKind::Single`]); `Unsupported` on other stores. Without this setting, the
    /// request waits for the place too.
    pub fn fail_if_contended(mut self) -> Self {
        self.fail_if_contended = true;
        self
    }

    /// Requests a hold that can outlive this process: the hold lasts until its ttl ends, unless it is released earlier.
    pub fn detached(mut self) -> Self {
        self.detached = true;
        self
    }

    /// Fails with `Denied` at once if the store denies access after it has worked before.
    ///
    /// Without this setting such a denial counts as an outage: a password may be replaced at that moment, or a role may
    /// not log in for a while. The request is then retried every few seconds until its [`timeout`](Self::timeout), and
    /// [`on_outage`](Self::on_outage) reports it. A denial before the store has worked once always fails at once.
    /// PostgreSQL is the only store with this distinction; on the others every denial fails at once.
    pub fn fail_fast(mut self) -> Self {
        self.fail_fast = true;
        self
    }

    /// Calls `f` once, on a separate task, when a waiter has asked for the lock.
    pub fn on_handoff_requested(mut self, f: impl Fn() + Send + Sync + 'static) -> Self {
        self.callbacks.handoff_requested.push(Arc::new(f));
        self
    }

    /// Calls `f`, on a separate task, with the error of every renewal that failed. The lock is still held until
    /// [`Guard::lost`] resolves.
    pub fn on_renewal_error(mut self, f: impl Fn(&Error) + Send + Sync + 'static) -> Self {
        self.callbacks.renewal_error.push(Arc::new(move |error| f(error)));
        self
    }

    /// Calls `f` when the store has been away for up to two seconds while the request waits, every 30 s after that, and
    /// when the store is back. The request is retried meanwhile. `f` must return soon.
    pub fn on_outage(mut self, f: impl Fn(&StoreOutage) + Send + Sync + 'static) -> Self {
        self.on_outage.push(f);
        self
    }

    /// Reports outages to a monitor that several requests share, instead of [`on_outage`](Self::on_outage).
    pub(crate) fn monitored_by(mut self, monitor: OutageMonitor) -> Self {
        self.monitor = Some(monitor);
        self
    }

    /// As [`on_renewal_error`](Self::on_renewal_error), for a callback that stores the error.
    pub(crate) fn on_renewal_error_shared(
        mut self,
        f: impl Fn(&Arc<Error>) + Send + Sync + 'static,
    ) -> Self {
        self.callbacks.renewal_error.push(Arc::new(f));
        self
    }

    /// Makes the acquisition fail with the first request that fails, instead of retrying. If that request may have
    /// taken effect, its result is released in the background.
    pub(crate) fn fail_on_error(mut self) -> Self {
        self.fail_on_error = true;
        self
    }

    /// Validates the settings of the request without sending it.
    pub(crate) fn check(self) -> Result<()> {
        self.prepare(false, None).map(drop)
    }

    /// Acquires the lock. Waits for the lock no longer than the [`timeout`](Self::timeout).
    ///
    /// # Errors
    ///
    /// - `Timeout` if another holder kept the lock for the whole timeout.
    /// - `Contention` if another waiter has the only place and [`fail_if_contended`](Self::fail_if_contended) is set.
    /// - `Unavailable` if the store could not be reached in time.
    /// - `Unknown` if the store gave no clear answer in time: the lock may be held for the caller for up to
    ///   [`Error::may_be_held_for`].
    /// - `Lost` if the lock was granted, and the hold ended before the guard could be returned.
    /// - `Denied`, `Invalid`, `Misconfigured` and `Unsupported` if no retry can succeed.
    ///
    /// # Cancel safety
    ///
    /// After a drop, a background task leaves the queue and releases a grant that arrives meanwhile.
    pub async fn acquire(self) -> Result<Guard> {
        let until = self.timeout.map(|timeout| self.clock.now() + timeout);
        let fail_on_error = self.fail_on_error;
        let prepared = self.prepare(false, until)?;
        prepared.acquire(fail_on_error).await
    }

    /// Acquires the lock if it is free, without waiting for a holder.
    ///
    /// # Errors
    ///
    /// `Held` if another holder has the lock. Otherwise as [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    ///
    /// As [`acquire`](Self::acquire).
    pub async fn try_acquire(self) -> Result<Guard> {
        let fail_on_error = self.fail_on_error;
        let prepared = self.prepare(true, None)?;
        prepared.acquire(fail_on_error).await
    }

    /// Runs `work` under the lock if the lock is free, and then releases the lock. `work` is dropped if the hold is
    /// lost.
    ///
    /// Returns the output of `work`, or `None` if another holder has the lock and `work` was not run.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
    /// let client = tenure::Client::connect("memory:").await?;
    /// let ran = client.lock("reports").try_run(async |guard| guard.fencing_token()).await?;
    /// assert!(ran.is_some(), "the lock was free");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// `Lost` if the hold ended before `work` completed; otherwise as [`acquire`](Self::acquire). A release without a
    /// clear answer is not an error: `work` completed under the lock.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops `work`, and releases the lock in the background.
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

    /// Joins the queue and returns. This is the first of two phases: the second is [`Pending::wait`], and the timeout
    /// counts from the call of that method.
    ///
    /// On a store without a queue, the lock is claimed in the background. If the grant arrives before the call of
    /// [`Pending::wait`], the hold is renewed until the [`Pending`] is dropped.
    ///
    /// # Errors
    ///
    /// `Invalid` and `Unsupported` for invalid settings. [`Pending::wait`] reports every other error.
    ///
    /// # Cancel safety
    ///
    /// As [`acquire`](Self::acquire).
    pub async fn enqueue(self) -> Result<Pending> {
        let (clock, timeout) = (self.clock.clone(), self.timeout);
        let prepared = self.prepare(false, None)?;
        let (reply, answer) = oneshot::channel();
        let (deadline, deadline_receiver) = oneshot::channel();
        let (placed, arrived) = oneshot::channel();
        let (key, store) = (prepared.claim.key.clone(), Arc::clone(&prepared.store));
        prepared.spawn(Caller::enqueued(reply, deadline_receiver, placed))?;
        arrived.await.map_err(|_| Error::task_ended(&key).at(&store))?;
        Ok(Pending::new(key, store, clock, timeout, answer, deadline))
    }

    fn prepare(self, try_once: bool, until: Option<tenure_core::Time>) -> Result<Prepared> {
        let store = self.store;
        let key = self.key.map_err(|error| Error::from(error).at(&store))?;
        let at = |error: Error| error.on(&key).at(&store);
        let invalid = |message: String| at(Error::new(ErrorKind::Invalid, message));
        let can = store.capabilities();
        let mode = match self.kind {
            RequestKind::Semaphore { shared: true, .. } => {
                let message =
                    "a slot of a semaphore has one holder: leave out `shared`, or use a lock";
                return Err(invalid(message.into()));
            }
            RequestKind::Semaphore { slots: 0, .. } => {
                return Err(invalid(
                    "a semaphore with 0 slots can never be held: use at least 1".into(),
                ));
            }
            RequestKind::Semaphore { .. } if !can.semaphore => {
                return Err(unsupported(&*store, "provide semaphores").on(&key));
            }
            RequestKind::Semaphore { slots, .. } => Mode::Slot { limit: slots },
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
            return Err(unsupported(&*store, "detect other waiters").on(&key));
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
        let options = AcquireOptions {
            lease,
            try_once,
            until,
            retry: self.retry.unwrap_or_else(|| Box::new(DEFAULT_CLAIM_BACKOFF)),
            fallback_interval: can.push.then_some(CLAIM_BACKSTOP_INTERVAL),
            #[expect(
                clippy::cast_possible_truncation,
                reason = "both halves matter: one differs per process, the other per claim"
            )]
            seed: (id >> 64) as u64 ^ id as u64,
        };
        let class = self.class.as_deref().unwrap_or(match mode {
            Mode::Exclusive => "lock",
            Mode::Shared => "shared",
            Mode::Slot { .. } => "semaphore",
        });
        let labels = Labels::new(&*store, class);
        let Self { clock, at_work, callbacks, on_outage, monitor, fail_fast, .. } = self;
        let outage = monitor
            .unwrap_or_else(|| OutageMonitor::new(clock.clone(), &claim.key, &store, on_outage));
        Ok(Prepared {
            store,
            clock,
            at_work,
            claim,
            lease,
            options,
            callbacks,
            labels,
            outage,
            fail_fast,
        })
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

/// Validated request.
struct Prepared {
    store: Arc<dyn Store>,
    clock: Clock,
    at_work: Option<watch::Receiver<()>>,
    claim: Claim,
    lease: Lease,
    options: AcquireOptions,
    callbacks: HoldCallbacks,
    labels: Labels,
    outage: OutageMonitor,
    fail_fast: bool,
}

impl Prepared {
    async fn acquire(self, fail_on_error: bool) -> Result<Guard> {
        let (key, store) = (self.claim.key.clone(), Arc::clone(&self.store));
        let (reply, answer) = oneshot::channel();
        self.spawn(Caller::waiting(reply, fail_on_error))?;
        answer.await.unwrap_or_else(|_| Err(Error::task_ended(&key).at(&store)))?.ensure_held()
    }

    /// Starts the task that owns the acquisition, and then the hold.
    fn spawn(self, caller: Caller) -> Result<()> {
        let runtime = Runtime::try_current().map_err(|error| {
            let message = "a lock needs a tokio runtime for its renewals: call this within one";
            Error::new(ErrorKind::Invalid, message).on(&self.claim.key).because(error)
        })?;
        let machine = Acquire::new(self.options, self.clock.now());
        let Self { store, clock, at_work, claim, lease, callbacks, labels, outage, .. } = self;
        let task = AcquireTask {
            store,
            clock,
            claim,
            lease,
            callbacks,
            caller,
            machine,
            labels,
            outage,
            fail_fast: self.fail_fast,
        };
        runtime.spawn(async move {
            task.run().await;
            drop(at_work);
        });
        Ok(())
    }
}
