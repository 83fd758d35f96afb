//! Faults that stop or end the server between two of its operations.

use std::panic::resume_unwind;
use std::rc::Rc;

use super::host::POKE_INTERVAL;
use super::plan::{Fault, ServerPoint};
use super::world::{self, ProductWorld, nanos, note};

/// Payload of the unwinding that ends a killed server in the middle of its step.
pub(super) struct ServerEnded;

/// Marks the end of an operation of the server: faults strike here.
pub(super) fn server_operation(point: ServerPoint) {
    world::with(|world| {
        if let Some(fault) = world.next_server_fault(point) {
            world.strike(fault);
        }
    });
}

/// Marks a write of the server. Returns the number of bytes that reach the file if the server is killed meanwhile; the
/// caller then calls [`end_server`].
pub(super) fn server_write(length: usize) -> Option<usize> {
    world::with(|world| {
        let fault = world.next_server_fault(ServerPoint::Disk)?;
        if matches!(fault, Fault::KillServer { .. } | Fault::CrashMachine { .. }) {
            world.disturb_all();
            let written = world.random.borrow_mut().below(length as u64 + 1);
            world.host.borrow_mut().armed.insert(0, (ServerPoint::Any, 0, fault));
            return usize::try_from(written).ok();
        }
        world.strike(fault);
        None
    })
}

/// Ends the server in the middle of a write.
pub(super) fn end_server() {
    server_operation(ServerPoint::Disk);
}

impl ProductWorld {
    /// Takes the fault that strikes at this operation, if any.
    fn next_server_fault(&self, point: ServerPoint) -> Option<Fault> {
        let mut host = self.host.borrow_mut();
        if !host.serving || self.judging.get() {
            return None;
        }
        let counts = |counted: ServerPoint| counted == ServerPoint::Any || counted == point;
        let struck = host.armed.iter().position(|(at, left, _)| counts(*at) && *left == 0);
        for (at, left, _) in &mut host.armed {
            if counts(*at) {
                *left = left.saturating_sub(1);
            }
        }
        struck.map(|index| host.armed.remove(index).2)
    }

    /// Stops or ends the server in the middle of its step.
    fn strike(self: &Rc<Self>, fault: Fault) {
        self.disturb_all();
        match fault {
            Fault::StopServer { lasts, .. } => {
                note!(self, "server", "is stopped for {lasts:?}");
                self.count_fault(fault.kind());
                // Every other process goes on meanwhile.
                self.run_until(self.now.get() + nanos(lasts));
                note!(self, "server", "continues");
            }
            Fault::KillServer { .. } | Fault::CrashMachine { .. } => {
                self.host.borrow_mut().armed.insert(0, (ServerPoint::Any, 0, fault));
                resume_unwind(Box::new(ServerEnded));
            }
            _ => {}
        }
    }

    pub(super) fn begin_server_fault(self: &Rc<Self>, fault: Fault) {
        match fault {
            Fault::StopServer { point, operations, .. }
            | Fault::KillServer { point, operations, .. }
            | Fault::CrashMachine { point, operations, .. } => {
                self.host.borrow_mut().armed.push((point, operations, fault));
                self.schedule_server(self.now.get() + POKE_INTERVAL);
            }
            Fault::ShutDownServer { restart_after } => {
                self.disturb_all();
                let mut host = self.host.borrow_mut();
                host.restart_after = nanos(restart_after);
                if let Some(handle) = &host.handle {
                    let handle = handle.clone();
                    drop(host);
                    self.count_fault(fault.kind());
                    handle.stop();
                }
            }
            _ => {}
        }
    }
}
