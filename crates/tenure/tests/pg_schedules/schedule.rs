//! The scheduler: draws by its seed which statement, reply or fault comes next.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use tenure_core::Random;
use tokio::sync::{mpsc, oneshot};

use crate::locks::{TTL, below};
use crate::pair::ServerPair;
use crate::plan::{Plan, Promotion, Work};
use crate::protocol::{is_heartbeat, is_question, short};
use crate::referee::RunRecord;
use crate::turnstile::{Line, ReplySummary, ReplyVerdict, StatementVerdict, TurnEvent, Turnstile};

/// Time that a client gets to do what it must do next.
const PATIENCE: Duration = Duration::from_secs(60);
/// Pause after which a statement that was not answered may be one that waits for a lock.
const BLOCKED_AFTER: Duration = Duration::from_millis(10);

/// Time that a heartbeat gets to arrive. It is not awaited again if it does not come.
const BEAT_PATIENCE: Duration = Duration::from_millis(500);

/// Sends the next operation to a client, with the random numbers that choose it.
pub(crate) type OrderSender = mpsc::UnboundedSender<Random>;

struct ClientState {
    orders: OrderSender,
    running: bool,
    operations_left: usize,
    /// False once a heartbeat failed: the worker sends the next one much later than a run lasts.
    beats: bool,
}

/// Fate of a heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BeatFate {
    Answered,
    ReplyLost,
    Lost,
    Delayed,
}

struct HeldStatement {
    sql: String,
    verdict: oneshot::Sender<StatementVerdict>,
}

struct HeldReply {
    sql: String,
    execution: u64,
    verdict: oneshot::Sender<ReplyVerdict>,
}

/// The next step of a run.
#[derive(Clone, Copy, Debug)]
enum Step {
    Begin(usize),
    Statement(Line, StatementVerdict),
    Reply(Line, ReplyVerdict),
    /// The heartbeat of a worker.
    Beat(usize, BeatFate),
    /// A request whose client has given up reaches the server, or never does.
    Late(Line, StatementVerdict),
    /// Time passes for clients and rows.
    Skip,
    Crash,
    /// The server crashes while it executes a statement.
    CrashDuring(Line),
    CutOffStandby,
    Promote,
}

pub(crate) struct Scheduler<'a> {
    pair: &'a mut ServerPair,
    plan: Plan,
    random: Random,
    record: Rc<RunRecord>,
    turnstile: Turnstile,
    events: mpsc::UnboundedReceiver<TurnEvent>,
    clients: Vec<ClientState>,
    statements: BTreeMap<Line, HeldStatement>,
    replies: BTreeMap<Line, HeldReply>,
    /// Heartbeats. They wait for their own step, because a timer sends them: otherwise the choice of steps would depend
    /// on their arrival.
    beats: BTreeMap<Line, HeldStatement>,
    beat_reply: ReplyVerdict,
    /// Requests whose client has given up.
    late: BTreeMap<Line, HeldStatement>,
    /// Lines whose next request has no client.
    without_client: BTreeSet<Line>,
    in_flight: BTreeMap<Line, String>,
    pub(crate) steps: u64,
}

impl<'a> Scheduler<'a> {
    pub(crate) fn new(
        pair: &'a mut ServerPair,
        plan: Plan,
        record: Rc<RunRecord>,
        turnstile: Turnstile,
        events: mpsc::UnboundedReceiver<TurnEvent>,
    ) -> Self {
        Self {
            pair,
            random: Random::new(plan.seed ^ 0x5eed),
            plan,
            record,
            turnstile,
            events,
            clients: Vec::new(),
            statements: BTreeMap::new(),
            replies: BTreeMap::new(),
            beats: BTreeMap::new(),
            beat_reply: ReplyVerdict::Deliver,
            late: BTreeMap::new(),
            without_client: BTreeSet::new(),
            in_flight: BTreeMap::new(),
            steps: 0,
        }
    }

    pub(crate) fn add_client(&mut self, orders: OrderSender) {
        let operations_left = self.plan.operations;
        self.clients.push(ClientState { orders, running: false, operations_left, beats: true });
    }

    /// Runs until every client has done its operations, or a promise is broken. Then nothing is held back any longer.
    pub(crate) async fn run(&mut self) {
        while self.record.violations().is_empty() {
            let Some(step) = self.draw() else { break };
            self.steps += 1;
            self.take(step).await;
            let now = self.record.now();
            self.record.referee().judge_jobs(now);
        }
        self.turnstile.open();
    }

