//! The scheduler: draws by its seed which statement, reply or fault comes next.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use tenure_core::{Random, Time};
use tokio::sync::{mpsc, oneshot};

use crate::pair::ServerPair;
use crate::plan::{Plan, Promotion, Work};
use crate::protocol::{is_heartbeat, is_wait_check, short};
use crate::referee::RunRecord;
use crate::steps::Step;
use crate::turnstile::{Line, ReplySummary, ReplyVerdict, StatementVerdict, TurnEvent, Turnstile};

/// Time that a client gets to do what it must do next.
const PATIENCE: Duration = Duration::from_secs(60);
/// Pause after which a statement that was not answered may be one that waits for a lock.
const BLOCKED_AFTER: Duration = Duration::from_millis(10);

/// Sends the next operation to a client, with the random numbers that choose it.
pub(crate) type OrderSender = mpsc::UnboundedSender<Random>;

pub(crate) struct ClientState {
    pub(crate) orders: OrderSender,
    pub(crate) running: bool,
    pub(crate) operations_left: usize,
    /// False once a heartbeat failed: the worker sends the next one much later than a run lasts.
    pub(crate) beats: bool,
}

pub(crate) struct HeldStatement {
    pub(crate) sql: String,
    pub(crate) verdict: oneshot::Sender<StatementVerdict>,
}

pub(crate) struct HeldReply {
    pub(crate) sql: String,
    pub(crate) execution: u64,
    pub(crate) verdict: oneshot::Sender<ReplyVerdict>,
}

pub(crate) struct Scheduler<'a> {
    pub(crate) pair: &'a mut ServerPair,
    pub(crate) plan: Plan,
    pub(crate) random: Random,
    pub(crate) record: Rc<RunRecord>,
    pub(crate) turnstile: Turnstile,
    pub(crate) events: mpsc::UnboundedReceiver<TurnEvent>,
    pub(crate) clients: Vec<ClientState>,
    pub(crate) statements: BTreeMap<Line, HeldStatement>,
    pub(crate) replies: BTreeMap<Line, HeldReply>,
    /// Heartbeats. They wait for their own step, because a timer sends them: otherwise the choice of steps would depend
    /// on their arrival.
    pub(crate) beats: BTreeMap<Line, HeldStatement>,
    pub(crate) beat_reply: ReplyVerdict,
    /// Requests whose client has given up.
    pub(crate) late: BTreeMap<Line, HeldStatement>,
    /// Lines whose next request has no client.
    pub(crate) without_client: BTreeSet<Line>,
    pub(crate) in_flight: BTreeMap<Line, String>,
    /// Checks that are not scheduled.
    pub(crate) wait_checks: BTreeSet<Line>,
    /// Instant of the last statement on each line, on the clock of all clients.
    pub(crate) quiet_since: BTreeMap<Line, Time>,
    /// Lines that end now, and whose sessions must be gone before the next step.
    pub(crate) closing: Vec<Line>,
    /// A statement has ended a session.
    pub(crate) evicted: bool,
    /// Steps to take; `None` if the seed draws them.
    pub(crate) script: Option<VecDeque<Step>>,
    /// Steps that were taken.
    pub(crate) taken: Vec<Step>,
}

