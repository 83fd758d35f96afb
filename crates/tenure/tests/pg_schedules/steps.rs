//! Steps of a run: drawn by the seed, or repeated from a list.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::locks::{TTL, below};
use crate::plan::{Emphasis, Promotion, Work};
use crate::schedule::Scheduler;
use crate::turnstile::{Line, ReplyVerdict, StatementVerdict};

/// Fate of a heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BeatFate {
    Answered,
    ReplyLost,
    Lost,
    Delayed,
}

/// End of a session between two statements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SessionFault {
    /// The connection breaks.
    Cut,
    /// An administrator ends the session.
    Terminated,
}

/// A step of a run. It contains everything that was drawn for it, so that a list of steps repeats a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// A client begins an operation, with the seed that chooses it.
    Begin(usize, u64),
    Statement(Line, StatementVerdict),
    Reply(Line, ReplyVerdict),
    /// The heartbeat of a worker.
    Beat(usize, BeatFate),
    /// A request whose client has given up reaches the server, or never does.
    Late(Line, StatementVerdict),
    /// Time passes for clients and rows.
    Skip(Duration),
    /// The session of a lock ends.
    EndSession(Line, SessionFault),
    Crash,
    /// The server crashes while it executes a statement, after this many turns of the runtime.
    CrashDuring(Line, usize),
    CutOffStandby,
    Promote,
}

impl Step {
    /// Client that the step is about.
    pub(crate) fn client(&self) -> Option<usize> {
        match self {
            Self::Begin(client, _) | Self::Beat(client, _) => Some(*client),
            Self::Statement(line, _)
            | Self::Reply(line, _)
            | Self::Late(line, _)
            | Self::EndSession(line, _)
            | Self::CrashDuring(line, _) => Some(line.0),
            Self::Skip(_) | Self::Crash | Self::CutOffStandby | Self::Promote => None,
        }
    }
}

