//! Requests of a client: the messages of one operation after another.

use std::time::Duration;

use tenure_core::Time;

use crate::contract::Breach;
use crate::in_flight::{InFlight, Operation, Outcome, ReplyEffect, StreamTurn};
use crate::message::{Request, RequestMessage};
use crate::setup::StoreKind;
use crate::task::Task;
use crate::world::World;

impl World {
    /// Ends a wait, which the next command may interrupt. Any other request must have ended already.
    pub(crate) fn cut_wait(&mut self, task: &mut Task) {
        if let Some(in_flight) = task.in_flight.take()
            && in_flight.operation != Operation::Wait
        {
            self.fail(Breach::TwoRequests, || format!("task {} while {in_flight:?}", task.id));
        }
    }

    pub(crate) fn begin(
        &mut self,
        client: usize,
        task: &mut Task,
        operation: Operation,
        limit: Duration,
    ) {
        self.cut_wait(task);
        let now = self.local(client);
        let faults = self.setup.faults;
        if self.connections[task.connection].broken {
            // Only a keeper has a broken connection: its request fails at once. An acquire has reconnected.
            task.in_flight = Some(in_flight(operation, now, now + Duration::from_micros(1)));
            return;
        }
        let mut limit_at = now + limit;
        if !self.healed && self.random.chance(faults.refuse) {
            let permanent_failure = self.random.chance(0.2);
            let soon = now + Duration::from_micros(1);
            task.in_flight =
                Some(InFlight { permanent_failure, ..in_flight(operation, now, soon) });
            return;
        }
        if !self.healed && operation != Operation::Wait && self.random.chance(faults.hang) {
            limit_at = limit_at + Duration::from_nanos(self.random_span(2.0));
        }
        task.in_flight =
            Some(InFlight { deadline: now + limit, ..in_flight(operation, now, limit_at) });
        if operation == Operation::Wait && self.setup.store == StoreKind::Bucket {
            if let Some(in_flight) = &mut task.in_flight {
                in_flight.polls = true;
            }
            return self.read_again(task, now);
        }
        let (key, wall) = (task.key, self.wall(client));
        let process = &mut self.clients[client].stream;
        process.connection = self.stream_connection;
        let effect = task.claim_state.begin(operation, &mut StreamTurn { process, key, now, wall });
        let ReplyEffect::Send(request) = effect else {
            let Some(in_flight) = task.in_flight else { return };
            return self.apply(client, task, in_flight, effect);
        };
        if self.setup.store == StoreKind::Stream
            && let Some(deadline) = task.in_flight.map(|in_flight| in_flight.deadline)
        {
            let shares = task.claim_state.time_share() < 1.0;
            let limit_at = if shares { stream_limit(task, deadline, now) } else { limit_at };
            task.in_flight = task.in_flight.map(|in_flight| InFlight { limit_at, ..in_flight });
        }
        self.send_request(task, request);
    }

    /// Sends the next read of a polling wait. A read has a shorter limit than the wait.
    pub(crate) fn read_again(&mut self, task: &mut Task, now: Time) {
        let limit_at = now + self.lease.request_limit();
        if let Some(in_flight) = &mut task.in_flight {
            (in_flight.sent, in_flight.next_read_at, in_flight.limit_at) =
                (now, Time::MAX, limit_at);
        }
        self.send_request(task, Request::Read);
    }

    /// Sends a message of the operation in flight.
    fn send_request(&mut self, task: &mut Task, request: Request) {
        let Some(in_flight) = &mut task.in_flight else { return };
        task.messages += 1;
        in_flight.number = task.messages;
        let reads = [Request::Read, Request::StreamRead, Request::StreamInfo].contains(&request);
        in_flight.wrote |= !reads;
        let (connection, number, key, due) =
            (task.connection, task.messages, task.key, in_flight.deadline);
        let client = self.connections[connection].client;
        let stream_connection = self.clients[client].stream.connection;
        let (deadline, stale) = (due, false);
        self.send(RequestMessage {
            connection,
            number,
            key,
            request,
            deadline,
            stale,
            stream_connection,
        });
    }

    /// Sends the next message of an operation, or ends it.
    pub(crate) fn apply(
        &mut self,
        client: usize,
        task: &mut Task,
        in_flight: InFlight,
        effect: ReplyEffect,
    ) {
        let now = self.local(client);
        match effect {
            ReplyEffect::Send(request) => {
                let mut next = InFlight { sent: now, ..in_flight };
                if self.setup.store == StoreKind::Stream {
                    if now >= in_flight.deadline {
                        task.complete(in_flight.unanswered(), now);
                        return self.drive(client, task);
                    }
                    next.limit_at = stream_limit(task, in_flight.deadline, now);
                }
                task.in_flight = Some(next);
                self.send_request(task, request);
            }
            ReplyEffect::Pause => {
                let again = (now + self.setup.ttl / 10).min(in_flight.deadline);
                task.in_flight = Some(InFlight {
                    next_read_at: again,
                    limit_at: Time::MAX,
                    number: 0,
                    ..in_flight
                });
            }
            ReplyEffect::Done(outcome) => {
                task.complete(outcome, now);
                if let Outcome::Broken = outcome {
                    self.connections[task.connection].broken = true;
                    task.connection = self.connect(client, task.id);
                }
                self.drive(client, task);
            }
        }
    }
}

/// Time limit of one request of several to a stream.
fn stream_limit(task: &Task, deadline: Time, now: Time) -> Time {
    now + deadline.since(now).mul_f64(task.claim_state.time_share())
}

fn in_flight(operation: Operation, sent: Time, limit_at: Time) -> InFlight {
    InFlight {
        operation,
        number: 0,
        sent,
        deadline: limit_at,
        limit_at,
        wrote: false,
        permanent_failure: false,
        next_read_at: Time::MAX,
        polls: false,
    }
}
