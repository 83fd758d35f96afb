//! Many non-blocking connections on one thread.
//!
//! One thread, because the machine has few cores and the server needs one: more threads would measure how the kernel
//! schedules them.

use std::io::{ErrorKind, Read as _, Write as _};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use mio::net::TcpStream;
use mio::{Events, Interest, Poll};

use crate::caller::Caller;
use crate::{Target, dial};

/// Maximum number of events per turn.
const EVENTS_PER_TURN: usize = 2_048;

/// Bytes read at once.
const READ_BYTES: usize = 64 * 1024;

/// Connections that are driven by [`Fleet::turn`].
#[derive(Debug)]
pub struct Fleet {
    poll: Poll,
    events: Events,
    peers: Vec<Peer>,
    scratch: Vec<u8>,
}

#[derive(Debug)]
struct Peer {
    sender: SendHalf,
    /// Start of an incomplete reply.
    partial: Vec<u8>,
}

/// The sending half of a connection.
#[derive(Debug)]
pub struct SendHalf {
    stream: TcpStream,
    /// Bytes that the kernel has not taken yet.
    unsent: Vec<u8>,
}

impl Fleet {
    /// Opens `connections` connections.
    ///
    /// # Errors
    ///
    /// The server cannot be reached, or the system allows fewer connections.
    pub fn dial(target: &Target, connections: usize) -> Result<Self> {
        dial::raise_file_limit(connections)?;
        let mut fleet = Self::new()?;
        for number in 0..connections {
            fleet.add(dial::dial(target.address, number)?)?;
        }
        Ok(fleet)
    }

    /// Takes over connections without unread replies.
    ///
    /// # Errors
    ///
    /// A connection cannot be registered for polling.
    pub fn adopt(callers: Vec<Caller>) -> Result<Self> {
        let mut fleet = Self::new()?;
        callers.into_iter().try_for_each(|caller| fleet.add(caller.into_stream()))?;
        Ok(fleet)
    }

    /// The sending half of a connection.
    pub fn sender(&mut self, number: usize) -> &mut SendHalf {
        &mut self.peers[number].sender
    }

    /// Waits for replies, at most for `limit`, and calls `on_reply` for each with the connection's number, its sending
    /// half and the reply.
    ///
    /// # Errors
    ///
    /// `on_reply` fails, or the server closes a connection.
    pub fn turn(
        &mut self,
        limit: Duration,
        mut on_reply: impl FnMut(usize, &mut SendHalf, &[u8]) -> Result<()>,
    ) -> Result<()> {
        match self.poll.poll(&mut self.events, Some(limit)) {
            Err(error) if error.kind() == ErrorKind::Interrupted => return Ok(()),
            polled => polled.context("waiting for replies")?,
        }
        for event in &self.events {
            let number = event.token().0;
            let peer = &mut self.peers[number];
            if event.is_writable() {
                peer.sender.flush()?;
            }
            if event.is_readable() {
                peer.receive(&mut self.scratch, |sender, reply| on_reply(number, sender, reply))
                    .with_context(|| format!("connection {number}"))?;
            }
        }
        Ok(())
    }

    fn new() -> Result<Self> {
        Ok(Self {
            poll: Poll::new().context("creating a poll")?,
            events: Events::with_capacity(EVENTS_PER_TURN),
            peers: Vec::new(),
            scratch: vec![0; READ_BYTES],
        })
    }

    fn add(&mut self, stream: std::net::TcpStream) -> Result<()> {
        stream.set_nonblocking(true).context("making a connection non-blocking")?;
        let mut stream = TcpStream::from_std(stream);
        let interest = Interest::READABLE | Interest::WRITABLE;
        let token = mio::Token(self.peers.len());
        self.poll.registry().register(&mut stream, token, interest).context("watching")?;
        let sender = SendHalf { stream, unsent: Vec::new() };
        self.peers.push(Peer { sender, partial: Vec::new() });
        Ok(())
    }
}

impl Peer {
    fn receive(
        &mut self,
        scratch: &mut [u8],
        mut on_reply: impl FnMut(&mut SendHalf, &[u8]) -> Result<()>,
    ) -> Result<()> {
        loop {
            let read = match self.sender.stream.read(scratch) {
                Ok(0) => bail!("the server closed it"),
                Ok(read) => read,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error).context("reading"),
            };
            let mut rest = &scratch[..read];
            while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                if self.partial.is_empty() {
                    on_reply(&mut self.sender, &rest[..end])?;
                } else {
                    self.partial.extend_from_slice(&rest[..end]);
                    on_reply(&mut self.sender, &self.partial)?;
                    self.partial.clear();
                }
                rest = &rest[end + 1..];
            }
            self.partial.extend_from_slice(rest);
            // The buffer was not filled: the socket is empty, and later bytes cause a new event.
            if read < scratch.len() {
                return Ok(());
            }
        }
    }
}

impl SendHalf {
    /// Sends requests. Bytes that the kernel does not take now are sent in a later [`Fleet::turn`].
    ///
    /// # Errors
    ///
    /// The connection is broken.
    pub fn send(&mut self, bytes: &[u8]) -> Result<()> {
        if !self.unsent.is_empty() {
            self.unsent.extend_from_slice(bytes);
            return Ok(());
        }
        let written = write(&mut self.stream, bytes)?;
        self.unsent.extend_from_slice(&bytes[written..]);
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        if !self.unsent.is_empty() {
            let written = write(&mut self.stream, &self.unsent)?;
            self.unsent.drain(..written);
        }
        Ok(())
    }
}

/// Writes as much as the kernel takes.
fn write(stream: &mut TcpStream, bytes: &[u8]) -> Result<usize> {
    let mut written = 0;
    while written < bytes.len() {
        match stream.write(&bytes[written..]) {
            Ok(0) => return Err(anyhow!("the kernel took nothing")),
            Ok(more) => written += more,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error).context("sending a request"),
        }
    }
    Ok(written)
}
