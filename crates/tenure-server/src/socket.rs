//! The sockets of a server and their unsent output.

use std::io::{self, ErrorKind};
use std::sync::Arc;

use rustls::ServerConfig;
use tenure_core::table::Owner;

use crate::engine::{Hangup, OutputSegment};
use crate::network::{Network, NetworkStream};
use crate::send_batch::{self, SendBatch, SendResult};
use crate::transport::{Sent, Transport};

/// Unsent output at which a connection is closed, because its peer does not read.
const MAX_BACKLOG_BYTES: usize = 16 << 20;

/// Progress of sending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// All was sent.
    Done,
    /// The rest is kept until the socket has room.
    Blocked,
    /// The connection is to be closed.
    Broken,
}

/// A client's socket.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "the flags are independent")]
pub(crate) struct Socket<S> {
    owner: Owner,
    pub(crate) transport: Transport<S>,
    /// Output that the socket had no room for. Takes no memory while it is empty.
    backlog: Vec<u8>,
    /// Number of backlog bytes sent.
    sent: usize,
    /// True if there may be something to read.
    pub(crate) readable: bool,
    /// True if the peer has closed its side.
    pub(crate) closed: bool,
    /// True while the socket has no room for writes.
    blocked: bool,
    handshaking: bool,
    /// True if writing is shut down once the backlog is sent.
    closing: bool,
    /// Number of the last batch that included this socket.
    last_batch: u32,
}

impl<S: NetworkStream> Socket<S> {
    pub(crate) fn new(
        owner: Owner,
        stream: S,
        tls: Option<&Arc<ServerConfig>>,
        network: &impl Network<Stream = S>,
    ) -> io::Result<Self> {
        let mut transport = Transport::new(stream, tls)?;
        network.register(transport.stream(), token(owner))?;
        Ok(Self {
            owner,
            transport,
            backlog: Vec::new(),
            sent: 0,
            readable: false,
            closed: false,
            blocked: false,
            handshaking: tls.is_some(),
            closing: false,
            last_batch: 0,
        })
    }

    pub(crate) fn is_blocked(&self) -> bool {
        self.blocked
    }

    /// Sends `bytes`, and keeps the part that cannot be sent now.
    pub(crate) fn send(&mut self, bytes: &[u8], network: &impl Network<Stream = S>) -> Progress {
        if self.closing {
            return Progress::Done;
        }
        if self.blocked {
            if self.backlog.len() + bytes.len() > MAX_BACKLOG_BYTES {
                return Progress::Broken;
            }
            self.backlog.extend_from_slice(bytes);
            return Progress::Blocked;
        }
        let sent = self.transport.write(bytes);
        self.keep_unsent(bytes, &sent, network)
    }

    /// Keeps the part of `bytes` that was not sent.
    fn keep_unsent(
        &mut self,
        bytes: &[u8],
        sent: &io::Result<Sent>,
        network: &impl Network<Stream = S>,
    ) -> Progress {
        match sent {
            Ok(Sent::All) => Progress::Done,
            Ok(Sent::Some(sent)) => {
                self.backlog.extend_from_slice(&bytes[*sent..]);
                self.set_blocked(true, network)
            }
            Err(_) => {
                // Nothing more is sent: the peer would take later output for the missing part.
                self.closing = true;
                Progress::Broken
            }
        }
    }

    /// Adds the socket to a batch. False if its output cannot be sent as it is (TLS, or no socket of the system), must
    /// wait behind a backlog, or if the batch already includes the socket: a second send could overtake the rest of the
    /// first.
    fn join_batch(&mut self, batch: u32) -> bool {
        let free = self.last_batch != batch && !self.closing && !self.blocked;
        let joins = free && self.transport.plain_socket().is_some();
        if joins {
            self.last_batch = batch;
        }
        joins
    }

