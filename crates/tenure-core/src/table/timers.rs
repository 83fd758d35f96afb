//! Timer heap that knows the position of each alarm.

use super::slab::NONE;
use crate::Time;

/// At most one alarm per slab slot, the earliest first.
///
/// A 4-ary heap, which is half as deep as a binary heap. The position of each alarm is kept, so an alarm can be moved
/// or removed.
#[derive(Debug)]
pub(super) struct TimerHeap {
    heap: Vec<Alarm>,
    /// Position in the heap of each slot's alarm, or `NONE`.
    positions: Vec<u32>,
}

/// Instant at which to check a hold. Alarms of one instant fire in the order of their grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Alarm {
    pub(super) at: Time,
    /// Fencing number of the hold.
    pub(super) number: u64,
    /// Slab slot of the hold.
    pub(super) id: u32,
}

const CHILDREN: usize = 4;

impl TimerHeap {
    pub(super) const fn new() -> Self {
        Self { heap: Vec::new(), positions: Vec::new() }
    }

    pub(super) fn first(&self) -> Option<Alarm> {
        self.heap.first().copied()
    }

    /// Alarm of `id`.
    pub(super) fn armed(&self, id: u32) -> Option<Alarm> {
        self.position(id).map(|position| self.heap[position])
    }

    /// Sets or moves the alarm of `alarm.id`.
    pub(super) fn arm(&mut self, alarm: Alarm) {
        if let Some(position) = self.position(alarm.id) {
            self.heap[position] = alarm;
            self.rise_or_sink(position);
            return;
        }
        if self.positions.len() <= alarm.id as usize {
            self.positions.resize(alarm.id as usize + 1, NONE);
        }
        self.heap.push(alarm);
        self.rise(self.heap.len() - 1);
    }

    /// Removes the alarm of `id`, if it has one.
    pub(super) fn disarm(&mut self, id: u32) {
        let Some(position) = self.position(id) else { return };
        self.positions[id as usize] = NONE;
        let last = self.heap.pop().expect("the heap holds the alarm");
        if position < self.heap.len() {
            self.heap[position] = last;
            self.rise_or_sink(position);
        }
    }

    /// Panics unless the heap is ordered and every position is right.
    pub(super) fn check(&self) {
        for (position, alarm) in self.heap.iter().enumerate() {
            assert_eq!(self.position(alarm.id), Some(position), "the position of {alarm:?}");
            assert!(
                position == 0 || self.heap[(position - 1) / CHILDREN] < *alarm,
                "order at {position}"
            );
        }
        let armed = self.positions.iter().filter(|position| **position != NONE).count();
        assert_eq!(armed, self.heap.len(), "positions in use");
    }

    fn position(&self, id: u32) -> Option<usize> {
        let position = *self.positions.get(id as usize)?;
        (position != NONE).then_some(position as usize)
    }

    fn rise_or_sink(&mut self, position: usize) {
        if position > 0 && self.heap[position] < self.heap[(position - 1) / CHILDREN] {
            self.rise(position);
        } else {
            self.sink(position);
        }
    }

    fn rise(&mut self, mut position: usize) {
        let alarm = self.heap[position];
        while position > 0 {
            let parent = (position - 1) / CHILDREN;
            if self.heap[parent] <= alarm {
                break;
            }
            self.put(position, self.heap[parent]);
            position = parent;
        }
        self.put(position, alarm);
    }

    fn sink(&mut self, mut position: usize) {
        let alarm = self.heap[position];
        loop {
            let first = position * CHILDREN + 1;
            let end = (first + CHILDREN).min(self.heap.len());
            let Some(child) = (first..end).min_by_key(|child| self.heap[*child]) else { break };
            if alarm <= self.heap[child] {
                break;
            }
            self.put(position, self.heap[child]);
            position = child;
        }
        self.put(position, alarm);
    }

    #[expect(clippy::cast_possible_truncation, reason = "the heap is no larger than its slab")]
    fn put(&mut self, position: usize, alarm: Alarm) {
        self.heap[position] = alarm;
        self.positions[alarm.id as usize] = position as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn alarm(at: u64, id: u32) -> Alarm {
        Alarm { at: Time::from_nanos(at), number: u64::from(id), id }
    }

    #[test]
    fn alarms_of_one_instant_go_off_in_the_order_of_their_numbers() {
        let mut timers = TimerHeap::new();
        for id in [3, 1, 2, 0] {
            timers.arm(alarm(9, id));
        }
        timers.arm(alarm(8, 2));
        let mut order = Vec::new();
        while let Some(first) = timers.first() {
            order.push(first.id);
            timers.disarm(first.id);
        }
        assert_eq!(order, [2, 0, 1, 3]);
    }

    #[test]
    fn arming_moving_and_disarming_at_random_agrees_with_a_sorted_list() {
        let mut timers = TimerHeap::new();
        let mut model: Vec<Alarm> = Vec::new();
        let mut random = 7_u32;
        for _ in 0..20_000 {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let id = (random >> 8) % 60;
            model.retain(|other| other.id != id);
            if random >> 30 == 0 {
                timers.disarm(id);
            } else {
                let new = alarm(u64::from(random >> 16) % 100, id);
                timers.arm(new);
                model.push(new);
            }
            timers.check();
            assert_eq!(timers.first(), model.iter().min().copied());
            assert_eq!(timers.armed(id), model.iter().find(|other| other.id == id).copied());
        }
    }
}
