//! Records of NATS, of object stores and of files.
//!
//! The formats are private modules of the library. Their sources are compiled into this crate, so that the library
//! need not export them.

use std::time::Duration;

use tenure::store::Identity;
use tenure_core::object::takeover::TakeoverEvidence;
use tenure_core::object::{ClockResolution, NextHolder, ObjectRead, WaiterReads};
use tenure_core::record::{HolderObservations, RecordClaim, Renewal};
use tenure_core::{Key, Rules, Time};

use crate::Samples;
use crate::store::{KeySpace, Mode};

#[path = "../../tenure/src/store/file/format.rs"]
#[allow(dead_code, reason = "the store uses the rest")]
mod file;
#[path = "../../tenure/src/store/nats/format.rs"]
#[allow(dead_code, reason = "the store uses the rest")]
mod nats;
#[path = "../../tenure/src/store/object/format.rs"]
#[allow(dead_code, reason = "the store uses the rest")]
mod object;

const LEASE: Duration = Duration::from_secs(10);
/// An instant, and the same as a span.
const NOW: Time = Time::from_nanos(1_000_000_000_000);
const WALL: Duration = Duration::from_secs(1_700_000_000);

/// A value in a bucket of NATS.
pub fn nats_record(bytes: &[u8]) {
    nats::read_ticket(bytes);
    if let Some(key) = std::str::from_utf8(bytes).ok().and_then(nats::unescape) {
        assert_eq!(nats::escape(key.as_str()).as_bytes(), bytes);
    }
    let Ok(record) = nats::read(bytes) else { return };
    assert_eq!(nats::read(&nats::write(&record)), Ok(record.clone()));
    let mut observations = HolderObservations::new(Rules::ALL);
    for version in [1, u64::MAX] {
        observations.observe(&record, version, NOW, NOW);
        let by = Identity::default();
        for mode in [Mode::Exclusive, Mode::Shared, Mode::Slot { limit: 2 }] {
            let claim = RecordClaim { id: 1, mode, lease: LEASE, by: &by };
            for now in [NOW, Time::MAX] {
                let take =
                    |holder: &nats::RecordHolder| observations.may_take_over(holder.claim, now);
                let _ = record.claim(&claim, version, take);
            }
        }
        observations.next_takeover(NOW);
        for holder in &record.holders {
            for attempted in [0, u64::MAX] {
                let renewal = Renewal { number: None, attempted, lease: LEASE, held_for: LEASE };
                if let Some(next) = record.renew(holder.claim, version, renewal) {
                    assert_eq!(nats::read(&nats::write(&next)), Ok(next));
                }
            }
            assert!(record.release(holder.claim, version).is_some());
        }
    }
}

/// Valid records and names of NATS.
pub fn nats_samples() -> Samples {
    let holder = |claim, mode, grant_number| nats::RecordHolder {
        claim,
        mode,
        grant_number,
        renewal_count: 3,
        lease: Some(LEASE),
        held_for: Duration::from_secs(1),
        by: identity(),
    };
    let slot = Mode::Slot { limit: 2 };
    let holders = vec![holder(5, slot, Some(9)), holder(6, slot, None)];
    let record = nats::KeyRecord { epoch: 4, fence: 9, served: 4, holders };
    let key = Key::new("a b.ключ").expect("a valid key");
    vec![
        nats::write(&record),
        nats::write(&nats::KeyRecord::default()),
        nats::write_ticket(&identity()),
        nats::escape(key.as_str()).into_bytes(),
    ]
}

