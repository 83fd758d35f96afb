//! Clients of the store of session locks: each has one lock at most, and loses it with its session.

use std::fmt::Write as _;
use std::rc::Rc;

use tenure::store::{Answer, Claim, Grant, Hold, Mode, Place, Waited};
use tenure::{ErrorKind, Key, PgAdvisoryStore, Store as _};
use tenure_core::lease::{Lease, LeaseTerms};
use tenure_core::{Random, Time};

use crate::locks::{self, LIMIT, TTL, below, sharing};
use crate::plan::Plan;
use crate::referee::{AckedGrant, RunRecord, show};
use crate::sessions::NOTICE_PATIENCE;
use crate::turnstile::Line;

/// Number of keys.
const KEYS: usize = 2;

/// Keys of a run. No other run uses them: these locks belong to the database, not to a schema.
pub(crate) fn keys(plan: &Plan) -> Vec<String> {
    (0..KEYS).map(|nth| format!("lock {nth} of run {}", plan.seed)).collect()
}

/// Options of the store's URL.
pub(crate) fn options(plan: &Plan) -> String {
    // Waits are not bounded by real time: a run has none.
    let mut options = "wait=600000".to_owned();
    if plan.has_short_queue() {
        // With one place in the queue, the third client for a key stands by.
        options.push_str("&queue=1");
    }
    if plan.counts_terms() {
        let _ = write!(options, "&terms={}.terms", plan.schema());
    }
    options
}

pub(crate) struct AdvisoryClient {
    number: usize,
    store: PgAdvisoryStore,
    lease: Lease,
    record: Rc<RunRecord>,
    keys: Vec<String>,
    /// The relay connects to the next server for its clients, as a pooler does.
    pooled: bool,
    claims: u128,
    hold: Option<SessionHold>,
}

struct SessionHold {
    key: String,
    /// Number of the grant in the referee's list.
    grant: usize,
    line: Option<Line>,
    hold: Box<dyn Hold>,
}

impl AdvisoryClient {
    pub(crate) fn new(number: usize, url: &str, plan: &Plan, record: Rc<RunRecord>) -> Self {
        Self {
            number,
            store: PgAdvisoryStore::open(&format!("{url}&{}", options(plan))).unwrap(),
            lease: Lease::new(LeaseTerms::new(TTL)).unwrap(),
            record,
            keys: keys(plan),
            pooled: plan.pooled,
            claims: 0,
            hold: None,
        }
    }

    /// Resolves when the session of the hold has ended, and its loss is recorded.
    pub(crate) async fn session_end(&mut self) {
        match &mut self.hold {
            Some(held) => {
                let event = held.hold.event().await;
                self.lose(&format!("{event:?}"));
            }
            None => std::future::pending().await,
        }
    }

    /// Does one operation that the random numbers choose.
    pub(crate) async fn act(&mut self, random: &mut Random) {
        match (self.hold.take(), random.unit()) {
            (Some(held), ..0.55) => self.renew(held).await,
            (Some(held), ..0.9) => self.release(held).await,
            (Some(held), _) => self.drop_hold(held, "drops its hold"),
            (None, ..0.08) => self.evict(random).await,
            (None, _) => {
                let key = self.keys[[0, 0, 0, 1][below(random, 4)]].clone();
                let mode = if random.chance(0.25) { Mode::Shared } else { Mode::Exclusive };
                self.claims += 1;
                let id = (self.number as u128 + 1) << 32 | self.claims;
                let mut claim = locks::claim(&key, mode, id, &format!("client {}", self.number));
                claim.queue = random.chance(0.5);
                self.claim(claim).await;
            }
        }
    }

    async fn claim(&mut self, claim: Claim) {
        let waits = if claim.queue { ", waits" } else { "" };
        self.say(&format!("claims {:?}{waits}", claim.mode), claim.key.as_str());
        let sent = self.record.now();
        match self.store.claim(&claim, LIMIT).await {
            Ok(Answer::Granted(grant)) => self.granted(&claim, grant, sent, true),
            Ok(Answer::Contended(_)) => self.say("is refused", claim.key.as_str()),
            Ok(Answer::Queued(place)) => self.wait(&claim, place).await,
            Ok(other) => self.record.violate(format!("unknown answer {other:?}")),
            Err(error) => self.unanswered(&error),
        }
    }

    /// Waits for a lock. A grant that comes out of a wait counts from a renewal.
    async fn wait(&mut self, claim: &Claim, mut place: Box<dyn Place>) {
        let mut grant = loop {
            match place.wait(LIMIT).await {
                Ok(Waited::Granted(grant)) => break grant,
                Ok(Waited::StillQueued { .. }) => {}
                Ok(Waited::Gone) => return self.say("lost its place", claim.key.as_str()),
                Ok(other) => return self.record.violate(format!("unknown answer {other:?}")),
                Err(error) => return self.unanswered(&error),
            }
        };
        self.say("confirms", claim.key.as_str());
        let sent = self.record.now();
        match grant.hold.renew(TTL, LIMIT).await {
            Ok(_) => self.granted(claim, grant, sent, false),
            // The session ended after the grant, and the client has not noticed it: behind a pooler nothing tells it.
            Err(error)
                if error.kind() == ErrorKind::NotHeld && self.record.faults_of(self.number) > 0 =>
            {
                self.say("has lost", claim.key.as_str());
            }
            Err(error) => self.unanswered(&error),
        }
    }

