//! The lock table once more, as plainly as it can be said: lists, searched from the front.

use std::time::Duration;

use tenure_core::table::{
    Ending, Grant, KeySpace, Mode, NotHeld, OnDisconnect, Refusal, Renewed, TableConfig, TableSizes,
};
use tenure_core::{LockToken, Time};

/// An owner, numbered by the order of connecting.
pub type OwnerNo = usize;
/// A queued claim, numbered by the order of queueing.
pub type PlaceNo = usize;
pub type Name = (KeySpace, &'static [u8]);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    Granted(Grant),
    Queued(PlaceNo),
    Busy,
    AlreadyEnqueued,
    LeaseExpired,
    NotEnqueued,
    Refused(Refusal),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    Granted { place: Option<PlaceNo>, owner: OwnerNo, name: Name, grant: Grant },
    Renewed { name: Name, token: LockToken, lease: Duration, ends: Time },
    Detached { name: Name, token: LockToken },
    Queued { place: PlaceNo, owner: OwnerNo, name: Name, mode: Mode },
    Left { place: PlaceNo, owner: OwnerNo, name: Name },
    Ended { how: Ending, owner: Option<OwnerNo>, name: Name, token: LockToken },
    Wanted { owner: OwnerNo, name: Name, token: LockToken },
}

#[derive(Clone, Debug)]
pub struct Hold {
    pub token: LockToken,
    pub mode: Mode,
    pub owner: Option<OwnerNo>,
    pub granted: Time,
    pub lease: Duration,
    pub ends: Time,
}

#[derive(Clone, Debug)]
pub struct Claim {
    pub place: Option<PlaceNo>,
    pub owner: OwnerNo,
    pub name: Name,
    pub mode: Mode,
    pub lease: Duration,
    pub since: Time,
    pub two_phase: bool,
    pub stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Waiting,
    /// With this fencing number.
    Granted(u64),
    Lapsed,
}

#[derive(Clone, Debug)]
pub struct Key {
    pub name: Name,
    pub limit: u32,
    pub holds: Vec<Hold>,
}

pub struct Model {
    pub config: TableConfig,
    pub number: u64,
    pub connected: Vec<bool>,
    pub places: usize,
    /// In the order of their arrival.
    pub claims: Vec<Claim>,
    /// Known keys, idle or not.
    pub keys: Vec<Key>,
    /// In the order of their idling.
    pub idle: Vec<(Name, Time)>,
    pub told: Vec<Told>,
}

/// What a `Want` says.
#[derive(Clone, Copy, Debug)]
pub struct Wish {
    pub owner: OwnerNo,
    pub mode: Mode,
    pub lease: Duration,
    pub queue: bool,
}

impl Model {
    pub fn new(config: TableConfig) -> Self {
        Self {
            config,
            number: 0,
            connected: Vec::new(),
            places: 0,
            claims: Vec::new(),
            keys: Vec::new(),
            idle: Vec::new(),
            told: Vec::new(),
        }
    }

    pub fn ask(&mut self, key: &'static [u8], wish: Wish, two_phase: bool, now: Time) -> Answer {
        let wish = Wish { mode: at_least_one(wish.mode), ..wish };
        self.expire(now);
        let name = (wish.mode.space(), key);
        if !self.connected[wish.owner] {
            return Answer::Refused(Refusal::UnknownOwner);
        }
        if two_phase && self.claim_of(wish.owner, name).is_some() {
            return Answer::AlreadyEnqueued;
        }
        if !self.is_live(name) && self.live() >= self.config.max_keys {
            return Answer::Refused(Refusal::MaxKeys);
        }
        if self.mismatch(name, wish.mode) {
            return Answer::Refused(Refusal::LimitMismatch);
        }
        let waiters = self.waiting(name).count();
        let free = waiters == 0 && self.has_room(name, wish.mode);
        if !free && !wish.queue && !two_phase {
            return Answer::Busy;
        }
        if !free && waiters >= self.config.max_waiters_per_key {
            return Answer::Refused(Refusal::MaxWaiters);
        }
        let mut claim = Claim {
            place: None,
            owner: wish.owner,
            name,
            mode: wish.mode,
            lease: wish.lease,
            since: now,
            two_phase,
            stage: Stage::Waiting,
        };
        if free {
            self.take_up(name, wish.mode);
            let grant = self.grant(name, wish.mode, Some(wish.owner), wish.lease, now);
            self.told.push(Told::Granted { place: None, owner: wish.owner, name, grant });
            if two_phase {
                claim.stage = Stage::Granted(grant.token.number());
                self.claims.push(claim);
            }
            return Answer::Granted(grant);
        }
        let place = self.places;
        claim.place = Some(place);
        self.places += 1;
        self.claims.push(claim);
        self.told.push(Told::Queued { place, owner: wish.owner, name, mode: wish.mode });
        if waiters == 0 && self.config.notify_holders {
            self.tell_holders(name);
        }
        Answer::Queued(self.places - 1)
    }

