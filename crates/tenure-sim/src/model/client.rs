//! A client of the small world.

use tenure_core::keeper::{Granted, Keeper, KeeperCommand, KeeperInput};
use tenure_core::lease::Lease;
use tenure_core::{Machine as _, Time};

use super::protocol::{Body, StepEffects};

/// A client: its stage, its clock and its remaining acquires.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct ModelClient {
    stage: ClientStage,
    /// True if its clock is one tick behind the store's.
    pub(super) behind: bool,
    pub(super) paused: bool,
    /// Number of acquires left.
    pub(super) wants: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum ClientStage {
    Idle,
    /// If the claim was repeated, the lease of its grant may have begun with an earlier request without a reply.
    Claiming {
        sent: Time,
        repeated: bool,
    },
    Waiting,
    Confirming {
        sent: Time,
        token: u64,
    },
    Keeping {
        keeper: Box<Keeper>,
        token: u64,
        guard: bool,
        pending: Option<PendingRequest>,
    },
}

/// A request of the keeper in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct PendingRequest {
    release: bool,
    limit_at: Time,
}

impl ModelClient {
    pub(super) fn new(wants: u8) -> Self {
        Self { stage: ClientStage::Idle, behind: false, paused: false, wants }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.stage == ClientStage::Idle
    }

    pub(super) fn has_guard(&self) -> bool {
        matches!(self.stage, ClientStage::Keeping { guard: true, .. })
    }

    pub(super) fn waits_for(&self, want: u8) -> bool {
        want == self.wants
            && matches!(self.stage, ClientStage::Claiming { .. } | ClientStage::Waiting)
    }

    pub(super) fn has_lost(&self) -> bool {
        matches!(&self.stage, ClientStage::Keeping { keeper, .. } if keeper.lost().is_some())
    }

    /// True while the hold is being released, after the end of its guard.
    pub(super) fn is_releasing(&self) -> bool {
        matches!(self.stage, ClientStage::Keeping { guard: false, .. })
    }

    pub(super) fn is_valid(&self, now: Time) -> bool {
        match &self.stage {
            ClientStage::Keeping { keeper, guard: true, .. } => now < keeper.deadline(),
            _ => false,
        }
    }

    pub(super) fn want(&mut self, _: Lease, now: Time, effects: &mut StepEffects) {
        self.wants -= 1;
        effects.sent.push(Body::Claim { want: self.wants });
        self.stage = ClientStage::Claiming { sent: now, repeated: false };
    }

    pub(super) fn release(&mut self, _: Lease, now: Time, effects: &mut StepEffects) {
        if let ClientStage::Keeping { keeper, guard, .. } = &mut self.stage {
            *guard = false;
            keeper.handle(KeeperInput::Release, now);
        }
        self.drive(now, effects);
    }

    /// Handles timeouts. A tick is coarser than the time limits of requests, so these take two ticks.
    pub(super) fn on_time(&mut self, lease: Lease, now: Time, effects: &mut StepEffects) {
        match &mut self.stage {
            // One repetition is enough to show the effect of a request without a reply.
            ClientStage::Claiming { sent, repeated: repeated @ false }
                if now >= *sent + lease.request_limit() =>
            {
                (*sent, *repeated) = (now, true);
                effects.sent.push(Body::Claim { want: self.wants });
            }
            ClientStage::Keeping { keeper, pending, .. } => {
                keeper.handle_timeout(now);
                if let Some(PendingRequest { release, .. }) =
                    pending.take_if(|pending| now >= pending.limit_at)
                {
                    let failed =
                        if release { KeeperInput::ReleaseFailed } else { KeeperInput::RenewFailed };
                    keeper.handle(failed, now);
                }
                self.drive(now, effects);
            }
            ClientStage::Idle
            | ClientStage::Claiming { .. }
            | ClientStage::Waiting
            | ClientStage::Confirming { .. } => {}
        }
    }

    pub(super) fn handle_reply(
        &mut self,
        body: Body,
        lease: Lease,
        now: Time,
        effects: &mut StepEffects,
    ) {
        match (&mut self.stage, body) {
            (ClientStage::Claiming { sent, repeated: false }, Body::Granted { token }) => {
                let sent = *sent;
                self.acquired(lease, token, sent, now, effects);
            }
            (ClientStage::Waiting, Body::Granted { token })
                if !lease.rules().confirm_waited_grants =>
            {
                self.acquired(lease, token, now, now, effects);
            }
            (ClientStage::Claiming { .. } | ClientStage::Waiting, Body::Granted { token }) => {
                effects.sent.push(Body::Renew { token });
                self.stage = ClientStage::Confirming { sent: now, token };
            }
            (ClientStage::Claiming { .. }, Body::Queued) => self.stage = ClientStage::Waiting,
            (ClientStage::Confirming { sent, token }, Body::Renewed) => {
                let (sent, token) = (*sent, *token);
                self.acquired(lease, token, sent, now, effects);
            }
            (ClientStage::Confirming { .. }, Body::Refused) => self.stage = ClientStage::Idle,
            (ClientStage::Keeping { keeper, pending, .. }, body) => {
                *pending = None;
                keeper.handle(
                    match body {
                        Body::Renewed => KeeperInput::Renewed { handoff_requested: false },
                        Body::Released => KeeperInput::Released,
                        _ => KeeperInput::Refused,
                    },
                    now,
                );
                self.drive(now, effects);
            }
            _ => {}
        }
    }

    fn acquired(
        &mut self,
        lease: Lease,
        token: u64,
        sent: Time,
        now: Time,
        effects: &mut StepEffects,
    ) {
        let deadline = lease.deadline(sent, now);
        if now >= deadline {
            // Past its deadline. The hold is left to expire, since a release would add nothing to the checked
            // properties.
            self.stage = ClientStage::Idle;
            return;
        }
        let granted = Granted { sent, deadline, handoff_requested: false };
        let keeper = Box::new(Keeper::new(lease, granted, None, now));
        self.stage = ClientStage::Keeping { keeper, token, guard: true, pending: None };
        effects.handed_out = Some(token);
        self.drive(now, effects);
    }

    fn drive(&mut self, now: Time, effects: &mut StepEffects) {
        loop {
            let ClientStage::Keeping { keeper, token, guard, pending } = &mut self.stage else {
                return;
            };
            let token = *token;
            match keeper.poll_command() {
                None => return,
                Some(KeeperCommand::Renew { limit }) => {
                    *pending = Some(PendingRequest { release: false, limit_at: now + limit });
                    effects.sent.push(Body::Renew { token });
                }
                Some(KeeperCommand::Release { limit }) => {
                    *pending = Some(PendingRequest { release: true, limit_at: now + limit });
                    effects.sent.push(Body::Release { token });
                }
                Some(KeeperCommand::Lost(_)) => {
                    *guard = false;
                }
                Some(KeeperCommand::Done(_)) => self.stage = ClientStage::Idle,
                Some(KeeperCommand::CheckHandoff { .. } | KeeperCommand::HandoffRequested) => {}
            }
        }
    }
}