    /// Draws the next step; `None` at the end of the run.
    fn draw(&mut self) -> Option<Step> {
        let mut steps: Vec<(Step, f64)> = Vec::new();
        for (number, client) in self.clients.iter().enumerate() {
            if !client.running && client.operations_left > 0 {
                steps.push((Step::Begin(number), 2.0));
            }
        }
        for (line, held) in &self.statements {
            let faults = self.plan.connection_faults * share_of_faults(&held.sql);
            steps.push((Step::Statement(*line, StatementVerdict::Pass), 4.0));
            steps.push((Step::Statement(*line, StatementVerdict::Cut), faults));
            steps.push((Step::Statement(*line, StatementVerdict::Delay), faults));
            if self.plan.crashes > 0 {
                steps.push((Step::CrashDuring(*line), 0.02));
            }
        }
        for (line, held) in &self.replies {
            let faults = self.plan.connection_faults * share_of_faults(&held.sql);
            steps.push((Step::Reply(*line, ReplyVerdict::Deliver), 4.0));
            steps.push((Step::Reply(*line, ReplyVerdict::Cut), 2.0 * faults));
        }
        if steps.is_empty() && self.late.is_empty() && self.in_flight.is_empty() {
            return None;
        }
        if self.plan.heartbeats && self.plan.work == Work::Jobs {
            let (referee, faults) = (self.record.referee(), self.plan.connection_faults);
            for (number, client) in self.clients.iter().enumerate() {
                if client.beats && referee.holds(number) {
                    steps.push((Step::Beat(number, BeatFate::Answered), 1.5));
                    steps.push((Step::Beat(number, BeatFate::ReplyLost), faults / 4.0));
                    steps.push((Step::Beat(number, BeatFate::Lost), faults / 4.0));
                    steps.push((Step::Beat(number, BeatFate::Delayed), faults / 2.0));
                }
            }
        }
        for line in self.late.keys() {
            steps.push((Step::Late(*line, StatementVerdict::Pass), 0.7));
            steps.push((Step::Late(*line, StatementVerdict::Cut), 0.1));
        }
        // A row that an open transaction has locked cannot be aged.
        if !self.turnstile.in_transaction() && self.in_flight.is_empty() {
            steps.push((Step::Skip, self.plan.skips));
        }
        if self.plan.crashes > 0 {
            steps.push((Step::Crash, 0.2));
        }
        match self.plan.promotion {
            Some(Promotion::Synchronous | Promotion::Lossy { cut_off: true }) => {
                steps.push((Step::Promote, 0.4));
            }
            Some(Promotion::Lossy { cut_off: false }) => steps.push((Step::CutOffStandby, 0.5)),
            None => {}
        }
        let total: f64 = steps.iter().map(|(_, weight)| weight).sum();
        let mut point = self.random.unit() * total;
        for (step, weight) in &steps {
            point -= weight;
            if point < 0.0 {
                return Some(*step);
            }
        }
        steps.first().map(|(step, _)| *step)
    }

