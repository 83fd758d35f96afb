//! Decisions on an object's record, one by one and over random courses of events.

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

fn sight(record: Option<LockObject<()>>, modified: u64, now: u64) -> ObjectRead<()> {
    ObjectRead { record, modified: secs(modified), now: secs(now) }
}

fn at(seconds: u64) -> Time {
    Time::ZERO + secs(seconds)
}

/// A claim of a client that sees the record for the first time.
fn claim(sight: &ObjectRead<()>, id: &str) -> ObjectDecision<()> {
    watched_claim(
        sight,
        id,
        &TakeoverEvidence { single_read: true, ..TakeoverEvidence::new(Time::ZERO, Time::ZERO) },
    )
}

fn watched_claim(sight: &ObjectRead<()>, id: &str, watch: &TakeoverEvidence) -> ObjectDecision<()> {
    sight.claim(id, LEASE, || (), ClockResolution::SECOND, watch)
}

fn takes(sight: &ObjectRead<()>, watch: &TakeoverEvidence) -> bool {
    matches!(watched_claim(sight, "b", watch), ObjectDecision::Write(_))
}

fn taken(sight: &ObjectRead<()>, id: &str) -> LockObject<()> {
    match claim(sight, id) {
        ObjectDecision::Write(record) => record,
        other => panic!("not granted: {other:?}"),
    }
}

#[test]
fn nothing_there_is_taken_with_the_stores_time_as_the_first_number() {
    let record = taken(&sight(None, 0, 1_000), "a");
    assert_eq!((&*record.owner, record.expires), ("a", secs(1_012)));
    assert_eq!((record.fence, record.lease), (Some(1_000_000_000), Some(LEASE)));
}

/// An own write at 100 s of the own clock, which the store stamped 1,000 s, in a reply dated `date`.
fn own_write(date: u64) -> WriteStamp {
    WriteStamp { sent: at(100), replied: at(100), modified: secs(1_000), date: secs(date) }
}

#[test]
fn a_version_that_stays_for_the_lease_and_the_margin_is_over_whatever_the_headers_say() {
    // `Date` says that the record is new, from the future, or ancient; the clocks were seen to disagree, or not compared.
    for now in [900, 1_000, 1_020] {
        for stamp in [None, Some(own_write(1_020)), Some(own_write(980))] {
            let sight = sight(Some(held("a", 5)), 1_000, now);
            let watch = |seconds: u64| TakeoverEvidence {
                stamp,
                ..TakeoverEvidence::new(at(50), at(50 + seconds))
            };
            assert!(!takes(&sight, &watch(13)), "{now} {stamp:?}");
            assert!(takes(&sight, &watch(14)), "{now} {stamp:?}");
        }
    }
}

#[test]
fn stamps_count_if_the_clocks_agreed_and_the_version_stayed_for_a_third_and_a_request() {
    // Last changed 11 s before the own write; first seen at 94 s of the own clock, written to at 100 s.
    let sight = sight(Some(held("a", 5)), 989, 1_003);
    let watch = |now, date| TakeoverEvidence {
        stamp: Some(own_write(date)),
        ..TakeoverEvidence::new(at(94), at(now))
    };
    for date in 998..=1_002 {
        assert!(!takes(&sight, &watch(102, date)), "13 s old by the stamps");
        assert!(takes(&sight, &watch(103, date)), "14 s old by the stamps: dated {date}");
    }
    for date in [997, 1_003] {
        assert!(!takes(&sight, &watch(103, date)), "dated {date}");
    }
    let late = |first, now| TakeoverEvidence { first_seen: at(first), ..watch(now, 1_000) };
    assert!(!takes(&sight, &late(97, 103)), "watched for 6 s of 7");
    assert!(takes(&sight, &late(97, 104)));
    assert!(!takes(&sight, &late(101, 108)), "no own write since it was first seen");
    // What later answers are dated has no say.
    let behind = ObjectRead { now: secs(10), ..sight.clone() };
    assert!(takes(&behind, &watch(103, 1_000)));
    let ahead = ObjectRead { now: secs(1_900), ..sight.clone() };
    assert!(!takes(&ahead, &watch(102, 1_000)));
    // Without the rule, what the answer is dated does.
    let rules = Rules { compare_store_clocks: false, ..Rules::ALL };
    assert!(takes(&ahead, &TakeoverEvidence { rules, ..TakeoverEvidence::new(at(94), at(101)) }));
}

