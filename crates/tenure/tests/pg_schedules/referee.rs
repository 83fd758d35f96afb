//! Judgement of a run from outside: by the answers that clients got, never by rows.

use std::cell::{Cell, RefCell, RefMut};
use std::collections::BTreeMap;
use std::time::Duration;

use tenure::jobs::Job;
use tenure::{Clock, ErrorKind, FencingToken};
use tenure_core::Time;

use crate::turnstile::Line;

/// Facts that all parts of a run share. One thread runs them all.
pub(crate) struct RunRecord {
    clock: Clock,
    /// Time that was skipped: rows were aged by it, and deadlines of clients come earlier by it.
    skipped: Cell<Duration>,
    /// Instants of the real clock at which time was skipped, and how much of it.
    skips: RefCell<Vec<(Time, Duration)>>,
    timeline: RefCell<Vec<String>>,
    /// Number of statements that the server executed so far.
    executed: Cell<u64>,
    /// By client: line and number of the execution whose reply the client got last.
    answered: RefCell<BTreeMap<usize, (Line, u64)>>,
    /// Connections that their clients close.
    closing: RefCell<Vec<Line>>,
    /// By client: number of faults that its connections had.
    faults: RefCell<BTreeMap<usize, u64>>,
    referee: RefCell<Referee>,
}

impl RunRecord {
    pub(crate) fn new() -> Self {
        Self {
            clock: Clock::system(),
            skipped: Cell::default(),
            skips: RefCell::default(),
            timeline: RefCell::default(),
            executed: Cell::default(),
            answered: RefCell::default(),
            closing: RefCell::default(),
            faults: RefCell::default(),
            referee: RefCell::default(),
        }
    }

    /// Instant on the clock of all clients.
    pub(crate) fn now(&self) -> Time {
        self.clock.now() + self.skipped.get()
    }

    pub(crate) fn skip(&self, span: Duration) {
        self.skips.borrow_mut().push((self.clock.now(), span));
        self.skipped.set(self.skipped.get() + span);
    }

    /// Deadline of a job on the clock of all clients. A worker counts on the real clock, from the instant at which its
    /// last confirmed request was sent. Time that was skipped since then ends the lease earlier.
    fn deadline_of(&self, job: &Job, lease: Duration) -> Time {
        if job.remaining().is_zero() {
            return Time::ZERO;
        }
        let deadline = self.clock.now() + job.remaining();
        let sent = deadline - lease;
        let skips = self.skips.borrow();
        let before = skips.iter().filter(|(at, _)| *at < sent).map(|(_, span)| *span);
        deadline + before.sum::<Duration>()
    }

    /// Takes the deadlines of jobs from their guards.
    fn refresh(&self, referee: &mut Referee) {
        for grant in &mut referee.grants {
            if let Some((job, lease)) = &grant.job {
                grant.deadline = self.deadline_of(job, *lease);
            }
        }
    }

    /// Adds a line to the timeline.
    pub(crate) fn note(&self, subject: &str, what: &str, effect: &str) {
        let line = format!("{subject:<9} {what:<30} {effect}");
        self.timeline.borrow_mut().push(line.trim_end().to_owned());
    }

    pub(crate) fn note_client(&self, client: usize, what: &str, effect: &str) {
        self.note(&format!("client {client}"), what, effect);
    }

    pub(crate) fn timeline(&self) -> String {
        let lines = self.timeline.borrow();
        let numbered =
            lines.iter().enumerate().map(|(nth, line)| format!("{:>5}  {line}", nth + 1));
        numbered.collect::<Vec<_>>().join("\n")
    }

    /// Counts an execution, and returns its number.
    pub(crate) fn count_execution(&self) -> u64 {
        self.executed.set(self.executed.get() + 1);
        self.executed.get()
    }

    pub(crate) fn executions(&self) -> u64 {
        self.executed.get()
    }

    pub(crate) fn deliver(&self, line: Line, execution: u64) {
        self.answered.borrow_mut().insert(line.0, (line, execution));
    }

