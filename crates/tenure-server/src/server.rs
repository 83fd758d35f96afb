//! The engine behind sockets: one thread, which owns the table and needs no lock.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use mio::event::Event;
use mio::{Events, Interest, Poll, Token, Waker};
use rustls::ServerConfig;
use tenure_core::Time;
use tenure_core::table::Owner;

use crate::clock;
use crate::engine::{Engine, Hangup};
use crate::socket::{Progress, Socket, Sockets};

/// How many sockets are served before what they did is written down and answered.
const TURN: usize = 128;
/// How many connections are accepted before others have their turn.
const ACCEPT: usize = 128;
/// How long the server sleeps at most: its timers count the time that the machine was asleep, the system's do not.
const NAP: Duration = Duration::from_secs(5);
/// When to try again to accept, where there are too many files open.
const PAUSE: Duration = Duration::from_millis(100);

const LISTENER: Token = Token(usize::MAX);
const ORDERS: Token = Token(usize::MAX - 1);

/// A lock server that listens.
#[derive(Debug)]
pub struct Server {
    poll: Poll,
    listener: Option<mio::net::TcpListener>,
    /// When to try again to accept.
    accept_at: Time,
    /// Whether the last attempt failed: said once, not at every attempt.
    full: bool,
    tls: Option<Arc<ServerConfig>>,
    engine: Engine,
    sockets: Sockets,
    /// Connections to read again without being told by the system.
    again: VecDeque<Owner>,
    /// Connections that are being told something long.
    telling: Vec<Owner>,
    buffer: Box<[u8]>,
    shutdown_timeout: Duration,
    /// When to stop though connections remain.
    stop_by: Option<Time>,
    orders: Arc<Orders>,
    /// Where to write down what happened, in the end.
    history: Option<PathBuf>,
    pulse: Option<Pulse>,
    /// The clock that leases count on; another one in tests.
    clock: fn() -> Time,
}

/// Word that the thread which serves comes around.
struct Pulse {
    every: Duration,
    due: Time,
    beat: Box<dyn FnMut() + Send>,
}

impl fmt::Debug for Pulse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pulse").field("every", &self.every).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct Orders(Mutex<Vec<Order>>);

#[derive(Debug)]
enum Order {
    Ask(Question),
    Stop,
    Tls(Arc<ServerConfig>),
    Secret(Box<[u8]>),
}

/// What somebody wants to know of the engine, or done by it.
struct Question(Box<Asked>);

type Asked = dyn FnOnce(&mut Engine, Time) + Send;

impl fmt::Debug for Question {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Question")
    }
}

/// Commands a running server from another thread.
#[derive(Clone, Debug)]
pub struct Handle {
    orders: Arc<Orders>,
    waker: Arc<Waker>,
}

impl Handle {
    /// Begins to stop: no new connections, waiters are turned away, and the server ends when its clients have left, or
    /// after its shutdown timeout.
    pub fn stop(&self) {
        self.order(Order::Stop);
    }

    /// Takes another certificate for connections from now on.
    pub fn set_tls(&self, config: Arc<ServerConfig>) {
        self.order(Order::Tls(config));
    }

    /// Takes another secret for connections from now on.
    pub fn set_secret(&self, secret: &[u8]) {
        self.order(Order::Secret(secret.into()));
    }

    /// Has the engine answer on its own thread, between two turns. Whoever asks keeps it short: all clients wait meanwhile.
    pub fn ask(&self, question: impl FnOnce(&mut Engine, Time) + Send + 'static) {
        self.order(Order::Ask(Question(Box::new(question))));
    }

    fn order(&self, order: Order) {
        self.orders.0.lock().unwrap_or_else(PoisonError::into_inner).push(order);
        if let Err(error) = self.waker.wake() {
            tracing::error!(target: "tenure::server", %error, "cannot_wake");
        }
    }
}

