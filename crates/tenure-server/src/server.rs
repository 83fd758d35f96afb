//! The server: runs an engine behind sockets, on one thread that owns the table and needs no lock.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustls::ServerConfig;
use tenure_core::Time;
use tenure_core::table::Owner;

use crate::engine::{Engine, Hangup};
use crate::mutex::Mutex;
use crate::network::{COMMANDS, EVENTS_PER_WAIT, LISTENER, Network, NetworkEvent, SystemNetwork};
use crate::socket::{Progress, Socket, Sockets};

/// Maximum number of connections accepted per turn.
const ACCEPTS_PER_TURN: usize = 128;
/// Maximum time to wait for events. The server's clock includes suspend, the timeout of the poll call does not: after a
/// resume, timers may be late by this much.
const MAX_POLL_TIMEOUT: Duration = Duration::from_secs(5);
/// Delay after a failed accept, for example because too many files are open.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// A lock server on a listener.
///
/// It runs in turns, the iterations of its event loop: wait for events, serve them, commit the journal, send replies.
#[derive(Debug)]
pub struct Server<N: Network = SystemNetwork> {
    network: N,
    events: Vec<NetworkEvent>,
    /// False once the server is stopping.
    listening: bool,
    /// Time of the next accept without an event from the system.
    accept_at: Time,
    /// True if the last accept failed: the failure is logged once, not at every retry.
    accept_failed: bool,
    tls: Option<Arc<ServerConfig>>,
    engine: Engine,
    sockets: Sockets<N::Stream>,
    /// Connections to read again without an event from the system.
    read_again: VecDeque<Owner>,
    /// Connections whose long reply has to be continued without an event from the system.
    long_replies: Vec<Owner>,
    buffer: Box<[u8]>,
    shutdown_timeout: Duration,
    /// Time at which the server stops even if connections remain. `None` until it is told to stop.
    stop_by: Option<Time>,
    commands: Arc<CommandQueue>,
    /// File for the history of keys, written at the end.
    history_file: Option<PathBuf>,
    watchdog: Option<Watchdog>,
}

/// Periodic sign of life of the serving thread.
struct Watchdog {
    every: Duration,
    due: Time,
    notify: Box<dyn FnMut() + Send>,
}

impl fmt::Debug for Watchdog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watchdog").field("every", &self.every).finish_non_exhaustive()
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

/// A function to run with the engine.
struct EngineCall(Box<EngineFn>);

type EngineFn = dyn FnOnce(&mut Engine, Time) + Send;

impl fmt::Debug for EngineCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EngineCall")
    }
}

/// Control of a running server from other threads.
#[derive(Clone)]
pub struct Handle {
    commands: Arc<CommandQueue>,
    wake: Arc<WakeFn>,
}

/// Ends the present wait of the server's [`Network`] with an event of the token [`COMMANDS`].
type WakeFn = dyn Fn() -> io::Result<()> + Send + Sync;

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").field("commands", &self.commands).finish_non_exhaustive()
    }
}

impl Handle {
    /// Begins to stop: no new connections are accepted and waiters are refused. The server ends when its last client
    /// has disconnected, or after its shutdown timeout. A second call ends it at once.
    pub fn stop(&self) {
        self.send(ServerCommand::Stop);
    }

    /// Replaces the certificate for new connections.
    pub fn set_tls(&self, config: Arc<ServerConfig>) {
        self.send(ServerCommand::Tls(config));
    }

    /// Replaces the secret. Connections that have authenticated stay authenticated.
    pub fn set_secret(&self, secret: &[u8]) {
        self.send(ServerCommand::Secret(secret.into()));
    }

    /// Runs `call` on the engine's thread. It must be short: no client is served meanwhile.
    pub fn run_on_engine(&self, call: impl FnOnce(&mut Engine, Time) + Send + 'static) {
        self.send(ServerCommand::Call(EngineCall(Box::new(call))));
    }

    fn send(&self, command: ServerCommand) {
        self.commands.0.lock().push(command);
        if let Err(error) = (self.wake)() {
            tracing::error!(target: "tenure::server", %error, "cannot_wake");
        }
    }
}

