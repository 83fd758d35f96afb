//! Watches of keys in a stream: messages that are late, delivered twice, or lost.

use tenure_core::Machine as _;
use tenure_core::acquire::AcquireInput;

use crate::message::StreamMessage;
use crate::task::{Task, TaskMachine};
use crate::world::{Event, World, note};

impl World {
    /// Ends the watch of a task if the holders of its key have changed.
    pub(crate) fn check_watch(&self, client: usize, task: &mut Task) {
        let now = self.local(client);
        let holders = self.clients[client].stream.holders_hash(task.key, now);
        if task.watching
            && holders != task.claim_state.contended_holders()
            && let TaskMachine::Acquire(acquire) = &mut task.machine
        {
            task.watching = false;
            acquire.handle(AcquireInput::Changed, now);
        }
    }

    /// Delivers a message of a stream to a client that watches.
    ///
    /// The message may have arrived over an earlier connection, and been handled only now.
    pub(crate) fn notify(&mut self, client: usize, message: StreamMessage, connection: u64) {
        if !self.clients[client].awake() {
            return;
        }
        let now = self.local(client);
        note!(self, "client {client}: is notified of {message:?}");
        self.clients[client].stream.note_message(message, connection, now);
        for index in 0..self.clients[client].tasks.len() {
            if self.clients[client].tasks[index].key == message.key {
                self.with_task(client, index, |world, task| {
                    world.check_watch(client, task);
                    world.drive(client, task);
                });
            }
        }
        self.remove_finished(client);
    }

    /// Sends a message of a stream to the clients that watch its key. It may be late, or twice, or lost.
    pub(crate) fn send_notifications(&mut self, message: StreamMessage) {
        for client in 0..self.clients.len() {
            let watches = |task: &Task| task.watching && task.key == message.key;
            if !self.clients[client].tasks.iter().any(watches) || self.clients[client].partitioned {
                continue;
            }
            let copies = if self.random.chance(0.1) { 2 } else { 1 };
            for _ in 0..copies {
                let lost = !self.healed && self.random.chance(self.setup.faults.lose_notification);
                let at = self.now + self.delay();
                if !lost {
                    self.schedule(at, Event::Notify(client, message, self.stream_connection));
                }
            }
        }
    }
}
