//! Watches of keys: one task per store for all watchers, woken by NOTIFY where notifications arrive, and polling.
//!
//! One statement reads all watched keys. While notifications arrive, the task polls about once per second, and when a
//! lease ends. Behind a pooler that assigns a session per transaction no notification arrives, and the task polls
//! often. Polling never takes more than an eighth of the time: a server that answers slowly is polled less often.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::{Key, Random, Time};
use tokio::sync::{Notify, oneshot, watch};

use super::listen::NotificationListener;
use super::settings::Settings;
use crate::mutex::Mutex;
use crate::store::Version;
use crate::{Clock, ErrorKind, Result, identity};

/// A store, as its watching task needs it.
#[async_trait]
pub(crate) trait Watched: fmt::Display + Send + Sync + 'static {
    /// Watchers of the store's keys.
    fn watch(&self) -> &WatchRegistry;

    fn clock(&self) -> &Clock;

    fn settings(&self) -> &Settings;

    /// Notification channel for changes.
    fn channel(&self) -> String;

    /// Poll interval while no notification arrives, if the user set one.
    fn poll(&self) -> Option<Duration>;

    /// True if the store was closed.
    fn is_closed(&self) -> bool;

    /// Sends `payload` on the channel, from another connection than the listening one.
    async fn notify(&self, payload: &str, by: Time) -> Result<()>;

    /// Reads the versions of all of these keys in one request.
    async fn read_versions(&self, names: &[WatchKey], by: Time) -> Result<PolledVersions>;
}

/// Result of a poll.
pub(crate) struct PolledVersions {
    /// Version of each key, in the order of the request.
    pub(crate) versions: Vec<Version>,
    /// Time until the next lease ends.
    pub(crate) next_end: Option<Duration>,
    /// Duration of the request.
    pub(crate) round_trip: Duration,
}

/// Poll interval while notifications arrive.
const NOTIFIED_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Shortest and longest poll interval while no notification arrives.
const POLL_INTERVAL_RANGE: (Duration, Duration) =
    (Duration::from_millis(5), Duration::from_millis(500));
/// Polling may take at most one part in this many of the time.
const POLL_TIME_DIVISOR: u32 = 8;
/// Timeout of one poll.
const POLL_TIMEOUT: Duration = Duration::from_secs(2);
/// Time after which the task ends if no key is watched.
const IDLE_TASK_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause before `LISTEN` is retried after it failed.
const LISTEN_RETRY_PAUSE: Duration = Duration::from_secs(30);

/// A key space, as the store numbers it, and a key. The payload of a notification is `0:KEY`.
pub(crate) type WatchKey = (i16, Key);

/// Watched keys of a store.
#[derive(Debug, Default)]
pub(crate) struct WatchRegistry {
    state: Mutex<WatchRegistryState>,
    added: Notify,
}

#[derive(Debug, Default)]
struct WatchRegistryState {
    keys: HashMap<WatchKey, WatchEntry>,
    running: bool,
}

#[derive(Debug)]
struct WatchEntry {
    watchers: usize,
    version: watch::Sender<Option<Version>>,
}

impl WatchRegistry {
    fn lock(&self) -> MutexGuard<'_, WatchRegistryState> {
        self.state.lock()
    }

    fn is_watched(&self, payload: &str) -> bool {
        let name = payload
            .split_once(':')
            .and_then(|(space, key)| Some((space.parse().ok()?, Key::new(key).ok()?)));
        name.is_some_and(|name| self.lock().keys.contains_key(&name))
    }
}

/// A watcher of a key; dropping it ends the watch.
struct KeyWatcher<'a> {
    watch: &'a WatchRegistry,
    name: WatchKey,
    version: watch::Receiver<Option<Version>>,
}

impl Drop for KeyWatcher<'_> {
    fn drop(&mut self) {
        let mut state = self.watch.lock();
        if let Some(entry) = state.keys.get_mut(&self.name) {
            entry.watchers -= 1;
            if entry.watchers == 0 {
                state.keys.remove(&self.name);
            }
        }
    }
}

/// Resolves when the version of the key differs from `since`.
pub(crate) async fn changed<W: Watched>(
    shared: &Arc<W>,
    name: WatchKey,
    since: Version,
) -> Result<()> {
    let mut watcher = watch_key(shared, name);
    loop {
        let now = *watcher.version.borrow_and_update();
        if now.is_some_and(|now| now != since) {
            return Ok(());
        }
        if watcher.version.changed().await.is_err() {
            return std::future::pending().await;
        }
    }
}

fn watch_key<W: Watched>(shared: &Arc<W>, name: WatchKey) -> KeyWatcher<'_> {
    let watch = shared.watch();
    let (version, begin) = {
        let mut state = watch.lock();
        let entry = state
            .keys
            .entry(name.clone())
            .or_insert_with(|| WatchEntry { watchers: 0, version: watch::Sender::new(None) });
        entry.watchers += 1;
        let version = entry.version.subscribe();
        (version, !std::mem::replace(&mut state.running, true))
    };
    if begin {
        tokio::spawn(run(Arc::clone(shared)));
    } else {
        watch.added.notify_one();
    }
    KeyWatcher { watch, name, version }
}

