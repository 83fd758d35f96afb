//! Several locks at once: acquired in one order by every program, so that no two programs wait for each other.

use std::collections::BTreeSet;
use std::fmt;
use std::future::poll_fn;
use std::task::Poll;
use std::time::Duration;

use tenure_core::{Key, Time};
use tokio::task::JoinSet;

use crate::client::Client;
use crate::guard::{Guard, Lost};
use crate::race::{Either, before, race};
use crate::request::LockRequest;
use crate::{Error, ErrorKind, Result};

/// Time that a failed request waits for the release of the locks that it had acquired.
const RELEASE_PATIENCE: Duration = Duration::from_secs(1);

/// Request for several locks. Made by [`Client::lock_all`].
///
/// The locks are acquired one after the other, in the order of their keys and not of the arguments. Two programs that
/// acquire the same locks this way never wait for each other in a circle. A key that is given twice is one lock.
///
/// ```
/// use std::time::Duration;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// # let client = tenure::Client::connect("memory:").await?;
/// let guards = client
///     .lock_all(["account/7", "account/3"])
///     .each(|lock| lock.ttl(Duration::from_secs(30)).note("transfer"))
///     .timeout(Duration::from_secs(10)) // for all of them together
///     .acquire()
///     .await?;
/// assert!(guards.is_held());
/// guards.run(async { /* dropped if one of the locks is lost */ }).await?;
/// guards.release().await?;
/// # Ok(()) }
/// ```
#[must_use = "a request does nothing until it is acquired"]
pub struct LockAllRequest {
    client: Client,
    keys: BTreeSet<String>,
    each: Vec<Box<dyn Fn(LockRequest) -> LockRequest + Send>>,
    timeout: Option<Duration>,
}

impl Client {
    /// Starts a request for several locks, which are acquired without deadlock and released together.
    pub fn lock_all<K: AsRef<str>>(&self, keys: impl IntoIterator<Item = K>) -> LockAllRequest {
        let keys = keys.into_iter().map(|key| key.as_ref().to_owned()).collect();
        LockAllRequest { client: self.clone(), keys, each: Vec::new(), timeout: None }
    }
}

impl LockAllRequest {
    /// Applies settings to the request of every lock. Each lock counts its settings by itself:
    /// [`max_hold`](LockRequest::max_hold) from its own grant, also while the others are waited for, and a timeout from
    /// its own request (use [`timeout`](Self::timeout) instead).
    pub fn each(mut self, settings: impl Fn(LockRequest) -> LockRequest + Send + 'static) -> Self {
        self.each.push(Box::new(settings));
        self
    }

    /// Sets the maximum time to wait for all locks together. Without a timeout, [`acquire`](Self::acquire) waits
    /// forever.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Acquires all locks. If one of them fails, those that were acquired before are released.
    ///
    /// # Errors
    ///
    /// `Invalid` without keys. `Lost` if a lock that was already acquired was lost while waiting for another one.
    /// Otherwise the error of the first lock that failed, as [`LockRequest::acquire`] reports it.
    ///
    /// # Cancel safety
    ///
    /// After a drop, the locks that were acquired or requested are released in the background.
    pub async fn acquire(self) -> Result<LockGuards> {
        self.gather(async |request| request.acquire().await).await
    }

    /// Acquires all locks if all are free, without waiting for a holder. Otherwise none is held afterwards.
    ///
    /// # Errors
    ///
    /// `Held` if another holder has one of the locks; the error names it. Otherwise as [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    ///
    /// As [`acquire`](Self::acquire).
    pub async fn try_acquire(self) -> Result<LockGuards> {
        self.gather(async |request| request.try_acquire().await).await
    }

    async fn gather(
        self,
        acquire: impl AsyncFn(LockRequest) -> Result<Guard>,
    ) -> Result<LockGuards> {
        if self.keys.is_empty() {
            let message = "no key to lock: give at least one";
            return Err(Error::new(ErrorKind::Invalid, message).at(self.client.store()));
        }
        let clock = self.client.clock().clone();
        let end = self.timeout.map_or(Time::MAX, |timeout| clock.now() + timeout);
        let mut held = LockGuards(Vec::with_capacity(self.keys.len()));
        for key in &self.keys {
            let mut request = self.client.lock(key);
            for settings in &self.each {
                request = settings(request);
            }
            if self.timeout.is_some() {
                request = request.timeout(end.since(clock.now()));
            }
            let next = match race(held.lost(), acquire(request)).await {
                Either::First(lost) => Err(lost.into()),
                Either::Second(next) => next,
            };
            match next {
                Ok(guard) => held.0.push(guard),
                Err(error) => {
                    // The reason matters more than the answers to the releases, which go on in the background.
                    before(&clock, clock.now() + RELEASE_PATIENCE, held.release()).await;
                    return Err(error);
                }
            }
        }
        Ok(held)
    }
}

