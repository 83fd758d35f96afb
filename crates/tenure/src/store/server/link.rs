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

use super::Shared;
use super::seat::Seat;
use crate::Clock;

/// How many requests of a connection may be without an answer.
const MAX_OUTSTANDING: usize = 65_536;
/// The longest line of a server: a page of a list with many holders.
const MAX_REPLY: usize = 32 << 20;
/// Servers in the field end connections that say nothing for 23 seconds.
const IDLE: Duration = Duration::from_secs(10);

/// A stream, in the clear or under TLS.
pub(super) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// What a server can answer, taken from its line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Said {
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

impl Said {
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
pub(super) enum Silence {
    /// The request was not sent.
    Unsent,
    /// The connection ended before the answer came.
    Cut,
    /// The time was over before the answer came.
    Late,
}

/// How a connection ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The server closed it: it knows that what lived on it is over.
    Closed,
    /// We closed it.
    Left,
    /// It broke, and the server may not know.
    Broken(Arc<str>),
}

/// A connection. It is closed when the last who uses it lets go.
pub(super) struct Link(Arc<Inner>);

struct Inner {
    /// Whose seats are told; set when the connection is found to be good.
    shared: OnceLock<Weak<Shared>>,
    clock: Clock,
    state: Mutex<State>,
    /// Told when there is something to send, or nothing any more.
    wake: Notify,
    /// Told when the connection needs pings.
    wake_pings: Notify,
}

struct State {
    out: Vec<u8>,
    /// Who waits for the next replies, in order.
    slots: VecDeque<Slot>,
    watches: HashMap<u64, oneshot::Sender<()>>,
    last_watch: u64,
    sent: Time,
    leaving: bool,
    pings: bool,
    end: Option<End>,
    #[cfg(unix)]
    door: Option<OwnedFd>,
}

/// Whom a reply is for.
enum Slot {
    Asker(oneshot::Sender<Said>),
    Seat(Arc<Seat>),
    Waiter(Weak<Seat>),
    Nobody,
}