async fn run<W: Watched>(shared: Arc<W>) {
    let seed = identity::random().map_or(1, u64::from_be_bytes);
    let mut random = Random::new(seed);
    let mut listen_state = ListenState::Opening(listen(&shared));
    let mut average = None;
    loop {
        let names: Vec<WatchKey> = shared.watch().lock().keys.keys().cloned().collect();
        let pause = if names.is_empty() {
            IDLE_TASK_TIMEOUT
        } else {
            match poll_keys(&*shared, &names).await {
                Ok((next_end, trip)) => {
                    // A moving average: one slow answer must not slow down the polling.
                    let trip = average.map_or(trip, |average: Duration| (average * 3 + trip) / 4);
                    average = Some(trip);
                    listen_state.pause(&*shared, trip, next_end, &mut random)
                }
                Err(error) if error.kind() == ErrorKind::Shutdown => return stop(&shared),
                Err(error) => {
                    tracing::debug!(name: "tenure.watch_failed", store = %shared, %error);
                    POLL_INTERVAL_RANGE.1
                }
            }
        };
        let end = shared.clock().now() + pause;
        tokio::select! {
            () = shared.clock().sleep_until(end) => {
                if names.is_empty() && shared.watch().lock().keys.is_empty() {
                    return stop(&shared);
                }
            }
            () = shared.watch().added.notified() => {}
            () = listen_state.next_change(&shared) => {}
        }
    }
}

/// Ends the task. If a watcher was added at the last moment, it saw the task as running and spawned none: then another
/// task is started here.
fn stop<W: Watched>(shared: &Arc<W>) {
    let mut state = shared.watch().lock();
    state.running = false;
    if !state.keys.is_empty() && !shared.is_closed() {
        state.running = true;
        tokio::spawn(run(Arc::clone(shared)));
    }
}

/// Reads all keys once and notifies their watchers. Returns the time until the next lease ends, and the duration.
async fn poll_keys<W: Watched>(
    shared: &W,
    names: &[WatchKey],
) -> Result<(Option<Duration>, Duration)> {
    let PolledVersions { versions, next_end, round_trip } =
        shared.read_versions(names, shared.clock().now() + POLL_TIMEOUT).await?;
    let state = shared.watch().lock();
    for (name, version) in names.iter().zip(versions) {
        if let Some(entry) = state.keys.get(name) {
            entry.version.send_replace(Some(version));
        }
    }
    Ok((next_end, round_trip))
}

/// State of the listening connection.
enum ListenState {
    Opening(oneshot::Receiver<Option<NotificationListener>>),
    Listening(Box<NotificationListener>),
    Unavailable { until: Time },
}

impl ListenState {
    /// Resolves when a watched key was notified, or when this state changed.
    async fn next_change<W: Watched>(&mut self, shared: &Arc<W>) {
        loop {
            match self {
                Self::Opening(opening) => {
                    *self = match opening.await {
                        Ok(Some(listener)) => Self::Listening(Box::new(listener)),
                        _ => Self::Unavailable { until: shared.clock().now() + LISTEN_RETRY_PAUSE },
                    };
                    return;
                }
                Self::Listening(listener) => match listener.notifications.recv().await {
                    Some((_, payload)) if shared.watch().is_watched(&payload) => return,
                    Some(_) => {}
                    // The connection broke, and notifications may be lost: poll now.
                    None => {
                        *self = Self::Opening(listen(shared));
                        return;
                    }
                },
                Self::Unavailable { until } => {
                    shared.clock().sleep_until(*until).await;
                    *self = Self::Opening(listen(shared));
                }
            }
        }
    }

    fn pause<W: Watched>(
        &self,
        shared: &W,
        trip: Duration,
        next_end: Option<Duration>,
        random: &mut Random,
    ) -> Duration {
        let poll = match (self, shared.poll()) {
            (Self::Listening(_), _) => NOTIFIED_POLL_INTERVAL,
            (_, Some(poll)) => poll,
            (_, None) => {
                (trip * POLL_TIME_DIVISOR).clamp(POLL_INTERVAL_RANGE.0, POLL_INTERVAL_RANGE.1)
            }
        };
        let spread = poll.mul_f64(0.75 + random.unit() / 2.0);
        // One millisecond after the end, so that the poll does not come just too early.
        next_end.map_or(spread, |end| spread.min(end + Duration::from_millis(1)))
    }
}

/// Starts to listen in a task of its own, because the check that notifications arrive takes up to a second.
fn listen<W: Watched>(shared: &Arc<W>) -> oneshot::Receiver<Option<NotificationListener>> {
    let (sender, receiver) = oneshot::channel();
    let shared = Arc::clone(shared);
    tokio::spawn(async move {
        let listener = match open(&*shared).await {
            Ok(listener) => listener,
            Err(error) => {
                tracing::debug!(name: "tenure.watch_failed", store = %shared, %error);
                None
            }
        };
        let _ = sender.send(listener);
    });
    receiver
}

/// Opens a connection that listens; `None` behind a pooler, or if a notification sent to its channel does not arrive.
async fn open<W: Watched>(shared: &W) -> Result<Option<NotificationListener>> {
    let by = shared.clock().now() + POLL_TIMEOUT;
    let (settings, clock) = (shared.settings(), shared.clock());
    let begun = NotificationListener::begin(settings, clock, &shared.channel(), by).await?;
    let Some(mut listener) = begun else { return Ok(None) };
    let probe = NotificationListener::probe()?;
    shared.notify(&probe, by).await?;
    Ok(listener.receives(&probe, clock).await.then_some(listener))
}
