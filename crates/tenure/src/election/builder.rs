//! Builder of an election participant.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tenure_core::election::ElectionConfig;
use tenure_core::retry::{ExponentialBackoff, Retry};
use tenure_core::{Key, KeyError};
use tokio::sync::watch;

use super::callbacks::{CallbackOutput, ElectionCallbacks};
use super::claims::Claims;
use super::participant::Election;
use super::task::ShutdownSignal;
use super::{AcquireFailed, Leadership, StateChange, StopReason};
use crate::guard::Lost;
use crate::outage::{OutageCallbacks, OutageMonitor, StoreOutage};
use crate::store::Store;
use crate::{Clock, Error, ErrorKind, Result};

/// Settings of an election participant. Made by [`Client::election`](crate::Client::election).
///
/// Invalid settings (a bad key, a health interval that does not fit into the ttl) are refused by
/// [`build`](Self::build) and [`start`](Self::start); the error names the values that conflict.
///
/// # Callbacks
///
/// Each `on_…` takes a closure that returns nothing, a `Result<(), E>`, or a future of either. It may be given several
/// times, also by the method of the same name of [`Election`] after the start: the closures are called one after the
/// other in the order of registration, and all of one event before the next event. They run on a task of their own, so a
/// slow callback delays later callbacks and nothing else: neither renewals nor the end of a leadership wait for it. A
/// closure that returns no future may block. A callback that panics or returns an error is reported to `on_error`, and
/// the election continues.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// # let client = tenure::Client::connect("memory:callbacks-doc").await?;
/// let election = client
///     .election("scheduler")
///     .on_acquired(|leadership| println!("leading with token {}", leadership.fencing_token()))
///     .on_acquired(|leadership| async move {
///         // Spawn what lasts: the next callback waits for this one.
///         tokio::spawn(async move { leadership.run(async { /* the leader's work */ }).await });
///     })
///     .on_lost(|lost| eprintln!("{lost}"))
///     .start()
///     .await?;
/// assert!(election.wait_for_leadership(None).await?);
/// election.shutdown(None).await?;
/// # Ok(()) }
/// ```
///
/// Slow callbacks receive all of up to about a thousand queued events. Beyond that, errors, failed claims and state
/// changes are dropped first, and then whole terms, so that `on_acquired` and the end of its term always come in pairs.
#[must_use = "an election does nothing until it is started"]
pub struct ElectionRequest {
    store: Arc<dyn Store>,
    clock: Clock,
    at_work: watch::Receiver<()>,
    key: Result<Key, KeyError>,
    ttl: Option<Duration>,
    stop_grace: Duration,
    health_interval: Option<Duration>,
    config: ElectionConfig,
    retry: Option<Box<dyn Retry>>,
    id: Option<String>,
    note: Option<String>,
    signal: Option<ShutdownSignal>,
    fail_fast: bool,
    callbacks: ElectionCallbacks,
    on_outage: OutageCallbacks,
}

/// Default interval between two proofs of a hold, if neither the interval nor the ttl is given.
const DEFAULT_HEALTH_INTERVAL: Duration = Duration::from_secs(5);
/// Renewals per ttl if only one of ttl and health interval is given.
const DEFAULT_RENEWALS_PER_TTL: u32 = 3;
/// Default delays after errors: short at first, for an outage that ends at once.
const DEFAULT_ERROR_BACKOFF: ExponentialBackoff = ExponentialBackoff {
    base: Duration::from_millis(100),
    max: Duration::from_secs(5),
    multiplier: 2.0,
    jitter: 0.5,
};

impl ElectionRequest {
    pub(crate) fn new(
        store: Arc<dyn Store>,
        clock: Clock,
        at_work: watch::Receiver<()>,
        key: Result<Key, KeyError>,
    ) -> Self {
        Self {
            store,
            clock,
            at_work,
            key,
            ttl: None,
            stop_grace: Duration::ZERO,
            health_interval: None,
            config: ElectionConfig::default(),
            retry: None,
            id: None,
            note: None,
            signal: None,
            fail_fast: false,
            callbacks: ElectionCallbacks::default(),
            on_outage: OutageCallbacks::default(),
        }
    }

