//! One blocking connection: request, reply. For set-ups, and for loads where one connection at a time is the point.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::dial;
use crate::wire::{self, Release, Token};

/// No reply within this is an error: no load asks for a longer wait.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);

/// The longest reply that is read; only `stats` has longer ones, and no load asks for it.
const MAX_REPLY_BYTES: u64 = 4_096;

/// A reply is some 40 bytes, and loads have thousands of callers.
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
    /// When the server cannot be reached.
    pub fn dial(target: SocketAddr, number: usize) -> Result<Self> {
        let stream = dial::dial(target, number)?;
        stream.set_read_timeout(Some(REPLY_TIMEOUT)).context("setting a time-out")?;
        Ok(Self { stream: BufReader::with_capacity(BUFFER_BYTES, stream), line: Vec::new() })
    }

    /// Sends requests, or a part of one.
    ///
    /// # Errors
    ///
    /// When the connection is gone.
    pub fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.stream.get_mut().write_all(bytes).context("sending a request")
    }

    /// The next reply.
    ///
    /// # Errors
    ///
    /// When the connection ends before it, or nothing comes for a minute.
    pub fn reply(&mut self) -> Result<&[u8]> {
        self.line.clear();
        let mut stream = self.stream.by_ref().take(MAX_REPLY_BYTES);
        stream.read_until(b'\n', &mut self.line).context("waiting for a reply")?;
        ensure!(
            self.line.pop() == Some(b'\n'),
            "the server closed the connection, or never ended a line"
        );
        Ok(&self.line)
    }

    /// Takes a free key.
    ///
    /// # Errors
    ///
    /// When the reply is not a grant.
    pub fn acquire(&mut self, key: &str, lease: u32) -> Result<Token> {
        self.send(&wire::lock(key, 0, lease))?;
        wire::granted(self.reply()?, "ok", lease)
    }

    /// Gives a key back.
    ///
    /// # Errors
    ///
    /// When the reply is not `ok`.
    pub fn release(&mut self, key: &str, token: &Token) -> Result<()> {
        self.send(Release::of(key).with(token))?;
        wire::expect_reply(self.reply()?, "ok")
    }

    /// Takes a free key and gives it back, as every client does before it idles.
    ///
    /// # Errors
    ///
    /// When a reply is wrong.
    pub fn acquire_release(&mut self, key: &str) -> Result<()> {
        let token = self.acquire(key, wire::LEASE_SECS)?;
        self.release(key, &token)
    }

    /// Gives up the connection for its stream, to close it or to drive it otherwise.
    pub fn into_stream(self) -> TcpStream {
        self.stream.into_inner()
    }
}