    async fn take(&mut self, step: Step) {
        match step {
            Step::Begin(client) => {
                let random = Random::new(self.random.bits());
                let state = &mut self.clients[client];
                state.running = true;
                state.operations_left -= 1;
                state.orders.send(random).expect("the client runs");
            }
            Step::Statement(line, verdict) => {
                let HeldStatement { sql, verdict: decide } = take(&mut self.statements, line);
                if verdict != StatementVerdict::Pass {
                    self.record.disturb(line.0);
                }
                match verdict {
                    StatementVerdict::Pass => return self.pass(line, sql, decide).await,
                    StatementVerdict::Cut => self.note(line, &sql, "lost, connection cut"),
                    StatementVerdict::Delay => {
                        self.without_client.insert(line);
                        self.note(line, &sql, "delayed, connection cut");
                    }
                }
                decide.send(verdict).expect("the connection waits");
            }
            Step::Late(line, verdict) => {
                let HeldStatement { sql, verdict: decide } = take(&mut self.late, line);
                if verdict == StatementVerdict::Pass {
                    return self.pass(line, sql, decide).await;
                }
                self.note(line, &sql, "never arrives");
                self.without_client.remove(&line);
                decide.send(verdict).expect("the connection waits");
            }
            Step::Reply(line, verdict) => {
                let HeldReply { sql, execution, verdict: decide } = take(&mut self.replies, line);
                if verdict == ReplyVerdict::Deliver {
                    self.record.deliver(line.0, execution);
                    self.note(line, &sql, "answered");
                } else {
                    self.record.disturb(line.0);
                    self.note(line, &sql, "reply lost, connection cut");
                }
                decide.send(verdict).expect("the connection waits");
            }
            Step::Beat(client, fate) => self.beat(client, fate).await,
            Step::Skip => self.skip().await,
            Step::Crash => {
                self.plan.crashes -= 1;
                self.pair.crash();
                self.server_replaced("crash and restart").await;
            }
            Step::CrashDuring(line) => {
                self.plan.crashes -= 1;
                let HeldStatement { sql, verdict } = take(&mut self.statements, line);
                self.note(line, &sql, "reaches the server, which crashes");
                self.in_flight.insert(line, sql);
                verdict.send(StatementVerdict::Pass).expect("the connection waits");
                // The connection's task writes the request before the server is stopped.
                for _ in 0..=below(&mut self.random, 4) {
                    tokio::task::yield_now().await;
                }
                self.pair.crash();
                self.server_replaced("crash and restart").await;
            }
            Step::CutOffStandby => {
                self.plan.promotion = Some(Promotion::Lossy { cut_off: true });
                self.pair.cut_off_standby().await;
                self.record.note("SERVER", "standby cut off", "");
            }
            Step::Promote => {
                if let Some(Promotion::Lossy { .. }) = self.plan.promotion.take() {
                    self.record.referee().forgive_losses(self.record.executions());
                }
                self.pair.promote().await;
                self.server_replaced("crash, standby promoted").await;
            }
        }
        self.settle().await;
    }

    /// Lets the server execute a statement, and waits until it has, or waits for another transaction.
    async fn pass(&mut self, line: Line, sql: String, decide: oneshot::Sender<StatementVerdict>) {
        self.in_flight.insert(line, sql);
        decide.send(StatementVerdict::Pass).expect("the connection waits");
        self.settle().await;
    }

    /// Decides about the next heartbeat of a worker, once it has arrived.
    async fn beat(&mut self, client: usize, fate: BeatFate) {
        let begun = std::time::Instant::now();
        let line = loop {
            let found = self.beats.keys().find(|line| line.0 == client).copied();
            let left = BEAT_PATIENCE.checked_sub(begun.elapsed());
            match (found, left) {
                (Some(line), _) => break line,
                (None, None) => {
                    self.clients[client].beats = false;
                    return self.record.note_client(client, "sends no heartbeat", "");
                }
                (None, Some(left)) => {
                    if let Ok(event) = tokio::time::timeout(left, self.events.recv()).await {
                        self.handle(event.expect("this run has senders"));
                    }
                }
            }
        };
        let HeldStatement { sql, verdict } = take(&mut self.beats, line);
        self.clients[client].beats = fate == BeatFate::Answered;
        if fate != BeatFate::Answered {
            self.record.disturb(client);
        }
        self.beat_reply = match fate {
            BeatFate::Answered => ReplyVerdict::Deliver,
            _ => ReplyVerdict::Cut,
        };
        match fate {
            BeatFate::Answered | BeatFate::ReplyLost => self.pass(line, sql, verdict).await,
            BeatFate::Lost => {
                self.note(line, &sql, "lost, connection cut");
                verdict.send(StatementVerdict::Cut).expect("the connection waits");
            }
            BeatFate::Delayed => {
                self.note(line, &sql, "delayed, connection cut");
                self.without_client.insert(line);
                verdict.send(StatementVerdict::Delay).expect("the connection waits");
            }
        }
    }

    /// Waits until nothing happens without another step: every statement in flight was answered or is blocked, and
    /// every client that is busy has a request or a reply here.
    async fn settle(&mut self) {
        let begun = std::time::Instant::now();
        while !self.is_settled() {
            match tokio::time::timeout(BLOCKED_AFTER, self.events.recv()).await {
                Ok(event) => self.handle(event.expect("this run has senders")),
                Err(_) if self.only_blocked().await => return,
                Err(_) => assert!(begun.elapsed() < PATIENCE, "stuck:\n{}", self.record.timeline()),
            }
        }
    }

    fn is_settled(&self) -> bool {
        self.in_flight.is_empty() && self.others_are_settled()
    }