    /// Time that a leadership lasts unless renewed; by default three times the health interval. On stores that cannot
    /// detect the death of a leader, no other participant can lead for this long after it.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Some(ttl);
        self
    }

    /// Time that the leader's work needs to stop: [`Leadership::ending`] resolves this long before the deadline.
    pub fn stop_grace(mut self, time: Duration) -> Self {
        self.stop_grace = time;
        self
    }

    /// Longest time between two proofs that the hold still exists; by default a third of the ttl, or 5 s if no ttl is
    /// given either. At most half the ttl.
    pub fn health_interval(mut self, interval: Duration) -> Self {
        self.health_interval = Some(interval);
        self
    }

    /// Polls for leadership with these delays instead of waiting at the store, and uses the same delays after errors
    /// and within the grace window. A strategy that gives up stops the election.
    ///
    /// Without a strategy, a follower waits at the store as a lock request does: in the store's queue, or for its
    /// notification, or else with short delays. That is faster and costs the store less.
    pub fn retry(mut self, retry: impl Retry + 'static) -> Self {
        self.retry = Some(Box::new(retry));
        self
    }

    /// Time during which a lost hold is claimed again before `on_lost` is called; none by default.
    ///
    /// The grace delays callbacks and nothing else: from the moment of the loss [`Election::is_leader`] is false and
    /// [`Leadership::ended`] has resolved. If the hold is reacquired in time and no other leader was seen, neither
    /// `on_lost` nor `on_acquired` is called, but the fencing token is a new one.
    pub fn reconnect_grace(mut self, grace: Duration) -> Self {
        self.config.reconnect_grace = Some(grace);
        self
    }

    /// Takes part again after a term, and after an error before the first term; on by default. If off, the election
    /// stops there.
    pub fn auto_reacquire(mut self, on: bool) -> Self {
        self.config.auto_reacquire = on;
        self
    }

    /// Time without claims after a step-down, so that another participant leads: 5 s by default. If the other
    /// participants poll, give at least their longest delay; give zero if any participant may lead next.
    pub fn cool_down(mut self, time: Duration) -> Self {
        self.config.cool_down = time;
        self
    }

    /// Name of this participant as shown to other clients; `host:pid:nonce` by default. It should be unique.
    pub fn id(mut self, id: impl Into<String>) -> Self {
        self.id = Some(id.into());
        self
    }

    /// Text that is shown beside the leader's name.
    pub fn note(mut self, note: impl Into<String>) -> Self {
        self.note = Some(note.into());
        self
    }

    /// Stops the election at once if the store denies access after it has worked before, as
    /// [`LockRequest::fail_fast`](crate::LockRequest::fail_fast) does. Without this setting such a denial is an outage,
    /// and the election goes on when the store grants access again.
    pub fn fail_fast(mut self) -> Self {
        self.fail_fast = true;
        self
    }

    /// Shuts the election down when `signal` resolves, whatever it waits for at that moment. The shutdown is final: the
    /// election cannot be started again. For a `CancellationToken`, pass `token.cancelled_owned()`.
    pub fn shutdown_on<F: Future + Send + 'static>(mut self, signal: F) -> Self {
        self.signal = Some(Box::pin(async move { drop(signal.await) }));
        self
    }

    /// Calls `f` when this participant becomes the leader.
    pub fn on_acquired<R: CallbackOutput<How>, How>(
        self,
        f: impl Fn(Leadership) -> R + Send + Sync + 'static,
    ) -> Self {
        self.callbacks.acquired.add(f);
        self
    }

    /// Calls `f` when this participant has given up its leadership.
    pub fn on_released<R: CallbackOutput<How>, How>(
        self,
        f: impl Fn() -> R + Send + Sync + 'static,
    ) -> Self {
        self.callbacks.released.add(move |()| f());
        self
    }

    /// Calls `f` when this participant has lost its leadership. To stop work in time, use [`Leadership::ended`]:
    /// callbacks may run late.
    pub fn on_lost<R: CallbackOutput<How>, How>(
        self,
        f: impl Fn(Lost) -> R + Send + Sync + 'static,
    ) -> Self {
        self.callbacks.lost.add(f);
        self
    }

    /// Calls `f` when a claim failed though the store answered. With a [`retry`](Self::retry) strategy, every poll that
    /// found another leader is such a claim. Without one a follower waits without a time limit, and such claims are
    /// rare.
    pub fn on_acquire_failed<R: CallbackOutput<How>, How>(
        self,
        f: impl Fn(AcquireFailed) -> R + Send + Sync + 'static,
    ) -> Self {
        self.callbacks.acquire_failed.add(f);
        self
    }

    /// Calls `f` when the state has changed.
    pub fn on_state_change<R: CallbackOutput<How>, How>(
        self,
        f: impl Fn(StateChange) -> R + Send + Sync + 'static,
    ) -> Self {
        self.callbacks.state_change.add(f);
        self
    }

    /// Calls `f` when a request to the store, a renewal or a callback failed. Such an error does not by itself end a
    /// term.
    pub fn on_error<R: CallbackOutput<How>, How>(
        self,
        f: impl Fn(Arc<Error>) -> R + Send + Sync + 'static,
    ) -> Self {
        self.callbacks.error.add(f);
        self
    }

    /// Calls `f` when the store has been away for up to two seconds, every 30 s after that, and when the store is back.
    /// Claims are retried meanwhile. Unlike the other callbacks it runs in the task of the election, so it must return
    /// soon.
    pub fn on_outage(mut self, f: impl Fn(&StoreOutage) + Send + Sync + 'static) -> Self {
        self.on_outage.push(f);
        self
    }

    /// Calls `f` when the run has ended, as the last callback of the run.
    pub fn on_stopped<R: CallbackOutput<How>, How>(
        self,
        f: impl Fn(StopReason) -> R + Send + Sync + 'static,
    ) -> Self {
        self.callbacks.stopped.add(f);
        self
    }

    /// Builds the election without starting it.
    ///
    /// # Errors
    ///
    /// `Invalid` if the key is bad or the settings conflict: the message names the values, and values that would work.
    pub fn build(self) -> Result<Election> {
        let key = self.key.map_err(|error| Error::from(error).at(&self.store))?;
        let invalid =
            |message: String| Error::new(ErrorKind::Invalid, message).on(&key).at(&self.store);
        let min_ttl = self.store.capabilities().min_ttl;
        let (ttl, health_interval) =
            intervals(self.ttl, self.health_interval, min_ttl).map_err(invalid)?;
        self.store.check_key(&key).map_err(|error| error.on(&key).at(&self.store))?;
        if self.config.reconnect_grace == Some(Duration::ZERO) {
            return Err(invalid(
                "a reconnect grace of 0 s has no effect: give it time, or leave it out".into(),
            ));
        }
        let polls = self.retry.is_some();
        let outage = OutageMonitor::new(self.clock.clone(), &key, &self.store, self.on_outage);
        let claims = Claims {
            outage,
            store: self.store,
            clock: self.clock,
            at_work: self.at_work,
            key,
            ttl,
            stop_grace: self.stop_grace,
            factor: renewals_per_ttl(ttl, health_interval),
            id: self.id,
            note: self.note,
            polls,
            fail_fast: self.fail_fast,
        };
        claims.check()?;
        let config = ElectionConfig { health_interval, ..self.config };
        let retry = self.retry.unwrap_or_else(|| Box::new(DEFAULT_ERROR_BACKOFF));
        Election::new(claims, config, retry, self.signal, self.callbacks)
    }

    /// Builds and starts the election.
    ///
    /// # Errors
    ///
    /// As [`build`](Self::build) and [`Election::start`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future shuts down an election that it has started.
    pub async fn start(self) -> Result<Election> {
        let election = self.build()?;
        election.start().await?;
        Ok(election)
    }
}