    pub fn redeem(&mut self, owner: OwnerNo, name: Name, now: Time) -> Answer {
        self.expire(now);
        let Some(at) = self.claim_of(owner, name) else { return Answer::NotEnqueued };
        match self.claims[at].stage {
            Stage::Waiting => Answer::Queued(self.claims[at].place.unwrap()),
            Stage::Lapsed => {
                self.claims.remove(at);
                self.idle_if_unused(name, now);
                Answer::LeaseExpired
            }
            Stage::Granted(number) => {
                self.claims.remove(at);
                let waiters = self.waiters(name);
                let hold = self.hold_mut(name, number).unwrap();
                hold.ends = now + hold.lease;
                let Hold { token, lease, ends, .. } = *hold;
                self.told.push(Told::Renewed { name, token, lease, ends });
                Answer::Granted(Grant { token, lease, ends, waiters })
            }
        }
    }

    pub fn abandon(&mut self, place: PlaceNo, now: Time) -> bool {
        self.expire(now);
        let Some(at) = self.claims.iter().position(|c| c.place == Some(place)) else {
            return false;
        };
        let claim = self.claims.remove(at);
        match claim.stage {
            Stage::Waiting => {
                self.left(&claim);
                self.promote(claim.name, now);
            }
            Stage::Granted(number) => self.end(claim.name, number, Ending::Abandoned, now),
            Stage::Lapsed => self.idle_if_unused(claim.name, now),
        }
        true
    }

    pub fn ahead(&self, place: PlaceNo) -> Option<usize> {
        let claim = self.claims.iter().find(|c| c.place == Some(place))?;
        self.waiting(claim.name).position(|c| c.place == Some(place))
    }

    pub fn renew(
        &mut self,
        name: Name,
        token: LockToken,
        lease: Duration,
        now: Time,
    ) -> Option<Renewed> {
        self.expire(now);
        let waiters = self.waiters(name);
        let hold = self.hold_mut(name, token.number()).filter(|hold| hold.token == token)?;
        hold.lease = lease;
        hold.ends = now + lease;
        let ends = hold.ends;
        self.told.push(Told::Renewed { name, token, lease, ends });
        Some(Renewed { ends, waiters })
    }

    pub fn detach(&mut self, name: Name, token: LockToken, now: Time) -> bool {
        self.expire(now);
        let hold = self.hold_mut(name, token.number()).filter(|hold| hold.token == token);
        let Some(hold) = hold else { return false };
        if hold.owner.take().is_some() {
            self.told.push(Told::Detached { name, token });
        }
        true
    }

    pub fn release(&mut self, name: Name, token: LockToken, now: Time) -> bool {
        self.expire(now);
        let held = self.hold_mut(name, token.number()).is_some_and(|hold| hold.token == token);
        if held {
            self.end(name, token.number(), Ending::Released, now);
        }
        held
    }

    pub fn evict(
        &mut self,
        name: Name,
        number: u64,
        now: Time,
    ) -> Result<Option<OwnerNo>, NotHeld> {
        self.expire(now);
        let owner = self.hold_mut(name, number).ok_or(NotHeld)?.owner;
        self.end(name, number, Ending::Evicted, now);
        Ok(owner)
    }

    pub fn restore(
        &mut self,
        key: &'static [u8],
        mode: Mode,
        token: LockToken,
        ends: Time,
        now: Time,
    ) -> bool {
        self.expire(now);
        let mode = at_least_one(mode);
        let name = (mode.space(), key);
        if self.mismatch(name, mode)
            || self.waiters(name) > 0
            || !self.has_room(name, mode)
            || self.hold_mut(name, token.number()).is_some()
        {
            return false;
        }
        self.take_up(name, mode);
        let lease = ends.since(now);
        let hold = Hold { token, mode, owner: None, granted: now, lease, ends };
        self.key_mut(name).unwrap().holds.push(hold);
        true
    }