#[test]
fn one_look_takes_over_only_what_is_older_than_three_leases_and_half_a_minute() {
    let look = |age: u64| sight(Some(held("a", 5)), 1_000, 1_000 + age);
    let once = TakeoverEvidence { single_read: true, ..TakeoverEvidence::new(at(50), at(50)) };
    for (age, held) in [(14, true), (66, true), (67, false)] {
        assert_eq!(look(age).is_held(&once, ClockResolution::SECOND), held, "{age}");
        assert_eq!(takes(&look(age), &once), !held, "{age}");
        let disagreed = TakeoverEvidence { stamp: Some(own_write(1_020)), ..once };
        assert!(!takes(&look(age), &disagreed), "{age}: the clocks are known to disagree");
        let waiting = TakeoverEvidence { single_read: false, ..once };
        assert!(!takes(&look(age), &waiting), "{age}: a waiter observes");
    }
    assert_eq!((look(14).held_for(), look(67).held_for()), (secs(52), Duration::ZERO));
    assert_eq!(
        (
            look(13).seems_expired(ClockResolution::SECOND),
            look(14).seems_expired(ClockResolution::SECOND)
        ),
        (false, true)
    );
    assert_eq!(taken(&look(67), "b").fence, Some(8));
    let forever = LockObject { lease: None, expires: Duration::MAX, ..held("py", 5) };
    assert!(sight(Some(forever), 1_000, 9_000).is_held(&once, ClockResolution::SECOND));
}

#[test]
fn a_long_lease_has_a_long_margin() {
    let record = LockObject { lease: Some(secs(60)), ..held("a", 5) };
    let sight = sight(Some(record), 100, 100);
    assert!(!takes(&sight, &TakeoverEvidence::new(at(5), at(74))));
    assert!(takes(&sight, &TakeoverEvidence::new(at(5), at(75))));
}

#[test]
fn a_record_of_the_plain_format_lasts_until_two_seconds_after_its_end_counted_from_its_stamp() {
    let record = LockObject { lease: None, fence: None, ..held("py", 160) };
    // `Date` is behind and ahead.
    for now in [50, 170] {
        let sight = sight(Some(record.clone()), 100, now);
        assert!(!takes(&sight, &TakeoverEvidence::new(at(5), at(66))), "{now}");
        assert!(takes(&sight, &TakeoverEvidence::new(at(5), at(67))), "{now}");
    }
    let taken = taken(&sight(Some(record), 100, 311), "b");
    assert_eq!(taken.fence, Some(311_000_000), "nobody had counted");
}

#[test]
fn a_released_lock_with_a_waiter_is_the_waiters_alone() {
    let released =
        held("a", 5).with_waiter("b", secs(110)).release("a", 7, None, secs(100)).unwrap();
    assert_eq!((released.expires, released.fence), (Duration::ZERO, Some(7)));
    let at = |now| sight(Some(released.clone()), 100, now);
    assert_eq!(claim(&at(101), "c"), ObjectDecision::WaiterAhead);
    assert_eq!(taken(&at(101), "b").fence, Some(8));
    assert_eq!(taken(&at(110), "c").fence, Some(8), "a place that nobody keeps is over");
}

#[test]
fn a_held_lock_has_one_place() {
    let record = held("a", 5);
    assert_eq!(claim(&sight(Some(record.clone()), 100, 101), "b"), ObjectDecision::Held);
    let waited = record.with_waiter("b", secs(110));
    let at = |now| sight(Some(waited.clone()), 100, now);
    assert_eq!(claim(&at(101), "b"), ObjectDecision::Held, "its own place");
    assert_eq!(claim(&at(101), "c"), ObjectDecision::WaiterAhead);
    assert_eq!(claim(&at(110), "c"), ObjectDecision::Held, "a place that was given up");
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
    assert_eq!(released.renew("a", 7, LEASE, secs(103)), None, "what was released stays so");
    assert_eq!(released.release("a", 7, None, secs(103)), None);
}

