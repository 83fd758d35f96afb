//! Decisions on an object's record, one by one and over random histories.

use super::*;
use crate::Random;
use crate::lease::{Lease, LeaseTerms};

const LEASE: Duration = Duration::from_secs(12);

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn held(owner: &str, expires: u64) -> LockObject<()> {
    LockObject {
        owner: owner.to_owned(),
        expires: secs(expires),
        waiter: None,
        fence: Some(7),
        lease: Some(LEASE),
        extra: (),
    }
}

fn read(record: Option<LockObject<()>>, modified: u64, now: u64) -> ObjectRead<()> {
    ObjectRead { record, modified: secs(modified), date: secs(now) }
}

fn at(seconds: u64) -> Time {
    Time::ZERO + secs(seconds)
}

/// Claim of a client that sees the record for the first time.
fn claim(read: &ObjectRead<()>, id: &str) -> ObjectDecision<()> {
    observed_claim(
        read,
        id,
        &TakeoverEvidence { single_read: true, ..TakeoverEvidence::new(Time::ZERO, Time::ZERO) },
    )
}

fn observed_claim(read: &ObjectRead<()>, id: &str, watch: &TakeoverEvidence) -> ObjectDecision<()> {
    read.claim(id, LEASE, || (), ClockResolution::SECOND, watch)
}

fn takes(read: &ObjectRead<()>, watch: &TakeoverEvidence) -> bool {
    matches!(observed_claim(read, "b", watch), ObjectDecision::Write(_))
}

fn taken(read: &ObjectRead<()>, id: &str) -> LockObject<()> {
    match claim(read, id) {
        ObjectDecision::Write(record) => record,
        other => panic!("not granted: {other:?}"),
    }
}

#[test]
fn nothing_there_is_taken_with_the_stores_time_as_the_first_number() {
    let record = taken(&read(None, 0, 1_000), "a");
    assert_eq!((&*record.owner, record.expires), ("a", secs(1_012)));
    assert_eq!((record.fence, record.lease), (Some(1_000_000_000), Some(LEASE)));
}

/// Own write at 100 s of the own clock, which the store stamped 1,000 s, in a reply dated `date`.
fn own_write(date: u64) -> WriteStamp {
    WriteStamp { sent: at(100), replied: at(100), modified: secs(1_000), date: secs(date) }
}

#[test]
fn a_version_that_stays_for_the_lease_and_the_margin_is_over_whatever_the_headers_say() {
    // By `Date` the record is new, from the future, or ancient; the clocks were seen to disagree, or not compared.
    for now in [900, 1_000, 1_020] {
        for stamp in [None, Some(own_write(1_020)), Some(own_write(980))] {
            let read = read(Some(held("a", 5)), 1_000, now);
            let watch = |seconds: u64| TakeoverEvidence {
                stamp,
                ..TakeoverEvidence::new(at(50), at(50 + seconds))
            };
            assert!(!takes(&read, &watch(13)), "{now} {stamp:?}");
            assert!(takes(&read, &watch(14)), "{now} {stamp:?}");
        }
    }
}

#[test]
fn stamps_count_if_the_clocks_agreed_and_the_version_stayed_for_a_third_and_a_request() {
    // Last changed 11 s before the own write; first seen at 94 s of the own clock, written to at 100 s.
    let read = read(Some(held("a", 5)), 989, 1_003);
    let watch = |now, date| TakeoverEvidence {
        stamp: Some(own_write(date)),
        ..TakeoverEvidence::new(at(94), at(now))
    };
    for date in 998..=1_002 {
        assert!(!takes(&read, &watch(102, date)), "13 s old by the stamps");
        assert!(takes(&read, &watch(103, date)), "14 s old by the stamps: dated {date}");
    }
    for date in [997, 1_003] {
        assert!(!takes(&read, &watch(103, date)), "dated {date}");
    }
    let late = |first, now| TakeoverEvidence { first_seen: at(first), ..watch(now, 1_000) };
    assert!(!takes(&read, &late(97, 103)), "observed for 6 s of 7");
    assert!(takes(&read, &late(97, 104)));
    assert!(!takes(&read, &late(101, 108)), "no own write since the version was first seen");
    // The `Date` of later answers does not matter.
    let behind = ObjectRead { date: secs(10), ..read.clone() };
    assert!(takes(&behind, &watch(103, 1_000)));
    let ahead = ObjectRead { date: secs(1_900), ..read.clone() };
    assert!(!takes(&ahead, &watch(102, 1_000)));
    // Without the rule, the `Date` of the answer does.
    let rules = Rules { compare_store_clocks: false, ..Rules::ALL };
    assert!(takes(&ahead, &TakeoverEvidence { rules, ..TakeoverEvidence::new(at(94), at(101)) }));
}