    /// Number of the execution that a client's last reply comes from.
    pub(crate) fn execution_of(&self, client: usize) -> u64 {
        self.answered.borrow().get(&client).map(|(_, execution)| *execution).unwrap_or_default()
    }

    /// Connection that a client's last reply came on.
    pub(crate) fn line_of(&self, client: usize) -> Option<Line> {
        self.answered.borrow().get(&client).map(|(line, _)| *line)
    }

    /// Records that a client closes a connection.
    pub(crate) fn close(&self, line: Line) {
        self.closing.borrow_mut().push(line);
    }

    /// Takes the connections that clients have closed.
    pub(crate) fn closing(&self) -> Vec<Line> {
        self.closing.take()
    }

    /// Counts a fault of a client's connection.
    pub(crate) fn disturb(&self, client: usize) {
        *self.faults.borrow_mut().entry(client).or_default() += 1;
    }

    /// Number of faults that a client's connections had so far.
    pub(crate) fn faults_of(&self, client: usize) -> u64 {
        self.faults.borrow().get(&client).copied().unwrap_or_default()
    }

    pub(crate) fn referee(&self) -> RefMut<'_, Referee> {
        let mut referee = self.referee.borrow_mut();
        self.refresh(&mut referee);
        referee
    }

    /// Judges a grant, and returns its number.
    pub(crate) fn granted(&self, mut grant: AckedGrant) -> usize {
        if let Some((job, lease)) = &grant.job {
            grant.deadline = self.deadline_of(job, *lease);
        }
        let now = self.now();
        self.referee().granted(grant, now)
    }

    /// Judges an error of a request. Only a fault of the client's connections explains a request without an answer.
    pub(crate) fn judge_error(&self, client: usize, error: &tenure::Error) {
        self.note_client(client, "got no answer", &format!("{:?}", error.kind()));
        if !matches!(error.kind(), ErrorKind::Unknown | ErrorKind::Unavailable) {
            self.violate(format!("client {client}: {error}"));
        } else if self.faults_of(client) == 0 {
            self.violate(format!("client {client} had no fault, and got no answer: {error}"));
        }
    }

    /// Number of grants so far.
    pub(crate) fn grants(&self) -> usize {
        self.referee().grants.len()
    }

    /// Records a broken promise.
    pub(crate) fn violate(&self, what: impl Into<String>) {
        self.referee().violations.push(what.into());
    }

    pub(crate) fn violations(&self) -> Vec<String> {
        self.referee().violations.clone()
    }
}

/// Sharing of a key among holders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sharing {
    Alone,
    WithOthers { most: usize },
}

/// An acknowledged grant.
#[derive(Clone, Debug)]
pub(crate) struct AckedGrant {
    pub(crate) client: usize,
    pub(crate) key: String,
    pub(crate) sharing: Sharing,
    /// Identity of the claim: the same for all its attempts.
    pub(crate) claim: u128,
    pub(crate) token: FencingToken,
    /// Number of the execution that granted.
    pub(crate) execution: u64,
    /// False if an earlier attempt may have granted, or if grants of several clients were answered in any order.
    pub(crate) in_order: bool,
    /// Connection whose session has the lock, if it ends with that session.
    pub(crate) line: Option<Line>,
    /// The claimed job and the part of its lease that its worker relies on. Its guard knows the deadline.
    pub(crate) job: Option<(Job, Duration)>,
    pub(crate) deadline: Time,
}

#[derive(Default)]
pub(crate) struct Referee {
    grants: Vec<AckedGrant>,
    /// Indices of grants whose holder may use them until their deadline.
    held: Vec<usize>,
    /// Indices of grants whose session has ended, and the number of executions until then.
    without_session: BTreeMap<usize, u64>,
    /// Sessions up to this execution ended with their server, and no client noticed.
    silent_until: u64,
    /// Acknowledged writes up to this execution may have been lost with a standby that was cut off.
    lost_until: u64,
    violations: Vec<String>,
    pub(crate) completed: BTreeMap<String, FencingToken>,
    pub(crate) enqueued: Vec<String>,
}

