//! One connection to a lock server: requests go out in order, one task reads replies and what the server pushes.

use std::collections::{HashMap, VecDeque};
use std::fmt;
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

/// How many requests of a connection may be without an answer.
const MAX_REQUESTS_IN_FLIGHT: usize = 65_536;
/// The longest line of a server: a page of a list with many holders.
const MAX_REPLY_BYTES: usize = 32 << 20;
/// Servers in the field end connections that say nothing for 23 seconds.
const PING_INTERVAL: Duration = Duration::from_secs(10);

/// A stream, in the clear or under TLS.
pub(super) trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for T {}

/// What a server can answer, taken from its line.
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

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoReply {
    /// The request was not sent.
    Unsent,
    /// The connection ended before the answer came.
    Disconnected,
    /// The time was over before the answer came.
    TimedOut,
}

/// How a connection ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ConnectionEnd {
    /// The server closed it: it knows that what lived on it is over.
    ClosedByServer,
    /// We closed it.
    ClosedByClient,
    /// It broke, and the server may not know.
    Broken(Arc<str>),
}

/// A connection. It is closed when the last who uses it lets go.
pub(super) struct Connection(Arc<ConnectionInner>);

struct ConnectionInner {
    /// Whose seats are told; set when the connection is found to be good.
    shared: OnceLock<Weak<ServerShared>>,
    clock: Clock,
    state: Mutex<ConnectionState>,
    /// Told when there is something to send, or nothing any more.
    wake: Notify,
    /// Told when the connection needs pings.
    wake_pings: Notify,
}

struct ConnectionState {
    output: Vec<u8>,
    /// Who waits for the next replies, in order.
    awaiting_reply: VecDeque<ReplyTarget>,
    watches: HashMap<u64, oneshot::Sender<()>>,
    last_watch: u64,
    last_sent: Time,
    closing: bool,
    pings: bool,
    end: Option<ConnectionEnd>,
    #[cfg(unix)]
    keep_open_fd: Option<OwnedFd>,
}

/// Whom a reply is for.
enum ReplyTarget {
    Caller(oneshot::Sender<OwnedReply>),
    Claim(Arc<ClaimState>),
    Wait(Weak<ClaimState>),
    Discard,
}

