//! Events of the world, and the parts of the world that they concern.

use std::rc::Rc;

use super::network::{Arrival, Side};
use super::world::{ProductWorld, WorldEvent, note};

/// Handles an event of the world.
pub(super) fn handle(world: &Rc<ProductWorld>, event: WorldEvent) {
    let now = world.now.get();
    match event {
        WorldEvent::Arrival(Arrival::Segment { connection, to }) => {
            if world.timeline.borrow().is_recorded() {
                world.note_segments(connection, to);
            }
            world.net.borrow_mut().deliver(connection, to, now);
        }
        WorldEvent::Arrival(Arrival::GivesUp { connection, side }) => {
            world.net.borrow_mut().break_end(connection, side);
        }
        WorldEvent::StepClient { client } => world.step_client(client),
        WorldEvent::StartClient { client } => world.start_client(client),
        WorldEvent::StepServer => world.step_server(),
        WorldEvent::StartServer => world.start_server(),
        WorldEvent::Fault(index) => world.strike_or_defer(index),
        WorldEvent::Told { connection, side, finish } => world.tell(connection, side, finish),
        WorldEvent::ReadAgain { client } => world.read_again(client),
        WorldEvent::PauseEnds { client } => {
            let process = world.process(client);
            if process.paused_until.get() <= now {
                note!(world, &format!("client {client}"), "continues");
            }
            world.schedule_step(client, now);
        }
        WorldEvent::DiskFreed => {
            let host = world.host.borrow();
            if host.full_until <= now {
                note!(world, "disk", "has space again");
                host.disk.set_full(false);
            }
        }
        WorldEvent::Check { belief } => world.check(belief),
        WorldEvent::Heal => world.heal(),
    }
}

impl ProductWorld {
    /// Adds the segments that arrive now to the timeline.
    fn note_segments(&self, connection: usize, to: Side) {
        let net = self.net.borrow();
        let client = net.connections[connection].client;
        for text in net.arriving(connection, to, self.now.get()) {
            let from = match to {
                Side::Client => format!("server to client {client}"),
                Side::Server => format!("client {client} to server"),
            };
            note!(self, "network", "  {from}, connection {connection}: {text}");
        }
    }

    fn check(&self, belief: usize) {
        self.judged(|referee, eyes| referee.check(belief, eyes));
        if let Some((breach, what)) = &self.referee.borrow().breach {
            note!(self, "referee", "{breach}: {what}");
        }
    }
}
