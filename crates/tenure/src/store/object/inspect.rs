//! Read-only views: the lock of a key, its holder and waiter, and lists.

use tenure_core::{FencingToken, Key};

use super::format;
use super::inner::{BELL, KnownLock, ObjectInner, REQUEST_TIMEOUT, holder_identity, version_of};
use crate::store::{HolderState, Identity, KeySpace, KeyState, Version, WaiterState};
use crate::{ErrorKind, Result};

/// Largest number of keys that one call lists.
const MAX_LISTED_KEYS: usize = 100;

/// The lock of a key.
pub(super) async fn read_lock(inner: &ObjectInner, key: &Key) -> Result<KnownLock> {
    let name = inner.name(key)?;
    inner.read_lock(&name, None, inner.until(REQUEST_TIMEOUT)).await
}

/// State of a key.
pub(super) async fn state(inner: &ObjectInner, key: &Key) -> Result<KeyState> {
    let known = read_lock(inner, key).await?;
    let name = inner.name(key)?;
    let rung = inner.read_bell(&name, inner.until(REQUEST_TIMEOUT)).await?;
    let record = known.sight.record.as_ref();
    // A bell of the present owner is left over from its own wait.
    let bell = rung.bell.filter(|bell| {
        rung.alive && record.is_none_or(|record| !record.is_owned_by(&bell.next_holder.id))
    });
    let bell = bell.as_ref().map(|bell| (&*bell.next_holder.id, &bell.by));
    Ok(key_state(inner, key.clone(), &known, bell))
}

/// Keys that are held.
pub(super) async fn list(
    inner: &ObjectInner,
    prefix: &str,
    after: Option<&str>,
) -> Result<Vec<KeyState>> {
    let mut states = Vec::new();
    let root = &inner.options.prefix;
    let full = format!("{root}{prefix}");
    let mut after = after.map(|after| format!("{root}{after}"));
    loop {
        let until = inner.until(REQUEST_TIMEOUT);
        let page = inner.bucket.list(&full, after.as_deref(), until).await;
        let page = page.map_err(|error| error.explain_read(&*inner.bucket))?;
        let Some(last) = page.last() else { return Ok(states) };
        after = Some(last.clone());
        for name in page.iter().filter(|name| !name.ends_with(BELL)) {
            let Some(key) = name.strip_prefix(root).and_then(|key| Key::new(key).ok()) else {
                continue;
            };
            match read_lock(inner, &key).await {
                Ok(known) => {
                    let state = key_state(inner, key, &known, None);
                    states.extend((!state.holders.is_empty()).then_some(state));
                }
                // Objects that are not locks may be in the bucket.
                Err(error) if error.kind() == ErrorKind::Misconfigured => {}
                Err(error) => return Err(error),
            }
            if states.len() >= MAX_LISTED_KEYS {
                return Ok(states);
            }
        }
        if !states.is_empty() {
            return Ok(states);
        }
    }
}

/// State of a key as `inspect` and `list` report it. `bell` is the waiter at the bell.
fn key_state(
    inner: &ObjectInner,
    key: Key,
    known: &KnownLock,
    bell: Option<(&str, &Identity)>,
) -> KeyState {
    let sight = &known.sight;
    let held = sight.is_held(&known.watch(true), inner.options.grain);
    let holder = sight.record.as_ref().filter(|_| held);
    let holders = holder.map(|record| HolderState {
        by: Some(holder_identity(record)),
        token: FencingToken::new(0, record.fence.unwrap_or_default()),
        held_for: None,
        lease_left: Some(match record.lease {
            Some(lease) => (sight.modified + lease).saturating_sub(sight.date).min(lease),
            None => record.expires.saturating_sub(sight.date),
        }),
        revision: None,
    });
    let named = sight.waiter().map(|waiter| {
        let id = format::owner_name(&waiter.id).to_owned();
        WaiterState { by: Some(Identity { id, ..Identity::default() }), waited_for: None }
    });
    let rings = bell.map(|(_, by)| WaiterState { by: Some(by.clone()), waited_for: None });
    let seen = match holders {
        None if named.is_none() && bell.is_none() => Version::default(),
        _ => version_of(sight, bell.map(|(id, _)| id)),
    };
    let waiters = named.into_iter().chain(rings).collect();
    KeyState {
        key,
        space: KeySpace::Lock,
        holders: holders.into_iter().collect(),
        waiters,
        version: seen,
    }
}
