//! Fault injection: a store whose requests fail on command, to test this library or your own code on a bad network.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::{FencingToken, Key};

use crate::mutex::Mutex;
use crate::store::{
    Answer, Capabilities, Claim, Finding, Grant, Handle, Hold, HoldEvent, KeySpace, KeyState,
    Place, Renewed, Store, Version, Waited,
};
use crate::{Clock, Error, ErrorKind, Result};

/// A store whose requests fail on command. Made by [`Faults::wrap`].
#[derive(Clone)]
pub struct FaultyStore {
    inner: Arc<dyn Store>,
    faults: Faults,
}

/// Control of the faults of a [`FaultyStore`]. Clones control the same store.
///
/// ```
/// use std::sync::Arc;
/// use tenure::conformance::{Fault, Faults, Op};
/// use tenure::{Client, Clock, MemoryStore};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// let (store, faults) = Faults::wrap(Arc::new(MemoryStore::new()), Clock::system());
/// let client = Client::with_store(Arc::new(store));
/// faults.always(Op::Claim, Fault::Deny);
/// assert!(client.lock("key").try_acquire().await.is_err()); // what does your code do now?
/// faults.heal();
/// client.lock("key").try_acquire().await?.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Faults(Arc<Mutex<FaultPlan>>);

#[derive(Debug)]
struct FaultPlan {
    clock: Clock,
    down: bool,
    planned: Vec<(Op, Fault)>,
    lasting: Vec<(Op, Fault)>,
    counts: HashMap<Op, RequestCounts>,
}

/// Requests of one kind.
#[derive(Clone, Copy, Debug, Default)]
struct RequestCounts {
    sent: u64,
    ended: u64,
}

/// A kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Op {
    /// [`Store::claim`].
    Claim,
    /// [`Place::wait`].
    Wait,
    /// [`Place::abandon`].
    Abandon,
    /// [`Hold::renew`].
    Renew,
    /// [`Hold::release`].
    Release,
    /// [`Store::inspect`], which has no time limit: [`Fault::Hang`] makes it hang for ever.
    Inspect,
    /// [`Store::changed`], which has no time limit either.
    Changed,
}

/// Fault of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The store executes the request, but the reply is lost: the caller does not know the outcome.
    LoseReply,
    /// The request does not reach the store, but the caller does not know the outcome.
    LoseRequest,
    /// The request does not reach the store. After its whole time limit, the caller gets an unknown outcome.
    Hang,
    /// The request reaches the store after half its time limit, and is answered then.
    Delay,
    /// The request is refused permanently, as if access had been revoked.
    Deny,
}

impl Faults {
    /// Wraps a store, and returns it with the control of its faults.
    pub fn wrap(inner: Arc<dyn Store>, clock: Clock) -> (FaultyStore, Self) {
        let (planned, lasting, counts) = (Vec::new(), Vec::new(), HashMap::new());
        let plan = FaultPlan { clock, down: false, planned, lasting, counts };
        let faults = Self(Arc::new(Mutex::new(plan)));
        (FaultyStore { inner, faults: faults.clone() }, faults)
    }

    /// Makes the store unavailable or available again. While it is unavailable, no request reaches it and all fail.
    pub fn set_down(&self, down: bool) {
        self.plan().down = down;
    }

    /// Applies this fault to the next request of this kind.
    pub fn next(&self, op: Op, fault: Fault) {
        self.plan().planned.push((op, fault));
    }

    /// Applies this fault to every request of this kind, until [`heal`](Self::heal).
    pub fn always(&self, op: Op, fault: Fault) {
        self.plan().lasting.push((op, fault));
    }

    /// Removes all faults.
    pub fn heal(&self) {
        let mut plan = self.plan();
        plan.down = false;
        plan.planned.clear();
        plan.lasting.clear();
    }

    /// Number of requests of this kind so far, including those that failed. With [`ended`](Self::ended) a test waits for
    /// a request instead of sleeping.
    pub fn sent(&self, op: Op) -> u64 {
        self.counts(op).sent
    }

    /// Number of requests of this kind that were answered or have failed. A request that its caller dropped is not
    /// counted.
    pub fn ended(&self, op: Op) -> u64 {
        self.counts(op).ended
    }

    /// Number of faults of [`next`](Self::next) that no request has met yet.
    pub fn unused(&self) -> usize {
        self.plan().planned.len()
    }

    fn counts(&self, op: Op) -> RequestCounts {
        self.plan().counts.get(&op).copied().unwrap_or_default()
    }

