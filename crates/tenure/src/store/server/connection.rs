//! A connection to a lock server. Requests are sent in order; one task reads replies and pushed messages.

use std::collections::{HashMap, VecDeque};
use std::fmt;
#[cfg(unix)]
use std::io;
#[cfg(unix)]
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use tenure_core::wire::{ClaimId, Push, Reply, Request};
use tenure_core::{LockToken, Time};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::{Notify, oneshot};

use super::ServerShared;
use super::claim::ClaimState;
use crate::Clock;

/// Maximum number of unanswered requests of a connection.
const MAX_REQUESTS_IN_FLIGHT: usize = 65_536;
/// Longest line of a server: a page of a list with many holders.
const MAX_REPLY_BYTES: usize = 32 << 20;
/// Interval between pings. Servers of the plain protocol close connections that are idle for 23 seconds.
const PING_INTERVAL: Duration = Duration::from_secs(10);

/// A byte stream, plain or TLS.
pub(super) trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for T {}

/// Reply of a server, parsed and owned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum OwnedReply {
    Done,
    Granted { token: LockToken, lease: u64 },
    Acquired,
    Queued,
    Number(u64),
    Renewed { lease: u64, waiters: u64 },
    Timeout,
    Json(Box<[u8]>),
    Error(String),
}

impl OwnedReply {
    fn parse(line: &[u8]) -> Option<Self> {
        Some(match Reply::parse(line)? {
            Reply::Done => Self::Done,
            Reply::Granted { token, lease } => Self::Granted { token, lease },
            Reply::Acquired { .. } => Self::Acquired,
            Reply::Queued => Self::Queued,
            Reply::Number(number) => Self::Number(number),
            Reply::Renewed { lease, waiters } => Self::Renewed { lease, waiters },
            Reply::Timeout => Self::Timeout,
            Reply::Json(json) => Self::Json(json.into()),
            Reply::Error(why) => Self::Error(String::from_utf8_lossy(why).into_owned()),
        })
    }
}

/// Reason for the lack of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoReply {
    /// The request was not sent.
    Unsent,
    /// The connection ended before the reply arrived.
    Disconnected,
    /// The time limit passed before the reply arrived.
    TimedOut,
}

/// Reason for the end of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ConnectionEnd {
    /// The server closed the connection, or a proxy between did.
    ClosedByPeer,
    /// This client closed the connection.
    ClosedByClient,
    /// The connection broke, and the server may not have noticed.
    Broken(Arc<str>),
}

/// A connection to the server. It is closed when its last user drops it.
pub(super) struct Connection(Arc<ConnectionInner>);

struct ConnectionInner {
    /// Store that gets the pushed messages; set once the connection has proved usable.
    shared: OnceLock<Weak<ServerShared>>,
    clock: Clock,
    state: Mutex<ConnectionState>,
    /// Notified when there is output to send, and when the connection is to be closed.
    wake: Notify,
    /// Notified when the connection needs pings.
    wake_pings: Notify,
}

struct ConnectionState {
    output: Vec<u8>,
    /// Recipients of the next replies, in order.
    awaiting_reply: VecDeque<ReplyTarget>,
    watches: HashMap<u64, oneshot::Sender<()>>,
    last_watch: u64,
    last_sent: Time,
    closing: bool,
    pings: bool,
    end: Option<ConnectionEnd>,
    #[cfg(unix)]
    has_descriptor: bool,
    #[cfg(unix)]
    keep_open_fd: Option<OwnedFd>,
}

/// Recipient of a reply.
enum ReplyTarget {
    Caller(oneshot::Sender<OwnedReply>),
    Claim(Arc<ClaimState>),
    Wait(Weak<ClaimState>),
    Discard,
}

impl Connection {
    /// Starts the connection on a stream. `keep_open_fd` is another descriptor of the same socket, if it is one.
    pub(super) fn start(
        stream: impl ByteStream + 'static,
        #[cfg(unix)] keep_open_fd: Option<OwnedFd>,
        clock: &Clock,
    ) -> Arc<Self> {
        let state = ConnectionState {
            output: Vec::new(),
            awaiting_reply: VecDeque::new(),
            watches: HashMap::new(),
            last_watch: 0,
            last_sent: clock.now(),
            closing: false,
            pings: false,
            end: None,
            #[cfg(unix)]
            has_descriptor: keep_open_fd.is_some(),
            #[cfg(unix)]
            keep_open_fd,
        };
        let inner = Arc::new(ConnectionInner {
            shared: OnceLock::new(),
            clock: clock.clone(),
            state: Mutex::new(state),
            wake: Notify::new(),
            wake_pings: Notify::new(),
        });
        tokio::spawn(run(Arc::clone(&inner), stream));
        Arc::new(Self(inner))
    }

