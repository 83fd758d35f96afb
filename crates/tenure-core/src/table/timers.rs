//! Which alarm is next: a heap that knows where each of its members stands.

use super::slab::NONE;
use crate::Time;

/// At most one alarm for each number of a slab, the earliest first.
///
/// A heap with four children to a node, which is half as deep as a binary one, and the place of each number beside it,
/// so that an alarm can be moved or taken out.
#[derive(Debug)]
pub(super) struct TimerHeap {
    heap: Vec<Alarm>,
    /// Where in the heap the alarm of a number stands.
    spots: Vec<u32>,
}

/// When to look at a hold. Alarms of one instant go off in the order of their grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Alarm {
    pub(super) at: Time,
    /// The fencing number of the hold.
    pub(super) number: u64,
    pub(super) id: u32,
}

const CHILDREN: usize = 4;

impl TimerHeap {
    pub(super) const fn new() -> Self {
        Self { heap: Vec::new(), spots: Vec::new() }
    }

    pub(super) fn first(&self) -> Option<Alarm> {
        self.heap.first().copied()
    }

    /// When the alarm of `id` goes off.
    pub(super) fn armed(&self, id: u32) -> Option<Alarm> {
        self.spot(id).map(|spot| self.heap[spot])
    }

    /// Sets the alarm of `alarm.id`, or moves it.
    pub(super) fn arm(&mut self, alarm: Alarm) {
        if let Some(spot) = self.spot(alarm.id) {
            self.heap[spot] = alarm;
            self.settle(spot);
            return;
        }
        if self.spots.len() <= alarm.id as usize {
            self.spots.resize(alarm.id as usize + 1, NONE);
        }
        self.heap.push(alarm);
        self.rise(self.heap.len() - 1);
    }

    /// Takes the alarm of `id` away, if it has one.
    pub(super) fn disarm(&mut self, id: u32) {
        let Some(spot) = self.spot(id) else { return };
        self.spots[id as usize] = NONE;
        let last = self.heap.pop().expect("the heap holds the alarm");
        if spot < self.heap.len() {
            self.heap[spot] = last;
            self.settle(spot);
        }
    }

    /// Panics unless every member is where it should be.
    pub(super) fn check(&self) {
        for (spot, alarm) in self.heap.iter().enumerate() {
            assert_eq!(self.spot(alarm.id), Some(spot), "the spot of {alarm:?}");
            assert!(spot == 0 || self.heap[(spot - 1) / CHILDREN] < *alarm, "order at {spot}");
        }
        let armed = self.spots.iter().filter(|spot| **spot != NONE).count();
        assert_eq!(armed, self.heap.len(), "spots in use");
    }

    fn spot(&self, id: u32) -> Option<usize> {
        let spot = *self.spots.get(id as usize)?;
        (spot != NONE).then_some(spot as usize)
    }

    fn settle(&mut self, spot: usize) {
        if spot > 0 && self.heap[spot] < self.heap[(spot - 1) / CHILDREN] {
            self.rise(spot);
        } else {
            self.sink(spot);
        }
    }

    fn rise(&mut self, mut spot: usize) {
        let alarm = self.heap[spot];
        while spot > 0 {
            let parent = (spot - 1) / CHILDREN;
            if self.heap[parent] <= alarm {
                break;
            }
            self.put(spot, self.heap[parent]);
            spot = parent;
        }
        self.put(spot, alarm);
    }

    fn sink(&mut self, mut spot: usize) {
        let alarm = self.heap[spot];
        loop {
            let first = spot * CHILDREN + 1;
            let end = (first + CHILDREN).min(self.heap.len());
            let Some(child) = (first..end).min_by_key(|child| self.heap[*child]) else { break };
            if alarm <= self.heap[child] {
                break;
            }
            self.put(spot, self.heap[child]);
            spot = child;
        }
        self.put(spot, alarm);
    }

    #[expect(clippy::cast_possible_truncation, reason = "the heap is no larger than its slab")]
    fn put(&mut self, spot: usize, alarm: Alarm) {
        self.heap[spot] = alarm;
        self.spots[alarm.id as usize] = spot as u32;
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