impl fmt::Debug for ElectionRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ElectionRequest")
            .field("key", &self.key)
            .field("store", &self.store)
            .field("ttl", &self.ttl)
            .field("health_interval", &self.health_interval)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

/// Ttl and health interval, each derived from the other if only one is given. A derived ttl is at least `min_ttl`.
fn intervals(
    ttl: Option<Duration>,
    health: Option<Duration>,
    min_ttl: Duration,
) -> Result<(Duration, Duration), String> {
    if health == Some(Duration::ZERO) {
        return Err("a health interval of 0 s would renew without a pause: give it time".to_owned());
    }
    if ttl == Some(Duration::ZERO) {
        return Err("a ttl of 0 s expires at once: give it time".to_owned());
    }
    match (ttl, health) {
        (Some(ttl), Some(health)) if health > ttl / 2 => Err(format!(
            "a health interval of {health:?} does not fit into a ttl of {ttl:?} twice: make it {:?} or less, or the ttl \
             {:?} or more",
            ttl / 2,
            health.saturating_mul(2),
        )),
        (Some(ttl), Some(health)) => Ok((ttl, health)),
        (Some(ttl), None) => Ok((ttl, ttl / DEFAULT_RENEWALS_PER_TTL)),
        (None, health) => {
            let health = health.unwrap_or(DEFAULT_HEALTH_INTERVAL);
            Ok((health.saturating_mul(DEFAULT_RENEWALS_PER_TTL).max(min_ttl), health))
        }
    }
}