#[test]
fn one_look_takes_over_only_what_is_older_than_three_leases_and_half_a_minute() {
    let aged = |age: u64| read(Some(held("a", 5)), 1_000, 1_000 + age);
    let once = TakeoverEvidence { single_read: true, ..TakeoverEvidence::new(at(50), at(50)) };
    for (age, held) in [(14, true), (66, true), (67, false)] {
        assert_eq!(aged(age).is_held(&once, ClockResolution::SECOND), held, "{age}");
        assert_eq!(takes(&aged(age), &once), !held, "{age}");
        let disagreed = TakeoverEvidence { stamp: Some(own_write(1_020)), ..once };
        assert!(!takes(&aged(age), &disagreed), "{age}: the clocks are known to disagree");
        let waiting = TakeoverEvidence { single_read: false, ..once };
        assert!(!takes(&aged(age), &waiting), "{age}: a waiter observes");
    }
    assert_eq!(
        (aged(14).time_to_takeover(), aged(67).time_to_takeover()),
        (secs(52), Duration::ZERO)
    );
    assert_eq!(
        (
            aged(13).seems_expired(ClockResolution::SECOND),
            aged(14).seems_expired(ClockResolution::SECOND)
        ),
        (false, true)
    );
    assert_eq!(taken(&aged(67), "b").fence, Some(8));
    let forever = LockObject { lease: None, expires: Duration::MAX, ..held("py", 5) };
    assert!(read(Some(forever), 1_000, 9_000).is_held(&once, ClockResolution::SECOND));
}

#[test]
fn a_long_lease_has_a_long_margin() {
    let record = LockObject { lease: Some(secs(60)), ..held("a", 5) };
    let read = read(Some(record), 100, 100);
    assert!(!takes(&read, &TakeoverEvidence::new(at(5), at(74))));
    assert!(takes(&read, &TakeoverEvidence::new(at(5), at(75))));
}

#[test]
fn a_record_of_the_plain_format_lasts_until_two_seconds_after_its_end_counted_from_its_stamp() {
    let record = LockObject { lease: None, fence: None, ..held("py", 160) };
    // `Date` is behind and ahead.
    for now in [50, 170] {
        let read = read(Some(record.clone()), 100, now);
        assert!(!takes(&read, &TakeoverEvidence::new(at(5), at(66))), "{now}");
        assert!(takes(&read, &TakeoverEvidence::new(at(5), at(67))), "{now}");
    }
    let taken = taken(&read(Some(record), 100, 311), "b");
    assert_eq!(taken.fence, Some(311_000_000), "no number had been written");
}

#[test]
fn a_released_lock_with_a_waiter_is_the_waiters_alone() {
    let released =
        held("a", 5).with_waiter("b", secs(110)).release("a", 7, None, secs(100)).unwrap();
    assert_eq!((released.expires, released.fence), (Duration::ZERO, Some(7)));
    let at = |now| read(Some(released.clone()), 100, now);
    assert_eq!(claim(&at(101), "c"), ObjectDecision::WaiterAhead);
    assert_eq!(taken(&at(101), "b").fence, Some(8));
    assert_eq!(taken(&at(110), "c").fence, Some(8), "the reservation has expired");
}

#[test]
fn a_held_lock_has_one_place() {
    let record = held("a", 5);
    assert_eq!(claim(&read(Some(record.clone()), 100, 101), "b"), ObjectDecision::Held);
    let waited = record.with_waiter("b", secs(110));
    let at = |now| read(Some(waited.clone()), 100, now);
    assert_eq!(claim(&at(101), "b"), ObjectDecision::Held, "the claimant's own place");
    assert_eq!(claim(&at(101), "c"), ObjectDecision::WaiterAhead);
    assert_eq!(claim(&at(110), "c"), ObjectDecision::Held, "the reservation has expired");
    assert_eq!(waited.without_waiter("c"), None);
    assert_eq!(waited.without_waiter("b"), Some(record));
}