    /// Attaches the connection to a store, for whose claims it is used from now on.
    pub(super) fn attach(&self, shared: &Arc<ServerShared>) {
        // Set once, by the store that made the connection.
        let _ = self.0.shared.set(Arc::downgrade(shared));
    }

    /// Sends pings from now on whenever the connection is idle.
    pub(super) fn enable_pings(&self) {
        self.0.lock().pings = true;
        self.0.wake_pings.notify_one();
    }

    pub(super) fn is_open(&self) -> bool {
        let state = self.0.lock();
        state.end.is_none() && !state.closing
    }

    /// Reason for the end of the connection; `None` while it is open.
    pub(super) fn end(&self) -> Option<ConnectionEnd> {
        self.0.lock().end.clone()
    }

    /// Sends a request and waits for its reply, at most until `until`.
    pub(super) async fn ask(
        &self,
        request: &Request<'_>,
        until: Time,
    ) -> Result<OwnedReply, NoReply> {
        let (caller, answer) = oneshot::channel();
        self.0.send([(request, ReplyTarget::Caller(caller))]).map_err(|()| NoReply::Unsent)?;
        tokio::select! {
            biased;
            reply = answer => reply.map_err(|_| NoReply::Disconnected),
            () = self.0.clock.sleep_until(until) => Err(NoReply::TimedOut),
        }
    }

    /// Sends a request whose reply is ignored.
    pub(super) fn send_without_reply(&self, request: &Request<'_>) {
        // If it cannot be sent, the connection has ended. The claim ends with it, or with its lease if the server keeps
        // its holds.
        let _ = self.0.send([(request, ReplyTarget::Discard)]);
    }

    /// Sends a claim. The claim state is kept alive until the reply arrives.
    pub(super) fn claim(
        &self,
        request: &Request<'_>,
        claim_state: &Arc<ClaimState>,
    ) -> Result<(), NoReply> {
        let target = ReplyTarget::Claim(Arc::clone(claim_state));
        self.0.send([(request, target)]).map_err(|()| NoReply::Unsent)
    }

    /// Sends a claim and then a wait. The reply to the wait may never arrive, so only a weak reference waits for it.
    pub(super) fn claim_and_wait(
        &self,
        claim: &Request<'_>,
        wait: &Request<'_>,
        claim_state: &Arc<ClaimState>,
    ) -> Result<(), NoReply> {
        let claim = (claim, ReplyTarget::Claim(Arc::clone(claim_state)));
        let wait = (wait, ReplyTarget::Wait(Arc::downgrade(claim_state)));
        self.0.send([claim, wait]).map_err(|()| NoReply::Unsent)
    }

    /// A new watch and its id. The receiver resolves when the server reports a change, and fails when the connection
    /// ends. The caller must end the watch with [`unwatch`](Self::unwatch).
    pub(super) fn watch(&self) -> Option<(u64, oneshot::Receiver<()>)> {
        let mut state = self.0.lock();
        if state.end.is_some() || state.watches.len() >= MAX_REQUESTS_IN_FLIGHT {
            return None;
        }
        state.last_watch += 1;
        let id = state.last_watch;
        let (notify, changed) = oneshot::channel();
        state.watches.insert(id, notify);
        Some((id, changed))
    }

    /// Removes a watch. True if it has not fired: the caller must then send an unwatch request to the server.
    pub(super) fn unwatch(&self, id: u64) -> bool {
        self.0.lock().watches.remove(&id).is_some()
    }

    /// Closes the connection once the pending output was sent.
    pub(super) fn close(&self) {
        self.0.lock().closing = true;
        self.0.wake.notify_one();
    }

    /// True if the stream is a socket of the system.
    #[cfg(unix)]
    pub(super) fn has_descriptor(&self) -> bool {
        self.0.lock().has_descriptor
    }