/// A body in a bucket of an object store: a lock or a bell.
pub fn object_record(bytes: &[u8]) {
    if let Some(bell) = object::read_bell(bytes) {
        assert_eq!(object::read_bell(&object::write_bell(&bell, String::new())), Some(bell));
    }
    let Ok(record) = object::read(bytes) else { return };
    // Seconds are written as a floating-point number, so the first write may round. The second must not.
    let written = object::write(&record);
    let again = object::read(&written).expect("a record is read back");
    assert_eq!(object::write(&again), written);
    let owner = record.owner.clone();
    let next = NextHolder { id: "next".to_owned(), lease: LEASE };
    let _ = record.renew(&owner, u64::MAX, LEASE, WALL);
    let _ = record.release(&owner, u64::MAX, Some(&next), WALL);
    let _ = record.with_waiter("next", WALL).without_waiter("next");
    for (modified, date) in [(WALL, WALL), (Duration::ZERO, WALL), (WALL, Duration::ZERO)] {
        let read = ObjectRead { record: Some(record.clone()), modified, date };
        let resolution = ClockResolution::SECOND;
        for (now, single_read) in [(NOW, true), (Time::MAX, false)] {
            let evidence = TakeoverEvidence { single_read, ..TakeoverEvidence::new(NOW, now) };
            let _ = read.claim("me", LEASE, object::RecordExtra::default, resolution, &evidence);
            read.is_held(&evidence, resolution);
        }
        read.time_to_takeover();
        read.seems_expired(resolution);
        let reads = WaiterReads::new(&read, NOW, Rules::ALL);
        reads.lease_start(&read, LEASE, NOW, resolution);
    }
}

/// Valid locks and bells of object stores.
pub fn object_samples() -> Samples {
    let record = object::LockRecord {
        owner: object::owner(&identity(), 5),
        expires: WALL,
        waiter: None,
        fence: Some(9),
        lease: Some(LEASE),
        extra: object::RecordExtra { info: Some(identity()), ..Default::default() },
    };
    let next_holder = NextHolder { id: object::owner(&identity(), 6), lease: LEASE };
    let bell = object::Bell { next_holder, life: LEASE, by: identity() };
    let plain = br#"{"ownerId":"a","expiresAt":1678886400.5,"waitingOwnerId":"b","waiterExpiresAt":1678886401}"#;
    let waiting = record.with_waiter("b", WALL);
    vec![
        object::write(&record),
        object::write(&waiting),
        object::write_bell(&bell, "n".to_owned()),
        plain.to_vec(),
    ]
}

/// A queue's file of the file store.
pub fn file_record(bytes: &[u8]) {
    if let Some(title) = bytes.first_chunk() {
        for space in [KeySpace::Lock, KeySpace::Semaphore] {
            if let Some(key) = file::key_in_title(title, space) {
                assert_eq!(file::title(&key, space), *title);
            }
        }
    }
    let Some(head) = bytes.get(file::HEAD_AT..).and_then(file::Head::parse) else { return };
    let again = file::Head::parse(&head.text()).expect("a head is read back");
    assert_eq!((again.fence, again.seq, again.lines), (head.fence, head.seq, head.lines));
    let text = bytes.get(file::LINES_AT..).unwrap_or_default();
    for line in text.chunks(file::LINE_BYTES) {
        assert!(!file::was_marked(line) || file::is_blank(line));
    }
    for line in file::parse_lines(text, head).unwrap_or_default() {
        assert!(line.index < head.lines);
        assert_eq!(file::QueueLine::parse(line.index, &line.text()), Some(line));
    }
}

/// Valid queues.
pub fn file_samples() -> Samples {
    let key = Key::new("printer").expect("a valid key");
    let line = |index, token, promised, mark| file::QueueLine {
        index,
        seq: 3 - index as u64,
        owner: 7,
        mode: Mode::Exclusive,
        token,
        promised,
        since: 4,
        mark,
    };
    let lines = [
        line(0, 0, 9, file::Mark::None),
        line(1, 8, 0, file::Mark::Evicted),
        line(2, 5, 0, file::Mark::CutOff),
    ];
    let head = file::Head { fence: 9, seq: 4, lines: lines.len() };
    let mut whole = file::title(&key, KeySpace::Lock).to_vec();
    whole.extend_from_slice(&head.text());
    let empty = whole.clone();
    for line in lines {
        whole.extend_from_slice(&line.text());
    }
    vec![whole, empty]
}

fn identity() -> Identity {
    Identity { id: "web-1".into(), host: "h".into(), pid: 7, note: "n \"q\"".into() }
}
