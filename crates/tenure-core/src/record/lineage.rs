//! Identity of the stream behind a bucket, and the highest sequence seen of it.
//!
//! A bucket can be deleted and created again under the same name, and a stream can lose acknowledged writes. In both
//! cases sequences repeat, and with them fencing tokens. A new bucket gives its tokens another epoch. A stream that
//! lost writes is detected, and grants with a number that may repeat are refused.

use super::decision::StoreTime;
use crate::Time;

/// State of a stream, as the server reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamState {
    /// Creation time in nanoseconds.
    pub created: u64,
    /// Sequence of the last message.
    pub last_sequence: u64,
    /// Time of the report in nanoseconds, or a lower bound.
    pub time: u64,
}

/// Known identity, sequence and time of a stream.
#[derive(Clone, Copy, Debug)]
pub struct Lineage {
    /// Creation time of the stream in nanoseconds.
    created: u64,
    /// Epoch of fencing tokens: the creation time, or the later time of [`begin_epoch`](Self::begin_epoch).
    epoch: u64,
    /// Highest sequence seen.
    highest: u64,
    /// Highest sequence that the stream is known to have lost. Grants up to it may repeat a token.
    lost: u64,
    /// Last reading of the server's time.
    server_time: StoreTime,
}

/// Knowledge of a stream before a write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LineageMark {
    epoch: u64,
    highest: u64,
}

/// Detection of a stream that has lost acknowledged writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WentBack {
    /// Sequence that the stream had.
    pub known: u64,
    /// Sequence that it has given again.
    pub found: u64,
}

impl Lineage {
    /// Lineage of a stream whose state was reported in a reply at `now`.
    pub const fn new(state: StreamState, now: Time) -> Self {
        let StreamState { created, last_sequence, time } = state;
        let server_time = StoreTime::new(time, now);
        Self { created, epoch: created, highest: last_sequence, lost: 0, server_time }
    }

    /// Epoch of the stream.
    pub const fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Remembers a sequence that was seen.
    pub fn note(&mut self, sequence: u64) {
        self.highest = self.highest.max(sequence);
    }

    /// Present knowledge, to be taken before a request is sent, and compared with its reply.
    pub const fn mark(&self) -> LineageMark {
        LineageMark { epoch: self.epoch, highest: self.highest }
    }

    /// Mark for a grant that an earlier write may have made: its number may be any that was seen.
    pub const fn mark_of_earlier_write(&self) -> LineageMark {
        LineageMark { epoch: self.epoch, highest: 0 }
    }

    /// Server time now, in nanoseconds, or a lower bound of it.
    pub fn server_time(&self, now: Time) -> u64 {
        self.server_time.at(now)
    }

    /// True if the server's time should be read again.
    pub fn is_server_time_old(&self, now: Time) -> bool {
        self.server_time.is_stale(now)
    }

    /// Updates from the stream's state, in a reply that arrived at `now`. `before` was taken before the request was
    /// sent. A stream that was created again begins a new epoch.
    pub fn refresh(&mut self, state: StreamState, before: LineageMark, now: Time) {
        if state.created != self.created {
            (self.created, self.epoch) = (state.created, state.created);
            (self.highest, self.lost) = (0, 0);
        } else if before.epoch == self.epoch && state.last_sequence < before.highest {
            self.lost = self.lost.max(before.highest);
        }
        self.note(state.last_sequence);
        self.server_time = StoreTime::new(state.time, now);
    }

    /// Begins a new epoch of the same stream, in which `sequence` was seen. The epoch is `server_time`, or the next one
    /// if the server's clock was set back.
    pub fn begin_epoch(&mut self, server_time: u64, sequence: u64) {
        let epoch = server_time.max(self.epoch.saturating_add(1));
        (self.epoch, self.highest, self.lost) = (epoch, sequence, 0);
    }

    /// True if the state of the stream must be read before a grant with this number gets its token. The write was sent
    /// after `before` was taken.
    ///
    /// The doubt is remembered: if the state cannot be read, a repeated claim finds the grant, and must doubt it too.
    pub fn doubts(&mut self, number: u64, before: LineageMark) -> bool {
        if number <= before.highest && self.epoch == before.epoch {
            self.lost = self.lost.max(before.highest);
        }
        number <= before.highest || number <= self.lost
    }

    /// Epoch of the grant with this number, whose write was sent after `before` was taken. `state` was requested after
    /// the grant was seen, and noted with [`refresh`](Self::refresh). It is needed if the number is
    /// [doubtful](Self::doubts).
    ///
    /// # Errors
    ///
    /// The stream went back: the grant is gone, or its number may have been given to an earlier grant. Every later
    /// grant up to the highest sequence that was seen is refused as well, also if a repeated claim finds it in the
    /// record.
    pub fn epoch_of(
        &mut self,
        number: u64,
        before: LineageMark,
        state: Option<StreamState>,
    ) -> Result<u64, WentBack> {
        // The grant was written to a stream that was deleted since, or the write is lost. With the epoch of the present
        // stream, its token would be above those of later grants.
        if let Some(state) = state.filter(|state| state.last_sequence < number) {
            return Err(WentBack { known: number, found: state.last_sequence });
        }
        if self.doubts(number, before) && self.epoch == before.epoch {
            return Err(WentBack { known: self.lost, found: number });
        }
        Ok(self.epoch)
    }

