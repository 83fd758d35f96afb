//! The tickets that this process knows: the queues that it waits in, as far as notifications have arrived.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, MutexGuard};

use tokio::sync::Notify;

use super::api::Message;
use crate::mutex::Mutex;

/// Tickets of the queues that this process watches, as far as notifications have arrived.
#[derive(Default)]
pub(super) struct TicketQueues(Mutex<HashMap<String, TicketQueue>>);

#[derive(Default)]
struct TicketQueue {
    /// Waiting claims by place.
    tickets: BTreeMap<u64, String>,
    /// Waiters of this process, by claim.
    local_waiters: HashMap<String, Arc<Notify>>,
}

impl TicketQueue {
    fn place(&self, claim: &str) -> Option<u64> {
        self.tickets.iter().find(|(_, waiting)| *waiting == claim).map(|(place, _)| *place)
    }

    /// Wakes the waiter directly behind a place, if it waits in this process.
    fn wake_behind(&self, place: u64) {
        let next = self.tickets.range(place + 1..).next();
        if let Some(next) = next.and_then(|(_, claim)| self.local_waiters.get(claim)) {
            next.notify_one();
        }
    }
}

/// Position of a claim in its queue, by the tickets that this process knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct QueuePosition {
    place: u64,
    /// Number of earlier tickets that are not void.
    pub(super) ahead: usize,
}

impl TicketQueues {
    /// Applies a message about a ticket: written, rewritten or removed.
    pub(super) fn note_message(&self, message: &Message) {
        let Some((prefix, claim)) = message.subject.rsplit_once('.') else { return };
        let mut queues = self.lock();
        let queue = queues.entry(prefix.to_owned()).or_default();
        let old_place = queue.place(claim);
        if let Some(old_place) = old_place {
            queue.tickets.remove(&old_place);
        }
        if message.value.is_some() {
            queue.tickets.insert(message.sequence, claim.to_owned());
            // A waiter does nothing until its own ticket arrives here: before that, it cannot know how many are ahead.
            if let Some(own) = queue.local_waiters.get(claim) {
                own.notify_one();
            }
        }
        if let Some(old_place) = old_place {
            queue.wake_behind(old_place);
        }
    }

    /// Forgets the tickets of a queue whose watch is about to start.
    ///
    /// A new consumer delivers every ticket that exists, but says nothing of tickets that were purged while no consumer
    /// ran. If such a ticket were kept from the previous watch, it would count as a waiter ahead until its turn timed
    /// out.
    pub(super) fn watch_starting(&self, filter: &str) {
        if let Some(prefix) = filter.strip_suffix(".*") {
            self.lock().entry(prefix.to_owned()).or_default().tickets.clear();
        }
    }

    /// Wakes the waiters of a queue whose watch has ended, so that they start another.
    ///
    /// `restarted`: another watch of the queue runs already, and still needs the queue's state.
    pub(super) fn watch_ended(&self, filter: &str, restarted: bool) {
        let Some(prefix) = filter.strip_suffix(".*") else { return };
        let mut queues = self.lock();
        let Some(queue) = queues.get(prefix) else { return };
        queue.local_waiters.values().for_each(|waiter| waiter.notify_one());
        if queue.local_waiters.is_empty() && !restarted {
            queues.remove(prefix);
        }
    }

    /// Registers a waiter of this process.
    pub(super) fn join(&self, prefix: &str, claim: &str, wake: &Arc<Notify>) {
        let mut queues = self.lock();
        let queue = queues.entry(prefix.to_owned()).or_default();
        queue.local_waiters.insert(claim.to_owned(), Arc::clone(wake));
    }

    /// Removes a waiter of this process.
    ///
    /// A repeated claim has the same id. Its new place may register before its old place is dropped. The comparison of
    /// `wake` keeps the old place from removing the new one.
    pub(super) fn leave(&self, prefix: &str, claim: &str, wake: &Arc<Notify>) {
        let mut queues = self.lock();
        let Some(queue) = queues.get_mut(prefix) else { return };
        if queue.local_waiters.get(claim).is_some_and(|known| Arc::ptr_eq(known, wake)) {
            queue.local_waiters.remove(claim);
        }
    }

