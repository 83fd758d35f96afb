//! The record as JSON: the plain format that other programs read and write, and tenure's additional fields.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tenure_core::object::{self, NextHolder, ObjectWaiter};

use crate::store::Identity;

pub(super) type LockRecord = object::LockObject<RecordExtra>;
pub(super) type Sight = object::ObjectRead<RecordExtra>;

/// Fields of a record on which no decision depends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RecordExtra {
    /// Identity of the owner, for display.
    pub(super) info: Option<Identity>,
    /// Random text that makes each write unique: on some stores the same content has the same version.
    pub(super) nonce: String,
    /// Unknown fields, which are written back unchanged.
    pub(super) rest: Map<String, Value>,
}

/// Reason that an object is not a lock.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Foreign(&'static str);

impl std::fmt::Display for Foreign {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

/// Parses a record. An object that is not a lock is an error, never a free lock.
pub(super) fn read(body: &[u8]) -> Result<LockRecord, Foreign> {
    let Ok(Value::Object(mut fields)) = serde_json::from_slice(body) else {
        return Err(Foreign("it is not a JSON object"));
    };
    let owner = match fields.remove("ownerId") {
        Some(Value::String(owner)) => owner,
        // Other programs may write a free lock like this.
        Some(Value::Null) => String::new(),
        Some(_) => return Err(Foreign("its ownerId is not a string")),
        None => return Err(Foreign("it has no ownerId")),
    };
    let expires = match fields.remove("expiresAt") {
        Some(Value::Null) if owner.is_empty() => Duration::ZERO,
        Some(value) => seconds(&value).ok_or(Foreign("its expiresAt is not a time"))?,
        None => return Err(Foreign("it has no expiresAt")),
    };
    let until = fields.remove("waiterExpiresAt").as_ref().and_then(seconds);
    let waiter = match (fields.remove("waitingOwnerId"), until) {
        (Some(Value::String(id)), Some(expires)) => Some(ObjectWaiter { id, expires }),
        _ => None,
    };
    let number = |value: Option<Value>| value.as_ref().and_then(Value::as_u64);
    let fence = number(fields.remove("fence"));
    let lease = number(fields.remove("leaseMs")).map(Duration::from_millis);
    let nonce = fields.remove("nonce").and_then(|nonce| nonce.as_str().map(str::to_owned));
    let nonce = nonce.unwrap_or_default();
    let info =
        fields.remove("info").and_then(|info| serde_json::from_value::<IdentityFields>(info).ok());
    let info = info.map(|info| info.identity(owner_name(&owner)));
    Ok(LockRecord {
        owner,
        expires,
        waiter,
        fence,
        lease,
        extra: RecordExtra { info, nonce, rest: fields },
    })
}

pub(super) fn write(record: &LockRecord) -> Vec<u8> {
    let mut fields = record.extra.rest.clone();
    let mut set = |name: &str, value: Option<Value>| match value {
        Some(value) => drop(fields.insert(name.to_owned(), value)),
        None => drop(fields.remove(name)),
    };
    set("ownerId", Some(record.owner.clone().into()));
    set("expiresAt", Some(record.expires.as_secs_f64().into()));
    let waiter = record.waiter.as_ref();
    // The plain format has these two fields in every record.
    set("waitingOwnerId", Some(waiter.map_or(Value::Null, |waiter| waiter.id.clone().into())));
    let until = waiter.map_or(Value::Null, |waiter| waiter.expires.as_secs_f64().into());
    set("waiterExpiresAt", Some(until));
    set("nonce", Some(record.extra.nonce.clone().into()));
    set("fence", record.fence.map(Value::from));
    let lease = record.lease.map(|lease| u64::try_from(lease.as_millis()).unwrap_or(u64::MAX));
    set("leaseMs", lease.map(Value::from));
    let info = record.extra.info.as_ref().map(IdentityFields::of);
    set("info", info.and_then(|info| serde_json::to_value(info).ok()));
    Value::Object(fields).to_string().into_bytes()
}

/// JSON fields of an identity.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct IdentityFields {
    id: String,
    host: String,
    pid: u32,
    #[serde(skip_serializing_if = "String::is_empty")]
    note: String,
}

impl IdentityFields {
    fn of(by: &Identity) -> Self {
        let Identity { id, host, pid, note } = by.clone();
        Self { id, host, pid, note }
    }

    fn identity(self, otherwise: &str) -> Identity {
        let Self { id, host, pid, note } = self;
        let id = if id.is_empty() { otherwise.to_owned() } else { id };
        Identity { id, host, pid, note }
    }
}

/// The bell beside a lock, which names the waiter. An empty bell is not rung.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Bell {
    pub(super) next_holder: NextHolder,
    /// Time for which the bell counts as rung after its last change.
    pub(super) life: Duration,
    pub(super) by: Identity,
}

#[derive(Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
struct BellFields {
    waiter_id: String,
    lease_ms: u64,
    life_ms: u64,
    nonce: String,
    info: IdentityFields,
}