    /// Duplicates the descriptor; the duplicate keeps the connection open.
    #[cfg(unix)]
    pub(super) fn keep_open(&self) -> io::Result<OwnedFd> {
        match &self.0.lock().keep_open_fd {
            Some(fd) => fd.try_clone(),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("end", &self.end()).finish_non_exhaustive()
    }
}

impl ConnectionInner {
    fn lock(&self) -> MutexGuard<'_, ConnectionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send<const N: usize>(&self, requests: [(&Request<'_>, ReplyTarget); N]) -> Result<(), ()> {
        let mut state = self.lock();
        if state.end.is_some()
            || state.closing
            || state.awaiting_reply.len() + N > MAX_REQUESTS_IN_FLIGHT
        {
            // Unlock before the targets are dropped: dropping the last reference to a claim state sends a request,
            // which would lock again and deadlock.
            drop(state);
            return Err(());
        }
        for (request, target) in requests {
            request.write(&mut state.output);
            state.awaiting_reply.push_back(target);
        }
        state.last_sent = self.clock.now();
        drop(state);
        self.wake.notify_one();
        Ok(())
    }

    /// Passes a line to its recipient.
    fn handle_line(&self, line: &[u8]) -> Result<(), &'static str> {
        if line.first() == Some(&b'!') {
            if let Some(push) = Push::parse(line) {
                self.handle_push(&push);
            }
            return Ok(());
        }
        let reply = OwnedReply::parse(line).ok_or("the server sent a line that is not a reply")?;
        let target = self
            .lock()
            .awaiting_reply
            .pop_front()
            .ok_or("the server sent a reply without a request")?;
        match target {
            // Fails if the caller has timed out.
            ReplyTarget::Caller(caller) => drop(caller.send(reply)),
            ReplyTarget::Claim(claim_state) => claim_state.handle_reply(reply),
            ReplyTarget::Wait(claim_state) => {
                if let Some(claim_state) = claim_state.upgrade() {
                    claim_state.handle_reply(reply);
                }
            }
            ReplyTarget::Discard => {}
        }
        Ok(())
    }

    fn handle_push(&self, push: &Push<'_>) {
        let Some(shared) = self.shared.get().and_then(Weak::upgrade) else { return };
        match *push {
            Push::Changed { id } => {
                if let Some(watch) = self.lock().watches.remove(&id) {
                    // Fails if the watch was dropped meanwhile.
                    let _ = watch.send(());
                }
            }
            Push::Granted { id: ClaimId(id), token, lease } => {
                if let Some(claim_state) =
                    shared.claim_by_id(id).filter(|claim_state| self.carries(claim_state))
                {
                    claim_state.handle_reply(OwnedReply::Granted { token, lease });
                }
            }
            Push::Gone { id: ClaimId(id) } => {
                if let Some(claim_state) =
                    shared.claim_by_id(id).filter(|claim_state| self.carries(claim_state))
                {
                    claim_state.handle_gone();
                }
            }
            Push::HandoffRequested { number } => {
                if let Some(claim_state) =
                    shared.claim_by_number(number).filter(|claim_state| self.carries(claim_state))
                {
                    claim_state.handle_handoff_request();
                }
            }
            Push::Ended { number, why } => {
                if let Some(claim_state) =
                    shared.claim_by_number(number).filter(|claim_state| self.carries(claim_state))
                {
                    claim_state.handle_ended(why);
                }
            }
        }
    }

    fn carries(&self, claim_state: &Arc<ClaimState>) -> bool {
        std::ptr::eq(Arc::as_ptr(&claim_state.connection().0), self)
    }

    /// Ends the connection: all requests and watches fail, and its claims are notified.
    fn handle_end(&self, end: &ConnectionEnd) {
        let (targets, watches) = {
            let mut state = self.lock();
            state.end = Some(end.clone());
            state.output = Vec::new();
            #[cfg(unix)]
            drop(state.keep_open_fd.take());
            (std::mem::take(&mut state.awaiting_reply), std::mem::take(&mut state.watches))
        };
        if let Some(shared) = self.shared.get().and_then(Weak::upgrade) {
            for claim_state in
                shared.all_claims().iter().filter(|claim_state| self.carries(claim_state))
            {
                claim_state.handle_disconnect(end);
            }
        }
        drop((targets, watches));
    }
}

/// Reads and writes until either ends.
async fn run(inner: Arc<ConnectionInner>, stream: impl ByteStream) {
    let (mut reader, mut writer) = tokio::io::split(stream);
    let end = tokio::select! {
        biased;
        end = read(&inner, &mut reader) => end,
        end = write(&inner, &mut writer) => end,
        never = ping(&inner) => match never {},
    };
    // The socket is closed before any claim learns of the end. Otherwise a claim could be sent again on another
    // connection while the server still counts the old one as open, and be refused as claimed elsewhere.
    drop((reader, writer));
    if let ConnectionEnd::Broken(why) = &end {
        tracing::debug!(name: "tenure.disconnected", %why);
    }
    inner.handle_end(&end);
}

async fn read(inner: &ConnectionInner, reader: &mut (impl AsyncRead + Unpin)) -> ConnectionEnd {
    let mut buffer = Vec::with_capacity(4096);
    let mut scanned = 0;
    loop {
        match reader.read_buf(&mut buffer).await {
            Ok(0) => return ConnectionEnd::ClosedByPeer,
            Ok(_) => {}
            Err(error) => return ConnectionEnd::Broken(error.to_string().into()),
        }
        let mut begin = 0;
        while let Some(at) = buffer[scanned..].iter().position(|byte| *byte == b'\n') {
            let line = &buffer[begin..scanned + at];
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            if let Err(why) = inner.handle_line(line) {
                return ConnectionEnd::Broken(why.into());
            }
            scanned += at + 1;
            begin = scanned;
        }
        buffer.drain(..begin);
        scanned = buffer.len();
        if buffer.len() > MAX_REPLY_BYTES {
            return ConnectionEnd::Broken("a reply is too long".into());
        }
        if buffer.is_empty() {
            buffer.shrink_to(64 << 10);
        }
    }
}

