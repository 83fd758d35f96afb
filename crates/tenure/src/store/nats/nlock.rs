//! nlock's layout: the value is the owner's id, a UUID as text, and the bucket's ttl removes it.
//!
//! tenure's additions (identity of the holder, number of the grant) are in a header that nlock does not read. The bytes
//! of the value are exactly nlock's.

use std::time::Duration;

use tenure_core::Key;
use tenure_core::table::Mode;

use super::api::KeyWrite;
use super::format::{self, KeyRecord, RecordHolder};
use crate::store::Identity;

/// Write of a record: a deletion if the record has no holder.
pub(super) fn write(record: &KeyRecord) -> KeyWrite {
    let Some(holder) = record.holders.first() else {
        return KeyWrite { operation: Some("DEL"), ..KeyWrite::default() };
    };
    let json = escape_non_ascii(&String::from_utf8_lossy(&format::write(record)));
    KeyWrite {
        operation: None,
        record_header: Some(json),
        value: format_uuid(holder.claim).into_bytes(),
    }
}

/// Parses a value written by tenure or by nlock. The error says what is wrong with it.
pub(super) fn read(
    value: &[u8],
    record_header: Option<&str>,
    sequence: u64,
    ttl: Duration,
) -> Result<KeyRecord, String> {
    if value.is_empty() {
        return Ok(KeyRecord::default());
    }
    let claim = std::str::from_utf8(value).ok().and_then(parse_uuid);
    let claim = claim.ok_or_else(|| "its value is not an owner id of nlock".to_owned())?;
    let ours = record_header.and_then(|json| format::read(json.as_bytes()).ok());
    // A header that names another owner is stale: a participant copied it along with its own value.
    if let Some(mut record) = ours.filter(|record| record.holder(claim).is_some()) {
        for holder in &mut record.holders {
            holder.lease = Some(ttl);
        }
        return Ok(record);
    }
    let holder = RecordHolder {
        claim,
        mode: Mode::Exclusive,
        grant_number: None,
        // nlock counts no renewals: each of its writes is one.
        renewal_count: sequence,
        lease: Some(ttl),
        held_for: Duration::ZERO,
        by: Identity { id: format_uuid(claim), ..Identity::default() },
    };
    Ok(KeyRecord { holders: vec![holder], ..KeyRecord::default() })
}

/// Name of a key, as nlock would choose it.
///
/// Keys that nlock's library refuses, and keys that look like an escaped name, are escaped. Locks on these keys are
/// shared with clients of tenure only.
pub(super) fn name(key: &Key) -> String {
    let text = key.as_str();
    if is_plain(text) { text.to_owned() } else { format!("{ESCAPED}{}", format::escape(text)) }
}

/// Key of a name.
pub(super) fn key(name: &str) -> Option<Key> {
    match name.strip_prefix(ESCAPED) {
        Some(escaped) => format::unescape(escaped),
        None => Key::new(name).ok(),
    }
}

/// Prefix of escaped names.
const ESCAPED: &str = "=";

/// True if a key is a name that nlock's library accepts, and does not look like an escaped name.
fn is_plain(text: &str) -> bool {
    let allowed =
        |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'/' | b'_' | b'=' | b'.');
    text.bytes().all(allowed)
        && !text.starts_with(ESCAPED)
        && text.split('.').all(|token| !token.is_empty())
}

/// Formats a claim's id as an owner id of nlock.
fn format_uuid(claim: u128) -> String {
    let hex = format!("{claim:032x}");
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

fn parse_uuid(text: &str) -> Option<u128> {
    let well_formed =
        text.len() == 36 && [8, 13, 18, 23].iter().all(|at| text.as_bytes()[*at] == b'-');
    well_formed.then(|| u128::from_str_radix(&text.replace('-', ""), 16).ok()).flatten()
}

/// Escapes the characters of a JSON text that are not ASCII: a header is only safe with ASCII.
fn escape_non_ascii(json: &str) -> String {
    use std::fmt::Write as _;
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        if c.is_ascii() {
            text.push(c);
        } else {
            let mut units = [0; 2];
            for unit in c.encode_utf16(&mut units) {
                let _ = write!(text, "\\u{unit:04x}");
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(30);
    const OWNER: &str = "0b54ac6e-9d4d-4f3e-8f0e-2f6d0b8f0c11";

    #[test]
    fn the_owner_of_another_participant_is_a_holder() {
        let record = read(OWNER.as_bytes(), None, 5, TTL).unwrap();
        let [holder] = &record.holders[..] else { panic!("{record:?}") };
        assert_eq!((&*holder.by.id, holder.grant_number), (OWNER, None));
        assert_eq!(format_uuid(holder.claim), OWNER);
        assert!(read(b"", None, 5, TTL).unwrap().holders.is_empty());
        assert!(read(b"hello", None, 5, TTL).is_err());
    }

    #[test]
    fn written_values_are_owner_ids_to_nlock_and_records_to_tenure() {
        let mut record = read(OWNER.as_bytes(), None, 5, TTL).unwrap();
        record.holders[0].grant_number = Some(17);
        record.holders[0].by.note = "día 🦀".to_owned();
        let KeyWrite { operation, record_header, value } = write(&record);
        assert_eq!((operation, &*value), (None, OWNER.as_bytes()));
        let json = record_header.unwrap();
        assert!(json.is_ascii(), "{json}");
        assert_eq!(read(&value, Some(&json), 5, TTL), Ok(record.clone()));
        // A header beside another owner's id is ignored.
        let other = OWNER.replace('0', "1");
        assert_eq!(
            read(other.as_bytes(), Some(&json), 5, TTL).unwrap().holders[0].grant_number,
            None
        );
        record.holders.clear();
        let free = write(&record);
        assert_eq!((free.operation, free.value.len()), (Some("DEL"), 0));
    }

    #[test]
    fn names_that_nlock_can_use_stay_and_others_are_mapped_reversibly() {
        for text in ["a", "reports/nightly", "a.b", "a=20b", "x="] {
            assert_eq!(name(&Key::new(text).unwrap()), text);
        }
        for text in ["a b", ".a", "a.", "a..b", "=61", "*", "ключ", "a>"] {
            let key = Key::new(text).unwrap();
            assert_ne!(name(&key), text);
            assert_eq!(super::key(&name(&key)), Some(key));
        }
    }
}
