//! Views of a key: JSON of its holders and waiters.

use serde_json::{Value, json};
use tenure_core::Time;
use tenure_core::table::{Holder, KeySpace, Mode, Owner, View, Waiter};

use super::Engine;
use super::claims::Claim;
use super::encode::{lossy_text, version_of};
use crate::units::millis;

impl Engine {
    pub(super) fn view_json(
        &self,
        key: &[u8],
        space: KeySpace,
        view: Option<View>,
        now: Time,
    ) -> Value {
        let seen = version_of(view.as_ref()).to_string();
        let space_name = match space {
            KeySpace::Lock => "lock",
            KeySpace::Semaphore => "semaphore",
        };
        let Some(View { summary, holders, waiters }) = view else {
            return json!({ "key": lossy_text(key), "space": space_name, "seen": seen, "held": 0, "waiting": 0, "holders": [], "waiters": [] });
        };
        let holders: Vec<Value> =
            holders.iter().map(|holder| self.holder_json(holder, now)).collect();
        let waiters: Vec<Value> =
            waiters.iter().map(|waiter| self.waiter_json(waiter, now)).collect();
        json!({
            "key": lossy_text(key), "space": space_name, "limit": summary.limit, "seen": seen,
            "held": summary.holders, "waiting": summary.waiters, "holders": holders, "waiters": waiters,
        })
    }

    fn holder_json(&self, holder: &Holder, now: Time) -> Value {
        let owner = holder.owner.filter(|owner| *owner != self.locks.detached_owner());
        json!({
            "fence": holder.number.to_string(),
            "mode": mode_name(holder.mode),
            "by": self.holder_identity(holder.number, holder.owner),
            "connection": owner.map(Owner::id),
            "held_ms": millis(now.since(holder.granted)),
            "lease_ms": millis(holder.lease),
            "left_ms": millis(holder.ends.since(now)),
        })
    }

    /// Identity of the holder with this fencing number.
    pub(super) fn holder_identity(&self, number: u64, owner: Option<Owner>) -> String {
        let claims = self.locks.claims();
        let (claim, restored) = (claims.by_number(number), claims.restored_identity(number));
        let owner = owner.filter(|owner| *owner != self.locks.detached_owner());
        restored.map_or_else(|| self.identity(claim, owner), lossy_text)
    }

    /// True if a hold with this owner belongs to no connection: it was detached, restored, or kept after a disconnect.
    pub(super) fn is_detached(&self, owner: Option<Owner>) -> bool {
        owner.is_none_or(|owner| owner == self.locks.detached_owner())
    }

    fn waiter_json(&self, waiter: &Waiter, now: Time) -> Value {
        let claim = self.locks.claims().by_place(waiter.place);
        let owner = claim.map_or(waiter.owner, |claim| claim.from);
        json!({
            "mode": mode_name(waiter.mode),
            "by": self.identity(claim, Some(owner)),
            "connection": owner.id(),
            "waited_ms": millis(now.since(waiter.since)),
        })
    }

    /// First of these that is known: the identity sent with the claim, the one sent with `hello`, the client's address.
    /// Empty if none is known.
    fn identity(&self, claim: Option<&Claim>, owner: Option<Owner>) -> String {
        if let Some(claim) = claim.filter(|claim| !claim.by.is_empty()) {
            return lossy_text(&claim.by);
        }
        owner.map(|owner| self.connections.identity(owner)).unwrap_or_default()
    }
}

fn mode_name(mode: Mode) -> &'static str {
    match mode {
        Mode::Exclusive => "exclusive",
        Mode::Shared => "shared",
        Mode::Slot { .. } => "slot",
    }
}
