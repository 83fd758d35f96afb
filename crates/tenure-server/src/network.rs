//! The network and the clock under a server: those of the system, or those of a simulator.

use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token, Waker};
use rustix::net::sockopt;
use tenure_core::Time;

use crate::clock;

/// Maximum number of events per wait. Their changes are journaled together before the replies are sent.
pub(crate) const EVENTS_PER_WAIT: usize = 128;
/// Token of the listener.
pub const LISTENER: usize = usize::MAX;
/// Token of commands from other threads.
pub const COMMANDS: usize = usize::MAX - 1;

/// Listener, connections, events and clock of a [`Server`](crate::Server).
///
/// Events are edge-triggered: a stream is reported once when it becomes readable, and again only after a read has
/// emptied it or found nothing.
pub trait Network: fmt::Debug {
    /// Connection to one client.
    type Stream: NetworkStream;

    /// Returns the present instant on the clock that leases are counted on.
    fn now(&self) -> Time;

    /// Waits until there are events, at most for `timeout`, and replaces the content of `events` by them.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Interrupted`] if there were no events because of a signal; any other error ends the server.
    fn wait(&mut self, timeout: Option<Duration>, events: &mut Vec<NetworkEvent>)
    -> io::Result<()>;

    /// Accepts a connection.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::WouldBlock`] if no client waits.
    fn accept(&mut self) -> io::Result<(Self::Stream, SocketAddr)>;

    /// Closes the listener.
    fn stop_listening(&mut self);

    /// Reports events of a new stream under `token` from now on: when it is readable.
    ///
    /// # Errors
    ///
    /// The stream cannot be watched.
    fn register(&self, stream: &mut Self::Stream, token: usize) -> io::Result<()>;

    /// Starts or stops reporting when the stream is writable.
    ///
    /// # Errors
    ///
    /// The stream cannot be watched.
    fn watch_writable(&self, stream: &mut Self::Stream, token: usize, on: bool) -> io::Result<()>;

    /// Stops reporting events of a stream that is about to be closed.
    fn deregister(&self, stream: &mut Self::Stream);
}

/// Non-blocking connection to a client. Dropping it closes the connection.
///
/// A read that returns fewer bytes than its buffer has room for has emptied the stream: the server reads again only
/// after the next event. A stream that could return a part of its bytes must fill the buffer as far as it can.
pub trait NetworkStream: Read + Write + fmt::Debug {
    /// Shuts down writing: the peer reads the end of the stream after all output.
    fn finish(&self);

    /// Takes the pending error of the connection; `None` if the peer closed it.
    ///
    /// # Errors
    ///
    /// The error is not known.
    fn take_error(&self) -> io::Result<Option<io::Error>>;

    /// Descriptor for sends in a batch, if the stream is a socket of the system.
    fn socket(&self) -> Option<BorrowedFd<'_>>;
}

/// Event of the listener, of a stream, or of the command queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetworkEvent {
    /// [`LISTENER`], [`COMMANDS`], or the token of a stream.
    pub token: usize,
    /// There are bytes to read, or the end of the stream.
    pub readable: bool,
    /// There is room for output.
    pub writable: bool,
    /// The peer has closed its side, or the connection broke.
    pub closed: bool,
}

/// Sockets and clock of the system.
#[derive(Debug)]
pub struct SystemNetwork {
    poll: Poll,
    events: Events,
    /// `None` once the server is stopping.
    listener: Option<mio::net::TcpListener>,
    /// Replaced in tests.
    pub(crate) clock: fn() -> Time,
}

impl SystemNetwork {
    /// Takes a listener, and returns a waker for the thread that waits for events.
    pub(crate) fn new(listener: TcpListener) -> io::Result<(Self, Waker)> {
        listener.set_nonblocking(true)?;
        configure_listener(&listener)?;
        let mut listener = mio::net::TcpListener::from_std(listener);
        let poll = Poll::new()?;
        poll.registry().register(&mut listener, Token(LISTENER), Interest::READABLE)?;
        let waker = Waker::new(poll.registry(), Token(COMMANDS))?;
        let events = Events::with_capacity(EVENTS_PER_WAIT);
        Ok((Self { poll, events, listener: Some(listener), clock: clock::now }, waker))
    }

    pub(crate) fn address(&self) -> io::Result<SocketAddr> {
        self.listener.as_ref().ok_or(ErrorKind::NotConnected)?.local_addr()
    }
}

impl Network for SystemNetwork {
    type Stream = TcpStream;

    fn now(&self) -> Time {
        (self.clock)()
    }

    fn wait(
        &mut self,
        timeout: Option<Duration>,
        events: &mut Vec<NetworkEvent>,
    ) -> io::Result<()> {
        events.clear();
        self.poll.poll(&mut self.events, timeout)?;
        events.extend(self.events.iter().map(|event| NetworkEvent {
            token: event.token().0,
            readable: event.is_readable(),
            writable: event.is_writable(),
            closed: event.is_read_closed() || event.is_error(),
        }));
        Ok(())
    }

    fn accept(&mut self) -> io::Result<(TcpStream, SocketAddr)> {
        self.listener.as_ref().ok_or(ErrorKind::WouldBlock)?.accept()
    }

    fn stop_listening(&mut self) {
        self.listener = None;
    }

    fn register(&self, stream: &mut TcpStream, token: usize) -> io::Result<()> {
        self.poll.registry().register(stream, Token(token), Interest::READABLE)
    }

    fn watch_writable(&self, stream: &mut TcpStream, token: usize, on: bool) -> io::Result<()> {
        let interest =
            if on { Interest::READABLE | Interest::WRITABLE } else { Interest::READABLE };
        self.poll.registry().reregister(stream, Token(token), interest)
    }

    fn deregister(&self, stream: &mut TcpStream) {
        // A failure is harmless: the kernel removes a closed socket from its poll set by itself.
        let _ = self.poll.registry().deregister(stream);
    }
}

impl NetworkStream for TcpStream {
    fn finish(&self) {
        // A failure is ignored: the connection is being closed anyway.
        let _ = self.shutdown(Shutdown::Write);
    }

    fn take_error(&self) -> io::Result<Option<io::Error>> {
        self.take_error()
    }

    fn socket(&self) -> Option<BorrowedFd<'_>> {
        Some(self.as_fd())
    }
}

/// Sets the options that accepted connections inherit: no delay, and keep-alive probes, which detect dead peers.
fn configure_listener(listener: &TcpListener) -> io::Result<()> {
    sockopt::set_tcp_nodelay(listener, true)?;
    sockopt::set_socket_keepalive(listener, true)?;
    sockopt::set_tcp_keepidle(listener, Duration::from_secs(15))?;
    sockopt::set_tcp_keepintvl(listener, Duration::from_secs(5))?;
    sockopt::set_tcp_keepcnt(listener, 3)?;
    Ok(())
}
