//! One run: tables, clients and a schedule of one seed, and the judgement at its end.

use std::rc::Rc;

use tenure::jobs::{Queue, Schema};
use tenure::store::{Answer, Mode};
use tenure::{PgAdvisoryStore, PgLeaseStore, Store};
use tenure_core::Random;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::advisory::{self, AdvisoryClient};
use crate::jobs::{self, JobClient};
use crate::locks::{self, LockClient, TTL};
use crate::pair::{LAZY_ROLE, ServerPair};
use crate::plan::{Plan, Work};
use crate::referee::{AckedGrant, RunRecord, Sharing, show};
use crate::schedule::{OrderSender, Scheduler};
use crate::steps::Step;
use crate::turnstile::{EventSender, TurnEvent, Turnstile};

/// Jobs at the beginning of a run.
const JOBS: usize = 2;

/// SQL that ends all sessions that hold or await a lock.
const END_SESSIONS: &str =
    "SELECT pg_terminate_backend(pid, 10000) FROM pg_locks WHERE locktype = 'advisory'";

/// Report on a run that broke no promise.
pub(crate) struct RunReport {
    pub(crate) steps: usize,
    pub(crate) statements: u64,
    pub(crate) grants: usize,
    pub(crate) timeline: String,
}

/// Broken promises of a run.
pub(crate) struct RunFailure {
    pub(crate) plan: Plan,
    pub(crate) steps: Vec<Step>,
    pub(crate) violations: Vec<String>,
    pub(crate) timeline: String,
}

/// Runs a plan, with steps that its seed draws, or with those of a list.
pub(crate) async fn run(
    pair: &mut ServerPair,
    plan: Plan,
    script: Option<Vec<Step>>,
) -> Result<RunReport, RunFailure> {
    let record = Rc::new(RunRecord::new());
    if plan.promotion.is_some() {
        pair.replicate().await;
    }
    prepare(pair, &plan, &record).await;
    let (sender, events) = mpsc::unbounded_channel();
    let mut turnstile = Turnstile::new(pair.port(), plan.pooled, sender.clone());
    let (mut clients, mut orders) = (Vec::new(), Vec::new());
    for number in 0..plan.clients {
        let role = if plan.lazy { LAZY_ROLE } else { "postgres" };
        let port = turnstile.listen().await;
        let url = format!("postgres://{role}@127.0.0.1:{port}/postgres?sslmode=disable");
        let (order, task) = start_client(number, &url, &plan, &record, sender.clone());
        orders.push(order);
        clients.push(ClientTask(task));
    }
    let recorded = Rc::clone(&record);
    let mut scheduler = Scheduler::new(pair, plan.clone(), recorded, turnstile, events, script);
    for order in orders {
        scheduler.add_client(order);
    }
    scheduler.run().await;
    let (steps, statements) = (std::mem::take(&mut scheduler.taken), record.executions());
    // Those at the end are the referee's.
    let grants = record.grants();
    drop((clients, scheduler));
    if plan.promotion.is_some() {
        pair.end_replication().await;
    }
    if record.violations().is_empty() {
        judge_end(pair, &plan, &record).await;
    }
    pair.run(&format!("DROP SCHEMA IF EXISTS {} CASCADE", plan.schema())).await;
    let (violations, timeline) = (record.violations(), record.timeline());
    if violations.is_empty() {
        let report = RunReport { steps: steps.len(), statements, grants, timeline };
        return Ok(report);
    }
    Err(RunFailure { plan, steps, violations, timeline })
}

/// Task of a client, which ends with the run.
struct ClientTask(JoinHandle<()>);

