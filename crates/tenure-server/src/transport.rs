//! A connection's bytes, in the clear or under TLS.

use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use mio::net::TcpStream;
use rustls::{ServerConfig, ServerConnection};

/// A stream that never blocks.
#[derive(Debug)]
pub(crate) enum Transport {
    Plain(TcpStream),
    Tls(Box<TlsStream>),
}

/// A stream under TLS.
#[derive(Debug)]
pub(crate) struct TlsStream {
    stream: TcpStream,
    session: ServerConnection,
}

/// What a write came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// All is with the system.
    All,
    /// So much was taken; the rest must wait until the peer has read.
    Some(usize),
}

impl Sent {
    /// What the system says of so many bytes.
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

    /// What the system says in one number: so many bytes, or an error below 0.
    pub(crate) fn from_raw(taken: i32, bytes: usize) -> io::Result<Self> {
        let error = |_| io::Error::from_raw_os_error(taken.saturating_neg());
        Self::from_result(usize::try_from(taken).map_err(error), bytes)
    }
}

impl Transport {
    pub(crate) fn new(stream: TcpStream, tls: Option<&Arc<ServerConfig>>) -> io::Result<Self> {
        let Some(config) = tls else { return Ok(Self::Plain(stream)) };
        let session = ServerConnection::new(Arc::clone(config)).map_err(io::Error::other)?;
        Ok(Self::Tls(Box::new(TlsStream { stream, session })))
    }

    pub(crate) fn stream(&mut self) -> &mut TcpStream {
        match self {
            Self::Plain(stream) => stream,
            Self::Tls(tls) => &mut tls.stream,
        }
    }

    pub(crate) fn is_plain(&self) -> bool {
        matches!(self, Self::Plain(_))
    }

    /// The socket, where what is written to it goes out as it is.
    pub(crate) fn plain_socket(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Plain(stream) => Some(stream.as_fd()),
            Self::Tls(_) => None,
        }
    }

    /// Whether bytes can be exchanged.
    pub(crate) fn is_open(&self) -> bool {
        match self {
            Self::Plain(_) => true,
            Self::Tls(tls) => !tls.session.is_handshaking(),
        }
    }

    /// Reads what is there: 0 at the end of the stream, [`ErrorKind::WouldBlock`] where nothing is.
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
                // Room first: a session that is full would take nothing, though the socket had room for all of it, and
                // then nobody would be told when to go on.
                if !tls.flush()? {
                    return Ok(Sent::Some(0));
                }
                let taken = tls.session.writer().write(bytes)?;
                let flushed = tls.flush()?;
                Ok(if flushed && taken == bytes.len() { Sent::All } else { Sent::Some(taken) })
            }
        }
    }

    /// Sends what the transport itself has kept; whether nothing is left.
    pub(crate) fn flush(&mut self) -> io::Result<bool> {
        match self {
            Self::Plain(_) => Ok(true),
            Self::Tls(tls) => tls.flush(),
        }
    }

    /// Says that nothing more will come.
    pub(crate) fn finish(&mut self) {
        if let Self::Tls(tls) = self {
            tls.session.send_close_notify();
            // The connection is being closed: whether the peer hears it properly is its affair.
            let _ = tls.flush();
        }
        let _ = self.stream().shutdown(Shutdown::Write);
    }

    /// How the connection broke, if it did: `Ok` where the peer closed it.
    pub(crate) fn take_error(&mut self) -> io::Result<Option<io::Error>> {
        self.stream().take_error()
    }
}

impl TlsStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.session.reader().read(buffer) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                // A peer that hangs up without taking leave is as gone as one that does.
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(0),
                result => return result,
            }
            let stream = &mut self.stream;
            if retry_interrupted(|| self.session.read_tls(stream))? == 0 {
                return Ok(0);
            }
            if let Err(error) = self.session.process_new_packets() {
                // The alert that says why.
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

/// Tries again what a signal interrupted.
fn retry_interrupted<T>(mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match attempt() {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}