impl Link {
    /// Takes a stream over. `door` is another descriptor of it.
    pub(super) fn start(
        stream: impl Stream + 'static,
        #[cfg(unix)] door: OwnedFd,
        clock: &Clock,
    ) -> Arc<Self> {
        let state = State {
            out: Vec::new(),
            slots: VecDeque::new(),
            watches: HashMap::new(),
            last_watch: 0,
            sent: clock.now(),
            leaving: false,
            pings: false,
            end: None,
            #[cfg(unix)]
            door: Some(door),
        };
        let inner = Arc::new(Inner {
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
    pub(super) fn adopt(&self, shared: &Arc<Shared>) {
        // Adopted once: by whoever made it.
        let _ = self.0.shared.set(Arc::downgrade(shared));
    }

    /// From now on something is said when nothing was for a while.
    pub(super) fn keep_talking(&self) {
        self.0.lock().pings = true;
        self.0.wake_pings.notify_one();
    }

    pub(super) fn is_open(&self) -> bool {
        let state = self.0.lock();
        state.end.is_none() && !state.leaving
    }

    /// How it ended, if it has.
    pub(super) fn end(&self) -> Option<End> {
        self.0.lock().end.clone()
    }

    /// Sends, and waits for the answer until then.
    pub(super) async fn ask(&self, request: &Request<'_>, until: Time) -> Result<Said, Silence> {
        let (asker, answer) = oneshot::channel();
        self.0.send([(request, Slot::Asker(asker))]).map_err(|()| Silence::Unsent)?;
        tokio::select! {
            biased;
            said = answer => said.map_err(|_| Silence::Cut),
            () = self.0.clock.sleep_until(until) => Err(Silence::Late),
        }
    }

    /// Sends what nobody waits for the answer to.
    pub(super) fn tell(&self, request: &Request<'_>) {
        // Where it cannot be sent, the end of the connection does what it would have.
        let _ = self.0.send([(request, Slot::Nobody)]);
    }

    /// Sends a claim: its answer is for a seat, which stays until then.
    pub(super) fn claim(&self, request: &Request<'_>, seat: &Arc<Seat>) -> Result<(), Silence> {
        let slot = Slot::Seat(Arc::clone(seat));
        self.0.send([(request, slot)]).map_err(|()| Silence::Unsent)
    }

    /// Sends a claim and a wait behind it, whose answer may take for ever: the seat does not stay for that.
    pub(super) fn claim_and_wait(
        &self,
        claim: &Request<'_>,
        wait: &Request<'_>,
        seat: &Arc<Seat>,
    ) -> Result<(), Silence> {
        let claim = (claim, Slot::Seat(Arc::clone(seat)));
        let wait = (wait, Slot::Waiter(Arc::downgrade(seat)));
        self.0.send([claim, wait]).map_err(|()| Silence::Unsent)
    }

    /// A watch, with its number: resolves when the server says that what it is for has changed, fails with the
    /// connection. To be [ended](Self::unwatch).
    pub(super) fn watch(&self) -> Option<(u64, oneshot::Receiver<()>)> {
        let mut state = self.0.lock();
        if state.end.is_some() || state.watches.len() >= MAX_OUTSTANDING {
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
    pub(super) fn leave(&self) {
        self.0.lock().leaving = true;
        self.0.wake.notify_one();
    }

    /// Another descriptor that keeps it open.
    #[cfg(unix)]
    pub(super) fn keep_open(&self) -> io::Result<OwnedFd> {
        match &self.0.lock().door {
            Some(door) => door.try_clone(),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.leave();
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("end", &self.end()).finish_non_exhaustive()
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send<const N: usize>(&self, requests: [(&Request<'_>, Slot); N]) -> Result<(), ()> {
        let mut state = self.lock();
        if state.end.is_some() || state.leaving || state.slots.len() + N > MAX_OUTSTANDING {
            // Not with the lock: a seat that goes takes it.
            drop(state);
            return Err(());
        }
        for (request, slot) in requests {
            request.write(&mut state.out);
            state.slots.push_back(slot);
        }
        state.sent = self.clock.now();
        drop(state);
        self.wake.notify_one();
        Ok(())
    }

    /// Passes a line on to whom it is for.
    fn heard(&self, line: &[u8]) -> Result<(), &'static str> {
        if line.first() == Some(&b'!') {
            if let Some(push) = Push::parse(line) {
                self.pushed(&push);
            }
            return Ok(());
        }
        let said = Said::parse(line).ok_or("the server said what is no reply")?;
        let slot = self.lock().slots.pop_front().ok_or("the server replied to nothing")?;
        match slot {
            // Nobody waits any more where the time was over.
            Slot::Asker(asker) => drop(asker.send(said)),
            Slot::Seat(seat) => seat.heard(said),
            Slot::Waiter(seat) => {
                if let Some(seat) = seat.upgrade() {
                    seat.heard(said);
                }
            }
            Slot::Nobody => {}
        }
        Ok(())
    }

    fn pushed(&self, push: &Push<'_>) {
        let Some(shared) = self.shared.get().and_then(Weak::upgrade) else { return };
        match *push {
            Push::Changed { id } => {
                if let Some(watch) = self.lock().watches.remove(&id) {
                    // Nobody may want to know any more.
                    let _ = watch.send(());
                }
            }
            Push::Granted { id: ClaimId(id), token, lease } => {
                if let Some(seat) = shared.seat(id).filter(|seat| self.carries(seat)) {
                    seat.heard(Said::Granted { token, lease });
                }
            }
            Push::Gone { id: ClaimId(id) } => {
                if let Some(seat) = shared.seat(id).filter(|seat| self.carries(seat)) {
                    seat.gone();
                }
            }
            Push::HandoffRequested { number } => {
                if let Some(seat) = shared.seat_of(number).filter(|seat| self.carries(seat)) {
                    seat.wanted();
                }
            }
            Push::Ended { number, why } => {
                if let Some(seat) = shared.seat_of(number).filter(|seat| self.carries(seat)) {
                    seat.ended(why);
                }
            }
        }
    }

    fn carries(&self, seat: &Arc<Seat>) -> bool {
        std::ptr::eq(Arc::as_ptr(&seat.link().0), self)
    }

    /// The connection is over: whoever waits on it, and whatever lives on it, learns of it.
    fn ended(&self, end: &End) {
        let (slots, watches) = {
            let mut state = self.lock();
            state.end = Some(end.clone());
            state.out = Vec::new();
            #[cfg(unix)]
            drop(state.door.take());
            (std::mem::take(&mut state.slots), std::mem::take(&mut state.watches))
        };
        if let Some(shared) = self.shared.get().and_then(Weak::upgrade) {
            for seat in shared.seats().iter().filter(|seat| self.carries(seat)) {
                seat.disconnected(end);
            }
        }
        drop((slots, watches));
    }
}

/// Reads and writes until either ends.
async fn run(inner: Arc<Inner>, stream: impl Stream) {
    let (mut reader, mut writer) = tokio::io::split(stream);
    let end = tokio::select! {
        biased;
        end = read(&inner, &mut reader) => end,
        end = write(&inner, &mut writer) => end,
        never = ping(&inner) => match never {},
    };
    // The descriptor goes before anybody hears of it, who might claim again on another connection.
    drop((reader, writer));
    if let End::Broken(why) = &end {
        tracing::debug!(name: "tenure.disconnected", %why);
    }
    inner.ended(&end);
}

async fn read(inner: &Inner, reader: &mut (impl AsyncRead + Unpin)) -> End {
    let mut buffer = Vec::with_capacity(4096);
    let mut looked = 0;
    loop {
        match reader.read_buf(&mut buffer).await {
            Ok(0) => return End::Closed,
            Ok(_) => {}
            Err(error) => return End::Broken(error.to_string().into()),
        }
        let mut begin = 0;
        while let Some(at) = buffer[looked..].iter().position(|byte| *byte == b'\n') {
            let line = &buffer[begin..looked + at];
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            if let Err(why) = inner.heard(line) {
                return End::Broken(why.into());
            }
            looked += at + 1;
            begin = looked;
        }
        buffer.drain(..begin);
        looked = buffer.len();
        if buffer.len() > MAX_REPLY {
            return End::Broken("a reply is too long".into());
        }
        if buffer.is_empty() {
            buffer.shrink_to(64 << 10);
        }
    }
}

async fn write(inner: &Inner, writer: &mut (impl AsyncWrite + Unpin)) -> End {
    loop {
        let (out, leaving) = {
            let mut state = inner.lock();
            (std::mem::take(&mut state.out), state.leaving)
        };
        if out.is_empty() {
            if leaving {
                return End::Left;
            }
            inner.wake.notified().await;
            continue;
        }
        let written = async {
            writer.write_all(&out).await?;
            writer.flush().await
        };
        if let Err(error) = written.await {
            return End::Broken(error.to_string().into());
        }
    }
}

/// Says something now and then on a connection that is to stay.
async fn ping(inner: &Inner) -> std::convert::Infallible {
    while !inner.lock().pings {
        inner.wake_pings.notified().await;
    }
    loop {
        let (sent, idle) = {
            let state = inner.lock();
            (state.sent, state.slots.is_empty())
        };
        let due = sent + IDLE;
        let now = inner.clock.now();
        if now < due {
            inner.clock.sleep_until(due).await;
        } else if idle {
            // A connection that has just ended needs none.
            let _ = inner.send([(&Request::Ping, Slot::Nobody)]);
        } else {
            inner.clock.sleep_until(now + IDLE).await;
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn link(clock: &Clock) -> (Arc<Link>, tokio::io::DuplexStream) {
        let (ours, theirs) = tokio::io::duplex(4096);
        let door = std::fs::File::open("/dev/null").expect("there is one").into();
        (Link::start(ours, door, clock), theirs)
    }

    #[tokio::test]
    async fn something_is_said_before_a_silent_connection_is_cut() {
        let (clock, hand) = Clock::manual();
        let (link, mut server) = link(&clock);
        link.keep_talking();
        let mut said = [0; 8];
        for _ in 0..3 {
            while hand.next_timer().is_none_or(|timer| timer <= clock.now()) {
                tokio::task::yield_now().await;
            }
            hand.advance(IDLE);
            server.read_exact(&mut said).await.expect("open");
            assert_eq!(&said, b"ping\n_\n\n");
            server.write_all(b"ok\n").await.expect("open");
            while !link.0.lock().slots.is_empty() {
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
        assert_eq!(asked.await.expect("no panic"), Err(Silence::Late));
        server.write_all(b"timeout\r\nok 7\n").await.expect("open");
        let said = link.ask(&Request::Ping, Time::MAX).await;
        assert_eq!(said, Ok(Said::Number(7)));
    }

    #[tokio::test]
    async fn what_is_no_reply_ends_the_connection() {
        for line in ["granted\n", "ok\n", "ok 1 2 3\n"] {
            let (link, mut server) = link(&Clock::system());
            server.write_all(line.as_bytes()).await.expect("open");
            while link.is_open() {
                tokio::task::yield_now().await;
            }
            assert!(matches!(link.end(), Some(End::Broken(_))), "{line:?}");
            assert_eq!(link.ask(&Request::Ping, Time::MAX).await, Err(Silence::Unsent));
        }
    }

    #[tokio::test]
    async fn what_was_told_is_sent_before_the_connection_is_left() {
        let (link, mut server) = link(&Clock::system());
        link.tell(&Request::Ping);
        drop(link);
        let mut said = Vec::new();
        server.read_to_end(&mut said).await.expect("closed in order");
        assert_eq!(said, b"ping\n_\n\n");
    }
}
