//! The sockets of a server, and what waits to be sent on each.

use std::io::{self, ErrorKind};
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use mio::net::TcpStream;
use mio::{Interest, Registry, Token};
use rustix::net::sockopt;
use rustls::ServerConfig;
use tenure_core::table::Owner;

use crate::engine::{Hangup, OutputSegment};
use crate::send_batch::{self, SendBatch, SendResult};
use crate::transport::{Sent, Transport};

/// A peer that does not read loses its connection when so much waits for it.
const MAX_BACKLOG_BYTES: usize = 16 << 20;

/// How far sending has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Done,
    Blocked,
    Broken,
}

#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each may be so by itself")]
pub(crate) struct Socket {
    owner: Owner,
    pub(crate) transport: Transport,
    /// What the peer has not made room for yet. Takes no memory while it is empty.
    backlog: Vec<u8>,
    /// How much of it is sent.
    sent: usize,
    /// Whether there may be something to read.
    pub(crate) readable: bool,
    /// Whether the peer has closed its side.
    pub(crate) closed: bool,
    /// Whether it waits for room to write.
    blocked: bool,
    handshaking: bool,
    /// Whether it ends when the backlog is sent.
    closing: bool,
    /// The last call in which something for it went out together with others.
    last_batch: u32,
}

impl Socket {
    pub(crate) fn new(
        owner: Owner,
        stream: TcpStream,
        tls: Option<&Arc<ServerConfig>>,
        registry: &Registry,
    ) -> io::Result<Self> {
        let mut transport = Transport::new(stream, tls)?;
        registry.register(transport.stream(), token(owner), Interest::READABLE)?;
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

    /// Sends, or keeps for later what cannot be sent.
    pub(crate) fn send(&mut self, bytes: &[u8], registry: &Registry) -> Progress {
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
        self.keep_unsent(bytes, &sent, registry)
    }

    /// Keeps for later what was not sent.
    fn keep_unsent(
        &mut self,
        bytes: &[u8],
        sent: &io::Result<Sent>,
        registry: &Registry,
    ) -> Progress {
        match sent {
            Ok(Sent::All) => Progress::Done,
            Ok(Sent::Some(sent)) => {
                self.backlog.extend_from_slice(&bytes[*sent..]);
                self.set_blocked(true, registry)
            }
            Err(_) => {
                // Nothing that comes later may be taken for what is missing.
                self.closing = true;
                Progress::Broken
            }
        }
    }

    /// Joins a call that sends to several, if what it is told next goes out as it is, and nothing of its own is in there
    /// that could be overtaken.
    fn join_batch(&mut self, batch: u32) -> bool {
        let joins =
            self.last_batch != batch && !self.closing && !self.blocked && self.transport.is_plain();
        if joins {
            self.last_batch = batch;
        }
        joins
    }

    /// Sends what was kept.
    pub(crate) fn flush(&mut self, registry: &Registry) -> Progress {
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
        self.set_blocked(false, registry)
    }

    /// Ends the connection for writing as soon as all is sent.
    pub(crate) fn close_after_flush(&mut self) {
        self.closing = true;
        if !self.blocked {
            self.transport.finish();
        }
    }

    /// Whether the handshake has come to its end since this was asked last.
    pub(crate) fn take_handshake_done(&mut self) -> bool {
        let opened = self.handshaking && self.transport.is_open();
        self.handshaking &= !opened;
        opened
    }

    /// How a connection that the system calls closed came to its end.
    pub(crate) fn hangup(&mut self) -> Hangup {
        match self.transport.take_error() {
            Ok(None) => Hangup::Finished,
            Ok(Some(_)) | Err(_) => Hangup::Aborted,
        }
    }

    fn set_blocked(&mut self, blocked: bool, registry: &Registry) -> Progress {
        self.blocked = blocked;
        let interest =
            if blocked { Interest::READABLE | Interest::WRITABLE } else { Interest::READABLE };
        match registry.reregister(self.transport.stream(), token(self.owner), interest) {
            Ok(()) if blocked => Progress::Blocked,
            Ok(()) => Progress::Done,
            Err(_) => Progress::Broken,
        }
    }
}

/// All sockets, by the index of their owner.
#[derive(Debug, Default)]
pub(crate) struct Sockets {
    slots: Slots,
    send_batch: Option<SendBatch>,
    /// Counts the calls that send to several.
    batch_number: u32,
}

#[derive(Debug, Default)]
struct Slots(Vec<Option<Socket>>);

impl Slots {
    fn get(&self, owner: Owner) -> Option<&Socket> {
        self.0.get(owner.index())?.as_ref().filter(|socket| socket.owner == owner)
    }

