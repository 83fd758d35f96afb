//! The core's lineage of a stream, from the server's description of it.

use tenure_core::Time;
use tenure_core::record::{Lineage, LineageMark, StreamState, WentBack};

use super::stream::StreamInfo;
use crate::{Error, ErrorKind, Result};

pub(super) fn new(info: &StreamInfo, now: Time) -> Result<Lineage> {
    Ok(Lineage::new(state(info)?, now))
}

/// Updates a lineage from a description that was requested after `before` was taken. Returns the state in it.
pub(super) fn refresh(
    lineage: &mut Lineage,
    info: &StreamInfo,
    before: LineageMark,
    now: Time,
) -> Result<StreamState> {
    let state = state(info)?;
    lineage.refresh(state, before, now);
    Ok(state)
}

fn state(info: &StreamInfo) -> Result<StreamState> {
    let (created, time) = (info.epoch()?, info.server_time()?);
    Ok(StreamState { created, last_sequence: info.last_sequence(), time })
}

/// Error for a stream that has lost acknowledged writes.
pub(super) fn went_back_error(WentBack { known, found }: WentBack) -> Error {
    let message = format!(
        "the stream went back from sequence {known} to {found}: it lost acknowledged writes, and its fencing tokens would \
         repeat; delete the bucket and create it again"
    );
    Error::new(ErrorKind::Unavailable, message)
}

/// Reason for which a grant that landed gets no token.
pub(super) enum TokenError {
    /// The stream has lost acknowledged writes: the token may have been handed out before.
    WentBack(WentBack),
    /// The state of the stream could not be read, or the bucket is unfit.
    Failed(Error),
}

impl From<WentBack> for TokenError {
    fn from(went_back: WentBack) -> Self {
        Self::WentBack(went_back)
    }
}

impl From<Error> for TokenError {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}