impl Referee {
    fn granted(&mut self, grant: AckedGrant, now: Time) -> usize {
        for other in self.grants.iter().filter(|other| other.key == grant.key) {
            let same_claim = other.claim == grant.claim;
            // A repeated claim of a shared hold gets its first token again, though other clients were granted since.
            let unordered = |grant: &AckedGrant| !grant.in_order && grant.sharing != Sharing::Alone;
            let wrong = if other.token == grant.token {
                !same_claim
            } else if unordered(other) || unordered(&grant) {
                false
            } else {
                (other.token < grant.token) != (other.execution < grant.execution)
            };
            if wrong {
                let text = format!(
                    "tokens of {} do not grow: client {} got {}, then client {} got {}",
                    grant.key,
                    other.client,
                    show(other.token),
                    grant.client,
                    show(grant.token)
                );
                self.violations.push(text);
            }
        }
        let number = self.grants.len();
        let silent = grant.line.is_some() && grant.execution <= self.silent_until;
        if silent {
            self.without_session.insert(number, self.silent_until);
        }
        let durable = !self.may_be_lost(grant.execution) && !silent;
        // A grant that was acknowledged twice is one hold.
        self.held.retain(|held| self.grants[*held].claim != grant.claim);
        let valid = now < grant.deadline && durable;
        self.grants.push(grant);
        if valid {
            self.held.push(number);
            self.judge_overlap(number, now);
        }
        number
    }

    /// Judges a renewal that was granted by this execution.
    pub(crate) fn renewed(&mut self, number: usize, deadline: Time, execution: u64, now: Time) {
        self.judge_renewal(number, execution);
        if self.without_session.get(&number).is_some_and(|until| *until < execution) {
            let AckedGrant { client, key, .. } = &self.grants[number];
            let text = format!("client {client} renewed {key}, whose session had ended");
            self.violations.push(text);
        }
        // A hold whose deadline has passed stays lost.
        if self.is_valid(number, now) {
            self.grants[number].deadline = deadline;
            self.judge_overlap(number, now);
        } else {
            self.end(number);
        }
    }

    /// Ends a hold: its client no longer relies on it.
    pub(crate) fn end(&mut self, number: usize) {
        self.held.retain(|held| *held != number);
    }

    pub(crate) fn is_valid(&self, number: usize, now: Time) -> bool {
        self.held.contains(&number) && now < self.grants[number].deadline
    }

    /// True if the store must still have the hold of this grant unless its client released it.
    pub(crate) fn is_due(&self, number: usize, now: Time) -> bool {
        let grant = &self.grants[number];
        now < grant.deadline && !self.may_be_lost(grant.execution)
    }

    /// True if a client has holds, be they valid or not.
    pub(crate) fn holds(&self, client: usize) -> bool {
        self.held.iter().any(|number| self.grants[*number].client == client)
    }

    /// True if a client relies on a hold now.
    pub(crate) fn relies(&self, client: usize, now: Time) -> bool {
        let mut own = self.held.iter().filter(|number| self.grants[**number].client == client);
        own.any(|number| self.is_valid(*number, now))
    }

    /// Connections whose sessions hold a lock that a client relies on.
    pub(crate) fn lines(&self) -> Vec<Line> {
        let with_session = self.held.iter().filter(|number| !self.is_without_session(**number));
        with_session.filter_map(|number| self.grants[*number].line).collect()
    }

    /// True if a client relies on a lock of these connections, though its session may have ended.
    pub(crate) fn relies_on(&self, lines: &[Line]) -> bool {
        let of_lines =
            |number: &usize| self.grants[*number].line.is_some_and(|line| lines.contains(&line));
        self.held.iter().any(of_lines)
    }

