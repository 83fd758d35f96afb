//! Values that belong to one process and not to its forked copies.

use std::sync::OnceLock;

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
