//! Model of the holds, built from the server's replies: every later reply must agree with it.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use tenure_core::Time;

/// A key of one of the two spaces.
pub(crate) type Name = (bool, Vec<u8>);

/// How a key is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    Alone,
    Shared,
    OneOf(u64),
}

#[derive(Clone, Debug)]
pub(crate) struct Hold {
    pub(crate) name: Name,
    pub(crate) how: How,
    /// The connection that it goes with.
    pub(crate) owner: Option<u64>,
    pub(crate) claim: Option<Vec<u8>>,
    pub(crate) lease: Duration,
    pub(crate) ends: Time,
}

#[derive(Debug, Default)]
pub(crate) struct Model {
    /// By the text of their token.
    holds: BTreeMap<Vec<u8>, Hold>,
    numbers: HashSet<u64>,
    /// The largest, and what that was before the present call.
    largest: u64,
    largest_before: u64,
    /// Numbers of grants that are not followed.
    untold: HashSet<u64>,
    /// Numbers of holds that were broken, perhaps before their grant was told.
    broken: HashSet<u64>,
}

impl Model {
    /// Records a grant that the server reports for the first time.
    pub(crate) fn granted(&mut self, token: &[u8], hold: Hold, fresh: bool, now: Time) {
        let number = number(token);
        assert!(self.numbers.insert(number), "{number} was granted twice");
        // Grants that are told at once are larger than what was told before this call.
        assert!(!fresh || number > self.largest_before, "{number} does not grow");
        self.largest = self.largest.max(number);
        if self.broken.contains(&number) {
            return;
        }
        let beside: Vec<&Hold> = self
            .holds
            .values()
            .filter(|other| other.name == hold.name && other.ends > now)
            .collect();
        let fits = match hold.how {
            How::Alone => beside.is_empty(),
            How::Shared => beside.iter().all(|other| other.how == How::Shared),
            How::OneOf(limit) => (beside.len() as u64) < limit,
        };
        assert!(fits, "{hold:?} beside {beside:?}");
        self.holds.insert(token.to_vec(), hold);
    }

    /// A grant that cannot be followed.
    pub(crate) fn untold(&mut self, token: &[u8]) {
        self.numbers.insert(number(token));
        self.untold.insert(number(token));
    }

    pub(crate) fn is_untold(&self, token: &[u8]) -> bool {
        self.untold.contains(&number(token))
    }

    /// A call to the engine is over: what it granted is known by now, or will be told late.
    pub(crate) fn settled(&mut self, now: Time) {
        self.largest_before = self.largest;
        self.holds.retain(|_, hold| hold.ends > now);
    }

    pub(crate) fn is_known(&self, token: &[u8]) -> bool {
        self.numbers.contains(&number(token))
    }

    /// The live hold that this token proves.
    pub(crate) fn proven(&mut self, token: &[u8], name: &Name, now: Time) -> Option<&mut Hold> {
        self.holds.get_mut(token).filter(|hold| hold.name == *name && hold.ends > now)
    }

    pub(crate) fn renew(&mut self, token: &[u8], name: &Name, lease: Duration, now: Time) {
        let hold = self.proven(token, name, now).expect("renewed without a hold");
        hold.lease = lease;
        hold.ends = now + lease;
    }

    pub(crate) fn release(&mut self, token: &[u8], name: &Name, now: Time) {
        assert!(self.proven(token, name, now).is_some(), "released without a hold");
        self.holds.remove(token);
    }

    pub(crate) fn broke(&mut self, broken: u64) {
        self.broken.insert(broken);
        self.holds.retain(|token, _| number(token) != broken);
    }

    pub(crate) fn abandoned(&mut self, claim: &[u8]) {
        self.holds.retain(|_, hold| hold.claim.as_deref() != Some(claim));
    }

    pub(crate) fn left(&mut self, owner: u64) {
        self.holds.retain(|_, hold| hold.owner != Some(owner));
    }

    /// Some token that is live, or was.
    pub(crate) fn some_token(&self, skip: usize) -> Option<(&[u8], &Name)> {
        let mut all = self.holds.iter();
        let at = skip % self.holds.len().max(1);
        all.nth(at).map(|(token, hold)| (&token[..], &hold.name))
    }
}

pub(crate) fn number(token: &[u8]) -> u64 {
    let text = std::str::from_utf8(&token[..16]).expect("hexadecimal digits");
    u64::from_str_radix(text, 16).expect("hexadecimal digits")
}