impl Server {
    /// A server on a listener.
    ///
    /// # Errors
    ///
    /// What the system says.
    pub fn new(
        listener: TcpListener,
        tls: Option<Arc<ServerConfig>>,
        engine: Engine,
        shutdown_timeout: Duration,
    ) -> io::Result<(Self, Handle)> {
        listener.set_nonblocking(true)?;
        crate::socket::prepare(&listener)?;
        let mut listener = mio::net::TcpListener::from_std(listener);
        let poll = Poll::new()?;
        poll.registry().register(&mut listener, LISTENER, Interest::READABLE)?;
        let waker = Arc::new(Waker::new(poll.registry(), ORDERS)?);
        let orders = Arc::<Orders>::default();
        let handle = Handle { orders: Arc::clone(&orders), waker };
        let at_once = engine.settings().max_pipelined.max(1);
        let server = Self {
            poll,
            listener: Some(listener),
            accept_at: Time::MAX,
            full: false,
            tls,
            engine,
            sockets: Sockets::default(),
            again: VecDeque::new(),
            telling: Vec::new(),
            buffer: vec![0; at_once].into(),
            shutdown_timeout,
            stop_by: None,
            orders,
            history: None,
            pulse: None,
            clock: clock::now,
        };
        Ok((server, handle))
    }

    /// Writes down in this file what happened, when it has stopped.
    pub fn keep_history_in(&mut self, file: PathBuf) {
        self.history = Some(file);
    }

    /// Calls `beat` at this interval, from the thread that serves and after all that was due: one that is stuck is silent.
    /// Whatever it does must not block.
    pub fn beat(&mut self, every: Duration, beat: impl FnMut() + Send + 'static) {
        self.pulse = Some(Pulse { every, due: clock::now(), beat: Box::new(beat) });
    }