    fn get_mut(&mut self, owner: Owner) -> Option<&mut Socket> {
        self.0.get_mut(owner.index())?.as_mut().filter(|socket| socket.owner == owner)
    }
}

impl Sockets {
    /// From now on sends to several in one call, where the system can.
    pub(crate) fn enable_batching(&mut self) {
        self.send_batch = SendBatch::new();
    }

    pub(crate) fn insert(&mut self, socket: Socket) {
        let index = socket.owner.index();
        let slots = &mut self.slots.0;
        if slots.len() <= index {
            slots.resize_with(index + 1, || None);
        }
        slots[index] = Some(socket);
    }

    pub(crate) fn get_mut(&mut self, owner: Owner) -> Option<&mut Socket> {
        self.slots.get_mut(owner)
    }

    /// Sends everybody's bytes, and tells how that went. Where somebody is told twice, it is in this order.
    pub(crate) fn send(
        &mut self,
        out: &[u8],
        segments: &[OutputSegment],
        registry: &Registry,
        mut on_progress: impl FnMut(Owner, Progress),
    ) {
        let mut left = segments;
        while let [first, others @ ..] = left {
            let batched = self.batchable(left);
            if batched > 1 {
                let (now, later) = left.split_at(batched);
                self.send_batched(out, now, registry, &mut on_progress);
                left = later;
                continue;
            }
            if let Some(socket) = self.slots.get_mut(first.to) {
                on_progress(first.to, socket.send(&out[first.bytes.clone()], registry));
            }
            left = others;
        }
    }

    /// How many of these, from the first on, go out in one call.
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
        registry: &Registry,
        on_progress: &mut impl FnMut(Owner, Progress),
    ) {
        let Some(batch) = self.send_batch.take() else { return };
        let parts = segments.iter().map(|segment| {
            let socket =
                self.slots.get(segment.to).and_then(|socket| socket.transport.plain_socket());
            (socket.expect("it has joined"), &out[segment.bytes.clone()])
        });
        let (results, batch) = batch.send(parts);
        self.send_batch = batch;
        for (index, segment) in segments.iter().enumerate() {
            let Some(socket) = self.slots.get_mut(segment.to) else { continue };
            let bytes = &out[segment.bytes.clone()];
            let progress = match results.get(index).copied().unwrap_or(SendResult::Untried) {
                SendResult::Done(taken) => {
                    socket.keep_unsent(bytes, &Sent::from_raw(taken, bytes.len()), registry)
                }
                SendResult::Untried => socket.send(bytes, registry),
                SendResult::Unknown => {
                    socket.keep_unsent(bytes, &Err(ErrorKind::Other.into()), registry)
                }
            };
            on_progress(segment.to, progress);
        }
        if let Some(batch) = &mut self.send_batch {
            batch.reuse_buffer(results);
        }
    }

    /// Closes a socket, and says whether it was there.
    pub(crate) fn remove(&mut self, owner: Owner, registry: &Registry) -> bool {
        let Some(socket) = self.get_mut(owner) else { return false };
        // The system forgets a closed socket by itself; being told is only for the sake of order.
        let _ = registry.deregister(socket.transport.stream());
        self.slots.0[owner.index()] = None;
        true
    }

    /// Whose socket the system means. An event may be older than its slot's present owner.
    pub(crate) fn owner(&self, raw_token: usize) -> Option<Owner> {
        let socket = self.slots.0.get(raw_token & INDEX_MASK)?.as_ref()?;
        (token(socket.owner) == Token(raw_token)).then_some(socket.owner)
    }
}

/// The lower half of a token is the index; the rest tells owners apart that had it one after the other.
const INDEX_MASK: usize = 0xffff_ffff;

fn token(owner: Owner) -> Token {
    let serial = usize::try_from(owner.id() & 0x7fff_ffff).expect("31 bits");
    Token((serial << 32) | (owner.index() & INDEX_MASK))
}

/// Sets what accepted connections inherit: no delay, and probes that find dead peers.
pub(crate) fn configure_listener(listener: &TcpListener) -> io::Result<()> {
    sockopt::set_tcp_nodelay(listener, true)?;
    sockopt::set_socket_keepalive(listener, true)?;
    sockopt::set_tcp_keepidle(listener, Duration::from_secs(15))?;
    sockopt::set_tcp_keepintvl(listener, Duration::from_secs(5))?;
    sockopt::set_tcp_keepcnt(listener, 3)?;
    Ok(())
}

#[cfg(test)]
mod tests;
