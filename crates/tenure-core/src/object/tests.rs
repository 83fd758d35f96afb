//! Decisions on an object's record, one by one and over random courses of events.

use super::*;
use crate::Random;
use crate::lease::{Lease, LeaseTerms};

const LEASE: Duration = Duration::from_secs(12);

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn held(owner: &str, expires: u64) -> Record<()> {
    Record {
        owner: owner.to_owned(),
        expires: secs(expires),
        waiter: None,
        fence: Some(7),
        lease: Some(LEASE),
        more: (),
    }
}

fn sight(record: Option<Record<()>>, modified: u64, now: u64) -> Sight<()> {
    Sight { record, modified: secs(modified), now: secs(now) }
}

fn claim(sight: &Sight<()>, id: &str) -> Claimed<()> {
    sight.claim(id, LEASE, || (), Grain::SECOND)
}

fn taken(sight: &Sight<()>, id: &str) -> Record<()> {
    match claim(sight, id) {
        Claimed::Take(record) => record,
        other => panic!("not granted: {other:?}"),
    }
}

#[test]
fn nothing_there_is_taken_with_the_stores_time_as_the_first_number() {
    let record = taken(&sight(None, 0, 1_000), "a");
    assert_eq!((&*record.owner, record.expires), ("a", secs(1_012)));
    assert_eq!((record.fence, record.lease), (Some(1_000_000_000), Some(LEASE)));
}

#[test]
fn a_lease_counts_from_the_last_change_by_the_stores_clock_with_slack() {
    // What the owner wrote as its end says nothing, however far off it is.
    let record = held("a", 5);
    let last = 100 + 12 + 2;
    for (now, free) in [(100, false), (112, false), (last - 1, false), (last, true)] {
        let claimed = claim(&sight(Some(record.clone()), 100, now), "b");
        assert_eq!(matches!(claimed, Claimed::Take(_)), free, "at {now}: {claimed:?}");
    }
    assert_eq!(taken(&sight(Some(record), 100, last), "b").fence, Some(8));
}

#[test]
fn a_long_lease_has_a_long_margin() {
    let record = Record { lease: Some(secs(60)), ..held("a", 5) };
    let at = |now| sight(Some(record.clone()), 100, now).held_until(Grain::SECOND);
    assert_eq!(at(169), Some(secs(170)));
    assert_eq!(at(170), None);
}

#[test]
fn a_record_of_the_plain_format_lasts_until_two_seconds_after_its_end() {
    let record = Record { lease: None, fence: None, ..held("py", 160) };
    assert_eq!(claim(&sight(Some(record.clone()), 100, 161), "b"), Claimed::Held);
    let taken = taken(&sight(Some(record), 100, 162), "b");
    assert_eq!(taken.fence, Some(162_000_000), "nobody had counted");
}

#[test]
fn a_released_lock_with_a_waiter_is_the_waiters_alone() {
    let released = held("a", 5).wait("b", secs(110)).release("a", 7, None, secs(100)).unwrap();
    assert_eq!((released.expires, released.fence), (Duration::ZERO, Some(7)));
    let at = |now| sight(Some(released.clone()), 100, now);
    assert_eq!(claim(&at(101), "c"), Claimed::Awaited);
    assert_eq!(taken(&at(101), "b").fence, Some(8));
    assert_eq!(taken(&at(110), "c").fence, Some(8), "a place that nobody keeps is over");
}

#[test]
fn a_held_lock_has_one_place() {
    let record = held("a", 5);
    assert_eq!(claim(&sight(Some(record.clone()), 100, 101), "b"), Claimed::Held);
    let waited = record.wait("b", secs(110));
    let at = |now| sight(Some(waited.clone()), 100, now);
    assert_eq!(claim(&at(101), "b"), Claimed::Held, "its own place");
    assert_eq!(claim(&at(101), "c"), Claimed::Awaited);
    assert_eq!(claim(&at(110), "c"), Claimed::Held, "a place that was given up");
    assert_eq!(waited.leave("c"), None);
    assert_eq!(waited.leave("b"), Some(record));
}

#[test]
fn a_renewal_keeps_the_mark_of_a_waiter_and_never_steals() {
    let stripped = Record { fence: None, lease: None, ..held("a", 5).wait("py", secs(160)) };
    let renewed = stripped.renew("a", 7, LEASE, secs(102)).unwrap();
    assert_eq!(renewed.waiter, stripped.waiter);
    assert_eq!((renewed.fence, renewed.lease, renewed.expires), (Some(7), Some(LEASE), secs(114)));
    assert_eq!(stripped.renew("b", 7, LEASE, secs(102)), None);
    let released = stripped.release("a", 7, None, secs(102)).unwrap();
    assert_eq!(released.renew("a", 7, LEASE, secs(103)), None, "what was released stays so");
    assert_eq!(released.release("a", 7, None, secs(103)), None);
}

