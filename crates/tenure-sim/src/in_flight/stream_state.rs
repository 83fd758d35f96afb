//! Knowledge of a stream: of a process, and of one of its claims.

use tenure_core::acquire::LeaseStart;
use tenure_core::record::{
    CasRecord, KnownRecord, Lineage, LineageMark, RecordSource, SeenRecord, StreamState,
};
use tenure_core::{Rules, Time};

use crate::message::StreamMessage;

/// Knowledge of a stream that all tasks of a process share.
#[derive(Debug)]
pub(crate) struct StreamProcess {
    pub(super) lineage: Option<Lineage>,
    pub(super) keys: Vec<KnownRecord<i64>>,
    /// Number of the connection, as far as the process has noticed.
    pub(crate) connection: u64,
}

/// State of a claim at a stream.
#[derive(Clone, Debug)]
pub(super) struct StreamClaim {
    pub(super) step: StreamStep,
    /// Number of writes of the operation that a read preceded, or for a change of a hold, of all its writes.
    pub(super) writes: u32,
    /// True if the last write was decided on a known record, without a read.
    pub(super) optimistic: bool,
    /// Sequence that the last write replaces.
    pub(super) over: u64,
    /// Record of the last write.
    pub(super) written: CasRecord<i64>,
    /// Knowledge before the last write, and before the last request for the stream's state.
    pub(super) before: LineageMark,
    pub(super) before_info: LineageMark,
    /// Record with our grant, and its sequence.
    pub(super) hold: Option<(u64, CasRecord<i64>)>,
    /// Connection over which that record was last read or written.
    pub(super) hold_connection: u64,
    /// Connection of the last request.
    pub(super) sent_over: u64,
    /// Largest renewal count that was tried.
    pub(super) attempted: u64,
    pub(super) lease_start: LeaseStart,
    /// Number of the last grant whose write was acknowledged.
    pub(super) acknowledged: Option<u64>,
    /// Set of holders that the last contended claim saw.
    pub(super) contended: u128,
    /// Error of a grant that is being undone.
    pub(super) undo: bool,
    /// Record that was read, while the state of the stream is read again.
    pub(super) read: Option<StreamMessage>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamStep {
    /// Reads the state of the stream, as a process does that connects.
    Open,
    /// Reads the store's time before a claim.
    ServerTime,
    /// Reads the record before a claim.
    Read,
    /// Reads the state of the stream, because the record is of another epoch.
    Refresh { unclear: bool },
    /// Writes the record.
    Write,
    /// Reads the record after a write that was refused, or that was not answered.
    ReadBack { unclear: bool },
    /// Reads the state of the stream before a grant gets its token.
    Epoch,
}

impl StreamProcess {
    pub(crate) fn new(keys: usize, rules: Rules) -> Self {
        Self { lineage: None, keys: vec![KnownRecord::new(rules); keys], connection: 0 }
    }

    /// Notes a message that a watch delivered over a connection.
    pub(crate) fn note_message(&mut self, message: StreamMessage, connection: u64, now: Time) {
        if let Some(lineage) = &mut self.lineage {
            lineage.note(message.sequence);
        }
        let seen = seen(Some(message), connection);
        self.keys[message.key].note(seen, RecordSource::Notification, now, now);
    }

    /// Set of holders of a key, as far as it is known.
    pub(crate) fn holders_hash(&self, key: usize, now: Time) -> u128 {
        self.keys[key].holders_hash(now)
    }

    pub(super) fn mark(&self) -> LineageMark {
        self.lineage.as_ref().map_or(LineageMark::default(), Lineage::mark)
    }

    pub(super) fn refresh(&mut self, state: StreamState, before: LineageMark, now: Time) {
        match &mut self.lineage {
            Some(lineage) => lineage.refresh(state, before, now),
            None => self.lineage = Some(Lineage::new(state, now)),
        }
    }
}

impl StreamClaim {
    pub(super) fn new() -> Self {
        Self {
            step: StreamStep::Open,
            writes: 0,
            optimistic: false,
            over: 0,
            written: CasRecord::default(),
            before: LineageMark::default(),
            before_info: LineageMark::default(),
            hold: None,
            hold_connection: 0,
            sent_over: 0,
            attempted: 0,
            lease_start: LeaseStart::FromRequest,
            acknowledged: None,
            contended: 0,
            undo: false,
            read: None,
        }
    }
}

/// Surroundings of a step of a claim.
pub(crate) struct StreamTurn<'a> {
    pub(crate) process: &'a mut StreamProcess,
    pub(crate) key: usize,
    pub(crate) now: Time,
    /// Wall clock of the client.
    pub(crate) wall: i64,
}

pub(super) fn seen(message: Option<StreamMessage>, connection: u64) -> SeenRecord<i64> {
    let record = message.and_then(|message| message.record).unwrap_or_default().to_core();
    SeenRecord {
        sequence: message.map_or(0, |message| message.sequence),
        record,
        timestamp: message.map(|message| message.stamp),
        connection,
    }
}