impl Drop for ClientTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn prepare(pair: &mut ServerPair, plan: &Plan, record: &RunRecord) {
    let (url, schema) = (pair.url(), plan.schema());
    pair.run(&format!("DROP SCHEMA IF EXISTS {schema} CASCADE")).await;
    if plan.work == Work::Locks {
        let store = PgLeaseStore::open(&format!("{url}?table={schema}.locks")).unwrap();
        return store.apply_schema().await.unwrap();
    }
    if plan.work == Work::Sessions {
        // Sessions of an earlier run of the same seed.
        pair.run(END_SESSIONS).await;
        pair.run("SET synchronous_commit = on").await;
        pair.run(&format!("CREATE SCHEMA {schema}")).await;
        pair.run("SET synchronous_commit = off").await;
        let url = format!("{url}?{}", advisory::options(plan));
        return PgAdvisoryStore::open(&url).unwrap().apply_schema().await.unwrap();
    }
    Schema::of_queue(&format!("{schema}.jobs")).unwrap().apply(&url).await.unwrap();
    pair.run(&format!("CREATE TABLE {schema}.effects (job bigint, token bigint)")).await;
    let rows = format!(
        "INSERT INTO {schema}.jobs (payload, max_attempts) SELECT '1', 1000 FROM generate_series(1, {JOBS}) \
         RETURNING id::text"
    );
    // The rows exist before the run: no crash may undo them.
    pair.run("SET synchronous_commit = on").await;
    for row in pair.db().await.query(&rows, &[]).await.unwrap() {
        record.referee().enqueued.push(row.get(0));
    }
    pair.run("SET synchronous_commit = off").await;
}

fn start_client(
    number: usize,
    url: &str,
    plan: &Plan,
    record: &Rc<RunRecord>,
    events: EventSender,
) -> (OrderSender, JoinHandle<()>) {
    let (sender, mut orders) = mpsc::unbounded_channel::<Random>();
    let (url, plan, record) = (url.to_owned(), plan.clone(), Rc::clone(record));
    let task = tokio::task::spawn_local(async move {
        let mut participant = Participant::new(number, &url, &plan, &record);
        loop {
            let mut random = tokio::select! {
                biased;
                () = participant.session_end() => continue,
                order = orders.recv() => match order {
                    Some(random) => random,
                    None => return,
                },
            };
            participant.act(&mut random).await;
            // The scheduler is gone at the end of a run.
            let _ = events.send(TurnEvent::Ended { client: number });
        }
    });
    (sender, task)
}

/// A client of any kind.
enum Participant {
    Locks(LockClient),
    Jobs(JobParticipant),
    Sessions(AdvisoryClient),
}

/// A worker, and all that it needs to connect.
struct JobParticipant {
    number: usize,
    url: String,
    plan: Plan,
    record: Rc<RunRecord>,
    client: Option<JobClient>,
}

impl Participant {
    fn new(number: usize, url: &str, plan: &Plan, record: &Rc<RunRecord>) -> Self {
        let (plan, record) = (plan.clone(), Rc::clone(record));
        match plan.work {
            Work::Locks => {
                let url = format!("{url}&table={}.locks", plan.schema());
                Self::Locks(LockClient::new(number, &url, record))
            }
            Work::Sessions => Self::Sessions(AdvisoryClient::new(number, url, &plan, record)),
            Work::Jobs => {
                let url = url.to_owned();
                Self::Jobs(JobParticipant { number, url, plan, record, client: None })
            }
        }
    }

    /// Resolves when a hold was lost with its session.
    async fn session_end(&mut self) {
        match self {
            Self::Sessions(client) => client.session_end().await,
            Self::Locks(_) | Self::Jobs(_) => std::future::pending().await,
        }
    }

    async fn act(&mut self, random: &mut Random) {
        match self {
            Self::Locks(client) => client.act(random).await,
            Self::Sessions(client) => client.act(random).await,
            Self::Jobs(worker) => worker.act(random).await,
        }
    }
}

impl JobParticipant {
    async fn act(&mut self, random: &mut Random) {
        let Self { number, url, plan, record, client } = self;
        if client.is_none() {
            match JobClient::connect(*number, url, plan, Rc::clone(record)).await {
                Ok(connected) => *client = Some(connected),
                Err(error) => return record.judge_error(*number, &error),
            }
        }
        if let Some(client) = client {
            client.act(random).await;
        }
    }
}

