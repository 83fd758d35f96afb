//! How a participant of an election is to behave.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tenure_core::election::ElectionConfig;
use tenure_core::retry::{ExponentialBackoff, Retry};
use tenure_core::{Key, KeyError};
use tokio::sync::watch;

use super::callbacks::{CallbackOutput, ElectionCallbacks};
use super::claims::Claims;
use super::{AcquireFailed, Election, Leadership, StateChange, StopReason};
use crate::guard::Lost;
use crate::store::Store;
use crate::{Clock, Error, ErrorKind, Result};

/// How to take part in an election. Made by [`Client::election`](crate::Client::election).
///
/// Settings that cannot be kept (a bad key, a health interval that does not fit into the ttl) are refused by
/// [`build`](Self::build) and [`start`](Self::start), with the values that conflict.
///
/// # Callbacks
///
/// Each `on_…` takes a closure that returns nothing or a future, and may be given several times: they are called one
/// after the other in the order of registration, each event's before the next event's, on a task of their own. So a
/// slow callback delays later callbacks and nothing else: neither renewals nor the end of a leadership wait for it. What
/// returns nothing may block. One that panics is reported to `on_error`, and the election goes on.
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
/// Callbacks that cannot keep up are told everything up to about a thousand events; past that, errors, failed claims and
/// changes of state are left out first, and then whole terms, so that `on_acquired` and its end always come in pairs.
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
    callbacks: ElectionCallbacks,
}

/// Resolves when the election is to shut down.
pub(super) type ShutdownSignal = Pin<Box<dyn Future<Output = ()> + Send>>;

/// How often a hold is proved where neither this nor the ttl is given.
const DEFAULT_HEALTH_INTERVAL: Duration = Duration::from_secs(5);
/// Proofs per ttl where only one of the two is given.
const DEFAULT_RENEWALS_PER_TTL: u32 = 3;
/// The pauses after errors where no strategy is given: quick at first, for an outage that is over at once.
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
            callbacks: ElectionCallbacks::default(),
        }
    }

    /// How long a leadership lasts unless renewed: three times the health interval by default. A leader that dies keeps
    /// others out for this long on stores that cannot notice its death.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Some(ttl);
        self
    }

    /// The time that the leader's work needs to stop: [`Leadership::ending`] resolves that long before the deadline.
    pub fn stop_grace(mut self, time: Duration) -> Self {
        self.stop_grace = time;
        self
    }

    /// The longest time between two proofs that the hold stands: a third of the ttl by default, and 5 s where that is
    /// not given either. At most half the ttl.
    pub fn health_interval(mut self, interval: Duration) -> Self {
        self.health_interval = Some(interval);
        self
    }

    /// Polls for leadership with these pauses instead of waiting for it, and uses the same pauses after errors and
    /// within the grace window. A strategy that gives up stops the election.
    ///
    /// Without one, a follower waits at the store as a lock does: in its queue, or for its push, or else with short
    /// pauses. That is quicker and costs the store less.
    pub fn retry(mut self, retry: impl Retry + 'static) -> Self {
        self.retry = Some(Box::new(retry));
        self
    }

    /// For how long a lost hold is sought again before `on_lost` is called; not at all by default.
    ///
    /// It damps callbacks and nothing else: [`Election::is_leader`] is false and [`Leadership::ended`] has resolved from
    /// the moment of the loss. Where the hold comes back in time and no other leader was seen, neither `on_lost` nor
    /// `on_acquired` is called, but the fencing token is a new one.
    pub fn reconnect_grace(mut self, grace: Duration) -> Self {
        self.config.reconnect_grace = Some(grace);
        self
    }

    /// Whether to take part again after a term, and after an error before the first; on by default. Without it the
    /// election stops there.
    pub fn auto_reacquire(mut self, on: bool) -> Self {
        self.config.auto_reacquire = on;
        self
    }

    /// How long to claim nothing after a step-down, so that another leads: 5 s by default. Where the others poll, give at
    /// least their longest pause; zero where it does not matter who leads next.
    pub fn cool_down(mut self, time: Duration) -> Self {
        self.config.cool_down = time;
        self
    }

    /// Who we are to others; `host:pid:nonce` by default. It should be unique.
    pub fn id(mut self, id: impl Into<String>) -> Self {
        self.id = Some(id.into());
        self
    }

    /// A text for others to read beside the leader's name.
    pub fn note(mut self, note: impl Into<String>) -> Self {
        self.note = Some(note.into());
        self
    }

    /// Shuts the election down when `signal` resolves, whatever it waits for then, and for good: it cannot be started
    /// again. For a `CancellationToken` that is `token.cancelled_owned()`.
    pub fn shutdown_on<F: Future + Send + 'static>(mut self, signal: F) -> Self {
        self.signal = Some(Box::pin(async move { drop(signal.await) }));
        self
    }

    /// Calls `f` when this participant leads.
    pub fn on_acquired<R: CallbackOutput<How>, How>(
        mut self,
        f: impl Fn(Leadership) -> R + Send + Sync + 'static,
    ) -> Self {
        self.callbacks.acquired.add(f);
        self
    }

    /// Calls `f` when this participant has given its leadership up.
    pub fn on_released<R: CallbackOutput<How>, How>(
        mut self,
        f: impl Fn() -> R + Send + Sync + 'static,
    ) -> Self {
        self.callbacks.released.add(move |()| f());
        self
    }

    /// Calls `f` when this participant's leadership has ended against its will. To stop work in time, use
    /// [`Leadership::ended`]: callbacks may come late.
    pub fn on_lost<R: CallbackOutput<How>, How>(
        mut self,
        f: impl Fn(Lost) -> R + Send + Sync + 'static,
    ) -> Self {
        self.callbacks.lost.add(f);
        self
    }

    /// Calls `f` when a claim came to nothing though the store answered. With a [`retry`](Self::retry) strategy that is
    /// every poll that found another leading; without one a follower waits without an end, and it is rare.
    pub fn on_acquire_failed<R: CallbackOutput<How>, How>(
        mut self,
        f: impl Fn(AcquireFailed) -> R + Send + Sync + 'static,
    ) -> Self {
        self.callbacks.acquire_failed.add(f);
        self
    }

    /// Calls `f` when the state has changed.
    pub fn on_state_change<R: CallbackOutput<How>, How>(
        mut self,
        f: impl Fn(StateChange) -> R + Send + Sync + 'static,
    ) -> Self {
        self.callbacks.state_change.add(f);
        self
    }

    /// Calls `f` when a request to the store, a renewal or a callback failed. By itself that ends nothing.
    pub fn on_error<R: CallbackOutput<How>, How>(
        mut self,
        f: impl Fn(Arc<Error>) -> R + Send + Sync + 'static,
    ) -> Self {
        self.callbacks.error.add(f);
        self
    }

    /// Calls `f` when the run is over, as the last of its callbacks.
    pub fn on_stopped<R: CallbackOutput<How>, How>(
        mut self,
        f: impl Fn(StopReason) -> R + Send + Sync + 'static,
    ) -> Self {
        self.callbacks.stopped.add(f);
        self
    }

    /// The election, not started yet.
    ///
    /// # Errors
    ///
    /// `Invalid` where the key is bad or the settings conflict: says which values, and what would do.
    pub fn build(self) -> Result<Election> {
        let key = self.key.map_err(|error| Error::from(error).at(&self.store))?;
        let invalid =
            |message: String| Error::new(ErrorKind::Invalid, message).on(&key).at(&self.store);
        let (ttl, health_interval) = intervals(self.ttl, self.health_interval).map_err(invalid)?;
        if self.config.reconnect_grace == Some(Duration::ZERO) {
            return Err(invalid(
                "a reconnect grace of 0 s saves nothing: give it time, or leave it out".into(),
            ));
        }
        let polls = self.retry.is_some();
        let claims = Claims {
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
        };
        claims.check()?;
        let config = ElectionConfig { health_interval, ..self.config };
        let retry = self.retry.unwrap_or_else(|| Box::new(DEFAULT_ERROR_BACKOFF));
        Election::new(claims, config, retry, self.signal, self.callbacks)
    }

    /// The election, started.
    ///
    /// # Errors
    ///
    /// As [`build`](Self::build) and [`Election::start`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future shuts down what was started.
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

