//! Read-only views: the holders and waiters of a key, their changes, and lists of keys.

use std::collections::BTreeSet;
use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher};
use std::sync::Arc;
use std::time::Duration;

use tenure_core::{FencingToken, Key};

use super::format::{MAX_LINES, QueueLine};
use super::layout::MAX_FILES_READ;
use super::liveness;
use super::names::key_of_file;
use super::notification::{FileEvents, MAX_WATCHED, POLL_INTERVAL, Wake};
use super::open_files::{LOCK_LIMIT, OpenFiles};
use super::queue_file::key_in;
use super::system::names_in;
use crate::Result;
use crate::store::{HolderState, KeySpace, KeyState, Version, WaiterState};

/// Largest number of holders and waiters that are shown per key.
const MAX_SHOWN: usize = 1_000;
/// Largest number of keys that one call lists.
const MAX_LISTED: usize = 1_000;

/// Holders and waiters of a key. Removes the lines of dead ones.
pub(super) async fn inspect(files: &OpenFiles, key: &Key, space: KeySpace) -> Result<KeyState> {
    read_state(files, key, space).await.map_err(|error| error.on(key).at(files))
}

async fn read_state(files: &OpenFiles, key: &Key, space: KeySpace) -> Result<KeyState> {
    let mut state = KeyState {
        key: key.clone(),
        space,
        holders: vec![],
        waiters: vec![],
        version: version_of(&[]),
    };
    if !files.has_queue(key, space) {
        return Ok(state);
    }
    let now = files.now();
    let shown = files.with_locked_key(key, space, |queue| {
        let mut shown = Vec::new();
        for line in queue.lines().to_vec() {
            if shown.len() < MAX_SHOWN {
                if liveness::is_alive(&files.folder, line.owner) {
                    shown.push((line, liveness::identity_of(&files.folder, line.owner)));
                } else {
                    queue.remove(line)?;
                }
            }
        }
        Ok((shown, version_of(queue.lines())))
    });
    let (shown, version) = shown.await?;
    state.version = version;
    for (line, by) in shown {
        let since = Some(Duration::from_nanos(now.saturating_sub(line.since)));
        if line.token == 0 {
            state.waiters.push(WaiterState { by, waited_for: since });
        } else {
            let token = FencingToken::new(0, line.token);
            let holder =
                HolderState { by, token, held_for: since, lease_left: None, revision: None };
            state.holders.push(holder);
        }
    }
    state.holders.sort_by_key(|holder| holder.token);
    Ok(state)
}

/// Waits until the holders and waiters of a key differ from those of a version.
pub(super) async fn changed(
    files: &OpenFiles,
    key: &Key,
    space: KeySpace,
    since: Version,
) -> Result<()> {
    let OpenFiles { folder, hub, clock, .. } = files;
    let wake = Arc::<Wake>::default();
    loop {
        let read = hub.ensure_reader();
        let queue = files.queue(key, space)?;
        // Watched before it is read: a change in between wakes us.
        let mut watches = vec![hub.watch(queue.path(), FileEvents::ChangedOrWritten, &wake)];
        let lines =
            files.with_locked(&queue, LOCK_LIMIT, |queue| Ok(queue.lines().to_vec())).await?;
        for line in lines.iter().flatten().take(MAX_WATCHED) {
            let path = folder.liveness_file(line.owner);
            watches.push(hub.watch(&path, FileEvents::Changed, &wake));
        }
        if inspect(files, key, space).await?.version != since {
            return Ok(());
        }
        if read && watches.iter().all(Option::is_some) && !wake.take_closed() {
            wake.notified().await;
        } else {
            clock.sleep_until(clock.now() + POLL_INTERVAL).await;
        }
    }
}

/// Keys with holders or waiters, in order of their names.
pub(super) async fn list(
    files: &OpenFiles,
    space: KeySpace,
    prefix: &str,
    after: Option<&str>,
) -> Result<Vec<KeyState>> {
    let folder = files.folder.queues(space);
    let mut keys = BTreeSet::new();
    for name in names_in(&folder, MAX_FILES_READ).map_err(|error| error.at(files))? {
        let long = || key_in(&folder.join(std::str::from_utf8(&name).ok()?), space);
        let key = key_of_file(&name).or_else(long);
        keys.extend(key.filter(|key| {
            key.as_str().starts_with(prefix) && after.is_none_or(|after| key.as_str() > after)
        }));
    }
    let mut listed = Vec::new();
    for key in keys {
        let state = inspect(files, &key, space).await?;
        if !state.holders.is_empty() || !state.waiters.is_empty() {
            listed.push(state);
        }
        if listed.len() == MAX_LISTED {
            break;
        }
    }
    Ok(listed)
}

/// Version of the holders and waiters.
pub(super) fn version_of(lines: &[QueueLine]) -> Version {
    let lines: Vec<_> = lines.iter().take(MAX_LINES).map(|line| (line.seq, line.token)).collect();
    // Versions are compared within this process only: any hasher without a random seed will do.
    Version(BuildHasherDefault::<DefaultHasher>::default().hash_one(lines).into())
}