    /// Checks a record of this epoch that was read at `sequence`. Its grant numbers are never above its sequence,
    /// unless the stream lost its last writes and gave their sequences again.
    ///
    /// # Errors
    ///
    /// The stream went back.
    pub const fn check_record(
        &self,
        epoch: u64,
        fence: u64,
        sequence: u64,
    ) -> Result<(), WentBack> {
        if epoch == self.epoch && fence > sequence {
            return Err(WentBack { known: fence, found: sequence });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Time = Time::ZERO;

    fn state(created: u64, last_sequence: u64) -> StreamState {
        StreamState { created, last_sequence, time: 0 }
    }

    #[test]
    fn a_grant_above_all_that_was_seen_needs_no_read() {
        let mut lineage = Lineage::new(state(7, 10), NOW);
        let before = lineage.mark();
        assert!(!lineage.doubts(11, before));
        assert_eq!(lineage.epoch_of(11, before, None), Ok(7));
        assert!(lineage.doubts(10, before));
    }

    #[test]
    fn a_stream_that_was_created_again_has_another_epoch() {
        let mut lineage = Lineage::new(state(7, 10), NOW);
        let before = lineage.mark();
        lineage.refresh(state(8, 2), before, NOW);
        assert_eq!(lineage.epoch_of(2, before, None), Ok(8));
        let before = lineage.mark();
        assert!(!lineage.doubts(3, before), "the old sequences do not count");
    }

    #[test]
    fn numbers_that_a_stream_lost_are_refused_until_it_is_past_them() {
        let mut lineage = Lineage::new(state(7, 10), NOW);
        let before = lineage.mark();
        assert!(lineage.doubts(5, before), "and the state cannot be read");
        // A repeated claim finds the grant in the record, and has no mark from before the write.
        let earlier = lineage.mark_of_earlier_write();
        assert!(lineage.doubts(5, earlier));
        assert_eq!(lineage.epoch_of(5, earlier, None), Err(WentBack { known: 10, found: 5 }));
        lineage.note(20);
        assert_eq!(lineage.epoch_of(5, earlier, None), Err(WentBack { known: 10, found: 5 }));
        assert_eq!(lineage.epoch_of(11, earlier, None), Ok(7));
        let before = lineage.mark();
        lineage.refresh(state(8, 1), before, NOW);
        let earlier = lineage.mark_of_earlier_write();
        assert_eq!(lineage.epoch_of(1, earlier, None), Ok(8));
    }

    #[test]
    fn an_epoch_that_was_begun_outlasts_reports_of_the_same_stream() {
        let mut lineage = Lineage::new(state(7, 10), NOW);
        let before = lineage.mark();
        assert!(lineage.doubts(1, before), "the server restarted without its messages");
        lineage.begin_epoch(50, 1);
        for number in [2, 3] {
            let before = lineage.mark();
            let report = state(7, number);
            lineage.refresh(report, before, NOW);
            assert_eq!(lineage.epoch_of(number, before, Some(report)), Ok(50));
        }
        let before = lineage.mark();
        lineage.begin_epoch(40, 1);
        assert_eq!(lineage.epoch_of(2, before, None), Ok(51), "the server's clock was set back");
        let before = lineage.mark();
        lineage.refresh(state(60, 1), before, NOW);
        assert_eq!(lineage.epoch(), 60, "the stream was created again");
    }

    #[test]
    fn a_grant_of_a_stream_that_was_deleted_since_gets_no_token_of_the_next() {
        let mut lineage = Lineage::new(state(7, 10), NOW);
        let before = lineage.mark();
        let now = state(8, 2);
        lineage.refresh(now, before, NOW);
        let went_back = WentBack { known: 11, found: 2 };
        assert_eq!(lineage.epoch_of(11, before, Some(now)), Err(went_back));
        assert_eq!(lineage.epoch_of(2, before, Some(now)), Ok(8));
    }

    #[test]
    fn a_report_from_before_all_that_was_seen_shows_a_loss() {
        let mut lineage = Lineage::new(state(7, 10), NOW);
        let before = lineage.mark();
        lineage.note(12);
        lineage.refresh(state(7, 11), before, NOW);
        let earlier = lineage.mark_of_earlier_write();
        assert!(!lineage.doubts(12, earlier), "12 was seen later");
        let before = lineage.mark();
        lineage.refresh(state(7, 11), before, NOW);
        let earlier = lineage.mark_of_earlier_write();
        assert_eq!(lineage.epoch_of(12, earlier, None), Err(WentBack { known: 12, found: 12 }));
        assert_eq!(lineage.epoch_of(13, earlier, None), Ok(7));
    }

    #[test]
    fn a_record_with_a_number_above_its_sequence_shows_a_loss() {
        let lineage = Lineage::new(state(7, 10), NOW);
        assert_eq!(lineage.check_record(7, 9, 9), Ok(()));
        assert_eq!(lineage.check_record(7, 10, 9), Err(WentBack { known: 10, found: 9 }));
        assert_eq!(lineage.check_record(6, 10, 9), Ok(()), "of another stream");
    }
}