impl Scheduler<'_> {
    /// Next step; `None` at the end of the run.
    pub(crate) fn next_step(&mut self) -> Option<Step> {
        if self.script.is_none() {
            let step = self.draw()?;
            return Some(self.fill(step));
        }
        loop {
            let step = self.script.as_mut()?.pop_front()?;
            if let Some(step) = self.applicable(step) {
                return Some(step);
            }
        }
    }

    /// Draws the next step.
    fn draw(&mut self) -> Option<Step> {
        let mut steps: Vec<(Step, f64)> = Vec::new();
        for (number, client) in self.clients.iter().enumerate() {
            if !client.running && client.operations_left > 0 {
                steps.push((Step::Begin(number, 0), 2.0));
            }
        }
        for (line, held) in &self.statements {
            let faults = self.plan.faults(&held.sql);
            steps.push((Step::Statement(*line, StatementVerdict::Pass), 4.0));
            steps.push((Step::Statement(*line, StatementVerdict::Cut), faults.cut));
            steps.push((Step::Statement(*line, StatementVerdict::Delay), faults.delay));
            if self.plan.crashes > 0 {
                steps.push((Step::CrashDuring(*line, 0), 0.02));
            }
        }
        for (line, held) in &self.replies {
            steps.push((Step::Reply(*line, ReplyVerdict::Deliver), 4.0));
            let cut = self.plan.faults(&held.sql).reply_cut;
            steps.push((Step::Reply(*line, ReplyVerdict::Cut), cut));
        }
        if steps.is_empty() && self.late.is_empty() && self.in_flight.is_empty() {
            return None;
        }
        for (line, held) in &self.late {
            let client_holds = self.record.referee().holds(line.0);
            let arrives = self.plan.late_weight(&held.sql, client_holds);
            steps.push((Step::Late(*line, StatementVerdict::Pass), arrives));
            steps.push((Step::Late(*line, StatementVerdict::Cut), 0.1));
        }
        self.add_heartbeats(&mut steps);
        self.add_session_faults(&mut steps);
        if self.may_skip() {
            steps.push((Step::Skip(Duration::ZERO), self.plan.skips));
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

    fn add_heartbeats(&self, steps: &mut Vec<(Step, f64)>) {
        if !self.plan.heartbeats || self.plan.work != Work::Jobs {
            return;
        }
        let (referee, faults) = (self.record.referee(), self.plan.connection_faults);
        for (number, client) in self.clients.iter().enumerate() {
            if client.beats && referee.holds(number) {
                steps.push((Step::Beat(number, BeatFate::Answered), self.plan.heartbeat_weight()));
                steps.push((Step::Beat(number, BeatFate::ReplyLost), faults / 4.0));
                steps.push((Step::Beat(number, BeatFate::Lost), faults / 4.0));
                steps.push((Step::Beat(number, BeatFate::Delayed), faults / 2.0));
            }
        }
    }

    /// Adds the end of sessions that hold a lock, or wait for one at the server.
    fn add_session_faults(&self, steps: &mut Vec<(Step, f64)>) {
        if self.plan.work != Work::Sessions {
            return;
        }
        let faults = self.plan.connection_faults;
        for line in self.record.referee().lines() {
            steps.push((Step::EndSession(line, SessionFault::Terminated), faults));
            steps.push((Step::EndSession(line, SessionFault::Cut), faults));
        }
        for line in self.in_flight.keys() {
            steps.push((Step::EndSession(*line, SessionFault::Terminated), faults / 2.0));
        }
    }

    /// A row that an open transaction has locked cannot be aged.
    fn may_skip(&self) -> bool {
        let blocked = !self.in_flight.is_empty() && self.plan.work != Work::Sessions;
        !self.turnstile.in_transaction() && !blocked
    }

    /// Draws the rest of a step.
    fn fill(&mut self, step: Step) -> Step {
        match step {
            Step::Begin(client, _) => Step::Begin(client, self.random.bits()),
            Step::Skip(_) => {
                let spans = match self.plan.emphasis {
                    Some(Emphasis::LateHeartbeats) => [TTL / 3, TTL * 5 / 4, TTL * 5 / 4, TTL * 2],
                    _ => [TTL / 3, TTL / 2, TTL * 5 / 6, TTL * 5 / 4],
                };
                Step::Skip(spans[below(&mut self.random, 4)])
            }
            Step::CrashDuring(line, _) => Step::CrashDuring(line, below(&mut self.random, 4)),
            step => step,
        }
    }

    /// A step of a list as it applies now; `None` if it does not. After another step was left out, a client may use
    /// another connection than before: then the step is about the connection that it uses.
    fn applicable(&self, step: Step) -> Option<Step> {
        let running = |client: usize| self.clients.get(client).is_some_and(|state| state.running);
        let applies = match step {
            Step::Begin(client, _) => !running(client),
            Step::Statement(line, verdict) => {
                return Some(Step::Statement(same_client(&self.statements, line)?, verdict));
            }
            Step::Reply(line, verdict) => {
                return Some(Step::Reply(same_client(&self.replies, line)?, verdict));
            }
            Step::Late(line, verdict) => {
                return Some(Step::Late(same_client(&self.late, line)?, verdict));
            }
            Step::CrashDuring(line, turns) => {
                return Some(Step::CrashDuring(same_client(&self.statements, line)?, turns));
            }
            Step::EndSession(line, fault) => {
                let held = self.record.referee().lines();
                let own = held.into_iter().find(|held| held.0 == line.0);
                let own = own.or_else(|| same_client(&self.in_flight, line));
                return own.map(|line| Step::EndSession(line, fault));
            }
            Step::Beat(client, _) => {
                self.clients[client].beats && self.record.referee().holds(client)
            }
            Step::Skip(_) => self.may_skip(),
            Step::Crash => true,
            Step::CutOffStandby => self.plan.promotion == Some(Promotion::Lossy { cut_off: false }),
            Step::Promote => matches!(
                self.plan.promotion,
                Some(Promotion::Synchronous | Promotion::Lossy { cut_off: true })
            ),
        };
        applies.then_some(step)
    }
}

/// This line, or another one of the same client.
fn same_client<T>(held: &BTreeMap<Line, T>, line: Line) -> Option<Line> {
    let mut own = held.keys().filter(|other| other.0 == line.0);
    if held.contains_key(&line) { Some(line) } else { own.next().copied() }
}