impl fmt::Debug for LockAllRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockAllRequest")
            .field("keys", &self.keys)
            .field("store", self.client.store())
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

/// Several locks that are held together. Dropping the value releases all of them in the background.
#[derive(Debug)]
#[must_use = "dropping the guards releases the locks"]
pub struct LockGuards(Vec<Guard>);

impl LockGuards {
    /// True while every lock is held.
    pub fn is_held(&self) -> bool {
        self.0.iter().all(Guard::is_held)
    }

    /// Guard of one of the locks: for its fencing token.
    pub fn get(&self, key: impl AsRef<str>) -> Option<&Guard> {
        self.iter().find(|guard| guard.key().as_str() == key.as_ref())
    }

    /// Guards of the locks, in the order of their keys.
    pub fn iter(&self) -> std::slice::Iter<'_, Guard> {
        self.0.iter()
    }

    /// Keys of the locks, in order.
    pub fn keys(&self) -> impl Iterator<Item = &Key> {
        self.iter().map(Guard::key)
    }

    /// Time until the first deadline of the locks, by the local clock.
    pub fn remaining(&self) -> Duration {
        self.iter().map(Guard::remaining).min().unwrap_or_default()
    }

    /// Resolves when one of the locks is lost. The others are still held.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time.
    pub async fn lost(&self) -> Lost {
        first(self.iter().map(Guard::lost)).await
    }

    /// Resolves when it is time to stop the protected work: as [`Guard::ending`], for the first of the locks.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time.
    pub async fn ending(&self) {
        first(self.iter().map(Guard::ending)).await;
    }

    /// Resolves when a waiter has asked for one of the locks.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time.
    pub async fn handoff_requested(&self) {
        first(self.iter().map(Guard::handoff_requested)).await;
    }

    /// Runs `work`, and drops it if one of the locks is lost.
    ///
    /// # Errors
    ///
    /// `Lost` if one of the locks was lost before `work` completed.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops `work`; the locks stay held.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        match race(self.lost(), work).await {
            Either::First(lost) => Err(lost.into()),
            Either::Second(output) => Ok(output),
        }
    }

    /// Releases all locks, at the same time, and waits for the results.
    ///
    /// # Errors
    ///
    /// The error of one of the locks, as [`Guard::release`] reports it: a loss, if there is one. The other locks are
    /// released all the same.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future releases the locks in the background.
    pub async fn release(self) -> Result<()> {
        let mut releases: JoinSet<Result<()>> = self.0.into_iter().map(Guard::release).collect();
        let mut first = Ok(());
        while let Some(ended) = releases.join_next().await {
            // A task fails only with its runtime.
            let result = ended.unwrap_or_else(|error| {
                let message = "the task that released the lock has ended with its runtime";
                Err(Error::new(ErrorKind::Shutdown, message).because(error))
            });
            // A loss says more than a release without an answer.
            let is_loss = |result: &Result<()>| {
                result.as_ref().is_err_and(|error| error.kind() == ErrorKind::Lost)
            };
            if first.is_ok() || (is_loss(&result) && !is_loss(&first)) {
                first = result;
            }
        }
        first
    }
}

/// Resolves with the first of these futures; never if there are none.
async fn first<F: Future>(futures: impl Iterator<Item = F>) -> F::Output {
    let mut futures: Vec<_> = futures.map(Box::pin).collect();
    poll_fn(|context| {
        for future in &mut futures {
            if let Poll::Ready(output) = future.as_mut().poll(context) {
                return Poll::Ready(output);
            }
        }
        Poll::Pending
    })
    .await
}

impl From<Guard> for LockGuards {
    /// One lock, or one slot of a semaphore, where several could be.
    fn from(guard: Guard) -> Self {
        Self(vec![guard])
    }
}

impl<'a> IntoIterator for &'a LockGuards {
    type Item = &'a Guard;
    type IntoIter = std::slice::Iter<'a, Guard>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}
