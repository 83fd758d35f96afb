//! Decisions on an object's record, one by one and over random courses of events.

use super::*;
use crate::Random;
use crate::lease::{Lease, LeaseTerms};
use crate::time::Time;

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

/// A store with versions whose clock is told in whole seconds, and clients that read, think, write and hear of it late
/// or never.
struct World {
    random: Random,
    now: u64,
    version: u64,
    modified: u64,
    record: Option<Record<()>>,
    bell: Option<Heir>,
    clients: Vec<Client>,
    last_fence: u64,
    grants: u32,
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
            bell: None,
            clients,
            last_fence: 0,
            grants: 0,
        }
    }

    fn told(ms: u64) -> Duration {
        secs(ms / 1_000)
    }

    fn sight(&self) -> Sight<()> {
        let (modified, now) = (Self::told(self.modified), Self::told(self.now));
        Sight { record: self.record.clone(), modified, now }
    }

    fn swap(&mut self, version: u64, record: Record<()>) -> bool {
        let won = version == self.version;
        if won {
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
        if fresh && !late {
            assert!(fence > self.last_fence, "{fence} after {}", self.last_fence);
            (self.last_fence, self.grants) = (fence, self.grants + 1);
        }
    }

    fn step(&mut self) {
        self.now += self.random.below(900);
        let at = usize::try_from(self.random.below(4)).unwrap();
        let client = self.clients[at].clone();
        if client.holding && self.now >= client.deadline {
            self.clients[at].holding = false;
        }
        match client.read {
            None => {
                self.clients[at].read = Some((self.sight(), self.version, self.now));
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
                self.clients[at].holding = false;
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
                // Handed over: it counts from the last look that showed otherwise.
                if let Some(since) = self.clients[at].ungranted.take() {
                    let fence = sight.record.as_ref().unwrap().fence.unwrap();
                    self.grant(at, since, fence, true);
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
