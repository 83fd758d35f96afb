//! Doubly linked lists through the values of a slab: insertion and removal take constant time.

use super::slab::{NONE, Slab};

/// Value that can be an element of a list.
pub(super) trait Linked {
    fn links(&self) -> Links;
    fn links_mut(&mut self) -> &mut Links;
}

/// Neighbours of a value in its list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Links {
    prev: u32,
    next: u32,
}

impl Links {
    pub(super) const UNLINKED: Self = Self { prev: NONE, next: NONE };

    pub(super) const fn prev(self) -> u32 {
        self.prev
    }

    pub(super) const fn next(self) -> u32 {
        self.next
    }
}

/// List in the order of insertion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct List {
    head: u32,
    tail: u32,
    len: u32,
}

impl List {
    pub(super) const EMPTY: Self = Self { head: NONE, tail: NONE, len: 0 };

    pub(super) const fn len(&self) -> u32 {
        self.len
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn first(&self) -> Option<u32> {
        (self.head != NONE).then_some(self.head)
    }

    pub(super) fn push<T: Linked>(&mut self, slab: &mut Slab<T>, id: u32) {
        *slab[id].links_mut() = Links { prev: self.tail, next: NONE };
        match self.tail {
            NONE => self.head = id,
            tail => slab[tail].links_mut().next = id,
        }
        self.tail = id;
        self.len += 1;
    }

    pub(super) fn remove<T: Linked>(&mut self, slab: &mut Slab<T>, id: u32) {
        let Links { prev, next } = std::mem::replace(slab[id].links_mut(), Links::UNLINKED);
        match prev {
            NONE => self.head = next,
            prev => slab[prev].links_mut().next = next,
        }
        match next {
            NONE => self.tail = prev,
            next => slab[next].links_mut().prev = prev,
        }
        self.len -= 1;
    }

    /// Elements from first to last.
    pub(super) fn iter<T: Linked>(self, slab: &Slab<T>) -> impl Iterator<Item = u32> {
        std::iter::successors(self.first(), |id| {
            let next = slab[*id].links().next;
            (next != NONE).then_some(next)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Node(Links);

    impl Linked for Node {
        fn links(&self) -> Links {
            self.0
        }

        fn links_mut(&mut self) -> &mut Links {
            &mut self.0
        }
    }

    fn backwards(list: List, slab: &Slab<Node>) -> Vec<u32> {
        let end = (list.tail != NONE).then_some(list.tail);
        std::iter::successors(end, |id| {
            let prev = slab[*id].links().prev();
            (prev != NONE).then_some(prev)
        })
        .collect()
    }

    #[test]
    fn members_leave_from_the_front_the_middle_and_the_end() {
        for leaving in [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]] {
            let mut slab = Slab::new();
            let mut list = List::EMPTY;
            let mut left: Vec<u32> = Vec::new();
            for _ in 0..4 {
                let id = slab.insert(Node(Links::UNLINKED));
                list.push(&mut slab, id);
                left.push(id);
            }
            for id in leaving {
                list.remove(&mut slab, id);
                left.retain(|other| *other != id);
                assert_eq!(list.iter(&slab).collect::<Vec<_>>(), left);
                assert!(backwards(list, &slab).into_iter().rev().eq(left.iter().copied()));
                assert_eq!(list.len() as usize, left.len());
            }
            assert!(list.is_empty() && list.first().is_none());
        }
    }
}
