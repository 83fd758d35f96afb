//! Read-only views: the record of a key, its holders and waiters, and lists.

use std::time::Duration;

use tenure_core::{FencingToken, Key};

use super::api::REQUEST_TIMEOUT;
use super::inner::NatsInner;
use super::keys::{self, KnownKey};
use super::layout::BucketLayout;
use super::{consumer, format, queue};
use crate::Result;
use crate::store::{HolderState, KeySpace, KeyState};

/// Largest number of keys that one call lists.
const MAX_LISTED_KEYS: usize = 1_000;

/// State of a key.
pub(super) async fn inspect(inner: &NatsInner, key: &Key, space: KeySpace) -> Result<KeyState> {
    let known =
        if inner.has_space(space) { read(inner, key, space).await? } else { KnownKey::default() };
    let mut state = key_state(inner, key.clone(), space, &known);
    if inner.layout == BucketLayout::Native {
        state.waiters = queue::waiters(inner, key, space, &known).await?;
    }
    Ok(state)
}

/// Record of a key, read from the leader.
pub(super) async fn read(inner: &NatsInner, key: &Key, space: KeySpace) -> Result<KnownKey> {
    let subject = inner.subject(key, space);
    inner.read(&subject, inner.api.deadline_after(REQUEST_TIMEOUT)).await
}

/// Keys that have holders, in order.
pub(super) async fn list(
    inner: &NatsInner,
    space: KeySpace,
    prefix: &str,
    after: Option<&str>,
) -> Result<Vec<KeyState>> {
    if !inner.has_space(space) {
        return Ok(Vec::new());
    }
    let root = inner.root();
    let filter = match inner.layout {
        BucketLayout::Native => format!("{root}{}.>", format::prefix(space)),
        BucketLayout::Nlock { .. } => format!("{root}>"),
    };
    let connection = inner.api.connections();
    let messages = consumer::snapshot(&inner.api, &inner.stream, &filter).await?;
    let mut states: Vec<_> = messages
        .iter()
        .filter_map(|message| {
            let key = inner.layout.key(message.subject.strip_prefix(&root)?, space)?;
            let listed =
                key.as_str().starts_with(prefix) && after.is_none_or(|after| key.as_str() > after);
            listed.then_some((key, message))
        })
        .filter_map(|(key, message)| {
            inner.note_message(message, connection);
            let known = inner.keys.known(&message.subject)?;
            Some(key_state(inner, key, space, &known))
        })
        .filter(|state| !state.holders.is_empty())
        .collect();
    states.sort_by(|a, b| a.key.cmp(&b.key));
    states.truncate(MAX_LISTED_KEYS);
    Ok(states)
}

/// State of a key as `inspect` and `list` report it.
fn key_state(inner: &NatsInner, key: Key, space: KeySpace, known: &KnownKey) -> KeyState {
    let now = inner.now();
    let lineage = *inner.lineage();
    let holders = known.holders(now).map(|holder| {
        let number = holder.number(known.sequence);
        let age = known.timestamp.map(|time| lineage.server_time(now).saturating_sub(time));
        let margin = holder.lease.map(tenure_core::lease::margin).unwrap_or_default();
        let end = known.observations.takeover_at(holder.claim) - margin;
        HolderState {
            by: Some(holder.by.clone()),
            token: FencingToken::new(lineage.epoch(), number),
            held_for: age.map(|age| holder.held_for + Duration::from_nanos(age)),
            lease_left: holder.lease.map(|_| end.since(now)),
            revision: Some(known.sequence),
        }
    });
    let holders = holders.collect();
    KeyState { key, space, holders, waiters: Vec::new(), version: keys::version_of(known, now) }
}