    /// Sends the backlog.
    pub(crate) fn flush(&mut self, network: &impl Network<Stream = S>) -> Progress {
        while self.sent < self.backlog.len() {
            match self.transport.write(&self.backlog[self.sent..]) {
                Ok(Sent::All) => self.sent = self.backlog.len(),
                Ok(Sent::Some(0)) => return Progress::Blocked,
                Ok(Sent::Some(sent)) => self.sent += sent,
                Err(_) => return Progress::Broken,
            }
        }
        match self.transport.flush() {
            Ok(true) => {}
            Ok(false) => return Progress::Blocked,
            Err(_) => return Progress::Broken,
        }
        self.backlog = Vec::new();
        self.sent = 0;
        if self.closing {
            self.transport.finish();
        }
        self.set_blocked(false, network)
    }

    /// Waits for room if the TLS session has unsent output. A session has output of its own while it is read, such as
    /// a handshake with a large certificate. No later reply would send the rest: the peer waits for it.
    pub(crate) fn watch_session_output(&mut self, network: &impl Network<Stream = S>) -> Progress {
        if self.transport.has_unsent() { self.set_blocked(true, network) } else { Progress::Done }
    }

    /// Shuts down writing as soon as the backlog is sent.
    pub(crate) fn close_after_flush(&mut self) {
        self.closing = true;
        if !self.blocked {
            self.transport.finish();
        }
    }

    /// True, once, when the TLS handshake is complete.
    pub(crate) fn take_handshake_done(&mut self) -> bool {
        let opened = self.handshaking && self.transport.is_open();
        self.handshaking &= !opened;
        opened
    }

    /// Distinguishes a close by the peer from a broken connection.
    pub(crate) fn hangup(&mut self) -> Hangup {
        match self.transport.take_error() {
            Ok(None) => Hangup::Finished,
            Ok(Some(_)) | Err(_) => Hangup::Aborted,
        }
    }

    fn set_blocked(&mut self, blocked: bool, network: &impl Network<Stream = S>) -> Progress {
        self.blocked = blocked;
        match network.watch_writable(self.transport.stream(), token(self.owner), blocked) {
            Ok(()) if blocked => Progress::Blocked,
            Ok(()) => Progress::Done,
            Err(_) => Progress::Broken,
        }
    }
}

/// All sockets, indexed by the slot of their owner.
#[derive(Debug)]
pub(crate) struct Sockets<S> {
    slots: Slots<S>,
    send_batch: Option<SendBatch>,
    /// Number of the present batch.
    batch_number: u32,
}

#[derive(Debug)]
struct Slots<S>(Vec<Option<Socket<S>>>);

impl<S> Slots<S> {
    fn get(&self, owner: Owner) -> Option<&Socket<S>> {
        self.0.get(owner.index())?.as_ref().filter(|socket| socket.owner == owner)
    }

    fn get_mut(&mut self, owner: Owner) -> Option<&mut Socket<S>> {
        self.0.get_mut(owner.index())?.as_mut().filter(|socket| socket.owner == owner)
    }
}

impl<S: NetworkStream> Sockets<S> {
    pub(crate) fn new() -> Self {
        Self { slots: Slots(Vec::new()), send_batch: None, batch_number: 0 }
    }

    /// Sends to several sockets in one system call from now on, if the kernel supports it.
    pub(crate) fn enable_batching(&mut self) {
        self.send_batch = SendBatch::new();
    }

    pub(crate) fn insert(&mut self, socket: Socket<S>) {
        let index = socket.owner.index();
        let slots = &mut self.slots.0;
        if slots.len() <= index {
            slots.resize_with(index + 1, || None);
        }
        slots[index] = Some(socket);
    }

    pub(crate) fn get_mut(&mut self, owner: Owner) -> Option<&mut Socket<S>> {
        self.slots.get_mut(owner)
    }