    fn granted(&mut self, claim: &Claim, grant: Grant, sent: Time, in_order: bool) {
        let (key, line) = (claim.key.as_str().to_owned(), self.record.line_of(self.number));
        let now = self.record.now();
        let acked = AckedGrant {
            client: self.number,
            key: key.clone(),
            sharing: sharing(claim.mode),
            claim: claim.id,
            token: grant.token,
            execution: self.record.execution_of(self.number),
            in_order,
            line,
            job: None,
            deadline: self.lease.deadline(sent, now),
        };
        let in_time = now < acked.deadline;
        self.say("holds", &format!("{key}, token {}", show(grant.token)));
        let number = self.record.granted(acked);
        let held = SessionHold { key, grant: number, line, hold: grant.hold };
        if in_time {
            self.hold = Some(held);
        } else {
            self.drop_hold(held, "was too late");
        }
    }

    async fn renew(&mut self, mut held: SessionHold) {
        let grant = held.grant;
        self.say("renews", &held.key);
        let sent = self.record.now();
        let renewed = held.hold.renew(TTL, LIMIT).await;
        let now = self.record.now();
        let valid = self.record.referee().is_valid(grant, now);
        match renewed {
            Ok(_) => {
                let deadline = self.lease.deadline(sent, now);
                let execution = self.record.execution_of(self.number);
                self.record.referee().renewed(grant, deadline, execution, now);
                if valid {
                    self.say("has renewed", &held.key);
                    self.hold = Some(held);
                } else {
                    self.drop_hold(held, "was too late");
                }
            }
            Err(error) if matches!(error.kind(), ErrorKind::NotHeld | ErrorKind::Lost) => {
                self.drop_hold(held, "has lost");
                // Without a fault of its connection, the session is there.
                if valid && !self.record.referee().is_without_session(grant) {
                    let text = format!("client {}: a valid hold was refused: {error}", self.number);
                    self.record.violate(text);
                }
            }
            Err(error) => {
                self.unanswered(&error);
                self.hold = Some(held);
                // The connection has ended, and the store must say so at once. If it does not, the client goes on.
                let noticed = tokio::time::timeout(NOTICE_PATIENCE, self.session_end()).await;
                if noticed.is_err() {
                    self.say("notices no end of its session", "");
                }
            }
        }
    }

    async fn release(&mut self, mut held: SessionHold) {
        self.say("releases", &held.key);
        // From here on the client does not rely on the lock, and another client may get it at any moment.
        self.record.referee().end(held.grant);
        match held.hold.release(LIMIT).await {
            Ok(()) => self.say("has released", &held.key),
            Err(error) if matches!(error.kind(), ErrorKind::NotHeld | ErrorKind::Lost) => {
                self.say("had lost", &held.key);
            }
            Err(error) => self.unanswered(&error),
        }
    }

    /// Drops a hold, which closes its connection.
    fn drop_hold(&mut self, held: SessionHold, why: &str) {
        self.say(why, &held.key);
        self.record.referee().end(held.grant);
        held.line.into_iter().for_each(|line| self.record.close(line));
        drop(held);
    }

    fn lose(&mut self, event: &str) {
        if let Some(held) = self.hold.take() {
            self.say("has lost its session", event);
            self.record.referee().end(held.grant);
        }
    }

    /// Ends the session of another client's hold, as an operator does.
    async fn evict(&mut self, random: &mut Random) {
        let key = self.keys[below(random, KEYS)].clone();
        let seen = self.record.referee().valid(&key, self.record.now());
        let Some((_, token)) = seen.first().copied() else { return };
        self.say("breaks", &format!("{key}, token {}", show(token)));
        match self.store.evict(&Key::new(&key).unwrap(), token, "test").await {
            Ok(()) => self.say("has broken", &key),
            Err(error) if error.kind() == ErrorKind::NotHeld => self.say("broke nothing", &key),
            Err(error) => self.unanswered(&error),
        }
    }

    fn unanswered(&self, error: &tenure::Error) {
        // A pooler in transaction mode is refused as soon as it shows.
        if self.pooled && error.kind() == ErrorKind::Misconfigured {
            self.say("refuses the pooler", "");
        } else {
            self.record.judge_error(self.number, error);
        }
    }

    fn say(&self, what: &str, effect: &str) {
        self.record.note_client(self.number, what, effect);
    }
}
