//! Watching keys: one task for all watchers of a store, told by NOTIFY where that reaches us, and looking by itself.
//!
//! All watched keys are looked at in one statement. While notifications come, it looks about once a second and when a
//! lease ends; behind a pooler that hands out another session for every transaction none can come, and it looks often,
//! but never for more than an eighth of the time: a server that answers slowly is asked less often.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::{Key, Random, Time};
use tokio::sync::{Notify, oneshot, watch};

use super::listen::NotificationListener;
use super::settings::Settings;
use crate::store::Version;
use crate::{Clock, ErrorKind, Result, identity};

/// What is watched: a store, as its watching task needs it.
#[async_trait]
pub(crate) trait Watched: fmt::Display + Send + Sync + 'static {
    /// Who watches what.
    fn watch(&self) -> &WatchRegistry;

    fn clock(&self) -> &Clock;

    fn settings(&self) -> &Settings;

    /// Where changes are told.
    fn channel(&self) -> String;

    /// How often to look where no notification arrives, if the user says so.
    fn poll(&self) -> Option<Duration>;

    /// Whether the store was closed.
    fn is_closed(&self) -> bool;

    /// Tells `payload` on the channel, from another connection than the one that listens.
    async fn notify(&self, payload: &str, by: Time) -> Result<()>;

    /// Looks at all of these keys at once.
    async fn read_versions(&self, names: &[WatchKey], by: Time) -> Result<PolledVersions>;
}

/// What a look showed.
pub(crate) struct PolledVersions {
    /// What was seen of each key, in the order in which they were asked for.
    pub(crate) versions: Vec<Version>,
    /// When the next lease ends.
    pub(crate) next_end: Option<Duration>,
    /// How long it took.
    pub(crate) round_trip: Duration,
}

/// How often to look while notifications come.
const NOTIFIED_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// How often to look while none can.
const POLL_INTERVAL_RANGE: (Duration, Duration) =
    (Duration::from_millis(5), Duration::from_millis(500));
/// The share of the time that looking may take: one part in so many.
const POLL_TIME_DIVISOR: u32 = 8;
/// How long one look may take.
const POLL_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the task stays when nobody watches any more.
const IDLE_TASK_TIMEOUT: Duration = Duration::from_secs(10);
/// The pause before listening is tried again after it failed.
const LISTEN_RETRY_PAUSE: Duration = Duration::from_secs(30);

/// A space, as the store numbers it, and a key. A notification names it as `0:KEY`.
pub(crate) type WatchKey = (i16, Key);

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
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_watched(&self, payload: &str) -> bool {
        let name = payload
            .split_once(':')
            .and_then(|(space, key)| Some((space.parse().ok()?, Key::new(key).ok()?)));
        name.is_some_and(|name| self.lock().keys.contains_key(&name))
    }
}

/// One who watches a key.
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

/// Resolves when the key shows something else than `since`.
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
    let (seen, begin) = {
        let mut state = watch.lock();
        let entry = state
            .keys
            .entry(name.clone())
            .or_insert_with(|| WatchEntry { watchers: 0, version: watch::Sender::new(None) });
        entry.watchers += 1;
        let seen = entry.version.subscribe();
        (seen, !std::mem::replace(&mut state.running, true))
    };
    if begin {
        tokio::spawn(run(Arc::clone(shared)));
    } else {
        watch.added.notify_one();
    }
    KeyWatcher { watch, name, version: seen }
}

async fn run<W: Watched>(shared: Arc<W>) {
    let seed = identity::random().map_or(1, u64::from_be_bytes);
    let mut random = Random::new(seed);
    let mut ear = ListenState::Opening(listen(&shared));
    let mut usual = None;
    loop {
        let names: Vec<WatchKey> = shared.watch().lock().keys.keys().cloned().collect();
        let pause = if names.is_empty() {
            IDLE_TASK_TIMEOUT
        } else {
            match poll_keys(&*shared, &names).await {
                Ok((next_end, trip)) => {
                    // One slow answer says little.
                    let trip = usual.map_or(trip, |usual: Duration| (usual * 3 + trip) / 4);
                    usual = Some(trip);
                    ear.pause(&*shared, trip, next_end, &mut random)
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
            () = ear.next_change(&shared) => {}
        }
    }
}

/// Ends the task, unless somebody came at the last moment: then another begins.
fn stop<W: Watched>(shared: &Arc<W>) {
    let mut state = shared.watch().lock();
    state.running = false;
    if !state.keys.is_empty() && !shared.is_closed() {
        state.running = true;
        tokio::spawn(run(Arc::clone(shared)));
    }
}

/// Looks at all keys once and tells whoever watches; when the next lease ends, and how long it took.
async fn poll_keys<W: Watched>(
    shared: &W,
    names: &[WatchKey],
) -> Result<(Option<Duration>, Duration)> {
    let PolledVersions { versions: seen, next_end, round_trip: trip } =
        shared.read_versions(names, shared.clock().now() + POLL_TIMEOUT).await?;
    let state = shared.watch().lock();
    for (name, seen) in names.iter().zip(seen) {
        if let Some(entry) = state.keys.get(name) {
            entry.version.send_replace(Some(seen));
        }
    }
    Ok((next_end, trip))
}

/// Whether notifications reach us.
enum ListenState {
    Opening(oneshot::Receiver<Option<NotificationListener>>),
    Listening(Box<NotificationListener>),
    Unavailable { until: Time },
}

impl ListenState {
    /// Resolves when there is news of a watched key, or of the ear itself.
    async fn next_change<W: Watched>(&mut self, shared: &Arc<W>) {
        loop {
            match self {
                Self::Opening(opening) => {
                    *self = match opening.await {
                        Ok(Some(listening)) => Self::Listening(Box::new(listening)),
                        _ => Self::Unavailable { until: shared.clock().now() + LISTEN_RETRY_PAUSE },
                    };
                    return;
                }
                Self::Listening(listening) => match listening.notifications.recv().await {
                    Some((_, payload)) if shared.watch().is_watched(&payload) => return,
                    Some(_) => {}
                    // The connection broke: news may have been lost with it.
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
        // A lease that is over by a hair is over.
        next_end.map_or(spread, |end| spread.min(end + Duration::from_millis(1)))
    }
}

/// Begins to listen, in a task of its own: finding out that no news arrives takes a while.
fn listen<W: Watched>(shared: &Arc<W>) -> oneshot::Receiver<Option<NotificationListener>> {
    let (tell, told) = oneshot::channel();
    let shared = Arc::clone(shared);
    tokio::spawn(async move {
        let listening = match open(&*shared).await {
            Ok(listening) => listening,
            Err(error) => {
                tracing::debug!(name: "tenure.watch_failed", store = %shared, %error);
                None
            }
        };
        let _ = tell.send(listening);
    });
    told
}

/// A connection that listens, if what is told arrives at it.
async fn open<W: Watched>(shared: &W) -> Result<Option<NotificationListener>> {
    let by = shared.clock().now() + POLL_TIMEOUT;
    let (settings, clock) = (shared.settings(), shared.clock());
    let mut listening = NotificationListener::begin(settings, clock, &shared.channel(), by).await?;
    let probe = NotificationListener::probe()?;
    shared.notify(&probe, by).await?;
    Ok(listening.receives(&probe, clock).await.then_some(listening))
}
