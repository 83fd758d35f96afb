//! One run of the first world.

use crate::contract::Breach;
use crate::setup::Setup;
use crate::violation::{Stats, Violation};
use crate::world::{Event, World, note};

/// Maximum number of events, far more than any run needs. Detects a state machine that keeps requesting the same
/// timeout.
const MAX_EVENTS: u64 = 1_000_000;

/// Runs one simulation.
///
/// # Errors
///
/// The first breach of the contract, with the events that led to it.
pub fn simulate(seed: u64, setup: &Setup) -> Result<Stats, Box<Violation>> {
    // A trace costs more than the run itself, so it is recorded in a second run, and only after a breach.
    match run(seed, setup, false) {
        Ok(stats) => Ok(stats),
        Err(_) => run(seed, setup, true),
    }
}

fn run(seed: u64, setup: &Setup, traced: bool) -> Result<Stats, Box<Violation>> {
    let mut world = World::new(seed, setup, traced);
    for _ in 0..world.client_count {
        world.add_client();
    }
    world.schedule_faults();
    while let Some(event) = world.next_event() {
        world.dispatch(event);
        if world.stats.events > MAX_EVENTS {
            world.fail(Breach::NoEnd, || "the number of events exceeds the limit".into());
        }
        if let Some(violation) = world.take_violation(seed) {
            return Err(violation);
        }
        if matches!(event, Event::Finish) {
            break;
        }
    }
    world.stats.excused_overlaps = world.checker.excused_overlaps;
    Ok(world.stats)
}

impl World {
    fn dispatch(&mut self, event: Event) {
        match event {
            Event::Wake(client) => self.alarm(client),
            Event::StoreWake => self.wake_store(),
            Event::ToStore(message) => self.arrive(message),
            Event::ToClient(message) => self.deliver(message),
            Event::Fault(client) => self.inject_fault(client),
            Event::Resume(client) => self.resume(client),
            Event::PartitionEnd(client) => self.end_partition(client),
            Event::ClientRestart(client) => self.restart_client(client),
            Event::Disconnect(connection) => {
                note!(self, "store: learns that connection {connection} is gone");
                self.store.disconnect(connection, self.store_clock.read(self.now));
                self.after_store();
            }
            Event::StoreSlew => self.slew_store(),
            Event::StoreDown => self.stop_store(),
            Event::StoreUp => self.start_store(),
            Event::LeaderChange => self.change_leader(),
            Event::Notify(client, message, connection) => self.notify(client, message, connection),
            Event::StoreLoss => self.lose_writes(),
            Event::Heal => self.heal(),
            Event::Probe => self.probe(),
            Event::Finish => self.check_probes(),
        }
    }
}