/// Judges what is left when all clients have gone and every lease is over.
async fn judge_end(pair: &mut ServerPair, plan: &Plan, record: &RunRecord) {
    record.skip(TTL * 3);
    if let Some(sql) = plan.aging(TTL * 3) {
        pair.run(&sql).await;
    }
    match plan.work {
        Work::Locks => {
            let url = format!("{}?table={}.locks", pair.url(), plan.schema());
            let store = PgLeaseStore::open(&url).unwrap();
            let keys: Vec<&str> = locks::keys().collect();
            judge_locks(&store, &keys, plan, record).await;
        }
        Work::Sessions => {
            // All idle sessions have ended by now.
            let holders =
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_locks WHERE locktype = 'advisory'";
            pair.run(holders).await;
            let url = format!("{}?{}", pair.url(), advisory::options(plan));
            let (store, keys) = (PgAdvisoryStore::open(&url).unwrap(), advisory::keys(plan));
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            judge_locks(&store, &keys, plan, record).await;
        }
        Work::Jobs => judge_jobs(pair, plan, record).await,
    }
}

/// Every key can be claimed again, under a larger token.
async fn judge_locks(store: &dyn Store, keys: &[&str], plan: &Plan, record: &RunRecord) {
    for (nth, key) in keys.iter().copied().enumerate() {
        let claim = locks::claim(key, locks::mode_of(key), nth as u128, "the referee");
        match store.claim(&claim, TTL).await {
            Ok(Answer::Granted(grant)) => {
                let alone = claim.mode == Mode::Exclusive;
                let sharing =
                    if alone { Sharing::Alone } else { Sharing::WithOthers { most: usize::MAX } };
                let acked = AckedGrant {
                    client: plan.clients,
                    key: key.to_owned(),
                    sharing,
                    claim: claim.id,
                    token: grant.token,
                    execution: record.count_execution(),
                    in_order: true,
                    line: None,
                    job: None,
                    deadline: record.now() + TTL,
                };
                record.granted(acked);
            }
            other => {
                let text = format!("{key} is not free after all leases have ended: {other:?}");
                record.violate(text);
            }
        }
    }
}

/// Every job that is left can be claimed and completed, and no acknowledged completion is undone or repeated.
async fn judge_jobs(pair: &mut ServerPair, plan: &Plan, record: &RunRecord) {
    let (url, schema) = (pair.url(), plan.schema());
    let table = format!("{schema}.jobs");
    let queue = Queue::connect_with(&url, &table, jobs::options(false)).await.unwrap();
    queue.sweep().await.unwrap();
    while let Some(guard) = queue.claim().await.unwrap() {
        let (id, token) = (guard.id().to_owned(), guard.fencing_token());
        let newest = record.referee().newest(&jobs::key(&id));
        if newest.is_some_and(|newest| newest >= token) {
            let (token, newest) = (show(token), newest.map(show));
            record.violate(format!("job {id}: the token {token} comes after {newest:?}"));
        }
        if record.referee().completed.contains_key(&id) {
            record.violate(format!("job {id} was completed, and is claimed again at the end"));
        }
        guard.complete().await.unwrap();
    }
    let db = pair.db().await;
    let rows = format!("SELECT id::text, completed_at IS NOT NULL, lease_token FROM {table}");
    let rows = db.query(&rows, &[]).await.unwrap();
    for row in &rows {
        let (id, completed): (&str, bool) = (row.get(0), row.get(1));
        if !completed {
            record.violate(format!("job {id} is neither completed nor available at the end"));
        }
    }
    let known = |id: &String| rows.iter().any(|row| row.get::<_, &str>(0) == id);
    let enqueued = record.referee().enqueued.clone();
    for id in enqueued.iter().filter(|id| !known(id)) {
        record.violate(format!("job {id} was enqueued, and is gone"));
    }
    let effects = format!(
        "SELECT e.job::text, count(*), min(e.token), min(j.lease_token) \
         FROM {schema}.effects AS e JOIN {table} AS j ON j.id = e.job GROUP BY e.job"
    );
    for row in db.query(&effects, &[]).await.unwrap() {
        let (id, count, effect, last): (&str, i64, i64, i64) =
            (row.get(0), row.get(1), row.get(2), row.get(3));
        if count > 1 || effect != last {
            record.violate(format!(
                "job {id} has {count} effects, under {effect}; its last token is {last}"
            ));
        }
        let acked = record.referee().completed.get(id).map(|token| token.number());
        if acked.is_some_and(|acked| i64::try_from(acked) != Ok(effect)) {
            record.violate(format!(
                "job {id} has an effect under {effect}, and was completed under {acked:?}"
            ));
        }
    }
}