    pub fn disconnect(&mut self, owner: OwnerNo, leave: OnDisconnect, now: Time) {
        self.expire(now);
        if !std::mem::replace(&mut self.connected[owner], false) {
            return;
        }
        let (gone, kept) = self.claims.drain(..).partition(|claim| claim.owner == owner);
        self.claims = kept;
        let gone: Vec<Claim> = gone;
        for claim in gone.iter().filter(|claim| claim.stage == Stage::Lapsed) {
            self.idle_if_unused(claim.name, now);
        }
        for claim in gone.iter().filter(|claim| claim.stage == Stage::Waiting) {
            self.left(claim);
        }
        for claim in gone.iter().filter(|claim| claim.stage == Stage::Waiting) {
            self.promote(claim.name, now);
        }
        let mut held: Vec<(u64, Name)> = Vec::new();
        for key in &mut self.keys {
            for hold in key.holds.iter().filter(|hold| hold.owner == Some(owner)) {
                held.push((hold.token.number(), key.name));
            }
        }
        held.sort_unstable();
        for (number, name) in held {
            match leave {
                OnDisconnect::Release => self.end(name, number, Ending::Disconnected, now),
                OnDisconnect::KeepHolds => {
                    let kept = self.hold_mut(name, number).unwrap();
                    kept.owner = None;
                    let token = kept.token;
                    self.told.push(Told::Detached { name, token });
                }
            }
        }
    }

    fn left(&mut self, claim: &Claim) {
        let Claim { place, owner, name, .. } = *claim;
        self.told.push(Told::Left { place: place.unwrap(), owner, name });
    }

    pub fn handle_timeout(&mut self, now: Time) {
        self.expire(now);
        while let Some((name, since)) = self.idle.first().copied()
            && since + self.config.max_idle <= now
        {
            self.idle.remove(0);
            self.keys.retain(|key| key.name != name);
        }
    }

    /// The instant at which something ends or is dropped.
    pub fn next_timeout(&self) -> Option<Time> {
        let ends = self.keys.iter().flat_map(|key| &key.holds).map(|hold| hold.ends);
        let idle = self.idle.first().map(|(_, since)| *since + self.config.max_idle);
        ends.chain(idle).filter(|at| *at < Time::MAX).min()
    }

    pub fn counts(&self) -> TableSizes {
        TableSizes {
            keys: self.live(),
            idle_keys: self.idle.len(),
            holds: self.keys.iter().map(|key| key.holds.len()).sum(),
            waiters: self.claims.iter().filter(|c| c.stage == Stage::Waiting).count(),
            owners: self.connected.iter().filter(|connected| **connected).count(),
        }
    }

    pub fn waiting(&self, name: Name) -> impl Iterator<Item = &Claim> {
        self.claims.iter().filter(move |c| c.name == name && c.stage == Stage::Waiting)
    }

    fn expire(&mut self, now: Time) {
        let due = |model: &Self| {
            let all = model.keys.iter().flat_map(|key| key.holds.iter().map(|h| (h, key.name)));
            let over = all.filter(|(hold, _)| hold.ends <= now && hold.ends < Time::MAX);
            over.map(|(hold, name)| (hold.ends, hold.token.number(), name)).min()
        };
        while let Some((_, number, name)) = due(self) {
            self.end(name, number, Ending::Expired, now);
        }
    }

    fn end(&mut self, name: Name, number: u64, how: Ending, now: Time) {
        let key = self.key_mut(name).unwrap();
        let at = key.holds.iter().position(|hold| hold.token.number() == number).unwrap();
        let hold = key.holds.remove(at);
        let claim = |c: &Claim| c.name == name && c.stage == Stage::Granted(number);
        if matches!(how, Ending::Expired | Ending::Evicted) {
            for lapsed in self.claims.iter_mut().filter(|c| claim(c)) {
                lapsed.stage = Stage::Lapsed;
            }
        } else {
            self.claims.retain(|c| !claim(c));
        }
        self.told.push(Told::Ended { how, owner: hold.owner, name, token: hold.token });
        self.promote(name, now);
    }

