//! Heartbeats of workers, which arrive by a timer and wait for their own step.

use std::time::{Duration, Instant};

use crate::schedule::{HeldStatement, Scheduler, take};
use crate::steps::BeatFate;
use crate::turnstile::{Line, ReplyVerdict, StatementVerdict};

/// Time that a heartbeat gets to arrive, if nothing explains its absence: far more than a busy machine needs,
/// and less than the patience of other clients.
const BEAT_PATIENCE: Duration = Duration::from_secs(4);
/// The same otherwise. A heartbeat that does not come is not awaited again.
const SHORT_BEAT_PATIENCE: Duration = Duration::from_millis(500);

impl Scheduler<'_> {
    /// Decides about the next heartbeat of a worker, once it has arrived.
    pub(crate) async fn beat(&mut self, client: usize, fate: BeatFate) {
        let begun = Instant::now();
        // A request that is held back here can hold back a heartbeat behind it, and a greeting those of its connection.
        let held_back = |line: &Line| line.0 == client;
        let due = self.record.faults_of(client) == 0
            && !self.clients[client].running
            && !self.statements.keys().any(held_back)
            && !self.replies.keys().any(held_back)
            && self.record.referee().relies(client, self.record.now());
        let patience = if due { BEAT_PATIENCE } else { SHORT_BEAT_PATIENCE };
        let line = loop {
            let found = self.beats.keys().find(|line| line.0 == client).copied();
            let left = patience.checked_sub(begun.elapsed());
            match (found, left) {
                (Some(line), _) => break line,
                (None, None) => {
                    self.clients[client].beats = false;
                    self.record.note_client(client, "sends no heartbeat", "");
                    if due {
                        let text = format!("client {client} had no fault, and renews no lease");
                        self.record.violate(text);
                    }
                    return;
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
}