#[test]
fn a_renewal_keeps_the_mark_of_a_waiter_and_never_steals() {
    let stripped =
        LockObject { fence: None, lease: None, ..held("a", 5).with_waiter("py", secs(160)) };
    let renewed = stripped.renew("a", 7, LEASE, secs(102)).unwrap();
    assert_eq!(renewed.waiter, stripped.waiter);
    assert_eq!((renewed.fence, renewed.lease, renewed.expires), (Some(7), Some(LEASE), secs(114)));
    assert_eq!(stripped.renew("b", 7, LEASE, secs(102)), None);
    let released = stripped.release("a", 7, None, secs(102)).unwrap();
    assert_eq!(released.renew("a", 7, LEASE, secs(103)), None, "a released lock stays released");
    assert_eq!(released.release("a", 7, None, secs(103)), None);
}

#[test]
fn release_hands_over_to_the_bell_waiter_unless_the_record_names_another() {
    let heir = NextHolder { id: "b".to_owned(), lease: secs(10) };
    let given = held("a", 5).release("a", 7, Some(&heir), secs(100)).unwrap();
    assert_eq!((&*given.owner, given.fence, given.lease), ("b", Some(8), Some(secs(10))));
    assert_eq!(claim(&read(Some(given.clone()), 100, 100), "b"), ObjectDecision::AlreadyGranted);
    assert_eq!(claim(&read(Some(given), 100, 100), "c"), ObjectDecision::Held);

    let named = held("a", 5).with_waiter("py", secs(160));
    let released = named.release("a", 7, Some(&heir), secs(100)).unwrap();
    assert_eq!((released.expires, released.waiter), (Duration::ZERO, named.waiter.clone()));
    let later = named.release("a", 7, Some(&heir), secs(160)).unwrap();
    assert_eq!(later.owner, "b", "the reservation in the record has expired");
    let both =
        held("a", 5).with_waiter("b", secs(160)).release("a", 7, Some(&heir), secs(100)).unwrap();
    assert_eq!((&*both.owner, both.waiter), ("b", None));
}

#[test]
fn a_grant_of_another_counts_from_before_it_was_made() {
    let at = |ms: u64| Time::ZERO + Duration::from_millis(ms);
    let given = |modified, now| read(Some(held("b", 5)), modified, now);
    let counts = |reads: &WaiterReads, read: &ObjectRead<()>, ttl, sent| {
        reads.lease_start(read, ttl, sent, ClockResolution::SECOND)
    };
    let before = read(Some(LockObject { fence: Some(6), ..held("a", 5) }), 90, 100);
    let mut reads = WaiterReads::new(&read(None, 0, 90), at(50_000), Rules::ALL);
    reads.note_ungranted(&before, at(60_000));
    let fresh = given(100, 100);
    assert_eq!(counts(&reads, &fresh, LEASE, at(60_250)), LeaseStart::FromConfirm, "no own write");
    // `Date` does not matter: right, ahead or behind.
    for now in [100, 120, 80] {
        let date = secs(now);
        let (sent, replied) = (at(59_900), at(60_100));
        reads.record_write(WriteStamp { sent, replied, modified: secs(100), date });
        // Stamped with the same second as our own write: up to a second before it.
        let fresh = given(100, now);
        assert_eq!(
            counts(&reads, &fresh, LEASE, at(60_250)),
            LeaseStart::Since(at(58_900)),
            "{now}"
        );
        // Three seconds after it, less one for rounding and a sixth for drift; but a read did not show the grant.
        let later = given(103, now + 3);
        assert_eq!(
            counts(&reads, &later, LEASE, at(70_000)),
            LeaseStart::Since(at(60_000)),
            "{now}"
        );
        let mut late = reads.clone();
        late.note_ungranted(&before, at(69_000));
        assert_eq!(
            counts(&late, &later, LEASE, at(70_000)),
            LeaseStart::Since(at(61_400)),
            "{now}"
        );
        // Five seconds before it: the reads since then returned an old record.
        let old = given(95, now);
        assert_eq!(counts(&reads, &old, LEASE, at(60_250)), LeaseStart::Since(at(52_900)), "{now}");
    }
    assert_eq!(counts(&reads, &fresh, LEASE * 2, at(60_250)), LeaseStart::FromConfirm, "too short");
    let plain = read(Some(LockObject { lease: None, ..held("b", 5) }), 100, 100);
    assert_eq!(counts(&reads, &plain, LEASE, at(60_250)), LeaseStart::FromConfirm);
    // A later grant was seen: this one has ended.
    reads.note_ungranted(&read(Some(held("c", 5)), 100, 100), at(60_500));
    reads.note_ungranted(&read(None, 0, 100), at(60_750));
    assert_eq!(counts(&reads, &fresh, LEASE, at(61_000)), LeaseStart::FromConfirm);
}

