//! Values that belong to one process and not to its forked copies.

use std::sync::{Arc, OnceLock};

use crate::store::Identity;

/// Value that each process creates for itself.
///
/// `fork` copies memory but not threads. A forked copy has the data of a thread, its timers and its runtime, but not
/// the thread itself, and it shares the descriptors with its parent. So the copy must create its own value, and must
/// leave the value of its parent alone.
///
/// The values form a linked list: each process appends its own, after those of its ancestors. Reading takes no lock:
/// another thread could hold the lock at the moment of the fork, and in the copy it would stay locked forever. One case
/// is not covered: a fork while another thread creates the *first* value of the process. The copy then waits for that
/// thread forever.
pub(crate) struct PerProcess<T>(OnceLock<Box<ProcessEntry<T>>>);

struct ProcessEntry<T> {
    pid: u32,
    value: T,
    next: PerProcess<T>,
}

impl<T> PerProcess<T> {
    pub(crate) const fn new() -> Self {
        Self(OnceLock::new())
    }

    /// Returns the value of this process. Creates it on the first call.
    pub(crate) fn get_or_init(&self, make: impl Fn() -> T) -> &T {
        self.of(std::process::id(), make)
    }

    fn of(&self, pid: u32, make: impl Fn() -> T) -> &T {
        let mut list = self;
        loop {
            let new = || Box::new(ProcessEntry { pid, value: make(), next: Self::new() });
            let entry = list.0.get_or_init(new);
            // Only the last entry can be ours: the system may reuse the pid of an ancestor for a later descendant.
            if entry.pid == pid && entry.next.0.get().is_none() {
                return &entry.value;
            }
            list = &entry.next;
        }
    }
}

/// Identity of a process, and the source of its claim ids.
pub(crate) struct Process {
    identity: Arc<Identity>,
    nonce: u64,
    claims: u64,
}

impl Process {
    /// Creates the identity of a process. The nonce distinguishes it from all other processes.
    pub(crate) fn new(host: String, pid: u32, nonce: u64) -> Self {
        let id = format!("{host}:{pid}:{:08x}", nonce >> 32);
        let identity = Identity { id, host, pid, note: String::new() };
        Self { identity: Arc::new(identity), nonce, claims: 0 }
    }

    /// Creates the identity of a simulated process.
    #[cfg(feature = "simulation")]
    pub(crate) fn simulated(host: &str, nonce: u64) -> Self {
        // Not the id of the real process: a message with more digits would change the run.
        let pid = u32::try_from(nonce % 30_000).unwrap_or(0) + 1;
        let id = format!("{host}:{:08x}", nonce >> 32);
        let identity = Identity { id, host: host.to_owned(), pid, note: String::new() };
        Self { identity: Arc::new(identity), nonce, claims: 0 }
    }

    pub(crate) fn identity(&self) -> &Arc<Identity> {
        &self.identity
    }

    /// Returns the id of the next claim: unique across processes, and not a secret.
    pub(crate) fn next_claim(&mut self) -> u128 {
        self.claims += 1;
        u128::from(self.nonce) << 64 | u128::from(self.claims)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_process_has_its_own_also_where_a_number_comes_again() {
        let values = PerProcess::new();
        for (nth, pid) in [7, 8, 7].into_iter().enumerate() {
            assert_eq!(*values.of(pid, || nth), nth);
            assert_eq!(*values.of(pid, || 99), nth, "made once");
        }
    }
}
