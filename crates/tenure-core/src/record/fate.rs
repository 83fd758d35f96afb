//! Fate of a write whose reply was lost, judged by a later read.

use super::decision::CasRecord;

/// Fate of a write without a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteFate {
    /// The write took effect.
    Landed,
    /// The write did not take effect, and cannot any longer: another write came first.
    Refused,
    /// The record is as it was before: the write may still take effect.
    Unsettled,
}

impl<T> CasRecord<T> {
    /// Fate of a write that was to grant `claim` over the record at sequence `over`. This record was read afterwards,
    /// at `sequence`.
    pub fn fate_of_grant(&self, claim: u128, sequence: u64, over: u64) -> WriteFate {
        if self.holder(claim).is_some() {
            return WriteFate::Landed;
        }
        // A sequence below `over` is that of a stream that went back, in which the write may still land.
        if sequence > over { WriteFate::Refused } else { WriteFate::Unsettled }
    }

    /// Fate of a write that was to renew or release the hold of `claim`. `written` is the renewal count that it wrote,
    /// `None` for a release. The write was to replace the record at sequence `over`. This record was read afterwards, at
    /// `sequence`.
    pub fn fate_of_change(
        &self,
        claim: u128,
        written: Option<u64>,
        sequence: u64,
        over: u64,
    ) -> WriteFate {
        let found = self.holder(claim).map(|holder| holder.renewal_count);
        // Only the holder increments its renewal count. After a release, a hold that is gone needs no other release.
        if found == written {
            return WriteFate::Landed;
        }
        // A hold that is gone is not renewed by waiting: its holder must stop at once. Otherwise as for a grant.
        let settled = found.is_none() || sequence > over;
        if settled { WriteFate::Refused } else { WriteFate::Unsettled }
    }
}