    /// Position of a claim when `served` is the last place granted; `None` if no ticket of the claim is known or it is
    /// void.
    pub(super) fn position(&self, prefix: &str, claim: &str, served: u64) -> Option<QueuePosition> {
        let mut queues = self.lock();
        let queue = queues.get_mut(prefix)?;
        queue.tickets.retain(|place, _| *place > served);
        let place = queue.place(claim)?;
        Some(QueuePosition { place, ahead: queue.tickets.range(..place).count() })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, TicketQueue>> {
        self.0.lock()
    }
}

/// True if the subject, in the bucket with this root, is that of a ticket.
pub(super) fn is_ticket(root: &str, subject: &str) -> bool {
    subject.strip_prefix(root).is_some_and(|name| name.starts_with("queue."))
}

/// Copy of the lock's record that a ticket's removal carries, as a message of the record's own subject.
///
/// Like any notification the copy may be outdated. A waiter that acts on it names its sequence in the write, and the
/// server refuses the write if the record has changed since.
pub(super) fn handed_over_record(root: &str, message: &Message) -> Option<Message> {
    let name = message.subject.strip_prefix(root)?.strip_prefix("queue.")?;
    let (sequence, record) = message.record_header.as_deref()?.split_once(' ')?;
    Some(Message {
        subject: format!("{root}{}", name.rsplit_once('.')?.0),
        // The record was written before the ticket's removal, so that its sequence is lower. Any other sequence is
        // corrupt, or from an earlier stream of the same name. If it were noted, it would hide the record's real state
        // from this process.
        sequence: sequence.parse().ok().filter(|sequence| *sequence < message.sequence)?,
        timestamp: message.timestamp,
        record_header: None,
        value: Some(record.as_bytes().to_vec()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: &str = "$KV.locks.";
    const QUEUE: &str = "$KV.locks.queue.lock.a/b";

    fn ticket_message(
        claim: &str,
        sequence: u64,
        value: Option<&str>,
        record_header: Option<&str>,
    ) -> Message {
        Message {
            subject: format!("{QUEUE}.{claim}"),
            sequence,
            timestamp: 5,
            record_header: record_header.map(str::to_owned),
            value: value.map(Into::into),
        }
    }

    #[test]
    fn a_removed_ticket_carries_the_record_that_was_written_before_it() {
        let removed = |record_header| ticket_message("7", 9, None, record_header);
        let record = handed_over_record(ROOT, &removed(Some("8 {\"tenure\": 1}"))).unwrap();
        assert_eq!((record.subject.as_str(), record.sequence), ("$KV.locks.lock.a/b", 8));
        assert_eq!(record.value.as_deref(), Some(&b"{\"tenure\": 1}"[..]));
        for header in [None, Some(""), Some("8"), Some("x {}"), Some("9 {}"), Some("10 {}")] {
            assert!(handed_over_record(ROOT, &removed(header)).is_none(), "{header:?}");
        }
        assert!(is_ticket(ROOT, &removed(None).subject));
        assert!(!is_ticket(ROOT, "$KV.locks.lock.queue.a"));
    }

    /// True if the waiter was woken since the last call.
    fn woken(wake: &Arc<Notify>) -> bool {
        let mut notified = std::pin::pin!(wake.notified());
        notified.as_mut().enable()
    }

    #[test]
    fn a_waiter_is_woken_by_the_ticket_before_its_own_and_by_no_other() {
        let queues = TicketQueues::default();
        queues.watch_starting(&format!("{QUEUE}.*"));
        let wakes: Vec<_> = (2..=4).map(|_| Arc::new(Notify::new())).collect();
        for (claim, wake) in (2..=4).zip(&wakes) {
            queues.join(QUEUE, &claim.to_string(), wake);
        }
        for claim in 1..=5 {
            queues.note_message(&ticket_message(&claim.to_string(), claim, Some("x"), None));
        }
        assert!(wakes.iter().all(woken), "each is woken by its own ticket");
        assert_eq!(queues.position(QUEUE, "3", 0), Some(QueuePosition { place: 3, ahead: 2 }));
        assert_eq!(queues.position(QUEUE, "3", 1), Some(QueuePosition { place: 3, ahead: 1 }));
        assert!(!wakes.iter().any(woken));
        // A claim that leaves, and the index of the waiter that its departure wakes.
        for (gone, next) in [("5", None), ("2", Some(1)), ("3", Some(2)), ("1", None)] {
            queues.note_message(&ticket_message(gone, 9, None, None));
            let woken: Vec<_> = wakes.iter().map(woken).collect();
            let expected: Vec<_> = (0..3).map(|at| Some(at) == next).collect();
            assert_eq!(woken, expected, "{gone} is gone");
        }
        assert_eq!(queues.position(QUEUE, "4", 0), Some(QueuePosition { place: 4, ahead: 0 }));
        queues.watch_ended(&format!("{QUEUE}.*"), false);
        assert!(wakes.iter().all(woken), "every waiter starts another watch");
        queues.watch_starting(&format!("{QUEUE}.*"));
        assert_eq!(queues.position(QUEUE, "4", 0), None, "not known until delivered again");
        for (claim, wake) in (2..=4).zip(&wakes) {
            queues.leave(QUEUE, &claim.to_string(), &Arc::default());
            assert!(
                queues.lock()[QUEUE].local_waiters.contains_key(&claim.to_string()),
                "joined again"
            );
            queues.leave(QUEUE, &claim.to_string(), wake);
        }
        queues.watch_ended(&format!("{QUEUE}.*"), true);
        assert!(!queues.lock().is_empty(), "another watch needs it");
        queues.watch_ended(&format!("{QUEUE}.*"), false);
        assert!(queues.lock().is_empty());
    }
}