impl Server {
    /// Creates a server on a listener.
    ///
    /// # Errors
    ///
    /// The listener cannot be configured, or the poll instance cannot be created.
    pub fn new(
        listener: TcpListener,
        tls: Option<Arc<ServerConfig>>,
        engine: Engine,
        shutdown_timeout: Duration,
    ) -> io::Result<(Self, Handle)> {
        let (network, waker) = SystemNetwork::new(listener)?;
        Ok(Self::on_network(network, move || waker.wake(), tls, engine, shutdown_timeout))
    }

    /// Local address of the listener.
    ///
    /// # Errors
    ///
    /// The server no longer listens, or the system does not know the address.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.network.address()
    }
}

impl<N: Network> Server<N> {
    /// Creates a server on a network that need not be the system's. `wake` ends the present wait of the network with an
    /// event of the token [`COMMANDS`](crate::network::COMMANDS).
    pub fn on_network(
        network: N,
        wake: impl Fn() -> io::Result<()> + Send + Sync + 'static,
        tls: Option<Arc<ServerConfig>>,
        engine: Engine,
        shutdown_timeout: Duration,
    ) -> (Self, Handle) {
        let commands = Arc::<CommandQueue>::default();
        let handle = Handle { commands: Arc::clone(&commands), wake: Arc::new(wake) };
        let at_once = engine.settings().max_pipelined.max(1);
        let server = Self {
            network,
            events: Vec::with_capacity(EVENTS_PER_WAIT),
            listening: true,
            accept_at: Time::MAX,
            accept_failed: false,
            tls,
            engine,
            sockets: Sockets::new(),
            read_again: VecDeque::new(),
            long_replies: Vec::new(),
            buffer: vec![0; at_once].into(),
            shutdown_timeout,
            stop_by: None,
            commands,
            history_file: None,
            watchdog: None,
        };
        (server, handle)
    }

    /// Writes the history of keys to this file when the server has stopped.
    pub fn keep_history_in(&mut self, file: PathBuf) {
        self.history_file = Some(file);
    }

    /// Calls `notify` at this interval from the serving thread, after the work that was due: a thread that is stuck
    /// does not call it. `notify` must not block.
    pub fn set_watchdog(&mut self, every: Duration, notify: impl FnMut() + Send + 'static) {
        self.watchdog = Some(Watchdog { every, due: self.network.now(), notify: Box::new(notify) });
    }

    /// Serves until [`Handle::stop`].
    ///
    /// # Errors
    ///
    /// The poll call fails, or the journal cannot be written. No reply was sent for a grant that is not in the journal.
    pub fn run(mut self) -> io::Result<()> {
        self.sockets.enable_batching();
        while !self.is_done() {
            self.wait_and_serve()?;
        }
        self.finish()
    }

    /// Waits for events, at most until the next timer, and serves them: one iteration of [`run`](Self::run).
    ///
    /// # Errors
    ///
    /// As for [`run`](Self::run).
    pub fn wait_and_serve(&mut self) -> io::Result<()> {
        let timeout = self.timeout();
        match self.network.wait(timeout, &mut self.events) {
            Err(error) if error.kind() == ErrorKind::Interrupted => return Ok(()),
            result => result?,
        }
        self.turn()?;
        if let Some(Watchdog { every, due, notify }) = &mut self.watchdog
            && *due <= self.network.now()
        {
            *due = self.network.now() + *every;
            notify();
        }
        Ok(())
    }

    /// Ends a server that [is done](Self::is_done): closes its journal.
    ///
    /// # Errors
    ///
    /// The journal cannot be written. The next server then starts as after a kill.
    pub fn finish(self) -> io::Result<()> {
        if let Some(file) = &self.history_file
            && let Err(error) = std::fs::write(file, self.engine.history())
        {
            // Not fatal: no hold depends on the history.
            tracing::warn!(target: "tenure::server", %error, "history_not_written");
        }
        self.engine.close(self.network.now()).map_err(io::Error::other)
    }

