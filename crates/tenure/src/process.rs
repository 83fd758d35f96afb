//! What belongs to one process and not to its forked copies.

use std::sync::OnceLock;

/// A value that each process makes for itself. `fork` copies memory and no threads: of a thread, its timers and its
/// runtime a copy of the process has the data alone, and shares descriptors with its parent. So it makes its own, and leaves
/// the old ones as they are.
///
/// A list in which each process that uses it adds itself at the end, behind those that it was forked from. No lock is taken
/// to read it: another thread might have held that in the moment of the fork, and for ever in the copy. A fork while
/// another thread makes the *first* value of the process is not covered: the copy waits for that thread.
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

    /// The value of this process, made where it has none yet.
    pub(crate) fn get_or_init(&self, make: impl Fn() -> T) -> &T {
        self.of(std::process::id(), make)
    }

    fn of(&self, pid: u32, make: impl Fn() -> T) -> &T {
        let mut place = self;
        loop {
            let new = || Box::new(ProcessEntry { pid, value: make(), next: Self::new() });
            let entry = place.0.get_or_init(new);
            // The last alone can be ours: a number may come again, some generations later.
            if entry.pid == pid && entry.next.0.get().is_none() {
                return &entry.value;
            }
            place = &entry.next;
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