async fn write(inner: &ConnectionInner, writer: &mut (impl AsyncWrite + Unpin)) -> ConnectionEnd {
    loop {
        let (out, closing) = {
            let mut state = inner.lock();
            (std::mem::take(&mut state.output), state.closing)
        };
        if out.is_empty() {
            if closing {
                return ConnectionEnd::ClosedByClient;
            }
            inner.wake.notified().await;
            continue;
        }
        let written = async {
            writer.write_all(&out).await?;
            writer.flush().await
        };
        if let Err(error) = written.await {
            return ConnectionEnd::Broken(error.to_string().into());
        }
    }
}

/// Sends pings on an idle connection.
async fn ping(inner: &ConnectionInner) -> std::convert::Infallible {
    while !inner.lock().pings {
        inner.wake_pings.notified().await;
    }
    loop {
        let (sent, idle) = {
            let state = inner.lock();
            (state.last_sent, state.awaiting_reply.is_empty())
        };
        let due = sent + PING_INTERVAL;
        let now = inner.clock.now();
        if now < due {
            inner.clock.sleep_until(due).await;
        } else if idle {
            // Fails if the connection has just ended, which needs no ping.
            let _ = inner.send([(&Request::Ping, ReplyTarget::Discard)]);
        } else {
            inner.clock.sleep_until(now + PING_INTERVAL).await;
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn connection(clock: &Clock) -> (Arc<Connection>, tokio::io::DuplexStream) {
        let (ours, theirs) = tokio::io::duplex(4096);
        let fd = std::fs::File::open("/dev/null").expect("there is one").into();
        (Connection::start(ours, Some(fd), clock), theirs)
    }

    #[tokio::test]
    async fn idle_connection_is_kept_open_by_pings() {
        let (clock, hand) = Clock::manual();
        let (connection, mut server) = connection(&clock);
        connection.enable_pings();
        let mut reply = [0; 8];
        for _ in 0..3 {
            while hand.next_timer().is_none_or(|timer| timer <= clock.now()) {
                tokio::task::yield_now().await;
            }
            hand.advance(PING_INTERVAL);
            server.read_exact(&mut reply).await.expect("open");
            assert_eq!(&reply, b"ping\n_\n\n");
            server.write_all(b"ok\n").await.expect("open");
            while !connection.0.lock().awaiting_reply.is_empty() {
                tokio::task::yield_now().await;
            }
        }
    }

    #[tokio::test]
    async fn late_reply_is_dropped_and_the_next_reaches_its_caller() {
        let (clock, hand) = Clock::manual();
        let (connection, mut server) = connection(&clock);
        let asked = {
            let connection = Arc::clone(&connection);
            let until = clock.now() + Duration::from_secs(1);
            tokio::spawn(async move { connection.ask(&Request::Ping, until).await })
        };
        while hand.next_timer().is_none() {
            tokio::task::yield_now().await;
        }
        hand.advance(Duration::from_secs(1));
        assert_eq!(asked.await.expect("no panic"), Err(NoReply::TimedOut));
        server.write_all(b"timeout\r\nok 7\n").await.expect("open");
        let reply = connection.ask(&Request::Ping, Time::MAX).await;
        assert_eq!(reply, Ok(OwnedReply::Number(7)));
    }

    #[tokio::test]
    async fn an_invalid_reply_ends_the_connection() {
        for line in ["granted\n", "ok\n", "ok 1 2 3\n"] {
            let (connection, mut server) = connection(&Clock::system());
            server.write_all(line.as_bytes()).await.expect("open");
            while connection.is_open() {
                tokio::task::yield_now().await;
            }
            assert!(matches!(connection.end(), Some(ConnectionEnd::Broken(_))), "{line:?}");
            assert_eq!(connection.ask(&Request::Ping, Time::MAX).await, Err(NoReply::Unsent));
        }
    }

    #[tokio::test]
    async fn queued_requests_are_sent_before_the_connection_is_closed() {
        let (connection, mut server) = connection(&Clock::system());
        connection.send_without_reply(&Request::Ping);
        drop(connection);
        let mut reply = Vec::new();
        server.read_to_end(&mut reply).await.expect("closed in order");
        assert_eq!(reply, b"ping\n_\n\n");
    }
}
