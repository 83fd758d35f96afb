//! A blocking connection: request, reply. For set-up, and for loads that use one connection at a time.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::dial;
use crate::wire::{self, Release, Token};

/// Time to wait for a reply. No load requests a longer wait from the server.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum length of a reply. Only `stats` has longer ones, and no load uses it.
const MAX_REPLY_BYTES: u64 = 4_096;

/// Read buffer per connection. A reply has about 40 bytes, and loads have thousands of connections.
const BUFFER_BYTES: usize = 128;

/// A blocking connection.
#[derive(Debug)]
pub struct Caller {
    stream: BufReader<TcpStream>,
    line: Vec<u8>,
}

impl Caller {
    /// Connects; `number` as for [`dial::dial`].
    ///
    /// # Errors
    ///
    /// The server cannot be reached.
    pub fn dial(target: SocketAddr, number: usize) -> Result<Self> {
        let stream = dial::dial(target, number)?;
        stream.set_read_timeout(Some(REPLY_TIMEOUT)).context("setting a time-out")?;
        Ok(Self { stream: BufReader::with_capacity(BUFFER_BYTES, stream), line: Vec::new() })
    }

    /// Sends requests, or a part of one.
    ///
    /// # Errors
    ///
    /// The connection is broken.
    pub fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.stream.get_mut().write_all(bytes).context("sending a request")
    }

    /// Reads the next reply.
    ///
    /// # Errors
    ///
    /// The connection ends before the reply does, or no reply arrives within a minute.
    pub fn reply(&mut self) -> Result<&[u8]> {
        self.line.clear();
        let mut stream = self.stream.by_ref().take(MAX_REPLY_BYTES);
        stream.read_until(b'\n', &mut self.line).context("waiting for a reply")?;
        ensure!(
            self.line.pop() == Some(b'\n'),
            "the server closed the connection, or sent a line without an end"
        );
        Ok(&self.line)
    }

    /// Acquires a free key.
    ///
    /// # Errors
    ///
    /// The reply is not a grant.
    pub fn acquire(&mut self, key: &str, lease: u32) -> Result<Token> {
        self.send(&wire::lock(key, 0, lease))?;
        wire::granted(self.reply()?, "ok", lease)
    }

    /// Releases a key.
    ///
    /// # Errors
    ///
    /// The reply is not `ok`.
    pub fn release(&mut self, key: &str, token: &Token) -> Result<()> {
        self.send(Release::of(key).with(token))?;
        wire::expect_reply(self.reply()?, "ok")
    }

    /// Acquires and releases a free key, as a typical client has done before it is idle.
    ///
    /// # Errors
    ///
    /// A reply is wrong.
    pub fn acquire_release(&mut self, key: &str) -> Result<()> {
        let token = self.acquire(key, wire::LEASE_SECS)?;
        self.release(key, &token)
    }

    /// Underlying stream of the connection.
    pub fn into_stream(self) -> TcpStream {
        self.stream.into_inner()
    }
}
