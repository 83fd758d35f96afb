//! Clients of the lease-row store: each keeps the rules of a holder on its own clock.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tenure::store::{Answer, Claim, Hold, Identity, Mode};
use tenure::{ErrorKind, Key, PgLeaseStore, Store as _};
use tenure_core::Random;
use tenure_core::lease::{Lease, LeaseTerms};

use crate::referee::{AckedGrant, RunRecord, Sharing, show};

/// Ttl of every hold: much longer than a run takes. Holds expire because the scheduler skips time.
pub(crate) const TTL: Duration = Duration::from_secs(600);
/// Time limit of a request, on the real clock.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);
/// Slots of the semaphore.
const SLOTS: u32 = 2;

/// Keys, and the modes in which they are held.
const KEYS: &[(&str, &[Mode])] = &[
    ("lock", &[Mode::Exclusive]),
    ("mixed", &[Mode::Exclusive, Mode::Shared, Mode::Shared]),
    ("slots", &[Mode::Slot { limit: SLOTS }]),
];

pub(crate) fn keys() -> impl Iterator<Item = &'static str> {
    KEYS.iter().map(|(key, _)| *key)
}

pub(crate) fn claim(key: &str, mode: Mode, id: u128, client: &str) -> Claim {
    let by = Arc::new(Identity { id: client.to_owned(), ..Identity::default() });
    {
        let mut claim = Claim::new(id, Key::new(key).unwrap(), mode, TTL, by);
        claim.queue = false;
        claim
    }
}

/// A mode in which the key may be held, for a claim after the run.
pub(crate) fn mode_of(key: &str) -> Mode {
    KEYS.iter().find(|(name, _)| *name == key).map_or(Mode::Exclusive, |(_, modes)| modes[0])
}

pub(crate) struct LockClient {
    number: usize,
    store: PgLeaseStore,
    lease: Lease,
    record: Rc<RunRecord>,
    claims: u128,
    /// A claim without a clear answer, and the number of its attempts.
    unclear: Option<(Claim, usize)>,
    holds: Vec<KeptHold>,
}

struct KeptHold {
    key: String,
    /// Number of the grant in the referee's list.
    grant: usize,
    hold: Box<dyn Hold>,
}

impl LockClient {
    pub(crate) fn new(number: usize, url: &str, record: Rc<RunRecord>) -> Self {
        let lease = Lease::new(LeaseTerms::new(TTL)).unwrap();
        let store = PgLeaseStore::open(url).unwrap();
        Self { number, store, lease, record, claims: 0, unclear: None, holds: Vec::new() }
    }

    /// Does one operation that the random numbers choose.
    pub(crate) async fn act(&mut self, random: &mut Random) {
        if let Some((claim, attempts)) = self.unclear.take() {
            if random.chance(0.7) {
                return self.claim(claim, attempts + 1).await;
            }
            self.say("abandons its claim", claim.key.as_str());
        }
        let draw = random.unit();
        if self.holds.is_empty() || draw < 0.3 {
            let (key, modes) = KEYS[[0, 0, 0, 1, 1, 2][below(random, 6)]];
            self.claims += 1;
            let id = (self.number as u128 + 1) << 32 | self.claims;
            let mode = modes[below(random, modes.len())];
            let claim = claim(key, mode, id, &format!("client {}", self.number));
            return self.claim(claim, 1).await;
        }
        let chosen = below(random, self.holds.len());
        match draw {
            ..0.62 => self.renew(chosen).await,
            ..0.92 => self.release(chosen).await,
            ..0.96 => self.evict(random).await,
            _ => {
                let KeptHold { key, grant, .. } = self.holds.swap_remove(chosen);
                self.record.referee().end(grant);
                self.say("drops its hold", &key);
            }
        }
    }

