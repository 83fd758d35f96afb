//! Heartbeats of workers, which arrive by a timer and wait for their own step.

use std::time::{Duration, Instant};

use crate::schedule::{HeldStatement, Scheduler, take};
use crate::steps::BeatFate;
use crate::turnstile::{ReplyVerdict, StatementVerdict};

/// Time that a heartbeat gets to arrive. It is not awaited again if it does not come.
const BEAT_PATIENCE: Duration = Duration::from_millis(500);

impl Scheduler<'_> {
    /// Decides about the next heartbeat of a worker, once it has arrived.
    pub(crate) async fn beat(&mut self, client: usize, fate: BeatFate) {
        let begun = Instant::now();
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
}
