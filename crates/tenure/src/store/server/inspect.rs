//! Parsing of the server's read-only views: holders, waiters, lists and history.

use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use tenure_core::{FencingToken, Key, hex};

use super::wire::WIRE_BLANK;
use crate::store::{HistoryEvent, HolderState, Identity, KeySpace, KeyState, Version, WaiterState};

/// Identity as it is sent with a claim, on one line.
pub(super) fn identity_line(by: &Identity) -> String {
    json!({ "id": by.id, "host": by.host, "pid": by.pid, "note": by.note }).to_string()
}

/// Parses the reply to `q`: the state of a key.
pub(super) fn parse_key(json: &[u8], space: KeySpace) -> Option<KeyState> {
    parse_key_state(&serde_json::from_slice(json).ok()?, space)
}

/// Parses a page of a list: its keys, without those that are invalid to us, and the start of the next page if there is
/// one.
pub(super) fn parse_page(json: &[u8], space: KeySpace) -> Option<(Vec<KeyState>, Option<Vec<u8>>)> {
    let page: Value = serde_json::from_slice(json).ok()?;
    let keys = page.get("keys")?.as_array()?;
    let keys = keys.iter().filter_map(|key| parse_key_state(key, space)).collect();
    let after = match page.get("after").and_then(Value::as_str) {
        Some(after) => Some(hex::decode(after)?),
        None => None,
    };
    Some((keys, after))
}

/// Parses the reply to `hist`: the history of a key, and whether the server keeps a history.
pub(super) fn parse_history(json: &[u8]) -> Option<(Vec<HistoryEvent>, bool)> {
    let reply: Value = serde_json::from_slice(json).ok()?;
    let events = reply.get("events")?.as_array()?.iter();
    Some((events.map(parse_event).collect::<Option<_>>()?, reply.get("kept")?.as_bool()?))
}

fn parse_event(value: &Value) -> Option<HistoryEvent> {
    let at = SystemTime::UNIX_EPOCH + Duration::from_millis(value.get("at")?.as_u64()?);
    let what = value.get("what")?.as_str()?.to_owned();
    let token = FencingToken::new(0, value.get("fence")?.as_str()?.parse().ok()?);
    let text = value.get("text")?.as_str()?;
    let named = matches!(&*what, "granted" | "waiting" | "gave_up");
    let by = named.then(|| parse_identity(text)).flatten();
    let reason = (!named && !text.is_empty())
        .then(|| text.chars().filter(|c| !c.is_control()).take(200).collect());
    Some(HistoryEvent { at, kind: what, token, by, reason })
}

fn parse_key_state(value: &Value, space: KeySpace) -> Option<KeyState> {
    let text = value.get("key")?.as_str()?;
    let key = Key::new(&text.replace(char::from(WIRE_BLANK), " ")).ok()?;
    let seen = value.get("seen")?.as_str()?.parse().ok()?;
    let holders =
        value.get("holders")?.as_array()?.iter().map(parse_holder).collect::<Option<_>>()?;
    let waiters = value.get("waiters")?.as_array()?;
    let waiters = waiters.iter().map(|waiter| WaiterState {
        by: parse_by(waiter),
        waited_for: millis(waiter, "waited_ms"),
    });
    Some(KeyState { key, space, holders, waiters: waiters.collect(), version: Version(seen) })
}

fn parse_holder(value: &Value) -> Option<HolderState> {
    let number = value.get("fence")?.as_str()?.parse().ok()?;
    Some(HolderState {
        by: parse_by(value),
        token: FencingToken::new(0, number),
        held_for: millis(value, "held_ms"),
        lease_left: millis(value, "left_ms"),
        revision: None,
    })
}

/// Identity as our own claims send it, or else as the server names a client of another kind.
fn parse_by(value: &Value) -> Option<Identity> {
    parse_identity(value.get("by")?.as_str()?)
}

