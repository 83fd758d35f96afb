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
const EVENTS_PER_TURN: usize = 128;
/// How many connections are accepted before others have their turn.
const ACCEPTS_PER_TURN: usize = 128;
/// How long the server sleeps at most: its timers count the time that the machine was asleep, the system's do not.
const MAX_POLL_TIMEOUT: Duration = Duration::from_secs(5);
/// When to try again to accept, where there are too many files open.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

const LISTENER: Token = Token(usize::MAX);
const COMMANDS: Token = Token(usize::MAX - 1);

/// A lock server that listens.
#[derive(Debug)]
pub struct Server {
    poll: Poll,
    listener: Option<mio::net::TcpListener>,
    /// When to try again to accept.
    accept_at: Time,
    /// Whether the last attempt failed: said once, not at every attempt.
    accept_failed: bool,
    tls: Option<Arc<ServerConfig>>,
    engine: Engine,
    sockets: Sockets,
    /// Connections to read again without being told by the system.
    read_again: VecDeque<Owner>,
    /// Connections that are being told something long.
    long_replies: Vec<Owner>,
    buffer: Box<[u8]>,
    shutdown_timeout: Duration,
    /// When to stop though connections remain.
    stop_by: Option<Time>,
    commands: Arc<CommandQueue>,
    /// Where to write down what happened, in the end.
    history_file: Option<PathBuf>,
    watchdog: Option<Watchdog>,
    /// The clock that leases count on; another one in tests.
    clock: fn() -> Time,
}

/// Word that the thread which serves comes around.
struct Watchdog {
    every: Duration,
    due: Time,
    notify: Box<dyn FnMut() + Send>,
}

impl fmt::Debug for Watchdog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pulse").field("every", &self.every).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct CommandQueue(Mutex<Vec<ServerCommand>>);

#[derive(Debug)]
enum ServerCommand {
    Call(EngineCall),
    Stop,
    Tls(Arc<ServerConfig>),
    Secret(Box<[u8]>),
}

/// What somebody wants to know of the engine, or done by it.
struct EngineCall(Box<EngineFn>);

type EngineFn = dyn FnOnce(&mut Engine, Time) + Send;

impl fmt::Debug for EngineCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Question")
    }
}

/// Commands a running server from another thread.
#[derive(Clone, Debug)]
pub struct Handle {
    commands: Arc<CommandQueue>,
    waker: Arc<Waker>,
}

impl Handle {
    /// Begins to stop: no new connections, waiters are turned away, and the server ends when its clients have left, or
    /// after its shutdown timeout.
    pub fn stop(&self) {
        self.send(ServerCommand::Stop);
    }

    /// Takes another certificate for connections from now on.
    pub fn set_tls(&self, config: Arc<ServerConfig>) {
        self.send(ServerCommand::Tls(config));
    }

    /// Takes another secret for connections from now on.
    pub fn set_secret(&self, secret: &[u8]) {
        self.send(ServerCommand::Secret(secret.into()));
    }

    /// Has the engine answer on its own thread, between two turns. Whoever asks keeps it short: all clients wait meanwhile.
    pub fn run_on_engine(&self, question: impl FnOnce(&mut Engine, Time) + Send + 'static) {
        self.send(ServerCommand::Call(EngineCall(Box::new(question))));
    }

    fn send(&self, command: ServerCommand) {
        self.commands.0.lock().unwrap_or_else(PoisonError::into_inner).push(command);
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
        crate::socket::configure_listener(&listener)?;
        let mut listener = mio::net::TcpListener::from_std(listener);
        let poll = Poll::new()?;
        poll.registry().register(&mut listener, LISTENER, Interest::READABLE)?;
        let waker = Arc::new(Waker::new(poll.registry(), COMMANDS)?);
        let commands = Arc::<CommandQueue>::default();
        let handle = Handle { commands: Arc::clone(&commands), waker };
        let at_once = engine.settings().max_pipelined.max(1);
        let server = Self {
            poll,
            listener: Some(listener),
            accept_at: Time::MAX,
            accept_failed: false,
            tls,
            engine,
            sockets: Sockets::default(),
            read_again: VecDeque::new(),
            long_replies: Vec::new(),
            buffer: vec![0; at_once].into(),
            shutdown_timeout,
            stop_by: None,
            commands,
            history_file: None,
            watchdog: None,
            clock: clock::now,
        };
        Ok((server, handle))
    }

    /// Writes down in this file what happened, when it has stopped.
    pub fn keep_history_in(&mut self, file: PathBuf) {
        self.history_file = Some(file);
    }

