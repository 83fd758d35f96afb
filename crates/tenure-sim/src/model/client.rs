//! A client of the small world.

use tenure_core::Time;
use tenure_core::keeper::{Granted, Keeper, KeeperCommand, KeeperInput};
use tenure_core::lease::Lease;

use super::{Body, StepEffects};

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct ModelClient {
    stage: ClientStage,
    pub(super) behind: bool,
    pub(super) paused: bool,
    /// How often it will still want the lock.
    pub(super) wants: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum ClientStage {
    Idle,
    /// Where the claim is repeated, what is granted may have begun with a sending of it that was not heard of.
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
        asked: Option<PendingRequest>,
    },
}

/// A request of the keeper that is under way.
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

    /// Its guard is over, and what is left of the hold is being given back.
    pub(super) fn is_releasing(&self) -> bool {
        matches!(self.stage, ClientStage::Keeping { guard: false, .. })
    }

    pub(super) fn is_valid(&self, now: Time) -> bool {
        match &self.stage {
            ClientStage::Keeping { keeper, guard: true, .. } => now < keeper.deadline(),
            _ => false,
        }
    }

    pub(super) fn want(&mut self, _: Lease, now: Time, deeds: &mut StepEffects) {
        self.wants -= 1;
        deeds.sent.push(Body::Claim { want: self.wants });
        self.stage = ClientStage::Claiming { sent: now, repeated: false };
    }

    pub(super) fn release(&mut self, _: Lease, now: Time, deeds: &mut StepEffects) {
        if let ClientStage::Keeping { keeper, guard, .. } = &mut self.stage {
            *guard = false;
            keeper.handle(KeeperInput::Release, now);
        }
        self.drive(now, deeds);
    }

    /// Does what is due. A tick is coarser than the time limits of requests, which so take two of them.
    pub(super) fn on_time(&mut self, lease: Lease, now: Time, deeds: &mut StepEffects) {
        match &mut self.stage {
            // Once is enough to see what an unheard sending does.
            ClientStage::Claiming { sent, repeated: repeated @ false }
                if now >= *sent + lease.request_limit() =>
            {
                (*sent, *repeated) = (now, true);
                deeds.sent.push(Body::Claim { want: self.wants });
            }
            ClientStage::Keeping { keeper, asked, .. } => {
                keeper.handle_timeout(now);
                if let Some(PendingRequest { release, .. }) =
                    asked.take_if(|asked| now >= asked.limit_at)
                {
                    let failed =
                        if release { KeeperInput::ReleaseFailed } else { KeeperInput::RenewFailed };
                    keeper.handle(failed, now);
                }
                self.drive(now, deeds);
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
        deeds: &mut StepEffects,
    ) {
        match (&mut self.stage, body) {
            (ClientStage::Claiming { sent, repeated: false }, Body::Granted { token }) => {
                let sent = *sent;
                self.acquired(lease, token, sent, now, deeds);
            }
            (ClientStage::Waiting, Body::Granted { token })
                if !lease.rules().confirm_waited_grants =>
            {
                self.acquired(lease, token, now, now, deeds);
            }
            (ClientStage::Claiming { .. } | ClientStage::Waiting, Body::Granted { token }) => {
                deeds.sent.push(Body::Renew { token });
                self.stage = ClientStage::Confirming { sent: now, token };
            }
            (ClientStage::Claiming { .. }, Body::Queued) => self.stage = ClientStage::Waiting,
            (ClientStage::Confirming { sent, token }, Body::Renewed) => {
                let (sent, token) = (*sent, *token);
                self.acquired(lease, token, sent, now, deeds);
            }
            (ClientStage::Confirming { .. }, Body::Refused) => self.stage = ClientStage::Idle,
            (ClientStage::Keeping { keeper, asked, .. }, body) => {
                *asked = None;
                keeper.handle(
                    match body {
                        Body::Renewed => KeeperInput::Renewed { handoff_requested: false },
                        Body::Released => KeeperInput::Released,
                        _ => KeeperInput::Refused,
                    },
                    now,
                );
                self.drive(now, deeds);
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
        deeds: &mut StepEffects,
    ) {
        let deadline = lease.deadline(sent, now);
        if now >= deadline {
            // Too late to be of use: left to its end, since a release adds nothing that is looked for here.
            self.stage = ClientStage::Idle;
            return;
        }
        let granted = Granted { sent, deadline, handoff_requested: false };
        let keeper = Box::new(Keeper::new(lease, granted, None, now));
        self.stage = ClientStage::Keeping { keeper, token, guard: true, asked: None };
        deeds.handed_out = Some(token);
        self.drive(now, deeds);
    }

    fn drive(&mut self, now: Time, deeds: &mut StepEffects) {
        loop {
            let ClientStage::Keeping { keeper, token, guard, asked } = &mut self.stage else {
                return;
            };
            let token = *token;
            match keeper.poll_command() {
                None => return,
                Some(KeeperCommand::Renew { limit }) => {
                    *asked = Some(PendingRequest { release: false, limit_at: now + limit });
                    deeds.sent.push(Body::Renew { token });
                }
                Some(KeeperCommand::Release { limit }) => {
                    *asked = Some(PendingRequest { release: true, limit_at: now + limit });
                    deeds.sent.push(Body::Release { token });
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