impl<'a> Scheduler<'a> {
    pub(crate) fn new(
        pair: &'a mut ServerPair,
        plan: Plan,
        record: Rc<RunRecord>,
        turnstile: Turnstile,
        events: mpsc::UnboundedReceiver<TurnEvent>,
        script: Option<Vec<Step>>,
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
            wait_checks: BTreeSet::new(),
            quiet_since: BTreeMap::new(),
            closing: Vec::new(),
            evicted: false,
            script: script.map(VecDeque::from),
            taken: Vec::new(),
        }
    }

    pub(crate) fn add_client(&mut self, orders: OrderSender) {
        let operations_left = self.plan.operations;
        self.clients.push(ClientState { orders, running: false, operations_left, beats: true });
    }

    /// Runs until every client has done its operations, or a promise is broken. Then nothing is held back any longer.
    pub(crate) async fn run(&mut self) {
        while self.record.violations().is_empty() {
            let Some(step) = self.next_step() else { break };
            self.taken.push(step);
            self.take(step).await;
            if self.plan.work == Work::Sessions {
                self.end_sessions().await;
            }
            let now = self.record.now();
            self.record.referee().judge_jobs(now);
        }
        self.turnstile.open();
    }

    async fn take(&mut self, step: Step) {
        match step {
            Step::Begin(client, seed) => {
                let state = &mut self.clients[client];
                state.running = true;
                state.operations_left = state.operations_left.saturating_sub(1);
                state.orders.send(Random::new(seed)).expect("the client runs");
            }
            Step::Statement(line, verdict) => {
                let HeldStatement { sql, verdict: decide } = take(&mut self.statements, line);
                if verdict != StatementVerdict::Pass {
                    self.record.disturb(line.0);
                }
                if verdict == StatementVerdict::Cut {
                    self.closing.push(line);
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
                self.closing.push(line);
                self.note(line, &sql, "never arrives");
                self.without_client.remove(&line);
                decide.send(verdict).expect("the connection waits");
            }
            Step::Reply(line, verdict) => {
                let HeldReply { sql, execution, verdict: decide } = take(&mut self.replies, line);
                if verdict == ReplyVerdict::Deliver {
                    self.record.deliver(line, execution);
                    self.note(line, &sql, "answered");
                } else {
                    self.closing.push(line);
                    self.record.disturb(line.0);
                    self.note(line, &sql, "reply lost, connection cut");
                }
                decide.send(verdict).expect("the connection waits");
            }
            Step::Beat(client, fate) => self.beat(client, fate).await,
            Step::Skip(span) => self.skip(span).await,
            Step::EndSession(line, fault) => self.end_session(line, fault).await,
            Step::Crash => {
                self.plan.crashes = self.plan.crashes.saturating_sub(1);
                self.disturb_all();
                self.pair.crash();
                self.server_replaced("crash and restart").await;
            }
            Step::CrashDuring(line, turns) => {
                self.plan.crashes = self.plan.crashes.saturating_sub(1);
                let HeldStatement { sql, verdict } = take(&mut self.statements, line);
                self.note(line, &sql, "reaches the server, which crashes");
                self.in_flight.insert(line, sql);
                verdict.send(StatementVerdict::Pass).expect("the connection waits");
                // The connection's task writes the request before the server is stopped.
                for _ in 0..=turns {
                    tokio::task::yield_now().await;
                }
                self.disturb_all();
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
                self.disturb_all();
                self.pair.promote().await;
                self.server_replaced("crash, standby promoted").await;
            }
        }
        self.settle().await;
    }

    /// Lets the server execute a statement, and waits until it has, or waits for another transaction.
    pub(crate) async fn pass(
        &mut self,
        line: Line,
        sql: String,
        decide: oneshot::Sender<StatementVerdict>,
    ) {
        self.in_flight.insert(line, sql);
        decide.send(StatementVerdict::Pass).expect("the connection waits");
        self.settle().await;
    }

    /// Waits until nothing happens without another step: every statement in flight was answered or is blocked, and
    /// every client that is busy has a request or a reply here.
    pub(crate) async fn settle(&mut self) {
        let begun = tokio::time::Instant::now();
        let mut look = begun + BLOCKED_AFTER;
        while !self.is_settled() {
            match tokio::time::timeout_at(look, self.events.recv()).await {
                Ok(event) => {
                    let event = event.expect("this run has senders");
                    // A client repeats a check as long as its wait is held back here: it does not delay the look.
                    if !self.is_of_wait_check(&event) {
                        look = tokio::time::Instant::now() + BLOCKED_AFTER;
                    }
                    self.handle(event);
                }
                Err(_) if self.only_blocked().await => return,
                Err(_) => look = tokio::time::Instant::now() + BLOCKED_AFTER,
            }
            assert!(begun.elapsed() < PATIENCE, "stuck:\n{}", self.record.timeline());
        }
    }

    fn is_of_wait_check(&self, event: &TurnEvent) -> bool {
        match event {
            TurnEvent::Sent { sql, .. } => is_wait_check(sql),
            TurnEvent::Answered { line, .. } => self.wait_checks.contains(line),
            TurnEvent::Broken { .. } | TurnEvent::Ended { .. } => false,
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
        let sql = "SELECT count(DISTINCT pid) FROM pg_locks WHERE NOT granted";
        let blocked: i64 = self.pair.db().await.query_one(sql, &[]).await.unwrap().get(0);
        usize::try_from(blocked) == Ok(self.in_flight.len())
    }

    pub(crate) fn handle(&mut self, event: TurnEvent) {
        match event {
            TurnEvent::Sent { line, sql, verdict } if is_wait_check(&sql) => {
                self.wait_checks.insert(line);
                // The connection waits, unless its client is gone.
                let _ = verdict.send(StatementVerdict::Pass);
            }
            TurnEvent::Answered { line, verdict, .. } if self.wait_checks.remove(&line) => {
                let _ = verdict.send(ReplyVerdict::Deliver);
            }
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
                self.wait_checks.remove(&line);
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
        self.quiet_since.insert(line, self.record.now());
        self.evicted |= short(&sql) == "evict";
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
        } else {
            self.closing.push(line);
        }
    }

    /// Counts a fault of every client. Clients may notice it before the server is back.
    fn disturb_all(&self) {
        (0..self.clients.len()).for_each(|client| self.record.disturb(client));
    }

    /// Ends connections to the old server, and forgets what was held on them.
    async fn server_replaced(&mut self, what: &str) {
        self.record.note("SERVER", what, "");
        let ended = self.turnstile.server_replaced(self.pair.port()).await;
        self.forget(&ended);
        if self.plan.work == Work::Sessions {
            // Behind a pooler, an answer of the old server may still arrive: it counts as executed before the end.
            self.settle().await;
            self.all_sessions_lost().await;
        }
    }

    /// Forgets what was held on connections that have ended.
    pub(crate) fn forget(&mut self, ended: &[Line]) {
        // Answers that came before the end are still on their way here.
        while let Ok(event) = self.events.try_recv() {
            self.handle(event);
        }
        for line in ended {
            self.statements.remove(line);
            if self.beats.remove(line).is_some() {
                self.clients[line.0].beats = false;
            }
            self.replies.remove(line);
            self.late.remove(line);
            self.without_client.remove(line);
            self.in_flight.remove(line);
            self.wait_checks.remove(line);
        }
    }

    pub(crate) fn note(&self, line: Line, sql: &str, effect: &str) {
        self.record.note_client(line.0, &format!("  {} [{}]", short(sql), line.1), effect);
    }
}

pub(crate) fn take<T>(held: &mut BTreeMap<Line, T>, line: Line) -> T {
    held.remove(&line).expect("drawn from this list")
}
