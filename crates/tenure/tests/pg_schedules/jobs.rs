//! Workers of a job queue. Each completes jobs by the library, or in a transaction with an effect.

use std::rc::Rc;
use std::time::Duration;

use tenure::ErrorKind;
use tenure::jobs::{JobGuard, NewJob, Options, Queue};
use tenure_core::Random;
use tenure_core::lease::margin;
use tokio_postgres::NoTls;

use crate::locks::{TTL, below};
use crate::plan::Plan;
use crate::referee::{AckedGrant, RunRecord, Sharing, show};

pub(crate) struct JobClient {
    number: usize,
    url: String,
    schema: String,
    record: Rc<RunRecord>,
    queue: Queue,
    /// Session for transactions of the worker.
    session: Option<tokio_postgres::Client>,
    jobs: Vec<KeptJob>,
    /// Guards of jobs whose outcome is recorded. Dropping one sends a request, so they are kept until the run is over.
    settled: Vec<JobGuard>,
    claims: u128,
    /// The last claim got no answer.
    unclear: bool,
    /// Share of operations that claim a job although the worker has one.
    claim_share: f64,
}

struct KeptJob {
    grant: usize,
    guard: JobGuard,
}

/// Interval of heartbeats: short, so that the scheduler never waits long for the next one.
const HEARTBEAT: Duration = Duration::from_millis(25);

/// Options of a queue whose leases are as long as those of locks. Without heartbeats, no lease is renewed in a run.
pub(crate) fn options(heartbeats: bool) -> Options {
    let mut options = Options::default().lease(TTL);
    options.heartbeat = heartbeats.then_some(HEARTBEAT);
    options.sweep_every = Duration::from_secs(86_400);
    options
}

/// Key under which the referee knows a job.
pub(crate) fn key(id: &str) -> String {
    format!("job {id}")
}

impl JobClient {
    /// Connects. The first connection passes the turnstile like any other request.
    pub(crate) async fn connect(
        number: usize,
        url: &str,
        plan: &Plan,
        record: Rc<RunRecord>,
    ) -> tenure::Result<Self> {
        let (schema, options) = (plan.schema(), options(plan.heartbeats));
        // The turnstile reads the text of each statement, which a prepared one has only once.
        let unprepared = format!("{url}{}prepare=off", if url.contains('?') { '&' } else { '?' });
        let queue = Queue::connect_with(&unprepared, &format!("{schema}.jobs"), options).await?;
        Ok(Self {
            number,
            url: url.to_owned(),
            schema,
            record,
            queue,
            session: None,
            jobs: Vec::new(),
            settled: Vec::new(),
            claims: 0,
            unclear: false,
            claim_share: if plan.emphasis.is_some() { 0.75 } else { 0.5 },
        })
    }

    /// Does one operation that the random numbers choose.
    pub(crate) async fn act(&mut self, random: &mut Random) {
        // A worker whose claim failed claims again.
        if self.unclear && random.chance(0.8) {
            return self.claim().await;
        }
        if self.jobs.is_empty() || random.chance(self.claim_share) {
            return match random.unit() {
                ..0.1 => self.enqueue(random).await,
                ..0.2 => self.sweep().await,
                // By default a worker sweeps before most of its claims.
                ..0.65 => {
                    self.sweep().await;
                    self.claim().await;
                }
                _ => self.claim().await,
            };
        }
        let chosen = below(random, self.jobs.len());
        let KeptJob { grant, guard } = self.jobs.swap_remove(chosen);
        match random.unit() {
            ..0.2 => self.complete(grant, guard).await,
            ..0.5 => self.complete_with_effect(grant, guard).await,
            ..0.76 => {
                let delay = [Duration::ZERO, TTL / 2][below(random, 2)];
                self.say("retries", &format!("job {} in {} s", guard.id(), delay.as_secs()));
                let (ended, id) = (self.begin_return(grant), guard.id().to_owned());
                let answer = guard.retry_in(delay, "test").await;
                self.judge_return(&id, ended, answer.map(drop));
            }
            _ => {
                self.say("releases", &format!("job {}", guard.id()));
                let (ended, id) = (self.begin_return(grant), guard.id().to_owned());
                let answer = guard.release().await;
                self.judge_return(&id, ended, answer);
            }
        }
    }