impl Connection {
    /// Takes a stream over. `door` is another descriptor of it.
    pub(super) fn start(
        stream: impl ByteStream + 'static,
        #[cfg(unix)] keep_open_fd: OwnedFd,
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
            keep_open_fd: Some(keep_open_fd),
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

    /// From now on it is for the seats of this store.
    pub(super) fn attach(&self, shared: &Arc<ServerShared>) {
        // Adopted once: by whoever made it.
        let _ = self.0.shared.set(Arc::downgrade(shared));
    }

    /// From now on something is said when nothing was for a while.
    pub(super) fn enable_pings(&self) {
        self.0.lock().pings = true;
        self.0.wake_pings.notify_one();
    }

    pub(super) fn is_open(&self) -> bool {
        let state = self.0.lock();
        state.end.is_none() && !state.closing
    }

    /// How it ended, if it has.
    pub(super) fn end(&self) -> Option<ConnectionEnd> {
        self.0.lock().end.clone()
    }

    /// Sends, and waits for the answer until then.
    pub(super) async fn ask(
        &self,
        request: &Request<'_>,
        until: Time,
    ) -> Result<OwnedReply, NoReply> {
        let (asker, answer) = oneshot::channel();
        self.0.send([(request, ReplyTarget::Caller(asker))]).map_err(|()| NoReply::Unsent)?;
        tokio::select! {
            biased;
            said = answer => said.map_err(|_| NoReply::Disconnected),
            () = self.0.clock.sleep_until(until) => Err(NoReply::TimedOut),
        }
    }

    /// Sends what nobody waits for the answer to.
    pub(super) fn send_without_reply(&self, request: &Request<'_>) {
        // Where it cannot be sent, the end of the connection does what it would have.
        let _ = self.0.send([(request, ReplyTarget::Discard)]);
    }

    /// Sends a claim: its answer is for a seat, which stays until then.
    pub(super) fn claim(
        &self,
        request: &Request<'_>,
        seat: &Arc<ClaimState>,
    ) -> Result<(), NoReply> {
        let slot = ReplyTarget::Claim(Arc::clone(seat));
        self.0.send([(request, slot)]).map_err(|()| NoReply::Unsent)
    }

    /// Sends a claim and a wait behind it, whose answer may take for ever: the seat does not stay for that.
    pub(super) fn claim_and_wait(
        &self,
        claim: &Request<'_>,
        wait: &Request<'_>,
        seat: &Arc<ClaimState>,
    ) -> Result<(), NoReply> {
        let claim = (claim, ReplyTarget::Claim(Arc::clone(seat)));
        let wait = (wait, ReplyTarget::Wait(Arc::downgrade(seat)));
        self.0.send([claim, wait]).map_err(|()| NoReply::Unsent)
    }

    /// A watch, with its number: resolves when the server says that what it is for has changed, fails with the
    /// connection. To be [ended](Self::unwatch).
    pub(super) fn watch(&self) -> Option<(u64, oneshot::Receiver<()>)> {
        let mut state = self.0.lock();
        if state.end.is_some() || state.watches.len() >= MAX_REQUESTS_IN_FLIGHT {
            return None;
        }
        state.last_watch += 1;
        let id = state.last_watch;
        let (tell, told) = oneshot::channel();
        state.watches.insert(id, tell);
        Some((id, told))
    }

    /// Forgets a watch; whether the server does not know yet that it is over.
    pub(super) fn unwatch(&self, id: u64) -> bool {
        self.0.lock().watches.remove(&id).is_some()
    }

    /// Closes the connection as soon as what is to be sent was.
    pub(super) fn close(&self) {
        self.0.lock().closing = true;
        self.0.wake.notify_one();
    }

    /// Another descriptor that keeps it open.
    #[cfg(unix)]
    pub(super) fn keep_open(&self) -> io::Result<OwnedFd> {
        match &self.0.lock().keep_open_fd {
            Some(door) => door.try_clone(),
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
        f.debug_struct("Link").field("end", &self.end()).finish_non_exhaustive()
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
            // Not with the lock: a seat that goes takes it.
            drop(state);
            return Err(());
        }
        for (request, slot) in requests {
            request.write(&mut state.output);
            state.awaiting_reply.push_back(slot);
        }
        state.last_sent = self.clock.now();
        drop(state);
        self.wake.notify_one();
        Ok(())
    }

    /// Passes a line on to whom it is for.
    fn handle_line(&self, line: &[u8]) -> Result<(), &'static str> {
        if line.first() == Some(&b'!') {
            if let Some(push) = Push::parse(line) {
                self.handle_push(&push);
            }
            return Ok(());
        }
        let said = OwnedReply::parse(line).ok_or("the server said what is no reply")?;
        let slot = self.lock().awaiting_reply.pop_front().ok_or("the server replied to nothing")?;
        match slot {
            // Nobody waits any more where the time was over.
            ReplyTarget::Caller(asker) => drop(asker.send(said)),
            ReplyTarget::Claim(seat) => seat.handle_reply(said),
            ReplyTarget::Wait(seat) => {
                if let Some(seat) = seat.upgrade() {
                    seat.handle_reply(said);
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
                    // Nobody may want to know any more.
                    let _ = watch.send(());
                }
            }
            Push::Granted { id: ClaimId(id), token, lease } => {
                if let Some(seat) = shared.claim_by_id(id).filter(|seat| self.carries(seat)) {
                    seat.handle_reply(OwnedReply::Granted { token, lease });
                }
            }
            Push::Gone { id: ClaimId(id) } => {
                if let Some(seat) = shared.claim_by_id(id).filter(|seat| self.carries(seat)) {
                    seat.handle_gone();
                }
            }
            Push::HandoffRequested { number } => {
                if let Some(seat) = shared.claim_by_number(number).filter(|seat| self.carries(seat))
                {
                    seat.handle_handoff_request();
                }
            }
            Push::Ended { number, why } => {
                if let Some(seat) = shared.claim_by_number(number).filter(|seat| self.carries(seat))
                {
                    seat.handle_ended(why);
                }
            }
        }
    }

    fn carries(&self, seat: &Arc<ClaimState>) -> bool {
        std::ptr::eq(Arc::as_ptr(&seat.connection().0), self)
    }