/// The ttl and the health interval, each from the other where only one is given.
fn intervals(
    ttl: Option<Duration>,
    health: Option<Duration>,
) -> Result<(Duration, Duration), String> {
    if health == Some(Duration::ZERO) {
        return Err("a health interval of 0 s asks without an end: give it time".to_owned());
    }
    if ttl == Some(Duration::ZERO) {
        return Err("a ttl of 0 s is over at once: give it time".to_owned());
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
            Ok((health.saturating_mul(DEFAULT_RENEWALS_PER_TTL), health))
        }
    }
}

/// How many times per ttl to renew, so that no two renewals are further apart than the health interval.
fn renewals_per_ttl(ttl: Duration, health_interval: Duration) -> u32 {
    // Less than a nanosecond per renewal is lost where one of the two was divided from the other.
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
        assert_eq!(intervals(None, None), Ok((secs(15), secs(5))));
        assert_eq!(intervals(None, Some(secs(2))), Ok((secs(6), secs(2))));
        assert_eq!(intervals(Some(secs(6)), None), Ok((secs(6), secs(2))));
        assert_eq!(intervals(Some(secs(60)), Some(secs(30))), Ok((secs(60), secs(30))));
    }

    #[test]
    fn conflicting_election_intervals_are_named_in_the_error() {
        let error = intervals(Some(secs(9)), Some(secs(5))).unwrap_err();
        for part in ["5s", "9s", "4.5s", "10s"] {
            assert!(error.contains(part), "{part} in {error}");
        }
        assert!(
            intervals(None, Some(Duration::ZERO)).unwrap_err().contains("health interval of 0")
        );
        assert!(intervals(Some(Duration::ZERO), None).unwrap_err().contains("ttl of 0"));
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