    /// Records that the sessions of these connections have ended.
    pub(crate) fn end_sessions(&mut self, lines: &[Line], executions: u64) {
        for (number, grant) in self.grants.iter().enumerate() {
            if grant.line.is_some_and(|line| lines.contains(&line)) {
                self.without_session.entry(number).or_insert(executions);
            }
        }
    }

    pub(crate) fn is_without_session(&self, number: usize) -> bool {
        self.without_session.contains_key(&number)
    }

    /// No longer counts holds of sessions, whose clients cannot notice that the sessions ended. A reply from before that
    /// end may still be on its way.
    pub(crate) fn forgive_silence(&mut self, executions: u64) {
        self.silent_until = executions;
        self.held.retain(|number| self.grants[*number].line.is_none());
    }

    /// Judges all jobs again: heartbeats move their deadlines.
    pub(crate) fn judge_jobs(&mut self, now: Time) {
        for number in self.held.clone() {
            // Each pair is judged from both sides: the first finding is enough.
            let judged = self.violations.is_empty() && self.grants[number].job.is_some();
            if judged && self.is_valid(number, now) {
                self.judge_overlap(number, now);
            }
        }
    }

    /// Largest token of a key.
    pub(crate) fn newest(&self, key: &str) -> Option<FencingToken> {
        self.grants.iter().filter(|grant| grant.key == key).map(|grant| grant.token).max()
    }

    /// Valid holds of a key.
    pub(crate) fn valid(&self, key: &str, now: Time) -> Vec<(usize, FencingToken)> {
        let of_key = |number: &&usize| self.grants[**number].key == key;
        let valid = self.held.iter().filter(of_key).filter(|number| self.is_valid(**number, now));
        valid.map(|number| (*number, self.grants[*number].token)).collect()
    }

    /// A standby that was cut off has become the primary: acknowledged writes may be lost.
    pub(crate) fn forgive_losses(&mut self, execution: u64) {
        self.lost_until = execution;
        self.held.clear();
        self.completed.clear();
        self.enqueued.clear();
    }

    /// True if an answer from this execution may have been lost afterwards.
    pub(crate) fn may_be_lost(&self, execution: u64) -> bool {
        execution <= self.lost_until
    }

    /// A renewal must fail once the key has another holder that excludes this one.
    fn judge_renewal(&mut self, number: usize, execution: u64) {
        let grant = &self.grants[number];
        let alone = |grant: &AckedGrant| grant.sharing == Sharing::Alone;
        let later = self.grants.iter().find(|other| {
            other.key == grant.key
                && (alone(other) || alone(grant))
                && other.token > grant.token
                && other.execution < execution
                && !self.may_be_lost(other.execution)
        });
        if let Some(later) = later {
            let text = format!(
                "client {} renewed {} under token {} after client {} got token {}",
                grant.client,
                grant.key,
                show(grant.token),
                later.client,
                show(later.token)
            );
            self.violations.push(text);
        }
    }

    fn judge_overlap(&mut self, number: usize, now: Time) {
        let grant = &self.grants[number];
        let others: Vec<&AckedGrant> = self
            .valid(&grant.key, now)
            .into_iter()
            .filter(|(other, _)| *other != number)
            .map(|(other, _)| &self.grants[other])
            .collect();
        let alone = |grant: &AckedGrant| grant.sharing == Sharing::Alone;
        let too_many = match grant.sharing {
            Sharing::Alone => !others.is_empty(),
            Sharing::WithOthers { most } => {
                others.iter().any(|other| alone(other)) || others.len() >= most
            }
        };
        if too_many {
            let tokens: Vec<String> = others
                .iter()
                .map(|other| format!("client {} with token {}", other.client, show(other.token)))
                .collect();
            let text = format!(
                "two holders of {}: client {} with token {}, beside {}",
                grant.key,
                grant.client,
                show(grant.token),
                tokens.join(" and ")
            );
            self.violations.push(text);
        }
    }
}

/// Both halves of a token, as people compare them.
pub(crate) fn show(token: FencingToken) -> String {
    format!("{}:{}", token.epoch(), token.number())
}