    /// The connection is over: whoever waits on it, and whatever lives on it, learns of it.
    fn handle_end(&self, end: &ConnectionEnd) {
        let (slots, watches) = {
            let mut state = self.lock();
            state.end = Some(end.clone());
            state.output = Vec::new();
            #[cfg(unix)]
            drop(state.keep_open_fd.take());
            (std::mem::take(&mut state.awaiting_reply), std::mem::take(&mut state.watches))
        };
        if let Some(shared) = self.shared.get().and_then(Weak::upgrade) {
            for seat in shared.all_claims().iter().filter(|seat| self.carries(seat)) {
                seat.handle_disconnect(end);
            }
        }
        drop((slots, watches));
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
    // The descriptor goes before anybody hears of it, who might claim again on another connection.
    drop((reader, writer));
    if let ConnectionEnd::Broken(why) = &end {
        tracing::debug!(name: "tenure.disconnected", %why);
    }
    inner.handle_end(&end);
}

async fn read(inner: &ConnectionInner, reader: &mut (impl AsyncRead + Unpin)) -> ConnectionEnd {
    let mut buffer = Vec::with_capacity(4096);
    let mut looked = 0;
    loop {
        match reader.read_buf(&mut buffer).await {
            Ok(0) => return ConnectionEnd::ClosedByServer,
            Ok(_) => {}
            Err(error) => return ConnectionEnd::Broken(error.to_string().into()),
        }
        let mut begin = 0;
        while let Some(at) = buffer[looked..].iter().position(|byte| *byte == b'\n') {
            let line = &buffer[begin..looked + at];
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            if let Err(why) = inner.handle_line(line) {
                return ConnectionEnd::Broken(why.into());
            }
            looked += at + 1;
            begin = looked;
        }
        buffer.drain(..begin);
        looked = buffer.len();
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
        let (out, leaving) = {
            let mut state = inner.lock();
            (std::mem::take(&mut state.output), state.closing)
        };
        if out.is_empty() {
            if leaving {
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

/// Says something now and then on a connection that is to stay.
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
            // A connection that has just ended needs none.
            let _ = inner.send([(&Request::Ping, ReplyTarget::Discard)]);
        } else {
            inner.clock.sleep_until(now + PING_INTERVAL).await;
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn link(clock: &Clock) -> (Arc<Connection>, tokio::io::DuplexStream) {
        let (ours, theirs) = tokio::io::duplex(4096);
        let door = std::fs::File::open("/dev/null").expect("there is one").into();
        (Connection::start(ours, door, clock), theirs)
    }

    #[tokio::test]
    async fn something_is_said_before_a_silent_connection_is_cut() {
        let (clock, hand) = Clock::manual();
        let (link, mut server) = link(&clock);
        link.enable_pings();
        let mut said = [0; 8];
        for _ in 0..3 {
            while hand.next_timer().is_none_or(|timer| timer <= clock.now()) {
                tokio::task::yield_now().await;
            }
            hand.advance(PING_INTERVAL);
            server.read_exact(&mut said).await.expect("open");
            assert_eq!(&said, b"ping\n_\n\n");
            server.write_all(b"ok\n").await.expect("open");
            while !link.0.lock().awaiting_reply.is_empty() {
                tokio::task::yield_now().await;
            }
        }
    }

    #[tokio::test]
    async fn a_late_answer_is_passed_over_and_the_next_finds_its_asker() {
        let (clock, hand) = Clock::manual();
        let (link, mut server) = link(&clock);
        let asked = {
            let link = Arc::clone(&link);
            let until = clock.now() + Duration::from_secs(1);
            tokio::spawn(async move { link.ask(&Request::Ping, until).await })
        };
        while hand.next_timer().is_none() {
            tokio::task::yield_now().await;
        }
        hand.advance(Duration::from_secs(1));
        assert_eq!(asked.await.expect("no panic"), Err(NoReply::TimedOut));
        server.write_all(b"timeout\r\nok 7\n").await.expect("open");
        let said = link.ask(&Request::Ping, Time::MAX).await;
        assert_eq!(said, Ok(OwnedReply::Number(7)));
    }

    #[tokio::test]
    async fn an_invalid_reply_ends_the_connection() {
        for line in ["granted\n", "ok\n", "ok 1 2 3\n"] {
            let (link, mut server) = link(&Clock::system());
            server.write_all(line.as_bytes()).await.expect("open");
            while link.is_open() {
                tokio::task::yield_now().await;
            }
            assert!(matches!(link.end(), Some(ConnectionEnd::Broken(_))), "{line:?}");
            assert_eq!(link.ask(&Request::Ping, Time::MAX).await, Err(NoReply::Unsent));
        }
    }

    #[tokio::test]
    async fn queued_requests_are_sent_before_the_connection_is_closed() {
        let (link, mut server) = link(&Clock::system());
        link.send_without_reply(&Request::Ping);
        drop(link);
        let mut said = Vec::new();
        server.read_to_end(&mut said).await.expect("closed in order");
        assert_eq!(said, b"ping\n_\n\n");
    }
}