    async fn claim(&mut self, claim: Claim, attempts: usize) {
        let what = format!("claims {}, {:?}", claim.key, claim.mode);
        self.say(&what, &format!("claim {:x}", claim.id));
        let sent = self.record.now();
        let answer = self.store.claim(&claim, LIMIT).await;
        let key = claim.key.as_str();
        match answer {
            Ok(Answer::Granted(grant)) => {
                let now = self.record.now();
                let acked = AckedGrant {
                    client: self.number,
                    key: key.to_owned(),
                    sharing: sharing(claim.mode),
                    claim: claim.id,
                    token: grant.token,
                    execution: self.record.execution_of(self.number),
                    in_order: attempts == 1,
                    line: None,
                    job: None,
                    deadline: self.lease.deadline(sent, now),
                };
                self.say("holds", &format!("{key}, token {}", show(grant.token)));
                let number = self.record.granted(acked);
                // An earlier attempt of the same claim may have been granted, too.
                self.holds.push(KeptHold { key: key.to_owned(), grant: number, hold: grant.hold });
            }
            Ok(Answer::Contended(_)) => self.say("is refused", key),
            Ok(other) => {
                self.record.violate(format!("a store without a queue answered {other:?}"));
            }
            Err(error) => {
                self.record.judge_error(self.number, &error);
                if error.kind() == ErrorKind::Unknown {
                    self.unclear = Some((claim, attempts));
                }
            }
        }
    }

    async fn renew(&mut self, chosen: usize) {
        let KeptHold { key, grant, hold } = &mut self.holds[chosen];
        let (record, number, grant) = (Rc::clone(&self.record), self.number, *grant);
        record.note_client(number, "renews", key);
        let sent = record.now();
        let renewed = hold.renew(TTL, LIMIT).await;
        let now = record.now();
        let valid = record.referee().is_valid(grant, now);
        match renewed {
            Ok(_) => {
                let deadline = self.lease.deadline(sent, now);
                let execution = record.execution_of(number);
                record.referee().renewed(grant, deadline, execution, now);
                record.note_client(number, if valid { "has renewed" } else { "was too late" }, key);
            }
            Err(error) if matches!(error.kind(), ErrorKind::NotHeld | ErrorKind::Lost) => {
                record.note_client(number, "has lost", key);
                if valid {
                    record.violate(format!("client {number}: a valid hold of {key} was refused"));
                }
                record.referee().end(grant);
                self.holds.swap_remove(chosen);
            }
            Err(error) => self.unanswered(&error),
        }
    }

    async fn release(&mut self, chosen: usize) {
        let KeptHold { key, grant, mut hold } = self.holds.swap_remove(chosen);
        self.say("releases", &key);
        // From here on the client does not rely on the hold, and another client may get it at any moment.
        let was_valid = self.record.referee().is_valid(grant, self.record.now());
        self.record.referee().end(grant);
        for attempt in 0..3 {
            match hold.release(LIMIT).await {
                Ok(()) => return self.say("has released", &key),
                Err(error) if matches!(error.kind(), ErrorKind::NotHeld | ErrorKind::Lost) => {
                    self.say("had lost", &key);
                    let now = self.record.now();
                    if was_valid && attempt == 0 && self.record.referee().is_due(grant, now) {
                        let text =
                            format!("client {}: a valid hold of {key} was gone", self.number);
                        self.record.violate(text);
                    }
                    return;
                }
                Err(error) => self.unanswered(&error),
            }
        }
    }

    /// Breaks a hold that this client sees: from then on nothing is promised about it.
    async fn evict(&mut self, random: &mut Random) {
        let key = KEYS[below(random, 2)].0;
        let seen = self.record.referee().valid(key, self.record.now());
        let Some((grant, token)) = seen.first().copied() else { return };
        self.say("breaks", &format!("{key}, token {}", show(token)));
        self.record.referee().end(grant);
        let broken = self.store.evict(&Key::new(key).unwrap(), token, "test").await;
        match broken {
            Ok(()) => self.say("has broken", key),
            Err(error) if error.kind() == ErrorKind::NotHeld => self.say("broke nothing", key),
            Err(error) => self.unanswered(&error),
        }
    }

    fn unanswered(&self, error: &tenure::Error) {
        self.record.judge_error(self.number, error);
    }

    fn say(&self, what: &str, effect: &str) {
        self.record.note_client(self.number, what, effect);
    }
}

pub(crate) fn sharing(mode: Mode) -> Sharing {
    match mode {
        Mode::Exclusive => Sharing::Alone,
        Mode::Shared => Sharing::WithOthers { most: usize::MAX },
        Mode::Slot { limit } => Sharing::WithOthers { most: limit as usize },
    }
}

pub(crate) fn below(random: &mut Random, bound: usize) -> usize {
    usize::try_from(random.below(bound as u64)).unwrap()
}