    /// True if nothing but statements in flight can move without another step.
    fn others_are_settled(&self) -> bool {
        let waits = |client: usize| {
            let of_client = |line: &Line| line.0 == client;
            self.statements.keys().any(of_client)
                || self.replies.keys().any(of_client)
                || self.in_flight.keys().any(of_client)
        };
        let arrived =
            |line: &Line| self.late.contains_key(line) || self.in_flight.contains_key(line);
        let mut clients = self.clients.iter().enumerate();
        self.without_client.iter().all(arrived)
            && clients.all(|(client, state)| !state.running || waits(client))
    }

    /// True if all statements in flight wait for locks, and nothing else moves.
    async fn only_blocked(&mut self) -> bool {
        if self.in_flight.is_empty() || !self.others_are_settled() {
            return false;
        }
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND wait_event_type = 'Lock'";
        let blocked: i64 = self.pair.db().await.query_one(sql, &[]).await.unwrap().get(0);
        usize::try_from(blocked) == Ok(self.in_flight.len())
    }

    fn handle(&mut self, event: TurnEvent) {
        match event {
            TurnEvent::Sent { line, sql, verdict } => {
                let held = HeldStatement { sql, verdict };
                let list = if self.without_client.contains(&line) {
                    &mut self.late
                } else if is_heartbeat(&held.sql) {
                    &mut self.beats
                } else {
                    &mut self.statements
                };
                list.insert(line, held);
            }
            TurnEvent::Answered { line, reply, verdict } => self.answered(line, &reply, verdict),
            TurnEvent::Broken { line } => {
                self.without_client.remove(&line);
                if let Some(sql) = self.in_flight.remove(&line) {
                    self.note(line, &sql, "connection broken");
                }
            }
            TurnEvent::Ended { client } => self.clients[client].running = false,
        }
    }

    fn answered(
        &mut self,
        line: Line,
        reply: &ReplySummary,
        verdict: oneshot::Sender<ReplyVerdict>,
    ) {
        let Some(sql) = self.in_flight.remove(&line) else { return };
        let execution = self.record.count_execution();
        let open = if reply.in_transaction { ", in a transaction" } else { "" };
        let late = if self.without_client.remove(&line) { "late: " } else { "" };
        self.note(line, &sql, &format!("executed, {late}{}{open}", reply.effect));
        if is_heartbeat(&sql) && late.is_empty() {
            if self.beat_reply == ReplyVerdict::Cut {
                self.note(line, &sql, "reply lost, connection cut");
            }
            // The connection waits, unless the run is over.
            let _ = verdict.send(self.beat_reply);
        } else if late.is_empty() {
            self.replies.insert(line, HeldReply { sql, execution, verdict });
        }
    }

    /// Ages every row, and lets as much time pass for the clients.
    async fn skip(&mut self) {
        let span = [TTL / 3, TTL / 2, TTL * 5 / 6, TTL * 5 / 4][below(&mut self.random, 4)];
        // First for the clients: rows must never end earlier than a client thinks.
        self.record.skip(span);
        let sql = self.plan.aging(span);
        self.pair.run(&sql).await;
        self.record.note("TIME", &format!("{} s pass", span.as_secs()), "");
    }

    /// Ends connections to the old server, and forgets what was held on them.
    async fn server_replaced(&mut self, what: &str) {
        self.record.note("SERVER", what, "");
        (0..self.clients.len()).for_each(|client| self.record.disturb(client));
        let ended = self.turnstile.server_replaced(self.pair.port()).await;
        // Answers that came before the end are still on their way here.
        while let Ok(event) = self.events.try_recv() {
            self.handle(event);
        }
        for line in ended {
            self.statements.remove(&line);
            if self.beats.remove(&line).is_some() {
                self.clients[line.0].beats = false;
            }
            self.replies.remove(&line);
            self.late.remove(&line);
            self.without_client.remove(&line);
            self.in_flight.remove(&line);
        }
    }

    fn note(&self, line: Line, sql: &str, effect: &str) {
        self.record.note_client(line.0, &format!("  {} [{}]", short(sql), line.1), effect);
    }
}

/// Most connection faults go to statements that may write: a lost question is asked again, and changes nothing.
fn share_of_faults(sql: &str) -> f64 {
    if is_question(sql) { 0.1 } else { 1.0 }
}

fn take<T>(held: &mut BTreeMap<Line, T>, line: Line) -> T {
    held.remove(&line).expect("drawn from this list")
}