#[test]
fn a_release_hands_over_to_who_rings_unless_the_record_names_another() {
    let heir = Heir { id: "b".to_owned(), lease: secs(10) };
    let given = held("a", 5).release("a", 7, Some(&heir), secs(100)).unwrap();
    assert_eq!((&*given.owner, given.fence, given.lease), ("b", Some(8), Some(secs(10))));
    assert_eq!(claim(&sight(Some(given.clone()), 100, 100), "b"), Claimed::Before);
    assert_eq!(claim(&sight(Some(given), 100, 100), "c"), Claimed::Held);

    let named = held("a", 5).wait("py", secs(160));
    let released = named.release("a", 7, Some(&heir), secs(100)).unwrap();
    assert_eq!((released.expires, released.waiter), (Duration::ZERO, named.waiter.clone()));
    let later = named.release("a", 7, Some(&heir), secs(160)).unwrap();
    assert_eq!(later.owner, "b", "the place in the record was given up");
    let both = held("a", 5).wait("b", secs(160)).release("a", 7, Some(&heir), secs(100)).unwrap();
    assert_eq!((&*both.owner, both.waiter), ("b", None));
}

#[test]
fn a_grant_of_another_counts_from_before_it_was_made() {
    let at = |ms: u64| Time::ZERO + Duration::from_millis(ms);
    let given = |modified, now| sight(Some(held("b", 5)), modified, now);
    let counts =
        |looks: &Looks, sight: &Sight<()>, ttl, sent| looks.counts(sight, ttl, sent, Grain::SECOND);
    let before = sight(Some(Record { fence: Some(6), ..held("a", 5) }), 90, 100);
    let mut looks = Looks::new(&sight(None, 0, 90), at(50_000), Rules::ALL);
    looks.ungranted(&before, at(60_000));
    // Changed in the second of the answer: up to a second ago.
    let fresh = given(100, 100);
    assert_eq!(counts(&looks, &fresh, LEASE, at(60_250)), Counts::Since(at(59_250)));
    // A look that was late: the last one without it is the earlier bound.
    assert_eq!(counts(&looks, &fresh, LEASE, at(70_000)), Counts::Since(at(60_000)));
    // The last look was shown an old record: the store's own times tell.
    assert_eq!(counts(&looks, &given(95, 100), LEASE, at(60_250)), Counts::Since(at(54_250)));
    assert_eq!(counts(&looks, &fresh, LEASE * 2, at(60_250)), Counts::FromConfirm, "too short");
    let plain = sight(Some(Record { lease: None, ..held("b", 5) }), 100, 100);
    assert_eq!(counts(&looks, &plain, LEASE, at(60_250)), Counts::FromConfirm);
    // We have seen a later grant: this one is over.
    looks.ungranted(&sight(Some(held("c", 5)), 100, 100), at(60_500));
    looks.ungranted(&sight(None, 0, 100), at(60_750));
    assert_eq!(counts(&looks, &fresh, LEASE, at(61_000)), Counts::FromConfirm);
}

/// A store with versions whose clock is told in whole seconds and that shows an old record now and then, and clients that
/// read, think, write and hear of it late or never.
struct World {
    random: Random,
    now: u64,
    version: u64,
    modified: u64,
    record: Option<Record<()>>,
    /// The record before the last change: its version, and when that was made.
    old: (Option<Record<()>>, u64, u64),
    bell: Option<Heir>,
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
    read: Option<(Sight<()>, u64, u64)>,
    /// When the last look was sent that found it ungranted.
    ungranted: Option<u64>,
}

impl World {
    fn new(seed: u64) -> Self {
        let client = |n| Client { id: format!("c{n}"), ..Client::default() };
        let clients = (0..4).map(client).collect();
        Self {
            random: Random::new(seed),
            now: 1_000_000,
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

    fn sight(&mut self) -> (Sight<()>, u64) {
        let newest = (self.record.clone(), self.version, self.modified);
        let old = self.random.chance(0.1);
        let (record, version, modified) = if old { self.old.clone() } else { newest };
        let (modified, now) = (Self::told(modified), Self::told(self.now));
        (Sight { record, modified, now }, version)
    }

    fn swap(&mut self, version: u64, record: Record<()>) -> bool {
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

    fn act(&mut self, at: usize, sight: &Sight<()>, version: u64, sent: u64) {
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
        match claim(sight, &client.id) {
            Claimed::Take(next) => {
                let fence = next.fence.unwrap();
                self.clients[at].ungranted = None;
                if self.swap(version, next) && heard {
                    self.grant(at, sent, fence, true);
                }
            }
            Claimed::Before => {
                if let Some(since) = self.clients[at].ungranted.take() {
                    let fence = sight.record.as_ref().unwrap().fence.unwrap();
                    let time = |ms: u64| Time::from_nanos(ms * 1_000_000);
                    let nothing = Sight::<()> { record: None, ..sight.clone() };
                    let looks = Looks::new(&nothing, time(since), Rules::ALL);
                    match looks.counts(sight, LEASE, time(sent), Grain::SECOND) {
                        Counts::Since(since) => {
                            self.grant(at, since.as_nanos() / 1_000_000, fence, true);
                        }
                        other => panic!("a whole lease was handed over: {other:?}"),
                    }
                }
            }
            Claimed::Held => {
                if self.bell.is_none() {
                    self.bell = Some(Heir { id: client.id.clone(), lease: LEASE });
                }
                self.clients[at].ungranted = Some(sent);
            }
            Claimed::Awaited => {}
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
        let mut world = World::new(seed);
        for _ in 0..600 {
            world.step();
        }
        grants += world.grants;
    }
    assert!(grants > 3_000, "the course is too quiet to show anything: {grants}");
}