    /// Serves the events of one turn, then sends the replies.
    ///
    /// A turn may take seconds: 128 TLS handshakes, or a process that is stopped (SIGSTOP, a freezer, a hypervisor). A
    /// lease counted from the start of the turn could begin before its request was sent, and would then end earlier
    /// than its holder expects. Therefore `now` is for the timers only, and each step reads the clock when it needs it.
    fn turn(&mut self) -> io::Result<()> {
        let now = self.network.now();
        // Taken now: a connection that is added during this turn is read in the next one.
        let rereads = self.read_again.len();
        if self.engine.poll_timeout().is_some_and(|due| due <= now) {
            self.engine.handle_timeout(now);
        }
        let events = std::mem::take(&mut self.events);
        for event in &events {
            match event.token {
                LISTENER => self.accept(),
                COMMANDS => self.run_commands(),
                token => {
                    if let Some(owner) = self.sockets.owner(token) {
                        self.handle_event(owner, *event);
                    }
                }
            }
        }
        self.events = events;
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

    /// Time until the next timer, for [`Network::wait`]; `None` if there is no timer.
    pub fn timeout(&self) -> Option<Duration> {
        if !self.read_again.is_empty() || !self.long_replies.is_empty() {
            return Some(Duration::ZERO);
        }
        let watchdog = self.watchdog.as_ref().map(|watchdog| watchdog.due);
        let due = self.engine.poll_timeout().into_iter().chain(self.stop_by).chain(watchdog).min();
        let due = due.map_or(self.accept_at, |due| due.min(self.accept_at));
        if due == Time::MAX {
            return None;
        }
        // The poll call rounds up to whole milliseconds, so the timer is due when it returns.
        let left = due.since(self.network.now());
        Some(left.min(MAX_POLL_TIMEOUT))
    }

    /// True once the server was told to stop and its last client has disconnected, or its shutdown timeout has passed.
    pub fn is_done(&self) -> bool {
        self.stop_by
            .is_some_and(|by| by <= self.network.now() || self.engine.connection_count() == 0)
    }

    fn run_commands(&mut self) {
        let commands = std::mem::take(&mut *self.commands.0.lock());
        for command in commands {
            // Read for each command, because a call may take long.
            let now = self.network.now();
            match command {
                ServerCommand::Call(EngineCall(call)) => call(&mut self.engine, now),
                ServerCommand::Stop if self.stop_by.is_none() => {
                    self.stop_by = Some(now + self.shutdown_timeout);
                    self.listening = false;
                    self.network.stop_listening();
                    self.accept_at = Time::MAX;
                    self.engine.drain(now);
                }
                // The second stop does not wait for the remaining clients.
                ServerCommand::Stop => self.stop_by = Some(now),
                ServerCommand::Tls(config) => self.tls = Some(config),
                ServerCommand::Secret(secret) => self.engine.set_secret(Some(&secret)),
            }
        }
    }

    fn accept(&mut self) {
        // Read once: no lease is counted from here, only the deadline of the handshake.
        let now = self.network.now();
        for _ in 0..ACCEPTS_PER_TURN {
            if !self.listening {
                return;
            }
            match self.network.accept() {
                Ok((stream, peer)) => {
                    self.accept_failed = false;
                    // Dropping the stream closes a connection that the engine rejects.
                    let Some(owner) = self.engine.open(Some(peer.ip()), now) else { continue };
                    let added = Socket::new(owner, stream, self.tls.as_ref(), &self.network);
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
                // The peer has disconnected already.
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

    fn handle_event(&mut self, owner: Owner, event: NetworkEvent) {
        let Some(socket) = self.sockets.get_mut(owner) else { return };
        if event.writable && socket.is_blocked() {
            match socket.flush(&self.network) {
                Progress::Done => {
                    self.read_again.push_back(owner);
                    self.continue_long_reply(owner);
                }
                Progress::Blocked => {}
                Progress::Broken => return self.hang_up(owner, Hangup::Aborted),
            }
        }
        let Some(socket) = self.sockets.get_mut(owner) else { return };
        if event.readable || event.closed {
            socket.readable = true;
            socket.closed |= event.closed;
            self.read(owner);
        }
    }

    /// Reads once from a connection and serves what it sent, if the engine is ready for it.
    fn read(&mut self, owner: Owner) {
        let Some(socket) = self.sockets.get_mut(owner) else { return };
        if !socket.readable {
            return;
        }
        if !self.engine.is_ready(owner) || socket.is_blocked() {
            // Not read now. If the peer is gone it must leave the queue, or a grant would go to a dead client. But a
            // peer may have closed only its sending side and still read its replies: that one is kept unless it waits.
            let how = socket.closed.then(|| socket.hangup());
            match how {
                Some(Hangup::Finished) if !self.engine.is_waiting(owner) => {}
                Some(how) => self.hang_up(owner, how),
                None => {}
            }
            return;
        }
        let read = socket.transport.read(&mut self.buffer);
        match socket.watch_session_output(&self.network) {
            Progress::Done => {}
            Progress::Blocked => self.engine.write_blocked(owner, self.network.now()),
            Progress::Broken => return self.hang_up(owner, Hangup::Aborted),
        }
        match read {
            Ok(0) => self.hang_up(owner, Hangup::Finished),
            Ok(read) => {
                // A read that did not fill the buffer has emptied the socket, and the system reports later bytes. Not
                // so for TLS, whose session may have more, nor for a closed socket, whose end has yet to be read.
                socket.readable =
                    read == self.buffer.len() || socket.closed || !socket.transport.is_plain();
                if socket.readable {
                    self.read_again.push_back(owner);
                }
                self.finish_handshake(owner);
                // The clock is read after the socket. The process may have been stopped between the two, while the
                // client sent its request. With an earlier time the lease would begin before the request was sent and
                // end before its holder expects. A hold that has expired by this time is not renewed: the table ends it
                // first, even if its timer is late.
                let now = self.network.now();
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

    /// Reports to the engine that all output for the peer was sent, which continues a long reply.
    fn continue_long_reply(&mut self, owner: Owner) {
        // The clock is read here, because this may serve requests that were buffered behind the reply and were read in
        // this very turn.
        self.engine.write_done(owner, self.network.now());
        let (_, segments) = self.engine.output();
        if self.engine.has_long_reply(owner) && segments.iter().all(|segment| segment.to != owner) {
            // The slice was empty. Without output no completed send continues the reply, so it is scheduled here.
            self.long_replies.push(owner);
        }
    }

    /// Reports to the engine, once, that the handshake is complete.
    fn finish_handshake(&mut self, owner: Owner) {
        if let Some(socket) = self.sockets.get_mut(owner)
            && socket.take_handshake_done()
        {
            self.engine.handshake_done(owner);
        }
    }

    fn hang_up(&mut self, owner: Owner, how: Hangup) {
        if self.sockets.remove(owner, &self.network) {
            self.engine.hang_up(owner, how, self.network.now());
        }
    }

    /// Commits the journal, then sends the replies.
    ///
    /// Closing a broken connection may release its holds and grant them to waiters. Those grants have to be committed
    /// and sent as well, so this repeats until no connection breaks.
    fn deliver(&mut self) -> io::Result<()> {
        loop {
            self.engine.commit().map_err(io::Error::other)?;
            let mut broken = Vec::new();
            let mut blocked = Vec::new();
            let (out, segments) = self.engine.output();
            self.sockets.send(out, segments, &self.network, |to, progress| match progress {
                Progress::Done if self.engine.has_long_reply(to) => self.long_replies.push(to),
                Progress::Done => {}
                Progress::Blocked => blocked.push(to),
                Progress::Broken => broken.push(to),
            });
            self.engine.clear_output();
            for owner in blocked {
                self.engine.write_blocked(owner, self.network.now());
            }
            while let Some(owner) = self.engine.poll_resumed() {
                if self.sockets.get_mut(owner).is_some_and(|socket| socket.readable) {
                    self.read_again.push_back(owner);
                }
            }
            while let Some(owner) = self.engine.poll_close() {
                if self.engine.must_close(owner, self.network.now()) {
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