/// Versioned store with a clock in whole seconds, and its clients. Reads sometimes return an old record; the reply to a
/// write is late or lost. `Date` comes from another clock.
struct ObjectWorld {
    random: Random,
    now: u64,
    /// Lead of `Date` over the clock that stamps objects, plus [`FAR`].
    date: u64,
    version: u64,
    modified: u64,
    record: Option<LockObject<()>>,
    /// Record before the last change, with its version and time.
    old: (Option<LockObject<()>>, u64, u64),
    bell: Option<NextHolder>,
    clients: Vec<Client>,
    last_fence: u64,
    grants: u32,
    claims: u32,
}

#[derive(Clone, Debug, Default)]
struct Client {
    id: String,
    /// Deadline of the hold, on the client's own clock.
    deadline: u64,
    fence: u64,
    holding: bool,
    /// Last read, its version, and the time at which it was sent.
    read: Option<(ObjectRead<()>, u64, u64)>,
    /// Time at which the last read that found the lock not granted was sent.
    ungranted: Option<u64>,
    /// Observed version, and the time since which it has been seen.
    seen: Option<(u64, u64)>,
    stamp: Option<WriteStamp>,
}

/// Largest difference between the two clocks, in milliseconds.
const FAR: u64 = 100_000;

impl ObjectWorld {
    fn new(seed: u64) -> Self {
        let client = |n| Client { id: format!("c{n}"), ..Client::default() };
        let clients = (0..4).map(client).collect();
        let mut random = Random::new(seed);
        let date = match random.below(3) {
            0 => FAR,
            1 => FAR - 3_000 + random.below(6_000),
            _ => random.below(2 * FAR),
        };
        Self {
            random,
            now: 1_000_000,
            date,
            version: 0,
            modified: 0,
            record: None,
            old: (None, 0, 0),
            bell: None,
            clients,
            last_fence: 0,
            grants: 0,
            claims: 0,
        }
    }

    fn truncated(ms: u64) -> Duration {
        secs(ms / 1_000)
    }

    fn read(&mut self) -> (ObjectRead<()>, u64) {
        let newest = (self.record.clone(), self.version, self.modified);
        let old = self.random.chance(0.1);
        let (record, version, modified) = if old { self.old.clone() } else { newest };
        let (modified, now) = (Self::truncated(modified), self.dated());
        (ObjectRead { record, modified, date: now }, version)
    }

    fn dated(&self) -> Duration {
        Self::truncated(self.now + self.date - FAR)
    }

    /// Evidence of a client about a version, by a read that is answered now.
    fn watch(&mut self, at: usize, version: u64) -> TakeoverEvidence {
        let time = |ms: u64| Time::from_nanos(ms * 1_000_000);
        let (now, client) = (self.now, &mut self.clients[at]);
        let (_, first) =
            *client.seen.take_if(|(seen, _)| *seen == version).get_or_insert((version, now));
        client.seen = Some((version, first));
        TakeoverEvidence { stamp: client.stamp, ..TakeoverEvidence::new(time(first), time(now)) }
    }

    /// Writes the bell, and records its stamp.
    fn ring(&mut self, at: usize) {
        let sent = Time::from_nanos(self.now * 1_000_000);
        self.bell = Some(NextHolder { id: self.clients[at].id.clone(), lease: LEASE });
        let modified = Self::truncated(self.now);
        self.now += self.random.below(300);
        let replied = Time::from_nanos(self.now * 1_000_000);
        self.clients[at].stamp = Some(WriteStamp { sent, replied, modified, date: self.dated() });
    }

    fn swap(&mut self, version: u64, record: LockObject<()>) -> bool {
        let won = version == self.version;
        if won {
            self.old = (self.record.take(), self.version, self.modified);
            (self.version, self.modified, self.record) = (self.version + 1, self.now, Some(record));
        }
        won
    }