    /// Ends reliance on a job that becomes available again. Also returns the number of faults so far.
    fn begin_return(&self, grant: usize) -> (Option<usize>, u64) {
        (self.end_reliance(grant), self.record.faults_of(self.number))
    }

    /// Judges the end of a claim that makes the job available. After a reply was lost, another worker may have claimed
    /// the job before the request was repeated: then `Lost` is a correct answer.
    fn judge_return(&self, id: &str, ended: (Option<usize>, u64), answer: tenure::Result<()>) {
        let (held, faults) = ended;
        let held = held.filter(|_| self.record.faults_of(self.number) == faults);
        self.judge_end(id, held, answer);
    }

    async fn enqueue(&mut self, random: &mut Random) {
        self.say("enqueues", "");
        let mut job = NewJob::json(self.number.to_string()).unwrap().max_attempts(1_000);
        if random.chance(0.3) {
            job = job.unique_key("one at a time");
        }
        match self.queue.enqueue(job).await {
            Ok(enqueued) => {
                self.say("has enqueued", &format!("job {}, new: {}", enqueued.id, enqueued.new));
                let execution = self.record.execution_of(self.number);
                let mut referee = self.record.referee();
                if !referee.may_be_lost(execution) {
                    referee.enqueued.push(enqueued.id);
                }
            }
            // The open job of the same key ended meanwhile.
            Err(error) if error.kind() == ErrorKind::Contention => self.say("enqueued nothing", ""),
            Err(error) => self.unanswered(&error),
        }
    }

    async fn sweep(&mut self) {
        self.say("sweeps", "");
        match self.queue.sweep().await {
            Ok(swept) => self.say("has swept", &format!("{} jobs", swept.freed + swept.failed)),
            Err(error) => self.unanswered(&error),
        }
    }

    /// Claims one job. The job comes from the statement that was answered last, so its place among all executions is
    /// known.
    async fn claim(&mut self) {
        self.say("claims a job", "");
        let claimed = self.queue.claim().await;
        self.unclear = claimed.is_err();
        let guard = match claimed {
            Ok(Some(guard)) => guard,
            Ok(None) => return self.say("finds no job", ""),
            Err(error) => return self.unanswered(&error),
        };
        self.claims += 1;
        let (id, token) = (guard.id(), guard.fencing_token());
        self.say("has claimed", &format!("job {id}, token {}", show(token)));
        let execution = self.record.execution_of(self.number);
        let completed = self.record.referee().completed.get(id).copied();
        if let Some(by) = completed {
            let (by, token) = (show(by), show(token));
            let text =
                format!("job {id} was completed under token {by}, and claimed under {token}");
            self.record.violate(text);
        }
        let acked = AckedGrant {
            client: self.number,
            key: key(id),
            sharing: Sharing::Alone,
            claim: (self.number as u128 + 1) << 32 | self.claims,
            token,
            execution,
            in_order: true,
            line: None,
            job: Some((guard.job().clone(), TTL.saturating_sub(margin(TTL)))),
            deadline: self.record.now(),
        };
        let grant = self.record.granted(acked);
        self.jobs.push(KeptJob { grant, guard });
    }

    async fn complete(&mut self, grant: usize, guard: JobGuard) {
        let (id, token) = (guard.id().to_owned(), guard.fencing_token());
        self.say("completes", &format!("job {id}"));
        let ended = self.end_reliance(grant);
        let answer = guard.complete().await;
        if answer.is_ok() {
            self.acknowledge_completion(&id, token);
        }
        self.judge_end(&id, ended, answer);
    }