    fn promote(&mut self, name: Name, now: Time) {
        while let Some(at) = self.first_waiting(name)
            && self.has_room(name, self.claims[at].mode)
        {
            let claim = self.claims[at].clone();
            self.claims[at].stage = Stage::Granted(self.number + 1);
            if !claim.two_phase {
                self.claims.remove(at);
            }
            let grant = self.grant(name, claim.mode, Some(claim.owner), claim.lease, now);
            let place = claim.place;
            self.told.push(Told::Granted { place, owner: claim.owner, name, grant });
        }
        self.idle_if_unused(name, now);
    }

    fn grant(
        &mut self,
        name: Name,
        mode: Mode,
        owner: Option<OwnerNo>,
        lease: Duration,
        now: Time,
    ) -> Grant {
        self.number += 1;
        let token = super::token(self.number);
        let ends = now + lease;
        let waiters = self.waiters(name);
        let hold = Hold { token, mode, owner, granted: now, lease, ends };
        self.key_mut(name).unwrap().holds.push(hold);
        Grant { token, lease, ends, waiters }
    }

    fn tell_holders(&mut self, name: Name) {
        let told = if name.0 == KeySpace::Semaphore { 1 } else { usize::MAX };
        let key = self.keys.iter().find(|key| key.name == name).unwrap();
        for hold in key.holds.iter().take(told) {
            if let Some(owner) = hold.owner {
                self.told.push(Told::Wanted { owner, name, token: hold.token });
            }
        }
    }

    /// Makes a key known and in use. Its limit is that of the new user if the key has no other user.
    fn take_up(&mut self, name: Name, mode: Mode) {
        self.idle.retain(|(idle, _)| *idle != name);
        if self.key_mut(name).is_none() {
            self.keys.push(Key { name, limit: 0, holds: Vec::new() });
        }
        let key = self.key_mut(name).unwrap();
        if let Mode::Slot { limit } = mode
            && key.holds.is_empty()
        {
            key.limit = limit;
        }
    }

    fn idle_if_unused(&mut self, name: Name, now: Time) {
        let held = self.key_mut(name).is_some_and(|key| !key.holds.is_empty());
        if held || self.waiters(name) > 0 || self.has_lapsed(name) {
            return;
        }
        self.idle.push((name, now));
        if self.idle.len() > self.config.max_idle_keys {
            let (dropped, _) = self.idle.remove(0);
            self.keys.retain(|key| key.name != dropped);
        }
    }

    fn has_room(&self, name: Name, mode: Mode) -> bool {
        let Some(key) = self.keys.iter().find(|key| key.name == name) else { return true };
        match mode {
            Mode::Exclusive => key.holds.is_empty(),
            Mode::Shared => key.holds.iter().all(|hold| hold.mode == Mode::Shared),
            Mode::Slot { .. } => key.holds.is_empty() || key.holds.len() < key.limit as usize,
        }
    }

    fn mismatch(&self, name: Name, mode: Mode) -> bool {
        let used = self.keys.iter().find(|key| key.name == name && !key.holds.is_empty());
        match mode {
            Mode::Slot { limit } => used.is_some_and(|key| key.limit != limit),
            _ => false,
        }
    }

    fn first_waiting(&self, name: Name) -> Option<usize> {
        self.claims.iter().position(|c| c.name == name && c.stage == Stage::Waiting)
    }

    fn live(&self) -> usize {
        self.keys.len() - self.idle.len()
    }

    fn is_live(&self, name: Name) -> bool {
        self.keys.iter().any(|key| key.name == name)
            && self.idle.iter().all(|(idle, _)| *idle != name)
    }

    fn has_lapsed(&self, name: Name) -> bool {
        self.claims.iter().any(|c| c.name == name && c.stage == Stage::Lapsed)
    }

    fn claim_of(&self, owner: OwnerNo, name: Name) -> Option<usize> {
        self.claims.iter().position(|c| c.two_phase && c.owner == owner && c.name == name)
    }

    fn waiters(&self, name: Name) -> u32 {
        u32::try_from(self.waiting(name).count()).unwrap()
    }

    fn key_mut(&mut self, name: Name) -> Option<&mut Key> {
        self.keys.iter_mut().find(|key| key.name == name)
    }

    fn hold_mut(&mut self, name: Name, number: u64) -> Option<&mut Hold> {
        let key = self.key_mut(name)?;
        key.holds.iter_mut().find(|hold| hold.token.number() == number)
    }
}

pub fn at_least_one(mode: Mode) -> Mode {
    match mode {
        Mode::Slot { limit } => Mode::Slot { limit: limit.max(1) },
        mode => mode,
    }
}
