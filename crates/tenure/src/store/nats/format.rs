//! tenure's own layout: the JSON record of a key, and the names of records and tickets.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tenure_core::Key;
use tenure_core::escape::Escape;
use tenure_core::record;
use tenure_core::table::{KeySpace, Mode};

use crate::store::Identity;

pub(super) type KeyRecord = record::CasRecord<Identity>;
pub(super) type RecordHolder = record::RecordHolder<Identity>;

/// Version of the format. A record with another version is refused.
const VERSION: u32 = 1;

/// A record in JSON. The fields are those of `KeyRecord`, and their names are part of the format.
#[derive(Serialize, Deserialize)]
struct RecordText {
    tenure: u32,
    epoch: u64,
    fence: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    served: u64,
    holders: Vec<HolderText>,
}

/// A holder in JSON: a `RecordHolder`, whose renewal count is named `beat`.
#[derive(Serialize, Deserialize)]
struct HolderText {
    claim: String,
    mode: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    slots: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    grant: Option<u64>,
    beat: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lease_ms: Option<u64>,
    #[serde(default)]
    held_ms: u64,
    #[serde(default)]
    id: String,
    #[serde(default)]
    host: String,
    #[serde(default)]
    pid: u32,
    #[serde(default)]
    note: String,
}

/// Serializes a record.
pub(super) fn write(record: &KeyRecord) -> Vec<u8> {
    let holders = record.holders.iter().map(|holder| {
        let (mode, slots) = match holder.mode {
            Mode::Exclusive => ("exclusive", None),
            Mode::Shared => ("shared", None),
            Mode::Slot { limit } => ("slot", Some(limit)),
        };
        HolderText {
            claim: format!("{:032x}", holder.claim),
            mode: mode.to_owned(),
            slots,
            grant: holder.grant_number,
            beat: holder.renewal_count,
            lease_ms: holder.lease.map(millis_up),
            held_ms: millis_up(holder.held_for),
            id: holder.by.id.clone(),
            host: holder.by.host.clone(),
            pid: holder.by.pid,
            note: holder.by.note.clone(),
        }
    });
    let KeyRecord { epoch, fence, served, .. } = *record;
    let text = RecordText { tenure: VERSION, epoch, fence, served, holders: holders.collect() };
    serde_json::to_vec(&text).expect("numbers and strings serialize to JSON")
}

