//! Byte stream of a connection, plain or under TLS.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rustls::{ServerConfig, ServerConnection};

use crate::network::NetworkStream;

/// A non-blocking stream.
#[derive(Debug)]
pub(crate) enum Transport<S> {
    Plain(S),
    Tls(Box<TlsStream<S>>),
}

/// A stream under TLS.
#[derive(Debug)]
pub(crate) struct TlsStream<S> {
    stream: S,
    session: ServerConnection,
}

/// Result of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// All bytes were handed to the kernel.
    All,
    /// Number of bytes taken. The rest must wait until the socket has room.
    Some(usize),
}

impl Sent {
    /// Result of a write of `bytes` bytes, of which the kernel took `taken`.
    pub(crate) fn from_result(taken: io::Result<usize>, bytes: usize) -> io::Result<Self> {
        match taken {
            Ok(sent) if sent == bytes => Ok(Self::All),
            Ok(sent) => Ok(Self::Some(sent)),
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                Ok(Self::Some(0))
            }
            Err(error) => Err(error),
        }
    }

    /// As [`from_result`](Self::from_result), for a raw result: a number of bytes, or a negated error number.
    pub(crate) fn from_raw(taken: i32, bytes: usize) -> io::Result<Self> {
        let error = |_| io::Error::from_raw_os_error(taken.saturating_neg());
        Self::from_result(usize::try_from(taken).map_err(error), bytes)
    }
}

impl<S: NetworkStream> Transport<S> {
    pub(crate) fn new(stream: S, tls: Option<&Arc<ServerConfig>>) -> io::Result<Self> {
        let Some(config) = tls else { return Ok(Self::Plain(stream)) };
        let session = ServerConnection::new(Arc::clone(config)).map_err(io::Error::other)?;
        Ok(Self::Tls(Box::new(TlsStream { stream, session })))
    }

    pub(crate) fn stream(&mut self) -> &mut S {
        match self {
            Self::Plain(stream) => stream,
            Self::Tls(tls) => &mut tls.stream,
        }
    }

    pub(crate) fn is_plain(&self) -> bool {
        matches!(self, Self::Plain(_))
    }

    /// The socket, if the stream is one and is not encrypted.
    pub(crate) fn plain_socket(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Plain(stream) => stream.socket(),
            Self::Tls(_) => None,
        }
    }

    /// True once the handshake is complete.
    pub(crate) fn is_open(&self) -> bool {
        match self {
            Self::Plain(_) => true,
            Self::Tls(tls) => !tls.session.is_handshaking(),
        }
    }

    /// Reads available bytes: 0 at the end of the stream, [`ErrorKind::WouldBlock`] if there are none.
    pub(crate) fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => retry_interrupted(|| stream.read(buffer)),
            Self::Tls(tls) => tls.read(buffer),
        }
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<Sent> {
        match self {
            Self::Plain(stream) => {
                Sent::from_result(retry_interrupted(|| stream.write(bytes)), bytes.len())
            }
            Self::Tls(tls) => {
                // Flushed first, to make room in the session. A full session would take nothing although the socket has
                // room, and then no writable event would ever resume the connection.
                if !tls.flush()? {
                    return Ok(Sent::Some(0));
                }
                let taken = tls.session.writer().write(bytes)?;
                let flushed = tls.flush()?;
                Ok(if flushed && taken == bytes.len() { Sent::All } else { Sent::Some(taken) })
            }
        }
    }

    /// True if the TLS session has output that the socket had no room for.
    pub(crate) fn has_unsent(&self) -> bool {
        match self {
            Self::Plain(_) => false,
            Self::Tls(tls) => tls.session.wants_write(),
        }
    }

    /// Sends what the TLS session has buffered. True if nothing is left.
    pub(crate) fn flush(&mut self) -> io::Result<bool> {
        match self {
            Self::Plain(_) => Ok(true),
            Self::Tls(tls) => tls.flush(),
        }
    }

    /// Shuts down writing.
    pub(crate) fn finish(&mut self) {
        if let Self::Tls(tls) = self {
            tls.session.send_close_notify();
            // A failure is ignored: the connection is being closed anyway.
            let _ = tls.flush();
        }
        self.stream().finish();
    }

    /// Pending error of the socket; `None` if the peer closed the connection.
    pub(crate) fn take_error(&mut self) -> io::Result<Option<io::Error>> {
        self.stream().take_error()
    }
}

impl<S: NetworkStream> TlsStream<S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.session.reader().read(buffer) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                // A close without `close_notify` counts as a close.
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(0),
                result => return result,
            }
            let stream = &mut self.stream;
            if retry_interrupted(|| self.session.read_tls(stream))? == 0 {
                return Ok(0);
            }
            if let Err(error) = self.session.process_new_packets() {
                // Sends the TLS alert with the reason.
                let _ = self.flush();
                return Err(io::Error::new(ErrorKind::InvalidData, error));
            }
            self.flush()?;
        }
    }

    fn flush(&mut self) -> io::Result<bool> {
        while self.session.wants_write() {
            let stream = &mut self.stream;
            match retry_interrupted(|| self.session.write_tls(stream)) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

/// Retries a call that was interrupted by a signal.
fn retry_interrupted<T>(mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match attempt() {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}
