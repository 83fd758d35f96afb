//! Keys on the status page.

use serde_json::{Value, json};
use tenure_core::table::KeySpace;

use super::site::Site;
use crate::clock;
use crate::engine::{HistoryEvent, HistoryEventKind, KeyRow};
use crate::units::millis;

/// Table slots visited per query of the engine. Between two queries the engine serves its clients.
const SLOTS_PER_SLICE: usize = 256;
/// Maximum number of keys shown.
const MAX_ROWS: usize = 200;

/// Keys in use that match `filter`; `None` if the engine does not respond.
pub(super) async fn rows(site: &Site, filter: &str) -> Option<Value> {
    let filter = filter.to_lowercase();
    let (mut shown, mut keys): (Vec<KeyRow>, usize) = (Vec::new(), 0);
    let mut from = Some(0);
    while let Some(at) = from {
        let (rows, next) =
            site.query_engine(move |engine, now| engine.key_rows(at, SLOTS_PER_SLICE, now)).await?;
        let matching = rows.into_iter().filter(|row| filter.is_empty() || matches(row, &filter));
        let before = shown.len();
        shown.extend(matching);
        keys += shown.len() - before;
        if shown.len() > 2 * MAX_ROWS {
            keep_most_relevant(&mut shown);
        }
        from = next;
    }
    keep_most_relevant(&mut shown);
    let rows: Vec<Value> = shown.iter().map(row_json).collect();
    Some(json!({ "keys": keys, "rows": rows }))
}

fn matches(row: &KeyRow, filter: &str) -> bool {
    let holder = row.holder.as_ref().map_or("", |holder| &holder.by);
    String::from_utf8_lossy(&row.key).to_lowercase().contains(filter)
        || holder.to_lowercase().contains(filter)
}

/// Sorts by relevance and truncates to [`MAX_ROWS`]: late renewals first, then by number of waiters, then by age of the
/// hold.
fn keep_most_relevant(rows: &mut Vec<KeyRow>) {
    rows.sort_by_cached_key(|row| {
        let held = row.holder.as_ref().map(|holder| holder.held_for);
        (std::cmp::Reverse((is_late(row), row.waiting, held)), row.key.clone(), row.space as u8)
    });
    rows.truncate(MAX_ROWS);
}

/// True if a renewal is overdue. Clients renew with at least half of the lease left, so a holder with less than a third
/// may be in trouble.
fn is_late(row: &KeyRow) -> bool {
    row.holder.as_ref().is_some_and(|holder| !holder.detached && holder.left < holder.lease / 3)
}

fn row_json(row: &KeyRow) -> Value {
    let holder = row.holder.as_ref().map(|holder| {
        json!({
            "by": identity_json(&holder.by),
            "token": holder.number.to_string(),
            "held_ms": millis(holder.held_for),
            "lease_ms": millis(holder.lease),
            "left_ms": millis(holder.left),
        })
    });
    json!({
        "name": String::from_utf8_lossy(&row.key),
        "kind": if row.space == KeySpace::Lock { "lock" } else { "semaphore" },
        "held": row.held,
        "limit": row.limit,
        "waiting": row.waiting,
        "oldest_ms": row.oldest_wait.map(millis),
        "late": is_late(row),
        "holder": holder,
    })
}

/// One key with its history; `None` if the engine does not respond.
pub(super) async fn key(site: &Site, space: KeySpace, name: Vec<u8>) -> Option<Value> {
    let (view, events, kept) = site
        .query_engine(move |engine, now| {
            let (view, events) = engine.key_details(space, &name, now);
            (view, events, engine.metrics(now).keeps_history)
        })
        .await?;
    let mut view: Value = serde_json::from_str(&view).unwrap_or_default();
    for list in ["holders", "waiters"] {
        for member in view[list].as_array_mut().into_iter().flatten() {
            member["by"] = identity_json(member["by"].as_str().unwrap_or_default());
        }
    }
    let events: Vec<Value> = events.iter().map(event_json).collect();
    let now = clock::wall_micros() / 1_000;
    Some(json!({ "view": view, "events": events, "remembers": kept, "now": now }))
}

fn event_json(event: &HistoryEvent) -> Value {
    let HistoryEvent { at, kind, number, text } = event;
    let has_identity = matches!(
        kind,
        HistoryEventKind::Granted | HistoryEventKind::Waiting | HistoryEventKind::GaveUp
    );
    json!({
        "at": at,
        "what": kind.name(),
        "fence": number.to_string(),
        "by": if has_identity { identity_json(text) } else { Value::Null },
        "text": if has_identity { "" } else { text },
    })
}

/// Identity of a holder or waiter: JSON from tenure's clients, plain text (usually an address) for other clients.
fn identity_json(text: &str) -> Value {
    let fields: Value = serde_json::from_str(text).unwrap_or_default();
    let id = fields["id"].as_str().or(fields["holder"].as_str()).unwrap_or(text);
    if id.is_empty() {
        return Value::Null;
    }
    let field = |name: &str| fields[name].as_str().unwrap_or_default();
    json!({ "id": id, "host": field("host"), "pid": fields["pid"].as_u64().unwrap_or(0), "note": field("note") })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::engine::RowHolder;

    fn held(name: &str, waiting: u32, left: u64, detached: bool) -> KeyRow {
        let (held_for, lease) = (Duration::from_secs(5), Duration::from_secs(30));
        let left = Duration::from_secs(left);
        let holder = RowHolder { by: "x".into(), number: 1, held_for, lease, left, detached };
        KeyRow {
            space: KeySpace::Lock,
            key: name.as_bytes().into(),
            held: 1,
            limit: None,
            waiting,
            oldest_wait: None,
            holder: Some(holder),
        }
    }

    #[test]
    fn late_and_contended_keys_are_listed_first() {
        let mut rows = vec![
            held("b", 0, 25, false),
            held("a", 0, 25, false),
            held("waited-for", 3, 25, false),
            held("late", 0, 5, false),
            held("left-behind", 0, 5, true),
        ];
        keep_most_relevant(&mut rows);
        let names: Vec<_> = rows.iter().map(|row| String::from_utf8_lossy(&row.key)).collect();
        assert_eq!(names, ["late", "waited-for", "a", "b", "left-behind"]);
    }

    #[test]
    fn identities_are_distinguished_from_addresses() {
        assert_eq!(identity_json(r#"{"id":"a","host":"h","pid":7,"note":"n"}"#)["pid"], 7);
        assert_eq!(identity_json("10.0.0.1")["id"], "10.0.0.1");
        assert_eq!(identity_json(""), Value::Null);
    }
}