/// Parses a record. The error says what is wrong with it.
pub(super) fn read(value: &[u8]) -> Result<KeyRecord, String> {
    let text: RecordText = serde_json::from_slice(value)
        .map_err(|_| "its value is not a record of tenure".to_owned())?;
    if text.tenure != VERSION {
        return Err(format!("it was written by a newer tenure (format {})", text.tenure));
    }
    let holders = text.holders.iter().map(parse_holder).collect::<Option<_>>();
    let holders = holders.ok_or_else(|| "its record has a holder of unknown mode".to_owned())?;
    let RecordText { epoch, fence, served, .. } = text;
    Ok(KeyRecord { epoch, fence, served, holders })
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde requires")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

fn parse_holder(text: &HolderText) -> Option<RecordHolder> {
    let mode = match (&*text.mode, text.slots) {
        ("exclusive", None) => Mode::Exclusive,
        ("shared", None) => Mode::Shared,
        ("slot", Some(limit)) => Mode::Slot { limit },
        _ => return None,
    };
    let HolderText { grant, beat, pid, .. } = *text;
    let [id, host, note] = [&text.id, &text.host, &text.note].map(String::clone);
    Some(RecordHolder {
        claim: u128::from_str_radix(&text.claim, 16).ok()?,
        mode,
        grant_number: grant,
        renewal_count: beat,
        lease: text.lease_ms.map(Duration::from_millis),
        held_for: Duration::from_millis(text.held_ms),
        by: Identity { id, host, pid, note },
    })
}

/// Milliseconds, rounded up: a lease is never written shorter than it is.
fn millis_up(span: Duration) -> u64 {
    u64::try_from(span.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// Name of a key's record in the bucket: `lock.` or `sem.`, then the escaped key.
pub(super) fn name(key: &Key, space: KeySpace) -> String {
    format!("{}.{}", prefix(space), escape(key.as_str()))
}

pub(super) fn prefix(space: KeySpace) -> &'static str {
    match space {
        KeySpace::Lock => "lock",
        KeySpace::Semaphore => "sem",
    }
}

/// Prefix of a key's tickets in the bucket.
pub(super) fn queue_prefix(key: &Key, space: KeySpace) -> String {
    format!("queue.{}.{}", prefix(space), escape(key.as_str()))
}

/// Serializes the ticket of a waiter.
pub(super) fn write_ticket(by: &Identity) -> Vec<u8> {
    let Identity { id, host, pid, note } = by;
    serde_json::json!({ "tenure": VERSION, "id": id, "host": host, "pid": pid, "note": note })
        .to_string()
        .into_bytes()
}

/// Parses the waiter's identity from a ticket; empty fields for what is missing.
pub(super) fn read_ticket(value: &[u8]) -> Identity {
    let text: serde_json::Value = serde_json::from_slice(value).unwrap_or_default();
    let field = |name: &str| text[name].as_str().unwrap_or_default().to_owned();
    let pid = text["pid"].as_u64().and_then(|pid| pid.try_into().ok()).unwrap_or_default();
    Identity { id: field("id"), host: field("host"), pid, note: field("note") }
}

/// Escapes a name into one token of a subject: letters, digits, `-`, `_` and `/` stay, and every other byte becomes `=`
/// and two hexadecimal digits.
pub(super) fn escape(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'/');
    Escape::EQUALS.encode(text.as_bytes(), is_plain)
}

/// Reverses [`escape`]; `None` for text that `escape` does not produce.
pub(super) fn unescape(text: &str) -> Option<Key> {
    let bytes = Escape::EQUALS.decode(text)?;
    let key = Key::new(std::str::from_utf8(&bytes).ok()?).ok()?;
    (escape(key.as_str()) == text).then_some(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> KeyRecord {
        let by = Identity { id: "web-1".into(), host: "h".into(), pid: 7, note: "n \"q\"".into() };
        let holder = |claim, mode, grant| RecordHolder {
            claim,
            mode,
            grant_number: grant,
            renewal_count: 3,
            lease: Some(Duration::from_millis(600)),
            held_for: Duration::from_secs(1),
            by: by.clone(),
        };
        let slot = Mode::Slot { limit: 2 };
        KeyRecord {
            epoch: u64::MAX,
            fence: 9,
            served: 4,
            holders: vec![holder(u128::MAX, slot, Some(9)), holder(1, slot, None)],
        }
    }

    #[test]
    fn a_record_is_read_back_from_its_text() {
        assert_eq!(read(&write(&record())), Ok(record()));
        assert_eq!(read(&write(&KeyRecord::default())), Ok(KeyRecord::default()));
    }

    #[test]
    fn a_lease_is_rounded_up() {
        let mut short = record();
        short.holders[0].lease = Some(Duration::from_nanos(600_000_001));
        let back = read(&write(&short)).unwrap();
        assert_eq!(back.holders[0].lease, Some(Duration::from_millis(601)));
    }

    #[test]
    fn invalid_records_are_refused_with_the_reason() {
        let newer = String::from_utf8(write(&record())).unwrap().replace(":1,", ":2,");
        let odd = String::from_utf8(write(&record())).unwrap().replace("slot\"", "sloth\"");
        for (text, part) in [
            ("", "not a record"),
            ("c4f2b0a2-9a0e-4b1e-8a0e-000000000000", "not a record"),
            (&*newer, "format 2"),
            (&*odd, "unknown mode"),
        ] {
            let why = read(text.as_bytes()).unwrap_err();
            assert!(why.contains(part), "{text}: {why}");
        }
    }

    #[test]
    fn names_are_mapped_reversibly() {
        for text in
            ["a", "a.b", "a b", "a=20b", "*", ">", "ключ", "../x", "=", "a//b", "\u{a0}x\u{200b}"]
        {
            let key = Key::new(text.trim()).unwrap();
            let escaped = escape(key.as_str());
            assert!(!escaped.contains(['.', ' ', '*', '>']), "{escaped}");
            assert_eq!(unescape(&escaped), Some(key));
        }
        for text in ["a=2", "a=zz", "a=61", "=2e", ""] {
            assert_eq!(unescape(text), None, "{text}: not what `escape` produces");
        }
    }
}