    /// Calls `beat` at this interval, from the thread that serves and after all that was due: one that is stuck is silent.
    /// Whatever it does must not block.
    pub fn set_watchdog(&mut self, every: Duration, notify: impl FnMut() + Send + 'static) {
        self.watchdog = Some(Watchdog { every, due: clock::now(), notify: Box::new(notify) });
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
        let mut events = Events::with_capacity(EVENTS_PER_TURN);
        self.sockets.enable_batching();
        while !self.is_done() {
            let timeout = self.timeout();
            match self.poll.poll(&mut events, timeout) {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                result => result?,
            }
            self.turn(&events)?;
            if let Some(Watchdog { every, due, notify }) = &mut self.watchdog
                && *due <= (self.clock)()
            {
                *due = (self.clock)() + *every;
                notify();
            }
        }
        if let Some(file) = &self.history_file
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
        let rereads = self.read_again.len();
        if self.engine.poll_timeout().is_some_and(|due| due <= now) {
            self.engine.handle_timeout(now);
        }
        for event in events {
            match event.token() {
                LISTENER => self.accept(),
                COMMANDS => self.run_commands(),
                Token(token) => {
                    if let Some(owner) = self.sockets.owner(token) {
                        self.handle_event(owner, event);
                    }
                }
            }
        }
        for owner in std::mem::take(&mut self.long_replies) {
            self.continue_long_reply(owner);
        }
        for _ in 0..rereads {
            if let Some(owner) = self.read_again.pop_front() {
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
        if !self.read_again.is_empty() || !self.long_replies.is_empty() {
            return Some(Duration::ZERO);
        }
        let watchdog = self.watchdog.as_ref().map(|pulse| pulse.due);
        let due = self.engine.poll_timeout().into_iter().chain(self.stop_by).chain(watchdog).min();
        let due = due.map_or(self.accept_at, |due| due.min(self.accept_at));
        if due == Time::MAX {
            return None;
        }
        // Whole milliseconds are waited for: rounded up, so that the timer is due when it wakes.
        let left = due.since((self.clock)());
        Some(left.min(MAX_POLL_TIMEOUT))
    }

    fn is_done(&self) -> bool {
        self.stop_by.is_some_and(|by| by <= (self.clock)() || self.engine.count() == 0)
    }

    fn run_commands(&mut self) {
        let commands =
            std::mem::take(&mut *self.commands.0.lock().unwrap_or_else(PoisonError::into_inner));
        for command in commands {
            // Once per order: a question may take long.
            let now = (self.clock)();
            match command {
                ServerCommand::Call(EngineCall(question)) => question(&mut self.engine, now),
                ServerCommand::Stop if self.stop_by.is_none() => {
                    self.stop_by = Some(now + self.shutdown_timeout);
                    self.listener = None;
                    self.accept_at = Time::MAX;
                    self.engine.drain(now);
                }
                // Told twice: those who are left are not waited for.
                ServerCommand::Stop => self.stop_by = Some(now),
                ServerCommand::Tls(config) => self.tls = Some(config),
                ServerCommand::Secret(secret) => self.engine.set_secret(Some(&secret)),
            }
        }
    }

    fn accept(&mut self) {
        // No lease counts from here, only the time that a client has for its handshake.
        let now = (self.clock)();
        for _ in 0..ACCEPTS_PER_TURN {
            let Some(listener) = &self.listener else { return };
            match listener.accept() {
                Ok((stream, peer)) => {
                    self.accept_failed = false;
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
                    if !std::mem::replace(&mut self.accept_failed, true) {
                        tracing::warn!(target: "tenure::server", %error, "cannot_accept");
                    }
                    self.accept_at = now + ACCEPT_RETRY_DELAY;
                    return;
                }
            }
        }
        self.accept_at = now;
    }

    fn handle_event(&mut self, owner: Owner, event: &Event) {
        let Some(socket) = self.sockets.get_mut(owner) else { return };
        if event.is_writable() && socket.is_blocked() {
            match socket.flush(self.poll.registry()) {
                Progress::Done => {
                    self.read_again.push_back(owner);
                    self.continue_long_reply(owner);
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
            let how = socket.closed.then(|| socket.hangup());
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
                    self.read_again.push_back(owner);
                }
                self.finish_handshake(owner);
                // After the read, not before: the process may have been stopped inside it while the request was sent. A
                // lease must not count from before its request was sent, because its holder counts from then. A hold
                // that is over by this clock is not renewed: the table ends it first, whether its timer was on time
                // or not.
                let now = (self.clock)();
                self.engine.receive(owner, &self.buffer[..read], now);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                socket.readable = false;
                self.finish_handshake(owner);
            }
            Err(error) => {
                tracing::debug!(target: "tenure::server", connection = owner.id(), %error, "broken");
                self.hang_up(owner, Hangup::Aborted);
            }
        }
    }

    /// All that was for the peer is sent: goes on with a long answer, if there is one.
    fn continue_long_reply(&mut self, owner: Owner) {
        // Requests that wait behind the answer are served then, and may have been read in this very turn.
        self.engine.write_done(owner, (self.clock)());
        let (_, segments) = self.engine.output();
        if self.engine.has_long_reply(owner) && segments.iter().all(|segment| segment.to != owner) {
            // There was nothing to say in this part of the table, so nothing will be sent that leads on.
            self.long_replies.push(owner);
        }
    }

    /// Tells the engine once that the handshake is over.
    fn finish_handshake(&mut self, owner: Owner) {
        if let Some(socket) = self.sockets.get_mut(owner)
            && socket.take_handshake_done()
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
                Progress::Done if self.engine.has_long_reply(to) => self.long_replies.push(to),
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
                    self.read_again.push_back(owner);
                }
            }
            while let Some(owner) = self.engine.poll_close() {
                if self.engine.must_close(owner, (self.clock)()) {
                    broken.push(owner);
                } else if let Some(socket) = self.sockets.get_mut(owner) {
                    socket.close_after_flush();
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
