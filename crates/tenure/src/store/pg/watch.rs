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

use super::listen::Listening;
use super::settings::Settings;
use crate::store::Seen;
use crate::{Clock, ErrorKind, Result, identity};

/// What is watched: a store, as its watching task needs it.
#[async_trait]
pub(crate) trait Watched: fmt::Display + Send + Sync + 'static {
    /// Who watches what.
    fn watch(&self) -> &Watch;

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
    async fn look(&self, names: &[Name], by: Time) -> Result<Looked>;
}

/// What a look showed.
pub(crate) struct Looked {
    /// What was seen of each key, in the order in which they were asked for.
    pub(crate) seen: Vec<Seen>,
    /// When the next lease ends.
    pub(crate) next_end: Option<Duration>,
    /// How long it took.
    pub(crate) trip: Duration,
}

/// How often to look while notifications come.
const BACKSTOP: Duration = Duration::from_secs(1);
/// How often to look while none can.
const POLL: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(500));
/// The share of the time that looking may take: one part in so many.
const SHARE: u32 = 8;
/// How long one look may take.
const LOOK_LIMIT: Duration = Duration::from_secs(2);
/// How long the task stays when nobody watches any more.
const LINGER: Duration = Duration::from_secs(10);
/// The pause before listening is tried again after it failed.
const LISTEN_AGAIN: Duration = Duration::from_secs(30);

/// A space, as the store numbers it, and a key. A notification names it as `0:KEY`.
pub(crate) type Name = (i16, Key);

#[derive(Debug, Default)]
pub(crate) struct Watch {
    state: Mutex<State>,
    more: Notify,
}

#[derive(Debug, Default)]
struct State {
    keys: HashMap<Name, Entry>,
    running: bool,
}

#[derive(Debug)]
struct Entry {
    watchers: usize,
    seen: watch::Sender<Option<Seen>>,
}

impl Watch {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watches(&self, payload: &str) -> bool {
        let name = payload
            .split_once(':')
            .and_then(|(space, key)| Some((space.parse().ok()?, Key::new(key).ok()?)));
        name.is_some_and(|name| self.lock().keys.contains_key(&name))
    }
}

/// One who watches a key.
struct Watcher<'a> {
    watch: &'a Watch,
    name: Name,
    seen: watch::Receiver<Option<Seen>>,
}

impl Drop for Watcher<'_> {
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
pub(crate) async fn changed<W: Watched>(shared: &Arc<W>, name: Name, since: Seen) -> Result<()> {
    let mut watcher = watch_key(shared, name);
    loop {
        let now = *watcher.seen.borrow_and_update();
        if now.is_some_and(|now| now != since) {
            return Ok(());
        }
        if watcher.seen.changed().await.is_err() {
            return std::future::pending().await;
        }
    }
}

fn watch_key<W: Watched>(shared: &Arc<W>, name: Name) -> Watcher<'_> {
    let watch = shared.watch();
    let (seen, begin) = {
        let mut state = watch.lock();
        let entry = state
            .keys
            .entry(name.clone())
            .or_insert_with(|| Entry { watchers: 0, seen: watch::Sender::new(None) });
        entry.watchers += 1;
        let seen = entry.seen.subscribe();
        (seen, !std::mem::replace(&mut state.running, true))
    };
    if begin {
        tokio::spawn(run(Arc::clone(shared)));
    } else {
        watch.more.notify_one();
    }
    Watcher { watch, name, seen }
}

async fn run<W: Watched>(shared: Arc<W>) {
    let seed = identity::random().map_or(1, u64::from_be_bytes);
    let mut random = Random::new(seed);
    let mut ear = Ear::Opening(listen(&shared));
    let mut usual = None;
    loop {
        let names: Vec<Name> = shared.watch().lock().keys.keys().cloned().collect();
        let pause = if names.is_empty() {
            LINGER
        } else {
            match look(&*shared, &names).await {
                Ok((next_end, trip)) => {
                    // One slow answer says little.
                    let trip = usual.map_or(trip, |usual: Duration| (usual * 3 + trip) / 4);
                    usual = Some(trip);
                    ear.pause(&*shared, trip, next_end, &mut random)
                }
                Err(error) if error.kind() == ErrorKind::Shutdown => return stop(&shared),
                Err(error) => {
                    tracing::debug!(name: "tenure.watch_failed", store = %shared, %error);
                    POLL.1
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
            () = shared.watch().more.notified() => {}
            () = ear.hears(&shared) => {}
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
async fn look<W: Watched>(shared: &W, names: &[Name]) -> Result<(Option<Duration>, Duration)> {
    let Looked { seen, next_end, trip } =
        shared.look(names, shared.clock().now() + LOOK_LIMIT).await?;
    let state = shared.watch().lock();
    for (name, seen) in names.iter().zip(seen) {
        if let Some(entry) = state.keys.get(name) {
            entry.seen.send_replace(Some(seen));
        }
    }
    Ok((next_end, trip))
}

/// Whether notifications reach us.
enum Ear {
    Opening(oneshot::Receiver<Option<Listening>>),
    Open(Box<Listening>),
    Deaf { until: Time },
}

impl Ear {
    /// Resolves when there is news of a watched key, or of the ear itself.
    async fn hears<W: Watched>(&mut self, shared: &Arc<W>) {
        loop {
            match self {
                Self::Opening(opening) => {
                    *self = match opening.await {
                        Ok(Some(listening)) => Self::Open(Box::new(listening)),
                        _ => Self::Deaf { until: shared.clock().now() + LISTEN_AGAIN },
                    };
                    return;
                }
                Self::Open(listening) => match listening.news.recv().await {
                    Some((_, payload)) if shared.watch().watches(&payload) => return,
                    Some(_) => {}
                    // The connection broke: news may have been lost with it.
                    None => {
                        *self = Self::Opening(listen(shared));
                        return;
                    }
                },
                Self::Deaf { until } => {
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
            (Self::Open(_), _) => BACKSTOP,
            (_, Some(poll)) => poll,
            (_, None) => (trip * SHARE).clamp(POLL.0, POLL.1),
        };
        let spread = poll.mul_f64(0.75 + random.unit() / 2.0);
        // A lease that is over by a hair is over.
        next_end.map_or(spread, |end| spread.min(end + Duration::from_millis(1)))
    }
}

/// Begins to listen, in a task of its own: finding out that no news arrives takes a while.
fn listen<W: Watched>(shared: &Arc<W>) -> oneshot::Receiver<Option<Listening>> {
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
async fn open<W: Watched>(shared: &W) -> Result<Option<Listening>> {
    let by = shared.clock().now() + LOOK_LIMIT;
    let (settings, clock) = (shared.settings(), shared.clock());
    let mut listening = Listening::begin(settings, clock, &shared.channel(), by).await?;
    let probe = Listening::probe()?;
    shared.notify(&probe, by).await?;
    Ok(listening.hears(&probe, clock).await.then_some(listening))
}
