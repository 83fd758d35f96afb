//! Probes after all work, in a quiet world: every kind of waiter must be woken when its key becomes free.

use std::time::Duration;

use tenure::{Client, Clock, LockRequest};

use super::super::referee::ProductBreach;
use super::super::world;
use super::surroundings::{SLOTS, activity, breach, key_name};

/// Time within which a waiter is woken in a quiet world.
const WAKE_LIMIT: Duration = Duration::from_secs(1);
/// Interval at which the end of all work is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// A key's use: the holders that are in the way, and the waiter.
#[derive(Clone, Copy, Debug)]
enum Contest {
    /// An exclusive waiter behind an exclusive holder.
    Exclusive,
    /// A shared waiter behind an exclusive holder.
    Shared,
    /// An exclusive waiter behind a shared holder.
    BehindShared,
    /// A waiter for a slot of a full semaphore.
    Slot,
}

impl Contest {
    const ALL: [Self; 4] = [Self::Exclusive, Self::Shared, Self::BehindShared, Self::Slot];

    fn holders(self) -> u32 {
        if matches!(self, Self::Slot) { SLOTS } else { 1 }
    }

    fn holder(self, store: &Client, key: &str) -> LockRequest {
        match self {
            Self::Exclusive | Self::Shared => store.lock(key),
            Self::BehindShared => store.lock(key).shared(),
            Self::Slot => store.semaphore(key, SLOTS),
        }
    }

    fn waiter(self, store: &Client, key: &str) -> LockRequest {
        match self {
            Self::Exclusive | Self::BehindShared => store.lock(key),
            Self::Shared => store.lock(key).shared(),
            Self::Slot => store.semaphore(key, SLOTS),
        }
    }
}

/// Waits for the end of all work, then probes each key in each way.
pub(super) async fn probe(client: usize, store: &Client, clock: &Clock) {
    let all_done =
        || world::with(|world| world.processes.borrow().iter().all(|process| process.done.get()));
    while !all_done() {
        clock.sleep_until(clock.now() + POLL_INTERVAL).await;
    }
    let keys = world::with(|world| world.plan.keys);
    for key in (0..keys).map(key_name) {
        for contest in Contest::ALL {
            activity(client, 0, || format!("probes {key}: {contest:?}"));
            if let Err((kind, what)) = probe_key(store, clock, &key, contest).await {
                return breach(kind, format!("probe of {key}, {contest:?}: {what}"));
            }
        }
    }
    world::with(|world| world.finished.set(true));
}

/// Acquires a key, lets a second task wait for it, and releases it.
async fn probe_key(
    store: &Client,
    clock: &Clock,
    key: &str,
    contest: Contest,
) -> Result<(), (ProductBreach, String)> {
    let failed =
        |error: &dyn std::fmt::Display| (ProductBreach::UnexpectedError, error.to_string());
    let mut holders = Vec::new();
    for _ in 0..contest.holders() {
        let holder = contest.holder(store, key).acquire().await;
        holders.push(holder.map_err(|error| failed(&error))?);
    }
    let waiter = tokio::spawn(contest.waiter(store, key).acquire());
    clock.sleep_until(clock.now() + WAKE_LIMIT).await;
    if waiter.is_finished() {
        return Err((ProductBreach::Overlap, "the waiter did not wait".to_owned()));
    }
    let first = holders.remove(0);
    let released = clock.now();
    first.release().await.map_err(|error| failed(&error))?;
    let guard = waiter.await.map_err(|error| failed(&error))?.map_err(|error| failed(&error))?;
    let took = clock.now().since(released);
    if took > WAKE_LIMIT {
        return Err((ProductBreach::NotWoken, format!("it was free for {took:?}")));
    }
    holders.push(guard);
    for guard in holders {
        guard.release().await.map_err(|error| failed(&error))?;
    }
    Ok(())
}