/// Parses a bell. `None`, as if not rung, for an empty or invalid one.
pub(super) fn read_bell(body: &[u8]) -> Option<Bell> {
    let fields: BellFields = serde_json::from_slice(body).ok()?;
    let (lease, life) =
        (Duration::from_millis(fields.lease_ms), Duration::from_millis(fields.life_ms));
    if fields.waiter_id.is_empty() || lease.is_zero() || life > MAX_BELL_LIFE {
        return None;
    }
    let by = fields.info.identity(owner_name(&fields.waiter_id));
    Some(Bell { next_holder: NextHolder { id: fields.waiter_id, lease }, life, by })
}

pub(super) fn write_bell(bell: &Bell, nonce: String) -> Vec<u8> {
    let millis = |span: Duration| u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
    let fields = BellFields {
        waiter_id: bell.next_holder.id.clone(),
        lease_ms: millis(bell.next_holder.lease),
        life_ms: millis(bell.life),
        nonce,
        info: IdentityFields::of(&bell.by),
    };
    // Strings and numbers only: serialization cannot fail.
    serde_json::to_vec(&fields).unwrap_or_default()
}

/// Longest life of a bell.
const MAX_BELL_LIFE: Duration = Duration::from_secs(3_600);

/// Owner id of a claim in the record: the claimant's id and the claim's.
pub(super) fn owner(by: &Identity, claim: u128) -> String {
    format!("{}#{claim:032x}", by.id)
}

/// Claim of an owner id; `None` if tenure did not write it.
pub(super) fn claim_of(owner: &str) -> Option<u128> {
    let (_, claim) = owner.rsplit_once('#')?;
    (claim.len() == 32).then(|| u128::from_str_radix(claim, 16).ok())?
}

/// Part of an owner id that is displayed.
pub(super) fn owner_name(owner: &str) -> &str {
    match claim_of(owner) {
        Some(_) => owner.rsplit_once('#').map_or(owner, |(name, _)| name),
        None => owner,
    }
}

fn seconds(value: &Value) -> Option<Duration> {
    let seconds = value.as_f64()?;
    // A time before 1970 has expired just as 1970 has.
    Duration::try_from_secs_f64(seconds.max(0.0)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_of_the_plain_format_is_read_and_what_is_unknown_is_kept() {
        let text = br#"{"ownerId":"a","expiresAt":1678886400.5,"waitingOwnerId":null,
            "waiterExpiresAt":null,"colour":"red","mass":1.8446744073709548e38}"#;
        let record = read(text).unwrap();
        assert_eq!((&*record.owner, record.expires.as_millis()), ("a", 1_678_886_400_500));
        assert_eq!((record.waiter.clone(), record.fence, record.lease), (None, None, None));
        let again = read(&write(&record)).unwrap();
        assert_eq!(again, record);
        assert_eq!(again.extra.rest["colour"], "red");
        let mass = String::from_utf8(write(&again)).unwrap();
        assert!(mass.contains("1.8446744073709548e+38"), "{mass}");
    }

    #[test]
    fn written_records_are_read_back_and_have_the_plain_fields() {
        let by = Identity { id: "web-1".into(), host: "h".into(), pid: 3, note: "n".into() };
        let record = LockRecord {
            owner: owner(&by, 5),
            expires: Duration::from_secs(100),
            waiter: Some(ObjectWaiter { id: "b".into(), expires: Duration::from_secs(110) }),
            fence: Some(9),
            lease: Some(Duration::from_secs(15)),
            extra: RecordExtra { info: Some(by), nonce: "n1".into(), rest: Map::new() },
        };
        let body = write(&record);
        assert_eq!(read(&body).unwrap(), record);
        let value: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(value["expiresAt"], 100.0);
        assert_eq!(value["waiterExpiresAt"], 110.0);
        assert_eq!(value["leaseMs"], 15_000);
    }

    #[test]
    fn foreign_objects_are_reported_as_foreign() {
        for (text, part) in [
            ("", "JSON"),
            ("hello", "JSON"),
            ("[]", "JSON"),
            ("{}", "ownerId"),
            (r#"{"ownerId":1,"expiresAt":2}"#, "not a string"),
            (r#"{"ownerId":"a"}"#, "expiresAt"),
            (r#"{"ownerId":"a","expiresAt":"soon"}"#, "not a time"),
            (r#"{"ownerId":"a","expiresAt":null}"#, "not a time"),
        ] {
            let refused = read(text.as_bytes()).unwrap_err().to_string();
            assert!(refused.contains(part), "{text}: {refused}");
        }
    }

    #[test]
    fn bell_reads_back_as_written_and_an_empty_bell_names_no_waiter() {
        let by = Identity { id: "b".into(), ..Identity::default() };
        let next_holder = NextHolder { id: owner(&by, 9), lease: Duration::from_secs(10) };
        let bell = Bell { next_holder, life: Duration::from_secs(15), by };
        assert_eq!(read_bell(&write_bell(&bell, "n".into())), Some(bell));
        for text in ["", "{}", "[]", r#"{"waiterId":"x"}"#] {
            assert_eq!(read_bell(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn owner_name_contains_identity_and_claim_id() {
        let by = Identity { id: "a#b".into(), ..Identity::default() };
        let named = owner(&by, u128::MAX);
        assert_eq!((owner_name(&named), claim_of(&named)), ("a#b", Some(u128::MAX)));
        assert_eq!((owner_name("py-1#x"), claim_of("py-1#x")), ("py-1#x", None));
    }
}
