//! Watching keys: one task for all watchers of a store, told by NOTIFY where that reaches us, and looking by itself.
//!
//! All watched keys are looked at in one statement. While notifications come, it looks about once a second and when a
//! lease ends; behind a pooler that hands out another session for every transaction none can come, and it looks often,
//! but never for more than an eighth of the time: a server that answers slowly is asked less often.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tenure_core::{Key, Random, Time};
use tokio::sync::{Notify, oneshot, watch};
use tokio_postgres::types::Type;

use super::shared::Shared;
use super::show::{Shown, seen};
use crate::store::Seen;
use crate::store::pg::clock::Reading;
use crate::store::pg::listen::Listening;
use crate::{ErrorKind, Result, identity};

/// What a claim has seen that was neither granted nor refused for somebody's sake: try again soon.
pub(super) const UNSETTLED: Seen = Seen(u128::MAX);
/// How soon.
const SOON: Duration = Duration::from_millis(40);
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

type Name = (i16, Key);

#[derive(Debug, Default)]
pub(super) struct Watch {
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
pub(super) async fn changed(
    shared: &Arc<Shared>,
    space: i16,
    key: &Key,
    since: Seen,
) -> Result<()> {
    if since == UNSETTLED {
        let clock = &shared.clock;
        clock.sleep_until(clock.now() + SOON).await;
        return Ok(());
    }
    let mut watcher = watch_key(shared, (space, key.clone()));
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

fn watch_key(shared: &Arc<Shared>, name: Name) -> Watcher<'_> {
    let watch = &shared.watch;
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

async fn run(shared: Arc<Shared>) {
    let seed = identity::random().map_or(1, u64::from_be_bytes);
    let mut random = Random::new(seed);
    let mut ear = Ear::Opening(listen(&shared));
    let mut usual = None;
    loop {
        let names: Vec<Name> = shared.watch.lock().keys.keys().cloned().collect();
        let pause = if names.is_empty() {
            LINGER
        } else {
            match look(&shared, &names).await {
                Ok((next_end, trip)) => {
                    // One slow answer says little.
                    let trip = usual.map_or(trip, |usual: Duration| (usual * 3 + trip) / 4);
                    usual = Some(trip);
                    ear.pause(&shared, trip, next_end, &mut random)
                }
                Err(error) if error.kind() == ErrorKind::Shutdown => return stop(&shared),
                Err(error) => {
                    tracing::debug!(name: "tenure.watch_failed", store = %shared, %error);
                    POLL.1
                }
            }
        };
        let end = shared.clock.now() + pause;
        tokio::select! {
            () = shared.clock.sleep_until(end) => {
                if names.is_empty() && shared.watch.lock().keys.is_empty() {
                    return stop(&shared);
                }
            }
            () = shared.watch.more.notified() => {}
            () = ear.hears(&shared) => {}
        }
    }
}

/// Ends the task, unless somebody came at the last moment: then another begins.
fn stop(shared: &Arc<Shared>) {
    let mut state = shared.watch.lock();
    state.running = false;
    if !state.keys.is_empty() && !shared.pool.is_closed() {
        state.running = true;
        tokio::spawn(run(Arc::clone(shared)));
    }
}

/// Looks at all keys once and tells whoever watches; when the next lease ends, and how long it took.
async fn look(shared: &Shared, names: &[Name]) -> Result<(Option<Duration>, Duration)> {
    let spaces: Vec<i16> = names.iter().map(|(space, _)| *space).collect();
    let keys: Vec<&str> = names.iter().map(|(_, key)| key.as_str()).collect();
    let by = shared.clock.now() + LOOK_LIMIT;
    let parameters = [
        (&spaces as &(dyn tokio_postgres::types::ToSql + Sync), Type::INT2_ARRAY),
        (&keys, Type::TEXT_ARRAY),
    ];
    let (rows, reading) = shared.ask(&shared.sql.inspect, &parameters, by).await?;
    let Reading { sent, replied, db } = reading;
    let (mut next_end, mut found) = (None::<i64>, HashMap::<Name, Vec<(i64, i64)>>::new());
    for shown in Shown::all(&rows) {
        next_end = Some(next_end.map_or(shown.until, |end| end.min(shown.until)));
        let holders = found.entry((shown.space, shown.key)).or_default();
        holders.push((shown.epoch, shown.number));
    }
    let state = shared.watch.lock();
    for name in names {
        let holders = found.remove(name).unwrap_or_default();
        if let Some(entry) = state.keys.get(name) {
            entry.seen.send_replace(Some(seen(holders)));
        }
    }
    drop(state);
    let left =
        next_end.map(|end| Duration::from_micros(end.saturating_sub(db).max(0).unsigned_abs()));
    Ok((left, replied.since(sent)))
}

/// Whether notifications reach us.
enum Ear {
    Opening(oneshot::Receiver<Option<Listening>>),
    Open(Box<Listening>),
    Deaf { until: Time },
}

impl Ear {
    /// Resolves when there is news of a watched key, or of the ear itself.
    async fn hears(&mut self, shared: &Arc<Shared>) {
        loop {
            match self {
                Self::Opening(opening) => {
                    *self = match opening.await {
                        Ok(Some(listening)) => Self::Open(Box::new(listening)),
                        _ => Self::Deaf { until: shared.clock.now() + LISTEN_AGAIN },
                    };
                    return;
                }
                Self::Open(listening) => match listening.news.recv().await {
                    Some((_, payload)) if shared.watch.watches(&payload) => return,
                    Some(_) => {}
                    // The connection broke: news may have been lost with it.
                    None => {
                        *self = Self::Opening(listen(shared));
                        return;
                    }
                },
                Self::Deaf { until } => {
                    shared.clock.sleep_until(*until).await;
                    *self = Self::Opening(listen(shared));
                }
            }
        }
    }

    fn pause(
        &self,
        shared: &Shared,
        trip: Duration,
        next_end: Option<Duration>,
        random: &mut Random,
    ) -> Duration {
        let poll = match (self, shared.poll) {
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
fn listen(shared: &Arc<Shared>) -> oneshot::Receiver<Option<Listening>> {
    let (tell, told) = oneshot::channel();
    let shared = Arc::clone(shared);
    tokio::spawn(async move {
        let listening = match open(&shared).await {
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
async fn open(shared: &Shared) -> Result<Option<Listening>> {
    let by = shared.clock.now() + LOOK_LIMIT;
    let settings = shared.pool.settings();
    let channel = shared.table.channel();
    let mut listening = Listening::begin(settings, &shared.clock, &channel, by).await?;
    let probe = Listening::probe()?;
    let mut lent = shared.lend(by).await?;
    lent.query(&shared.sql.notify, &[(&probe, Type::TEXT)], by).await?;
    drop(lent);
    Ok(listening.hears(&probe, &shared.clock).await.then_some(listening))
}