#[test]
fn release_hands_over_to_the_bell_waiter_unless_the_record_names_another() {
    let heir = NextHolder { id: "b".to_owned(), lease: secs(10) };
    let given = held("a", 5).release("a", 7, Some(&heir), secs(100)).unwrap();
    assert_eq!((&*given.owner, given.fence, given.lease), ("b", Some(8), Some(secs(10))));
    assert_eq!(claim(&sight(Some(given.clone()), 100, 100), "b"), ObjectDecision::AlreadyGranted);
    assert_eq!(claim(&sight(Some(given), 100, 100), "c"), ObjectDecision::Held);

    let named = held("a", 5).with_waiter("py", secs(160));
    let released = named.release("a", 7, Some(&heir), secs(100)).unwrap();
    assert_eq!((released.expires, released.waiter), (Duration::ZERO, named.waiter.clone()));
    let later = named.release("a", 7, Some(&heir), secs(160)).unwrap();
    assert_eq!(later.owner, "b", "the place in the record was given up");
    let both =
        held("a", 5).with_waiter("b", secs(160)).release("a", 7, Some(&heir), secs(100)).unwrap();
    assert_eq!((&*both.owner, both.waiter), ("b", None));
}

#[test]
fn a_grant_of_another_counts_from_before_it_was_made() {
    let at = |ms: u64| Time::ZERO + Duration::from_millis(ms);
    let given = |modified, now| sight(Some(held("b", 5)), modified, now);
    let counts = |looks: &WaiterReads, sight: &ObjectRead<()>, ttl, sent| {
        looks.lease_start(sight, ttl, sent, ClockResolution::SECOND)
    };
    let before = sight(Some(LockObject { fence: Some(6), ..held("a", 5) }), 90, 100);
    let mut looks = WaiterReads::new(&sight(None, 0, 90), at(50_000), Rules::ALL);
    looks.note_ungranted(&before, at(60_000));
    let fresh = given(100, 100);
    assert_eq!(counts(&looks, &fresh, LEASE, at(60_250)), LeaseStart::FromConfirm, "no own write");
    // `Date` has no say: right, ahead or behind.
    for now in [100, 120, 80] {
        let date = secs(now);
        let (sent, replied) = (at(59_900), at(60_100));
        looks.record_write(WriteStamp { sent, replied, modified: secs(100), date });
        // Stamped with the same second as our own write: up to a second before it.
        let fresh = given(100, now);
        assert_eq!(
            counts(&looks, &fresh, LEASE, at(60_250)),
            LeaseStart::Since(at(58_900)),
            "{now}"
        );
        // Three seconds after it, one of which may be rounded off, and a sixth for drift; but a look was without it.
        let later = given(103, now + 3);
        assert_eq!(
            counts(&looks, &later, LEASE, at(70_000)),
            LeaseStart::Since(at(60_000)),
            "{now}"
        );
        let mut late = looks.clone();
        late.note_ungranted(&before, at(69_000));
        assert_eq!(
            counts(&late, &later, LEASE, at(70_000)),
            LeaseStart::Since(at(61_400)),
            "{now}"
        );
        // Five seconds before it: the looks since then were shown an old record.
        let old = given(95, now);
        assert_eq!(counts(&looks, &old, LEASE, at(60_250)), LeaseStart::Since(at(52_900)), "{now}");
    }
    assert_eq!(counts(&looks, &fresh, LEASE * 2, at(60_250)), LeaseStart::FromConfirm, "too short");
    let plain = sight(Some(LockObject { lease: None, ..held("b", 5) }), 100, 100);
    assert_eq!(counts(&looks, &plain, LEASE, at(60_250)), LeaseStart::FromConfirm);
    // We have seen a later grant: this one is over.
    looks.note_ungranted(&sight(Some(held("c", 5)), 100, 100), at(60_500));
    looks.note_ungranted(&sight(None, 0, 100), at(60_750));
    assert_eq!(counts(&looks, &fresh, LEASE, at(61_000)), LeaseStart::FromConfirm);
}

/// A store with versions whose clock is told in whole seconds and that shows an old record now and then, and clients that
/// read, think, write and hear of it late or never. Its answers are dated by another clock.
struct ObjectWorld {
    random: Random,
    now: u64,
    /// How far `Date` is ahead of the clock that stamps objects, plus [`FAR`].
    date: u64,
    version: u64,
    modified: u64,
    record: Option<LockObject<()>>,
    /// The record before the last change: its version, and when that was made.
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
    /// Holds until then, on its own count.
    deadline: u64,
    fence: u64,
    holding: bool,
    /// What it read, at which version, and when it had asked.
    read: Option<(ObjectRead<()>, u64, u64)>,
    /// When the last look was sent that found it ungranted.
    ungranted: Option<u64>,
    /// The version that it looks at, and since when.
    seen: Option<(u64, u64)>,
    stamp: Option<WriteStamp>,
}

