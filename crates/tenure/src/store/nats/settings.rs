//! Settings of the stream behind a bucket that could drop, hide or refuse the record of a holder, and the times at
//! which they are checked.
//!
//! A setting that loses a live record admits two holders, because the next claim finds the key free: such a bucket is
//! refused. A limit that only refuses writes loses nothing: the refused write reports it, and `tenure doctor` warns of
//! it.

use std::sync::MutexGuard;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tenure_core::Time;

use super::layout::BucketLayout;
use super::stream::{StreamConfig, StreamInfo};
use crate::mutex::Mutex;
use crate::store::Finding;
use crate::units::in_whole_units;

/// Shortest time between two checks if the only reason is write conflicts, which are normal on contended keys.
const CONFLICT_RECHECK_PAUSE: Duration = Duration::from_secs(10);
/// Record size that a bucket should accept: enough for several holders with long notes.
const AMPLE_RECORD_BYTES: i64 = 8 * 1_024;
/// Usage of a limit from which a bucket is reported as nearly full.
const NEARLY_FULL_PERCENT: u64 = 90;

/// Settings that lose or hide records, each with the command that repairs it; empty for a fit stream.
pub(super) fn unfit_settings(config: &StreamConfig, bucket: &str) -> Vec<String> {
    let edit = |flags: &str| format!("run `nats stream edit KV_{bucket} {flags}`");
    let another = "it cannot be changed: create another bucket with `nats kv add NAME`";
    let mut reasons = Vec::new();
    if config.retention != "limits" {
        reasons.push(format!(
            "its retention is {}, which removes a record once consumers have seen it, or at once if there are no consumers; {another}",
            config.retention
        ));
    }
    // At its limit, a stream with `discard=old` removes the oldest record to make room, held or not.
    let limits = [("max_msgs", config.max_msgs), ("max_bytes", config.max_bytes)];
    let limits = limits.into_iter().filter(|(_, limit)| *limit > 0 && config.discard == "old");
    let limits: Vec<_> = limits.map(|(name, limit)| format!("{name} is {limit}")).collect();
    if !limits.is_empty() {
        reasons.push(format!(
            "its discard is old and its {}, so that a full bucket removes the oldest record, held or not; {}",
            limits.join(" and its "),
            edit("--discard=new")
        ));
    }
    if config.discard_new_per_subject {
        reasons.push(format!(
            "its discard_new_per_subject is true, so that no record can be written twice, and no hold renewed; {}",
            edit("--no-discard-per-subject")
        ));
    }
    if !config.subject_transform.is_null() {
        reasons.push(format!(
            "its subject_transform is set, so that records are kept under other names; remove it: {}",
            edit("--interactive")
        ));
    }
    if config.no_ack {
        reasons.push(format!(
            "its no_ack is true, so that no claim is ever answered; {}",
            edit("--ack")
        ));
    }
    if config.allow_msg_counter {
        reasons.push(format!(
            "its allow_msg_counter is true: it accepts counters only, and no records; {another}"
        ));
    }
    if config.persist_mode == "async" {
        reasons.push(format!(
            "its persist_mode is async: a server that is killed forgets holds that it acknowledged; {another}"
        ));
    }
    reasons
}

/// Reason for refusing a bucket in nlock's layout with delete markers: the marker of an expired record can overwrite a
/// renewal that was acknowledged at the same moment.
pub(super) fn marker_error(bucket: &str) -> String {
    format!(
        "its subject_delete_marker_ttl is set, and the marker of an expired record can remove one that was renewed at the \
         same moment; create the bucket again without that setting: run `nats kv del {bucket}`, and restart the clients"
    )
}

/// Message for a write that a limit refused: the limit, its value and the command that removes it.
pub(super) fn limit_error(info: &StreamInfo, bucket: &str, server_error: &str) -> String {
    let config = &info.config;
    let (field, flag, limit) = if server_error.contains("maximum bytes") {
        ("max_bytes", "--max-bytes", config.max_bytes)
    } else if server_error.contains("maximum messages") {
        ("max_msgs", "--max-msgs", config.max_msgs)
    } else {
        ("max_msg_size", "--max-msg-size", config.max_msg_size)
    };
    let what = match field {
        "max_msg_size" => format!("the record is too long for the bucket {bucket}"),
        _ => format!("the bucket {bucket} is full"),
    };
    format!(
        "{what}: its {field} is {limit}; {server_error}; raise the limit, or remove it: run `nats stream edit KV_{bucket} {flag}=-1`"
    )
}

