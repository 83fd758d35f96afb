//! A connection to a lock server, as its users see it: requests are sent in order, and each waits for its reply.

use std::collections::{HashMap, VecDeque};
use std::fmt;
#[cfg(unix)]
use std::io;
#[cfg(unix)]
use std::os::fd::OwnedFd;
use std::sync::{Arc, MutexGuard, Weak};
use std::time::Duration;

use tenure_core::Time;
use tenure_core::wire::Request;
use tokio::io::{AsyncWrite, AsyncWriteExt as _};
use tokio::sync::{Notify, oneshot};

use super::wire::{NoReply, OwnedReply};
use crate::Clock;
use crate::mutex::Mutex;

/// Maximum number of unanswered requests of a connection.
const MAX_REQUESTS_IN_FLIGHT: usize = 65_536;
/// Interval between pings. Servers of the plain protocol close connections that are idle for 23 seconds.
const PING_INTERVAL: Duration = Duration::from_secs(10);

/// A connection to the server. It is closed when its last user drops it.
///
/// `C` is the state of a claim, which replies to claims are for.
pub(super) struct Connection<C>(Arc<ConnectionInner<C>>);

/// State of a connection, for its users and for its task.
pub(super) struct ConnectionInner<C> {
    clock: Clock,
    state: Mutex<ConnectionState<C>>,
    /// Notified when there is output to send, and when the connection is to be closed.
    wake: Notify,
    /// Notified when the connection needs pings.
    wake_pings: Notify,
}

struct ConnectionState<C> {
    output: Vec<u8>,
    /// Recipients of the next replies, in order.
    awaiting_reply: VecDeque<ReplyTarget<C>>,
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
pub(super) enum ReplyTarget<C> {
    Caller(oneshot::Sender<OwnedReply>),
    Claim(Arc<C>),
    Wait(Weak<C>),
    Discard,
}

/// Requests and watches that were open when the connection ended.
type Unanswered<C> = (VecDeque<ReplyTarget<C>>, HashMap<u64, oneshot::Sender<()>>);

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

impl<C> Connection<C> {
    /// Returns the connection whose task is about to start. `keep_open_fd` is another descriptor of its socket, if the
    /// stream is a socket.
    pub(super) fn new(#[cfg(unix)] keep_open_fd: Option<OwnedFd>, clock: &Clock) -> Arc<Self> {
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
        Arc::new(Self(Arc::new(ConnectionInner {
            clock: clock.clone(),
            state: Mutex::new(state),
            wake: Notify::new(),
            wake_pings: Notify::new(),
        })))
    }

    /// The part that outlives this handle until the task has ended.
    pub(super) fn inner(&self) -> &Arc<ConnectionInner<C>> {
        &self.0
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
    pub(super) fn claim(&self, request: &Request<'_>, claim_state: &Arc<C>) -> Result<(), NoReply> {
        let target = ReplyTarget::Claim(Arc::clone(claim_state));
        self.0.send([(request, target)]).map_err(|()| NoReply::Unsent)
    }

    /// Sends a claim and then a wait. The reply to the wait may never arrive, so only a weak reference waits for it.
    pub(super) fn claim_and_wait(
        &self,
        claim: &Request<'_>,
        wait: &Request<'_>,
        claim_state: &Arc<C>,
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

impl<C> Drop for Connection<C> {
    fn drop(&mut self) {
        self.close();
    }
}

impl<C> fmt::Debug for Connection<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("end", &self.end()).finish_non_exhaustive()
    }
}

impl<C> ConnectionInner<C> {
    fn lock(&self) -> MutexGuard<'_, ConnectionState<C>> {
        self.state.lock()
    }

    fn send<const N: usize>(
        &self,
        requests: [(&Request<'_>, ReplyTarget<C>); N],
    ) -> Result<(), ()> {
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

    /// Recipient of the next reply.
    pub(super) fn next_target(&self) -> Option<ReplyTarget<C>> {
        self.lock().awaiting_reply.pop_front()
    }

    /// Wakes the watch that the server has reported a change for.
    pub(super) fn wake_watch(&self, id: u64) {
        if let Some(watch) = self.lock().watches.remove(&id) {
            // Fails if the watch was dropped meanwhile.
            let _ = watch.send(());
        }
    }

    /// Records the end of the connection. Requests and watches fail when the returned value is dropped.
    pub(super) fn finish(&self, end: &ConnectionEnd) -> Unanswered<C> {
        let mut state = self.lock();
        state.end = Some(end.clone());
        state.output = Vec::new();
        #[cfg(unix)]
        drop(state.keep_open_fd.take());
        (std::mem::take(&mut state.awaiting_reply), std::mem::take(&mut state.watches))
    }

    /// Writes the output until the connection is to be closed, or broken.
    pub(super) async fn write(&self, writer: &mut (impl AsyncWrite + Unpin)) -> ConnectionEnd {
        loop {
            let (out, closing) = {
                let mut state = self.lock();
                (std::mem::take(&mut state.output), state.closing)
            };
            if out.is_empty() {
                if closing {
                    return ConnectionEnd::ClosedByClient;
                }
                self.wake.notified().await;
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
    pub(super) async fn ping(&self) -> std::convert::Infallible {
        while !self.lock().pings {
            self.wake_pings.notified().await;
        }
        loop {
            let (sent, idle) = {
                let state = self.lock();
                (state.last_sent, state.awaiting_reply.is_empty())
            };
            let due = sent + PING_INTERVAL;
            let now = self.clock.now();
            if now < due {
                self.clock.sleep_until(due).await;
            } else if idle {
                // Fails if the connection has just ended, which needs no ping.
                let _ = self.send([(&Request::Ping, ReplyTarget::Discard)]);
            } else {
                self.clock.sleep_until(now + PING_INTERVAL).await;
            }
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use tokio::io::AsyncReadExt as _;

    use super::super::claim::ServerConnection;
    use super::super::task::start;
    use super::*;

    fn connection(clock: &Clock) -> (Arc<ServerConnection>, tokio::io::DuplexStream) {
        let (ours, theirs) = tokio::io::duplex(4096);
        let fd = std::fs::File::open("/dev/null").expect("there is one").into();
        (start(ours, Some(fd), clock, &Arc::default()), theirs)
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