/// The largest difference between the two clocks, in milliseconds.
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

    fn told(ms: u64) -> Duration {
        secs(ms / 1_000)
    }

    fn sight(&mut self) -> (ObjectRead<()>, u64) {
        let newest = (self.record.clone(), self.version, self.modified);
        let old = self.random.chance(0.1);
        let (record, version, modified) = if old { self.old.clone() } else { newest };
        let (modified, now) = (Self::told(modified), self.dated());
        (ObjectRead { record, modified, now }, version)
    }

    fn dated(&self) -> Duration {
        Self::told(self.now + self.date - FAR)
    }

    /// What a client knows of the version that it looks at, by a look that is answered now.
    fn watch(&mut self, at: usize, version: u64) -> TakeoverEvidence {
        let time = |ms: u64| Time::from_nanos(ms * 1_000_000);
        let (now, client) = (self.now, &mut self.clients[at]);
        let (_, first) =
            *client.seen.take_if(|(seen, _)| *seen == version).get_or_insert((version, now));
        client.seen = Some((version, first));
        TakeoverEvidence { stamp: client.stamp, ..TakeoverEvidence::new(time(first), time(now)) }
    }

    /// Rings the bell, and notes how that was stamped.
    fn ring(&mut self, at: usize) {
        let sent = Time::from_nanos(self.now * 1_000_000);
        self.bell = Some(NextHolder { id: self.clients[at].id.clone(), lease: LEASE });
        let modified = Self::told(self.now);
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

    /// A lease that was counted from `sent` on.
    fn grant(&mut self, at: usize, sent: u64, fence: u64, fresh: bool) {
        let lease = Lease::new(LeaseTerms::new(LEASE)).unwrap();
        let sent = Time::from_nanos(sent * 1_000_000);
        let deadline = lease.deadline(sent, sent).as_nanos() / 1_000_000;
        let client = &mut self.clients[at];
        // A grant past its own deadline is given back, not used.
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

    /// The next claim has another name, as each of ours has.
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
                let (sight, version) = self.sight();
                self.clients[at].read = Some((sight, version, self.now));
                if self.random.chance(0.1) {
                    // Frozen for a while between the look and the write.
                    self.now += self.random.below(40_000);
                }
            }
            Some((sight, version, sent)) => {
                self.clients[at].read = None;
                self.act(at, &sight, version, sent);
            }
        }
        self.check();
    }

    fn act(&mut self, at: usize, sight: &ObjectRead<()>, version: u64, sent: u64) {
        let client = self.clients[at].clone();
        let heard = self.random.chance(0.9);
        let now = Self::told(self.now);
        if client.holding {
            let Some(record) = &sight.record else { return };
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
                if self.swap(version, next) && heard {
                    self.grant(at, sent, client.fence, false);
                }
            }
            return;
        }
        let watch = self.watch(at, version);
        match watched_claim(sight, &client.id, &watch) {
            ObjectDecision::Write(next) => {
                let fence = next.fence.unwrap();
                self.clients[at].ungranted = None;
                if self.swap(version, next) && heard {
                    self.grant(at, sent, fence, true);
                }
            }
            ObjectDecision::AlreadyGranted => {
                if let Some(since) = self.clients[at].ungranted.take() {
                    let fence = sight.record.as_ref().unwrap().fence.unwrap();
                    let time = |ms: u64| Time::from_nanos(ms * 1_000_000);
                    let nothing = ObjectRead::<()> { record: None, ..sight.clone() };
                    let mut looks = WaiterReads::new(&nothing, time(since), Rules::ALL);
                    if let Some(stamp) = watch.stamp {
                        looks.record_write(stamp);
                    }
                    match looks.lease_start(sight, LEASE, time(sent), ClockResolution::SECOND) {
                        LeaseStart::Since(since) => {
                            self.grant(at, since.as_nanos() / 1_000_000, fence, true);
                        }
                        // A write of its own that landed unheard, without a bell before it.
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
        assert!(holders.len() <= 1, "two hold it at {}: {holders:?}", self.now);
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
    assert!(grants > 3_000, "the course is too quiet to show anything: {grants}");
}