    /// Records that a job was completed: no other completion of the same job may be acknowledged.
    fn acknowledge_completion(&self, id: &str, token: tenure::FencingToken) {
        let execution = self.record.execution_of(self.number);
        if self.record.referee().may_be_lost(execution) {
            return;
        }
        let before = self.record.referee().completed.insert(id.to_owned(), token);
        if let Some(before) = before {
            let (before, token) = (show(before), show(token));
            self.record
                .violate(format!("job {id} was completed twice: under {before} and {token}"));
        }
    }

    /// Ends reliance on a hold. Returns the grant if the store must still have it.
    fn end_reliance(&self, grant: usize) -> Option<usize> {
        let valid = self.record.referee().is_valid(grant, self.record.now());
        self.record.referee().end(grant);
        valid.then_some(grant)
    }

    fn judge_end(&self, id: &str, held: Option<usize>, answer: tenure::Result<()>) {
        match answer {
            Ok(()) => self.say("is done with", &format!("job {id}")),
            Err(error) if error.kind() == ErrorKind::Lost => {
                self.say("had lost", &format!("job {id}"));
                let now = self.record.now();
                if held.is_some_and(|grant| self.record.referee().is_due(grant, now)) {
                    let text =
                        format!("client {}: a valid claim of job {id} was gone", self.number);
                    self.record.violate(text);
                }
            }
            Err(error) => self.unanswered(&error),
        }
    }

    /// Completes a job in one transaction with its effect. If the commit is not answered, the rows decide later.
    async fn complete_with_effect(&mut self, grant: usize, guard: JobGuard) {
        let (id, token) = (guard.id().to_owned(), guard.fencing_token());
        self.say("completes with effect", &format!("job {id}"));
        match self.transact(&guard).await {
            Ok(true) => {
                self.acknowledge_completion(&id, token);
                self.record.referee().end(grant);
                self.say("has committed", &format!("job {id}"));
                self.settled.push(guard);
            }
            Ok(false) => {
                let ended = self.end_reliance(grant);
                let lost = tenure::Error::new(ErrorKind::Lost, "refused");
                self.judge_end(&id, ended, Err(lost));
                self.settled.push(guard);
            }
            Err(error) => {
                self.session = None;
                self.record.referee().end(grant);
                self.record.judge_error(self.number, &error);
                self.settled.push(guard);
            }
        }
    }

    /// True if the transaction was committed; false if the job was lost.
    async fn transact(&mut self, guard: &JobGuard) -> tenure::Result<bool> {
        if self.session.as_ref().is_none_or(tokio_postgres::Client::is_closed) {
            let connected = tokio_postgres::connect(&self.url, NoTls).await;
            let (session, connection) = connected.map_err(unanswered_statement)?;
            tokio::spawn(connection);
            self.session = Some(session);
        }
        let session = self.session.as_ref().expect("connected above");
        // The caller of `complete_in` decides itself how durable its commit is.
        session
            .batch_execute("BEGIN; SET LOCAL synchronous_commit = on")
            .await
            .map_err(unanswered_statement)?;
        let (table, id) = (format!("{}.effects", self.schema), guard.id());
        let effect =
            format!("INSERT INTO {table} (job, token) VALUES ({id}, {})", guard.lease_token());
        session.batch_execute(&effect).await.map_err(unanswered_statement)?;
        match guard.complete_in(session).await {
            Ok(()) => session.batch_execute("COMMIT").await.map_err(unanswered_statement)?,
            Err(error) if error.kind() == ErrorKind::Lost => {
                session.batch_execute("ROLLBACK").await.map_err(unanswered_statement)?;
                return Ok(false);
            }
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    fn unanswered(&self, error: &tenure::Error) {
        self.record.judge_error(self.number, error);
    }

    fn say(&self, what: &str, effect: &str) {
        self.record.note_client(self.number, what, effect);
    }
}

/// An error of the worker's own session, as an error of the library. The server's refusal is no lack of an answer.
fn unanswered_statement(error: tokio_postgres::Error) -> tenure::Error {
    let kind = match error.code() {
        Some(state) if !state.code().starts_with("57P") => ErrorKind::Misconfigured,
        _ => ErrorKind::Unknown,
    };
    tenure::Error::new(kind, "a statement of the worker failed").because(error)
}