    /// Sends all segments and reports the progress of each. Segments of one connection are sent in order.
    pub(crate) fn send(
        &mut self,
        out: &[u8],
        segments: &[OutputSegment],
        network: &impl Network<Stream = S>,
        mut on_progress: impl FnMut(Owner, Progress),
    ) {
        let mut left = segments;
        while let [first, others @ ..] = left {
            let batched = self.batchable(left);
            if batched > 1 {
                let (now, later) = left.split_at(batched);
                self.send_batched(out, now, network, &mut on_progress);
                left = later;
                continue;
            }
            if let Some(socket) = self.slots.get_mut(first.to) {
                on_progress(first.to, socket.send(&out[first.bytes.clone()], network));
            }
            left = others;
        }
    }

    /// Number of segments, from the first on, that can be sent in one batch.
    fn batchable(&mut self, segments: &[OutputSegment]) -> usize {
        if self.send_batch.is_none() || segments.len() < 2 {
            return 0;
        }
        self.batch_number = self.batch_number.wrapping_add(1);
        let joins = |segment: &&OutputSegment| {
            self.slots
                .get_mut(segment.to)
                .is_some_and(|socket| socket.join_batch(self.batch_number))
        };
        segments.iter().take(send_batch::MAX_BATCH.into()).take_while(joins).count()
    }

    fn send_batched(
        &mut self,
        out: &[u8],
        segments: &[OutputSegment],
        network: &impl Network<Stream = S>,
        on_progress: &mut impl FnMut(Owner, Progress),
    ) {
        let Some(batch) = self.send_batch.take() else { return };
        let parts = segments.iter().map(|segment| {
            let socket =
                self.slots.get(segment.to).and_then(|socket| socket.transport.plain_socket());
            (socket.expect("only plain sockets join a batch"), &out[segment.bytes.clone()])
        });
        let (results, batch) = batch.send(parts);
        self.send_batch = batch;
        for (index, segment) in segments.iter().enumerate() {
            let Some(socket) = self.slots.get_mut(segment.to) else { continue };
            let bytes = &out[segment.bytes.clone()];
            let progress = match results.get(index).copied().unwrap_or(SendResult::Untried) {
                SendResult::Done(taken) => {
                    socket.keep_unsent(bytes, &Sent::from_raw(taken, bytes.len()), network)
                }
                SendResult::Untried => socket.send(bytes, network),
                // Some bytes may have been sent. Sending them again could duplicate them, so the connection is closed.
                SendResult::Unknown => {
                    socket.keep_unsent(bytes, &Err(ErrorKind::Other.into()), network)
                }
            };
            on_progress(segment.to, progress);
        }
        if let Some(batch) = &mut self.send_batch {
            batch.reuse_buffer(results);
        }
    }

    /// Closes a socket. False if it is unknown.
    pub(crate) fn remove(&mut self, owner: Owner, network: &impl Network<Stream = S>) -> bool {
        let Some(socket) = self.get_mut(owner) else { return false };
        network.deregister(socket.transport.stream());
        self.slots.0[owner.index()] = None;
        true
    }

    /// Owner of the socket that an event is for. `None` if the event is older than the present owner of its slot.
    pub(crate) fn owner(&self, raw_token: usize) -> Option<Owner> {
        let socket = self.slots.0.get(raw_token & INDEX_MASK)?.as_ref()?;
        (token(socket.owner) == raw_token).then_some(socket.owner)
    }
}

/// Bits of a token that are the slot. The others, except the first, distinguish successive owners of a slot. On a
/// 32-bit system they are few: an event that is 2,048 owners old would be mistaken for a new one.
const INDEX_BITS: u32 = if usize::BITS >= 64 { 32 } else { 20 };
const INDEX_MASK: usize = (1 << INDEX_BITS) - 1;
const SERIAL_MASK: u64 = (1 << (usize::BITS - INDEX_BITS - 1)) - 1;

fn token(owner: Owner) -> usize {
    let serial = usize::try_from(owner.id() & SERIAL_MASK).expect("fewer bits than a token has");
    (serial << INDEX_BITS) | (owner.index() & INDEX_MASK)
}

#[cfg(test)]
mod tests;