fn parse_identity(text: &str) -> Option<Identity> {
    let text = Some(text).filter(|text| !text.is_empty())?;
    let fields: Value = serde_json::from_str(text).unwrap_or_default();
    let field = |name| fields.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
    let id = fields.get("id").or(fields.get("holder")).and_then(Value::as_str).unwrap_or(text);
    let pid = fields.get("pid").and_then(Value::as_u64).and_then(|pid| u32::try_from(pid).ok());
    // A client can send any text here, and the text is printed: control characters could forge terminal output.
    let clean = |text: &str| text.chars().filter(|c| !c.is_control()).take(200).collect();
    Some(Identity {
        id: clean(id),
        host: clean(&field("host")),
        pid: pid.unwrap_or(0),
        note: clean(&field("note")),
    })
}

fn millis(value: &Value, name: &str) -> Option<Duration> {
    value.get(name)?.as_u64().map(Duration::from_millis)
}

/// Parses the reply to `stats` for one key: the numbers of holders and waiters, without their names.
pub(super) fn parse_stats(
    json: &[u8],
    key: &Key,
    sent: &[u8],
    space: KeySpace,
) -> Option<KeyState> {
    let all: Value = serde_json::from_slice(json).ok()?;
    let list = match space {
        KeySpace::Lock => "locks",
        KeySpace::Semaphore => "semaphores",
    };
    let entries = all.get(list)?.as_array()?;
    let named = |entry: &&Value| {
        entry.get("key").and_then(Value::as_str).is_some_and(|name| name.as_bytes() == sent)
    };
    let entry = entries.iter().find(named);
    let count = |name| {
        let count = entry.and_then(|entry| entry.get(name)).and_then(Value::as_u64);
        usize::try_from(count.unwrap_or(0)).unwrap_or(usize::MAX).min(MAX_COUNTED)
    };
    let held =
        match space {
            KeySpace::Lock => usize::from(entry.is_some_and(|entry| {
                entry.get("owner_conn_id").is_some_and(|owner| !owner.is_null())
            })),
            KeySpace::Semaphore => count("holders"),
        };
    let left = entry.and_then(|entry| entry.get("lease_expires_in_s")?.as_f64());
    let left = left.and_then(|left| Duration::try_from_secs_f64(left.max(0.0)).ok());
    let holder = HolderState {
        by: None,
        token: FencingToken::NONE,
        held_for: None,
        lease_left: left,
        revision: None,
    };
    let waiter = WaiterState { by: None, waited_for: None };
    let waiting = count("waiters");
    let seen = Version((held as u128) << 64 | waiting as u128);
    let (holders, waiters) = (vec![holder; held], vec![waiter; waiting]);
    Some(KeyState { key: key.clone(), space, holders, waiters, version: seen })
}

/// Maximum number of holders, and of waiters, that are counted.
const MAX_COUNTED: usize = 10_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_survives_its_text() {
        let by =
            Identity { id: "a \"b\"\\ é".into(), host: "h".into(), pid: 7, note: "x".repeat(200) };
        let reply = json!({ "by": identity_line(&by) });
        assert_eq!(parse_by(&reply), Some(by));
    }

    #[test]
    fn clients_of_other_kinds_are_shown_as_the_server_knows_them() {
        let id = |by: &str| parse_by(&json!({ "by": by })).map(|by| by.id);
        assert_eq!(id("10.0.0.7"), Some("10.0.0.7".to_owned()));
        assert_eq!(id(r#"{"holder":"web-1","pid":3}"#), Some("web-1".to_owned()));
        assert_eq!(id("a\u{1b}[31m"), Some("a[31m".to_owned()));
        assert_eq!(id(""), None);
    }

    #[test]
    fn start_of_the_next_page_need_not_be_utf8() {
        let (keys, after) = parse_page(br#"{"keys":[],"after":"61ff"}"#, KeySpace::Lock).unwrap();
        assert_eq!((keys.len(), after), (0, Some(vec![0x61, 0xff])));
        assert_eq!(parse_page(br#"{"keys":[],"after":"6"}"#, KeySpace::Lock), None);
    }
}