    fn plan(&self) -> MutexGuard<'_, FaultPlan> {
        self.0.lock()
    }

    /// Fault of a request that begins now; an error if the store is unavailable.
    fn take_fault(&self, op: Op) -> Result<Option<Fault>> {
        let mut plan = self.plan();
        plan.counts.entry(op).or_default().sent += 1;
        if plan.down {
            return Err(Error::new(
                ErrorKind::Unavailable,
                "the store is unavailable (injected fault)",
            ));
        }
        let planned = plan.planned.iter().position(|(planned, _)| *planned == op);
        let lasting = plan.lasting.iter().find(|(lasting, _)| *lasting == op);
        Ok(match planned {
            None => lasting.map(|(_, fault)| *fault),
            Some(at) => Some(plan.planned.remove(at).1),
        })
    }

    /// Makes a request with its fault, and counts it.
    async fn apply<T>(
        &self,
        op: Op,
        limit: Duration,
        request: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let result = self.apply_fault(op, limit, request).await;
        self.plan().counts.entry(op).or_default().ended += 1;
        result
    }

    /// Makes a request with its fault. The content of a lost reply is leaked, not dropped: dropping a grant would
    /// release it, but the store keeps a grant whose reply was lost.
    async fn apply_fault<T>(
        &self,
        op: Op,
        limit: Duration,
        request: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let lost = |what: &str| {
            Error::new(ErrorKind::Unknown, format!("{what} was lost (injected fault)"))
        };
        match self.take_fault(op)? {
            None => request.await,
            Some(Fault::LoseReply) => {
                std::mem::forget(request.await?);
                Err(lost("the reply"))
            }
            Some(Fault::LoseRequest) => Err(lost("the request")),
            Some(Fault::Deny) => {
                Err(Error::new(ErrorKind::Denied, "access refused (injected fault)"))
            }
            Some(Fault::Delay) => {
                let clock = self.plan().clock.clone();
                clock.sleep_until(clock.now() + limit / 2).await;
                request.await
            }
            Some(Fault::Hang) => {
                let clock = self.plan().clock.clone();
                clock.sleep_until(clock.now() + limit).await;
                Err(lost("the request"))
            }
        }
    }
}

impl fmt::Display for FaultyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl fmt::Debug for FaultyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Faulty").field(&self.inner).finish()
    }
}

#[async_trait]
impl Store for FaultyStore {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn claim(&self, claim: &Claim, limit: Duration) -> Result<Answer> {
        let answer = self.faults.apply(Op::Claim, limit, self.inner.claim(claim, limit)).await?;
        Ok(match answer {
            Answer::Granted(grant) => Answer::Granted(self.faults.wrap_grant(grant)),
            Answer::Queued(inner) => {
                Answer::Queued(Box::new(FaultyPlace { inner, faults: self.faults.clone() }))
            }
            Answer::Contended(busy) => Answer::Contended(busy),
        })
    }

    fn check_key(&self, key: &Key) -> Result<()> {
        self.inner.check_key(key)
    }

    async fn withdraw(&self, claim: &Claim, limit: Duration) -> Result<()> {
        self.inner.withdraw(claim, limit).await
    }

    async fn resume(&self, key: &Key, handle: &Handle) -> Result<Box<dyn Hold>> {
        self.inner.resume(key, handle).await
    }

    async fn changed(&self, key: &Key, space: KeySpace, since: Version) -> Result<()> {
        self.faults.apply(Op::Changed, Duration::MAX, self.inner.changed(key, space, since)).await
    }

    async fn inspect(&self, key: &Key, space: KeySpace) -> Result<KeyState> {
        self.faults.apply(Op::Inspect, Duration::MAX, self.inner.inspect(key, space)).await
    }

    async fn list(
        &self,
        space: KeySpace,
        prefix: &str,
        after: Option<&str>,
    ) -> Result<Vec<KeyState>> {
        self.inner.list(space, prefix, after).await
    }

    async fn evict(&self, key: &Key, token: FencingToken, reason: &str) -> Result<()> {
        self.inner.evict(key, token, reason).await
    }

    async fn examine(&self, limit: Duration) -> Vec<Finding> {
        self.inner.examine(limit).await
    }

    async fn close(&self) {
        self.inner.close().await;
    }
}

impl Faults {
    fn wrap_grant(&self, grant: Grant) -> Grant {
        let hold = Box::new(FaultyHold { inner: grant.hold, faults: self.clone() });
        Grant { hold, ..grant }
    }
}

#[derive(Debug)]
struct FaultyPlace {
    inner: Box<dyn Place>,
    faults: Faults,
}

#[async_trait]
impl Place for FaultyPlace {
    async fn wait(&mut self, limit: Duration) -> Result<Waited> {
        Ok(match self.faults.apply(Op::Wait, limit, self.inner.wait(limit)).await? {
            Waited::Granted(grant) => Waited::Granted(self.faults.wrap_grant(grant)),
            other => other,
        })
    }

    async fn abandon(&mut self, limit: Duration) -> Result<()> {
        self.faults.apply(Op::Abandon, limit, self.inner.abandon(limit)).await
    }
}

#[derive(Debug)]
struct FaultyHold {
    inner: Box<dyn Hold>,
    faults: Faults,
}

#[async_trait]
impl Hold for FaultyHold {
    async fn renew(&mut self, ttl: Duration, limit: Duration) -> Result<Renewed> {
        self.faults.apply(Op::Renew, limit, self.inner.renew(ttl, limit)).await
    }

    async fn check_handoff(&mut self, limit: Duration) -> Result<bool> {
        self.inner.check_handoff(limit).await
    }

    async fn event(&mut self) -> HoldEvent {
        self.inner.event().await
    }

    async fn release(&mut self, limit: Duration) -> Result<()> {
        self.faults.apply(Op::Release, limit, self.inner.release(limit)).await
    }

    fn handle(&self) -> Option<Handle> {
        self.inner.handle()
    }

    fn revision(&self) -> Option<u64> {
        self.inner.revision()
    }

    async fn detach(&mut self, limit: Duration) -> Result<()> {
        self.inner.detach(limit).await
    }

    #[cfg(unix)]
    fn keep_open(&self) -> Option<std::sync::Weak<dyn crate::store::KeepOpen>> {
        self.inner.keep_open()
    }
}