    /// Where it listens.
    ///
    /// # Errors
    ///
    /// What the system says, or that it no longer listens.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.as_ref().ok_or(ErrorKind::NotConnected)?.local_addr()
    }

    /// Serves until it is told to [stop](Handle::stop).
    ///
    /// # Errors
    ///
    /// What the system says of waiting for sockets, or of writing down what was granted: nothing that was not written
    /// has been answered.
    pub fn run(mut self) -> io::Result<()> {
        let mut events = Events::with_capacity(TURN);
        self.sockets.send_together();
        while !self.is_done() {
            let timeout = self.timeout();
            match self.poll.poll(&mut events, timeout) {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                result => result?,
            }
            self.turn(&events)?;
            if let Some(Pulse { every, due, beat }) = &mut self.pulse
                && *due <= (self.clock)()
            {
                *due = (self.clock)() + *every;
                beat();
            }
        }
        if let Some(file) = &self.history
            && let Err(error) = std::fs::write(file, self.engine.history())
        {
            // Nobody's hold depends on it.
            tracing::warn!(target: "tenure::server", %error, "history_not_written");
        }
        self.engine.close((self.clock)()).map_err(io::Error::other)
    }

    /// Serves what the system told of, then sends the answers.
    ///
    /// A turn may take seconds: 128 TLS handshakes, or a process that is stopped (SIGSTOP, a freezer, a hypervisor). A
    /// lease that counted from the beginning of the turn would end before its holder expects it, which counts from when the
    /// request was sent. Therefore `now` is for the timers only, and each step reads the clock when it needs it.
    fn turn(&mut self, events: &Events) -> io::Result<()> {
        let now = (self.clock)();
        let again = self.again.len();
        if self.engine.poll_timeout().is_some_and(|due| due <= now) {
            self.engine.handle_timeout(now);
        }
        for event in events {
            match event.token() {
                LISTENER => self.accept(),
                ORDERS => self.obey(),
                Token(token) => {
                    if let Some(owner) = self.sockets.owner(token) {
                        self.happened(owner, event);
                    }
                }
            }
        }
        for owner in std::mem::take(&mut self.telling) {
            self.tell_more(owner);
        }
        for _ in 0..again {
            if let Some(owner) = self.again.pop_front() {
                self.read(owner);
            }
        }
        if self.accept_at <= now {
            self.accept_at = Time::MAX;
            self.accept();
        }
        self.deliver()
    }

    fn timeout(&self) -> Option<Duration> {
        if !self.again.is_empty() || !self.telling.is_empty() {
            return Some(Duration::ZERO);
        }
        let pulse = self.pulse.as_ref().map(|pulse| pulse.due);
        let due = self.engine.poll_timeout().into_iter().chain(self.stop_by).chain(pulse).min();
        let due = due.map_or(self.accept_at, |due| due.min(self.accept_at));
        if due == Time::MAX {
            return None;
        }
        // Whole milliseconds are waited for: rounded up, so that the timer is due when it wakes.
        let left = due.since((self.clock)());
        Some(left.min(NAP))
    }

    fn is_done(&self) -> bool {
        self.stop_by.is_some_and(|by| by <= (self.clock)() || self.engine.count() == 0)
    }

    fn obey(&mut self) {
        let orders =
            std::mem::take(&mut *self.orders.0.lock().unwrap_or_else(PoisonError::into_inner));
        for order in orders {
            // Once per order: a question may take long.
            let now = (self.clock)();
            match order {
                Order::Ask(Question(question)) => question(&mut self.engine, now),
                Order::Stop if self.stop_by.is_none() => {
                    self.stop_by = Some(now + self.shutdown_timeout);
                    self.listener = None;
                    self.accept_at = Time::MAX;
                    self.engine.drain(now);
                }
                // Told twice: those who are left are not waited for.
                Order::Stop => self.stop_by = Some(now),
                Order::Tls(config) => self.tls = Some(config),
                Order::Secret(secret) => self.engine.set_secret(Some(&secret)),
            }
        }
    }

    fn accept(&mut self) {
        // No lease counts from here, only the time that a client has for its handshake.
        let now = (self.clock)();
        for _ in 0..ACCEPT {
            let Some(listener) = &self.listener else { return };
            match listener.accept() {
                Ok((stream, peer)) => {
                    self.full = false;
                    // Closed at once where there are too many.
                    let Some(owner) = self.engine.open(Some(peer.ip()), now) else { continue };
                    let added = Socket::new(owner, stream, self.tls.as_ref(), self.poll.registry());
                    match added {
                        Ok(socket) => {
                            if self.tls.is_some() {
                                self.engine.expect_handshake(owner, now);
                            }
                            self.sockets.insert(socket);
                        }
                        Err(error) => {
                            tracing::warn!(target: "tenure::server", %peer, %error, "not_accepted");
                            self.engine.hang_up(owner, Hangup::Aborted, now);
                        }
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // The peer has left already.
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    if !std::mem::replace(&mut self.full, true) {
                        tracing::warn!(target: "tenure::server", %error, "cannot_accept");
                    }
                    self.accept_at = now + PAUSE;
                    return;
                }
            }
        }
        self.accept_at = now;
    }

    fn happened(&mut self, owner: Owner, event: &Event) {
        let Some(socket) = self.sockets.get_mut(owner) else { return };
        if event.is_writable() && socket.is_blocked() {
            match socket.flush(self.poll.registry()) {
                Progress::Done => {
                    self.again.push_back(owner);
                    self.tell_more(owner);
                }
                Progress::Blocked => {}
                Progress::Broken => return self.hang_up(owner, Hangup::Aborted),
            }
        }
        let Some(socket) = self.sockets.get_mut(owner) else { return };
        if event.is_readable() || event.is_read_closed() || event.is_error() {
            socket.readable = true;
            socket.closed |= event.is_read_closed() || event.is_error();
            self.read(owner);
        }
    }

    /// Reads once, if the connection may be read and somebody serves what comes.
    fn read(&mut self, owner: Owner) {
        let Some(socket) = self.sockets.get_mut(owner) else { return };
        if !socket.readable {
            return;
        }
        if !self.engine.is_ready(owner) || socket.is_blocked() {
            // Nobody serves it now. A peer that is gone must not wait in a queue, but may have closed only its side, and
            // still read what it asked for.
            let how = socket.closed.then(|| socket.how_it_ended());
            match how {
                Some(Hangup::Finished) if !self.engine.is_waiting(owner) => {}
                Some(how) => self.hang_up(owner, how),
                None => {}
            }
            return;
        }
        match socket.transport.read(&mut self.buffer) {
            Ok(0) => self.hang_up(owner, Hangup::Finished),
            Ok(read) => {
                // A read that did not fill the buffer has emptied the socket; what comes later, the system tells.
                socket.readable =
                    read == self.buffer.len() || socket.closed || !socket.transport.is_plain();
                if socket.readable {
                    self.again.push_back(owner);
                }
                self.opened(owner);
                // After the read, not before: the process may have been stopped inside it while the request was sent. A
                // lease must not count from before its request was sent, because its holder counts from then. A hold
                // that is over by this clock is not renewed: the table ends it first, whether its timer was on time
                // or not.
                let now = (self.clock)();
                self.engine.receive(owner, &self.buffer[..read], now);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                socket.readable = false;
                self.opened(owner);
            }
            Err(error) => {
                tracing::debug!(target: "tenure::server", connection = owner.id(), %error, "broken");
                self.hang_up(owner, Hangup::Aborted);
            }
        }
    }

    /// All that was for the peer is sent: goes on with a long answer, if there is one.
    fn tell_more(&mut self, owner: Owner) {
        // Requests that wait behind the answer are served then, and may have been read in this very turn.
        self.engine.write_done(owner, (self.clock)());
        let (_, segments) = self.engine.output();
        if self.engine.has_long_reply(owner) && segments.iter().all(|segment| segment.to != owner) {
            // There was nothing to say in this part of the table, so nothing will be sent that leads on.
            self.telling.push(owner);
        }
    }

    /// Tells the engine once that the handshake is over.
    fn opened(&mut self, owner: Owner) {
        if let Some(socket) = self.sockets.get_mut(owner)
            && socket.opened()
        {
            self.engine.handshake_done(owner);
        }
    }

    fn hang_up(&mut self, owner: Owner, how: Hangup) {
        if self.sockets.remove(owner, self.poll.registry()) {
            self.engine.hang_up(owner, how, (self.clock)());
        }
    }

    /// Writes down what was granted in this turn, then sends the answers.
    fn deliver(&mut self) -> io::Result<()> {
        loop {
            self.engine.commit().map_err(io::Error::other)?;
            let mut broken = Vec::new();
            let mut blocked = Vec::new();
            let (out, segments) = self.engine.output();
            self.sockets.send(out, segments, self.poll.registry(), |to, progress| match progress {
                Progress::Done if self.engine.has_long_reply(to) => self.telling.push(to),
                Progress::Done => {}
                Progress::Blocked => blocked.push(to),
                Progress::Broken => broken.push(to),
            });
            self.engine.clear_output();
            for owner in blocked {
                self.engine.write_blocked(owner, (self.clock)());
            }
            while let Some(owner) = self.engine.poll_resumed() {
                if self.sockets.get_mut(owner).is_some_and(|socket| socket.readable) {
                    self.again.push_back(owner);
                }
            }
            while let Some(owner) = self.engine.poll_close() {
                if self.engine.must_close(owner, (self.clock)()) {
                    broken.push(owner);
                } else if let Some(socket) = self.sockets.get_mut(owner) {
                    socket.part();
                }
            }
            if broken.is_empty() {
                return Ok(());
            }
            for owner in broken {
                self.hang_up(owner, Hangup::Aborted);
            }
        }
    }
}

#[cfg(test)]
mod tests;