/// Number of renewals per ttl that keeps two renewals at most the health interval apart.
fn renewals_per_ttl(ttl: Duration, health_interval: Duration) -> u32 {
    // If one of the two was divided from the other, the division rounded down by less than a nanosecond per renewal.
    // Without the subtraction, rounding up would then add a renewal that is not needed.
    let times = ttl
        .as_nanos()
        .saturating_sub(u128::from(DEFAULT_RENEWALS_PER_TTL))
        .div_ceil(health_interval.as_nanos().max(1));
    u32::try_from(times).unwrap_or(u32::MAX).max(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn secs(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    #[test]
    fn ttl_and_health_interval_follow_from_each_other() {
        assert_eq!(intervals(None, None, secs(1)), Ok((secs(15), secs(5))));
        assert_eq!(intervals(None, Some(secs(2)), secs(1)), Ok((secs(6), secs(2))));
        let quick = Duration::from_millis(250);
        assert_eq!(intervals(None, Some(quick), secs(1)), Ok((secs(1), quick)), "at the minimum");
        assert_eq!(intervals(Some(secs(6)), None, secs(1)), Ok((secs(6), secs(2))));
        assert_eq!(intervals(Some(secs(60)), Some(secs(30)), secs(1)), Ok((secs(60), secs(30))));
    }

    #[test]
    fn conflicting_election_intervals_are_named_in_the_error() {
        let error = intervals(Some(secs(9)), Some(secs(5)), secs(1)).unwrap_err();
        for part in ["5s", "9s", "4.5s", "10s"] {
            assert!(error.contains(part), "{part} in {error}");
        }
        assert!(
            intervals(None, Some(Duration::ZERO), secs(1))
                .unwrap_err()
                .contains("health interval of 0")
        );
        assert!(intervals(Some(Duration::ZERO), None, secs(1)).unwrap_err().contains("ttl of 0"));
    }

    #[test]
    fn renewals_are_no_further_apart_than_the_health_interval() {
        assert_eq!(renewals_per_ttl(secs(15), secs(5)), 3);
        assert_eq!(renewals_per_ttl(secs(10), secs(10) / 3), 3);
        assert_eq!(renewals_per_ttl(secs(10), secs(4)), 3);
        assert_eq!(renewals_per_ttl(secs(10), secs(5)), 2);
        assert_eq!(renewals_per_ttl(secs(60), secs(1)), 60);
    }
}
