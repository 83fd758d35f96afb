//! Client-side state of a claim.

use std::time::Duration;

use tenure_core::object::{ObjectRead, WaiterReads};
use tenure_core::observe::Observation;
use tenure_core::{Rules, Time};

use super::stream_state::StreamClaim;
use crate::setup::{Setup, StoreKind};

/// Client-side state of a claim.
#[derive(Debug)]
pub(crate) struct ClaimState {
    pub(crate) claim: u64,
    pub(crate) token: u64,
    /// Epoch of the token, at a stream.
    pub(crate) epoch: u64,
    pub(super) version: u64,
    pub(super) ttl: Duration,
    pub(super) rules: Rules,
    pub(super) store: StoreKind,
    pub(super) observation: Observation<u64>,
    /// Object in a bucket, as it was last seen or written with this claim as its owner.
    pub(super) owned: Option<ObjectRead<()>>,
    /// Results of the reads during a wait at a bucket.
    pub(super) reads: WaiterReads,
    /// Send time of the read that led to a write.
    pub(super) read_sent: Time,
    pub(super) rung: Time,
    /// True while a write of a wait has no reply: it may or may not take effect.
    pub(super) unsettled: bool,
    pub(super) stream: StreamClaim,
    pub(super) claims_name_version: bool,
}

impl ClaimState {
    pub(crate) fn new(claim: u64, setup: &Setup) -> Self {
        let Setup { ttl, rules, store, claims_name_version, .. } = *setup;
        let nothing =
            ObjectRead::<()> { record: None, modified: Duration::ZERO, date: Duration::ZERO };
        Self {
            claim,
            token: 0,
            epoch: 0,
            version: 0,
            ttl,
            rules,
            store,
            observation: Observation::new(rules),
            owned: None,
            reads: WaiterReads::new(&nothing, Time::ZERO, rules),
            read_sent: Time::ZERO,
            rung: Time::ZERO,
            unsettled: false,
            stream: StreamClaim::new(),
            claims_name_version,
        }
    }
}