/// Finding for `tenure doctor` about settings that lose or refuse records.
pub(super) fn finding(info: &StreamInfo, bucket: &str, layout: BucketLayout) -> Finding {
    const WHAT: &str = "settings";
    let config = &info.config;
    let reasons = unfit_settings(config, bucket);
    if !reasons.is_empty() {
        return Finding::failed(WHAT, reasons.join("; "))
            .advise("records of holders can be lost, so that two clients hold a lock at once: tenure refuses the bucket");
    }
    let (messages, bytes) = info.used();
    let usages = [
        ("records", "max_msgs", messages, config.max_msgs),
        ("bytes", "max_bytes", bytes, config.max_bytes),
    ];
    let usages = usages.into_iter().filter_map(|(what, field, used, limit)| {
        let limit = u64::try_from(limit).ok().filter(|limit| *limit > 0)?;
        Some((format!("{used} of at most {limit} {what} ({field})"), used, limit))
    });
    let usages: Vec<_> = usages.collect();
    let mut limits: Vec<_> = usages.iter().map(|(text, ..)| text.clone()).collect();
    let nearly_full =
        usages.iter().any(|(_, used, limit)| used * 100 >= limit * NEARLY_FULL_PERCENT);
    let full = usages.iter().any(|(_, used, limit)| used >= limit);
    if (1..AMPLE_RECORD_BYTES).contains(&config.max_msg_size) {
        limits.push(format!("at most {} bytes per record (max_msg_size)", config.max_msg_size));
    }
    let max_age = info.max_age();
    // In nlock's layout the age is the ttl, which the bucket's own finding reports.
    if !max_age.is_zero() && layout == BucketLayout::Native {
        limits.push(format!("records are kept for {} (max_age)", in_whole_units(max_age)));
    }
    if limits.is_empty() {
        return Finding::ok(WHAT, "no limit on records, their size or their age");
    }
    let limits = limits.join("; ");
    let raise = format!("raise the limit with `nats stream edit KV_{bucket}`");
    if full {
        Finding::failed(WHAT, limits)
            .advise(format!("full: new keys are refused, and renewals may be; {raise}"))
    } else if nearly_full {
        Finding::warning(WHAT, limits).advise(format!(
            "nearly full: a full bucket refuses new keys, and perhaps renewals; {raise}"
        ))
    } else {
        Finding::warning(WHAT, limits).advise(
            "a write beyond a limit is refused, and so are leases that are not shorter than max_age",
        )
    }
}

/// Decides when to read the settings of the bucket again: they can be edited while the client runs.
#[derive(Debug)]
pub(super) struct SettingsCheck {
    /// Number of reasons for doubt so far: refused writes, and settings found unfit.
    doubts: AtomicU64,
    /// Counters and time of the last check that found the settings fit.
    last_fit: Mutex<(SettingsCounters, Time)>,
    /// Age at which the bucket removes records, in nanoseconds; 0 if it does not.
    max_age: AtomicU64,
}

/// Counters at the time of a check. Another check is due once they have changed.
///
/// They are taken before the settings are read: a reconnect or a refused write during the read then makes another check
/// due. If they were taken afterwards, that event would count as checked, although an edit of the bucket may have come
/// after the read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SettingsCounters {
    /// Number of connections made.
    connections: u64,
    doubts: u64,
}

impl SettingsCheck {
    pub(super) fn new(info: &StreamInfo, connections: u64, now: Time) -> Self {
        let counters = SettingsCounters { connections, doubts: 0 };
        let check = Self {
            doubts: AtomicU64::new(0),
            last_fit: Mutex::new((counters, now)),
            max_age: AtomicU64::new(0),
        };
        check.set_max_age(info);
        check
    }

    /// Counters of a check that begins now.
    pub(super) fn counters_now(&self, connections: u64) -> SettingsCounters {
        SettingsCounters { connections, doubts: self.doubts.load(Ordering::Acquire) }
    }

    /// True if the settings should be read.
    pub(super) fn is_due(&self, connections: u64) -> bool {
        self.last().0 != self.counters_now(connections)
    }

    /// Makes a check due.
    pub(super) fn add_doubt(&self) {
        self.doubts.fetch_add(1, Ordering::AcqRel);
    }

    /// Makes a check due after a write conflict, unless the last check was recent. A dropped record shows as a
    /// conflict, but so does ordinary contention.
    pub(super) fn note_conflict(&self, now: Time) {
        if now.since(self.last().1) >= CONFLICT_RECHECK_PAUSE {
            self.add_doubt();
        }
    }

    /// Records that the settings are fit. `counters` were taken before the settings were read.
    pub(super) fn confirm(&self, info: &StreamInfo, counters: SettingsCounters, now: Time) {
        self.set_max_age(info);
        *self.lock() = (counters, now);
    }