    /// Starts a hold whose lease counts from `sent`.
    fn grant(&mut self, at: usize, sent: u64, fence: u64, fresh: bool) {
        let lease = Lease::new(LeaseTerms::new(LEASE)).unwrap();
        let sent = Time::from_nanos(sent * 1_000_000);
        let deadline = lease.deadline(sent, sent).as_nanos() / 1_000_000;
        let client = &mut self.clients[at];
        // A grant past its own deadline is released, not used.
        let late = self.now >= deadline;
        (client.deadline, client.fence, client.holding) = (deadline, fence, !late);
        if late {
            self.start_over(at);
        }
        if fresh && !late {
            assert!(fence > self.last_fence, "{fence} after {}", self.last_fence);
            (self.last_fence, self.grants) = (fence, self.grants + 1);
        }
    }

    /// Begins a new claim, with a new id.
    fn start_over(&mut self, at: usize) {
        self.claims += 1;
        self.bell.take_if(|heir| heir.id == self.clients[at].id);
        self.clients[at] = Client { id: format!("c{at}-{}", self.claims), ..Client::default() };
    }

    fn step(&mut self) {
        self.now += self.random.below(900);
        let at = usize::try_from(self.random.below(4)).unwrap();
        let client = self.clients[at].clone();
        if client.holding && self.now >= client.deadline {
            self.start_over(at);
        }
        match client.read {
            None => {
                let (read, version) = self.read();
                self.clients[at].read = Some((read, version, self.now));
                if self.random.chance(0.1) {
                    // Frozen for a while between the read and the write.
                    self.now += self.random.below(40_000);
                }
            }
            Some((read, version, sent)) => {
                self.clients[at].read = None;
                self.act(at, &read, version, sent);
            }
        }
        self.check();
    }

    fn act(&mut self, at: usize, read: &ObjectRead<()>, version: u64, sent: u64) {
        let client = self.clients[at].clone();
        let replied = self.random.chance(0.9);
        let now = Self::truncated(self.now);
        if client.holding {
            let Some(record) = &read.record else { return };
            if self.random.chance(0.5) {
                let heir = self.bell.clone().filter(|heir| heir.id != client.id);
                let next = record.release(&client.id, client.fence, heir.as_ref(), now);
                self.start_over(at);
                if let Some(next) = next
                    && self.swap(version, next)
                {
                    self.bell = None;
                }
            } else if let Some(next) = record.renew(&client.id, client.fence, LEASE, now) {
                let sent = self.now;
                if self.swap(version, next) && replied {
                    self.grant(at, sent, client.fence, false);
                }
            }
            return;
        }
        let watch = self.watch(at, version);
        match observed_claim(read, &client.id, &watch) {
            ObjectDecision::Write(next) => {
                let fence = next.fence.unwrap();
                self.clients[at].ungranted = None;
                if self.swap(version, next) && replied {
                    self.grant(at, sent, fence, true);
                }
            }
            ObjectDecision::AlreadyGranted => {
                if let Some(since) = self.clients[at].ungranted.take() {
                    let fence = read.record.as_ref().unwrap().fence.unwrap();
                    let time = |ms: u64| Time::from_nanos(ms * 1_000_000);
                    let nothing = ObjectRead::<()> { record: None, ..read.clone() };
                    let mut reads = WaiterReads::new(&nothing, time(since), Rules::ALL);
                    if let Some(stamp) = watch.stamp {
                        reads.record_write(stamp);
                    }
                    match reads.lease_start(read, LEASE, time(sent), ClockResolution::SECOND) {
                        LeaseStart::Since(since) => {
                            self.grant(at, since.as_nanos() / 1_000_000, fence, true);
                        }
                        // An own write that took effect without a reply, without a bell before it.
                        LeaseStart::FromConfirm if watch.stamp.is_none() => {}
                        other => panic!("a whole lease was handed over: {other:?}"),
                    }
                }
            }
            ObjectDecision::Held => {
                if self.bell.as_ref().is_none_or(|heir| heir.id == client.id) {
                    self.ring(at);
                }
                self.clients[at].ungranted = Some(sent);
            }
            ObjectDecision::WaiterAhead => {}
        }
    }

    fn check(&self) {
        let valid = |client: &&Client| client.holding && self.now < client.deadline;
        let holders: Vec<_> = self.clients.iter().filter(valid).collect();
        assert!(holders.len() <= 1, "two holders at {}: {holders:?}", self.now);
    }
}

#[test]
fn no_course_of_events_gives_two_holders_or_a_number_twice() {
    let mut grants = 0;
    for seed in 0..300 {
        let mut world = ObjectWorld::new(seed);
        for _ in 0..600 {
            world.step();
        }
        grants += world.grants;
    }
    assert!(grants > 3_000, "too few grants to prove anything: {grants}");
}