    fn last(&self) -> (SettingsCounters, Time) {
        *self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, (SettingsCounters, Time)> {
        self.last_fit.lock()
    }

    /// Age at which the bucket removes records, if it does.
    pub(super) fn max_age(&self) -> Option<Duration> {
        let nanos = self.max_age.load(Ordering::Acquire);
        (nanos > 0).then(|| Duration::from_nanos(nanos))
    }

    fn set_max_age(&self, info: &StreamInfo) {
        let nanos = u64::try_from(info.max_age().as_nanos()).unwrap_or(u64::MAX);
        self.max_age.store(nanos, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::store::FindingLevel;

    fn info(change: &Value) -> StreamInfo {
        let mut config =
            json!({ "storage": "file", "discard": "new", "max_msgs": -1, "max_bytes": -1 });
        for (field, value) in change.as_object().unwrap() {
            config[field] = value.clone();
        }
        serde_json::from_value(json!({
            "config": config, "created": "2026-01-01T00:00:00Z",
            "state": { "last_seq": 9, "messages": 5, "bytes": 950 },
        }))
        .unwrap()
    }

    #[test]
    fn only_settings_that_lose_records_are_unfit() {
        let reasons = |change: Value| unfit_settings(&info(&change).config, "b");
        for fit in [
            json!({}),
            json!({ "discard": "old" }),
            json!({ "max_msgs": 5, "max_bytes": 9 }),
            json!({ "persist_mode": "default", "deny_purge": true, "republish": { "dest": "x" } }),
        ] {
            assert_eq!(reasons(fit), Vec::<String>::new());
        }
        let both = reasons(json!({ "discard": "old", "max_msgs": 5, "max_bytes": 9 }));
        assert!(both[0].contains("its max_msgs is 5 and its max_bytes is 9"), "{both:?}");
        assert!(both[0].contains("`nats stream edit KV_b --discard=new`"), "{both:?}");
        let all = json!({
            "retention": "workqueue", "discard": "old", "max_msgs": 5, "discard_new_per_subject": true,
            "subject_transform": { "src": "a" }, "no_ack": true, "allow_msg_counter": true,
            "persist_mode": "async",
        });
        assert_eq!(reasons(all).len(), 7, "each is reported");
        // A field that an old server leaves out has its default.
        let absent: StreamConfig = serde_json::from_value(json!({ "storage": "file" })).unwrap();
        assert_eq!(unfit_settings(&absent, "b"), Vec::<String>::new());
    }

    #[test]
    fn the_level_of_a_limit_depends_on_its_usage() {
        let found = |change: Value| finding(&info(&change), "b", BucketLayout::Native);
        assert_eq!(found(json!({})).level, FindingLevel::Ok);
        assert_eq!(found(json!({ "max_msgs": 5 })).level, FindingLevel::Failed);
        let nearly = found(json!({ "max_bytes": 1_000 }));
        assert_eq!(nearly.level, FindingLevel::Warning);
        assert!(nearly.advice.unwrap().contains("nearly full"));
        assert_eq!(found(json!({ "max_bytes": 10_000 })).level, FindingLevel::Warning);
        assert_eq!(found(json!({ "retention": "interest" })).level, FindingLevel::Failed);
        let message =
            |error| limit_error(&info(&json!({ "max_bytes": 7, "max_msgs": 8 })), "b", error);
        assert!(message("maximum bytes exceeded").contains("max_bytes is 7"));
        assert!(message("maximum messages exceeded").contains("max_msgs is 8"));
    }

    #[test]
    fn settings_are_read_again_after_a_reconnect_and_a_refused_write() {
        let at = |ms| Time::ZERO + Duration::from_millis(ms);
        let check = SettingsCheck::new(&info(&json!({})), 1, at(0));
        assert!(!check.is_due(1) && check.is_due(2));
        check.confirm(&info(&json!({ "max_age": 7 })), check.counters_now(2), at(100));
        assert!(!check.is_due(2));
        assert_eq!(check.max_age(), Some(Duration::from_nanos(7)));
        check.note_conflict(at(10_099));
        assert!(!check.is_due(2), "conflicts are normal");
        check.note_conflict(at(10_100));
        assert!(check.is_due(2));
        check.confirm(&info(&json!({})), check.counters_now(2), at(10_200));
        assert_eq!((check.is_due(2), check.max_age()), (false, None));
        let counters = check.counters_now(2);
        check.add_doubt();
        check.confirm(&info(&json!({})), counters, at(10_300));
        assert!(check.is_due(2), "a write was refused while the settings were read");
    }
}
