//! Locks on a lock server: `tenure://HOST:PORT`, and `tenures://` under TLS.
//!
//! With tenure's own server, one connection carries all claims, waits and holds of a process. With a server that does
//! not know tenure's protocol extension (such as dflockd), the store uses the plain protocol: no shared locks, no
//! names, no list, no fencing tokens unless the URL declares that the server's tokens are ordered, and one connection
//! per wait. The protocol is determined when the store is opened and does not change afterwards.
//!
//! A hold is bound to its connection: when the connection ends, for whatever reason, the hold is lost at once. When the
//! process dies, the server notices it and grants the lock to the next waiter. Detached holds outlive both.

mod claim;
mod connection;
mod dial;
mod errors;
mod examine;
mod hold;
mod inspect;
mod options;
mod place;
mod plain;
#[cfg(feature = "tls")]
mod tls;

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::wire::{ClaimId, ExtensionRequest, MAX_SEMAPHORE_SLOTS, Request};
use tenure_core::{FencingToken, Key, Time};
use tokio::io::{AsyncRead, AsyncWrite};

use self::claim::{ClaimStage, ClaimState};
use self::connection::{Connection, NoReply, OwnedReply};
use self::dial::{Dialer, Greeting, StreamFn};
use self::errors::{
    refusal_error, unavailable, unexpected_reply, unknown_outcome, unreadable_reply,
};
use self::hold::ServerHold;
use self::options::Options;
use super::{
    Answer, Capabilities, Claim, Contended, Finding, Handle, Handoff, HistoryEvent, Hold, KeySpace,
    KeyState, LeaseStart, Liveness, Mode, QueueKind, Store, Version,
};
use crate::{Clock, Error, ErrorKind, Result};

/// Time limit of the first connection, and of a request that has no limit of its own.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Number of free connections of the plain protocol that are kept for reuse.
const MAX_POOLED_CONNECTIONS: usize = 4;

/// A lock server as a store. Cloning is cheap, and clones are the same store.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// # use tenure_server::{Engine, Server, Settings};
/// # let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
/// # let engine = Engine::new(Settings::default(), None, 1, 1);
/// # let (server, _) = Server::new(listener, None, engine, std::time::Duration::ZERO).expect("it serves");
/// # let url = format!("tenure://{}", server.address().expect("it listens"));
/// # std::thread::spawn(move || server.run());
/// let client = tenure::Client::connect(&url).await?; // tenure://locks.example:6388
/// let guard = client.lock("reports/nightly").acquire().await?;
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct LockServerStore(Arc<ServerShared>);

/// Protocol that the server speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protocol {
    /// The plain protocol with tenure's extension.
    Extended,
    /// The plain protocol of dflockd, without the extension.
    Plain,
}

impl Protocol {
    /// Converts a lease from the wire.
    fn lease_from_wire(self, lease: u64) -> Duration {
        match self {
            Self::Extended => Duration::from_millis(lease),
            Self::Plain => Duration::from_secs(lease),
        }
    }

    /// Converts a lease for the wire, rounded up: never shorter than requested.
    fn lease_to_wire(self, ttl: Duration) -> u64 {
        let unit = match self {
            Self::Extended => Duration::from_millis(1),
            Self::Plain => Duration::from_secs(1),
        };
        u64::try_from(ttl.as_nanos().div_ceil(unit.as_nanos())).unwrap_or(u64::MAX)
    }
}

/// State that the clones of a store share.
struct ServerShared {
    dialer: Dialer,
    clock: Clock,
    protocol: Protocol,
    greeting: Greeting,
    /// The shared connection. The lock ensures that only one is made at a time.
    current: tokio::sync::Mutex<Option<Arc<Connection>>>,
    /// Free connections of the plain protocol.
    pool: Mutex<Vec<Arc<Connection>>>,
    registry: Mutex<ClaimRegistry>,
    closed: AtomicBool,
}

/// Live claims, by claim id and by token number.
#[derive(Default)]
struct ClaimRegistry {
    by_id: HashMap<u128, Weak<ClaimState>>,
    by_number: HashMap<u64, u128>,
}

impl LockServerStore {
    /// Connects to the server; `rest` is the URL after its scheme.
    pub(crate) async fn open(tls: bool, rest: &str) -> Result<Self> {
        let options = Options::parse(tls, rest, |name| std::env::var(name).ok())?;
        Self::open_with(options, Clock::system(), None).await
    }

    /// Connects to the server at `url` over streams that `connect` makes to a host and a port: for a tunnel, or for
    /// tests that control the network and the clock. The URL begins with `tenure://`; TLS is the task of `connect`.
    ///
    /// ```
    /// # use tenure::{Client, Clock, LockServerStore};
    /// # use tokio::net::TcpStream;
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
    /// # use tenure_server::{Engine, Server, Settings};
    /// # let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    /// # let engine = Engine::new(Settings::default(), None, 1, 1);
    /// # let (server, _) = Server::new(listener, None, engine, std::time::Duration::ZERO).expect("it serves");
    /// # let url = format!("tenure://{}", server.address().expect("it listens"));
    /// # std::thread::spawn(move || server.run());
    /// let connect = |host: &str, port| TcpStream::connect((host.to_owned(), port));
    /// let store = LockServerStore::with_connections(&url, Clock::system(), connect).await?;
    /// let guard = Client::with_store(std::sync::Arc::new(store)).lock("reports").acquire().await?;
    /// # guard.release().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// `Invalid` for a URL that is not one of a lock server in the clear. `Unavailable` if no connection can be made.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time.
    pub async fn with_connections<F, Opening, S>(
        url: &str,
        clock: Clock,
        connect: F,
    ) -> Result<Self>
    where
        F: Fn(&str, u16) -> Opening + Send + Sync + 'static,
        Opening: Future<Output = std::io::Result<S>> + Send + 'static,
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let rest = url.strip_prefix("tenure:").ok_or_else(|| {
            let message = "the URL does not begin with tenure:// : give the URL of a lock server";
            Error::new(ErrorKind::Invalid, message)
        })?;
        let options = Options::parse(false, rest, |name| std::env::var(name).ok())?;
        Self::open_with(options, clock, Some(StreamFn::new(connect))).await
    }

    async fn open_with(options: Options, clock: Clock, connect: Option<StreamFn>) -> Result<Self> {
        let dialer = Dialer::new(options, clock.clone(), connect)?;
        let until = clock.now() + REQUEST_TIMEOUT;
        let (first, greeting) = dialer.dial(until).await?;
        let protocol = if greeting.extended { Protocol::Extended } else { Protocol::Plain };
        let shared = Arc::new(ServerShared {
            dialer,
            clock,
            protocol,
            greeting,
            current: tokio::sync::Mutex::new(Some(Arc::clone(&first))),
            pool: Mutex::default(),
            registry: Mutex::default(),
            closed: AtomicBool::new(false),
        });
        first.attach(&shared);
        Ok(Self(shared))
    }

    fn unsupported(&self, what: &str) -> Error {
        super::unsupported(self, what)
    }
}

#[async_trait]
impl Store for LockServerStore {
    fn capabilities(&self) -> Capabilities {
        let extended = self.0.protocol == Protocol::Extended;
        Capabilities {
            queue: QueueKind::Fifo,
            liveness: if self.0.greeting.auto_release { Liveness::Both } else { Liveness::Lease },
            push: extended,
            handoff: if extended { Handoff::Pushed } else { Handoff::None },
            shared: extended,
            semaphore: true,
            detached: extended,
            list: extended,
            identities: extended,
            evict: extended && self.0.greeting.auth,
            ordered_tokens: self.0.has_ordered_tokens(),
            min_ttl: if extended { Duration::from_millis(1) } else { Duration::from_secs(1) },
        }
    }

    fn max_ttl(&self) -> Option<Duration> {
        Some(self.0.greeting.max_lease)
    }

    async fn claim(&self, claim: &Claim, limit: Duration) -> Result<Answer> {
        let at = |error: Error| error.on(&claim.key).at(self);
        let until = self.0.clock.now() + limit;
        self.0.check(claim).map_err(at)?;
        let (claim_state, known) = match self.0.live_claim(claim) {
            Some(claim_state) => (claim_state, true),
            None => (self.0.send_claim(claim, until).await.map_err(at)?, false),
        };
        let stage = claim_state.wait_answered(until).await;
        let (claim_state, stage) = match stage {
            // In the plain protocol, a claim that waits needs another request.
            Some(ClaimStage::Busy)
                if claim.queue
                    && !claim_state.own_connection
                    && self.0.protocol == Protocol::Plain =>
            {
                let claim_state = self.0.enqueue(claim, until).await.map_err(at)?;
                let stage = claim_state.wait_answered(until).await;
                (claim_state, stage)
            }
            stage => (claim_state, stage),
        };
        match stage {
            Some(ClaimStage::Held { token, lease }) => {
                if lease < claim.ttl {
                    // Dropping the state releases the hold.
                    let message =
                        format!("the server's longest lease is {lease:?}: request a shorter ttl");
                    return Err(at(Error::new(ErrorKind::Invalid, message)));
                }
                let lease_start =
                    if known { LeaseStart::FromConfirm } else { LeaseStart::FromRequest };
                Ok(Answer::Granted(hold::grant(claim_state, token, lease_start)))
            }
            Some(ClaimStage::Waiting) => {
                Ok(Answer::Queued(Box::new(place::ServerPlace(claim_state))))
            }
            Some(ClaimStage::Busy) => Ok(Answer::Contended(self.0.contended(claim, until).await)),
            Some(ClaimStage::Refused(why)) => Err(at(refusal_error(&why))),
            Some(ClaimStage::Gone | ClaimStage::Lost(_) | ClaimStage::Unclear) => {
                Err(at(unknown_outcome(NoReply::Disconnected)))
            }
            Some(ClaimStage::Asked) | None => Err(at(unknown_outcome(NoReply::TimedOut))),
        }
    }

    async fn resume(&self, key: &Key, handle: &Handle) -> Result<Box<dyn Hold>> {
        if self.0.protocol == Protocol::Plain {
            return Err(self.unsupported("keep a hold without its process").on(key));
        }
        let (space, token) = hold::parse_handle(handle).ok_or_else(|| {
            let message =
                "not a handle of a lock server: give the handle that `tenure acquire` printed";
            Error::new(ErrorKind::Invalid, message).on(key).at(self)
        })?;
        Ok(Box::new(ServerHold::resumed(Arc::clone(&self.0), key.clone(), space, token)))
    }

    async fn changed(&self, key: &Key, space: KeySpace, since: Version) -> Result<()> {
        let at = |error: Error| error.on(key).at(self);
        if self.0.protocol == Protocol::Plain {
            return Err(self.unsupported("notify of changes").on(key));
        }
        let until = self.0.clock.now() + REQUEST_TIMEOUT;
        let connection = self.0.connection(until).await.map_err(at)?;
        let (watch, changed) =
            KeyWatch::new(connection).ok_or_else(|| at(unavailable(NoReply::Unsent)))?;
        // A version that does not fit is not one of this server's: the maximum differs from all of its own.
        let seen = u64::try_from(since.0).unwrap_or(u64::MAX);
        let (id, key) = (watch.id, &wire_key(key)[..]);
        let request = Request::Extended(ExtensionRequest::Watch { key, space, seen, id });
        match watch.connection.ask(&request, until).await {
            Ok(OwnedReply::Done) => {
                changed.await.map_err(|_| at(unavailable(NoReply::Disconnected)))
            }
            Ok(reply) => Err(at(unexpected_reply(&reply))),
            Err(no_reply) => Err(at(unavailable(no_reply))),
        }
    }

    async fn inspect(&self, key: &Key, space: KeySpace) -> Result<KeyState> {
        let shown = match self.0.protocol {
            Protocol::Extended => {
                self.0.query(key, space, self.0.clock.now() + REQUEST_TIMEOUT).await
            }
            Protocol::Plain => self.0.inspect_plain(key, space).await,
        };
        shown.map_err(|error| error.on(key).at(self))
    }

    async fn list(
        &self,
        space: KeySpace,
        prefix: &str,
        after: Option<&str>,
    ) -> Result<Vec<KeyState>> {
        if self.0.protocol == Protocol::Plain {
            return Err(self.unsupported("list keys"));
        }
        // No key begins with such a prefix.
        if prefix.len() > Key::MAX_BYTES || prefix.chars().any(char::is_control) {
            return Ok(Vec::new());
        }
        if after.is_some_and(|after| Key::new(after).is_err()) {
            return Err(Error::new(
                ErrorKind::Invalid,
                "a list continues after a key, and this is not a valid key",
            )
            .at(self));
        }
        let mut after = after.map(wire_text);
        loop {
            let until = self.0.clock.now() + REQUEST_TIMEOUT;
            let connection = self.0.connection(until).await.map_err(|error| error.at(self))?;
            let prefix = &wire_text(prefix)[..];
            let request = Request::Extended(ExtensionRequest::List {
                prefix,
                space,
                after: after.as_deref(),
            });
            let reply = connection
                .ask(&request, until)
                .await
                .map_err(|no_reply| unavailable(no_reply).at(self))?;
            let OwnedReply::Json(json) = reply else {
                return Err(unexpected_reply(&reply).at(self));
            };
            let (page, next) =
                inspect::parse_page(&json, space).ok_or_else(|| unreadable_reply().at(self))?;
            // An empty page means the end of the list. So a page that has only keys that are invalid to us is skipped.
            if !page.is_empty() || next.is_none() {
                return Ok(page);
            }
            after = next;
        }
    }

    async fn history(&self, key: &Key, space: KeySpace) -> Result<Vec<HistoryEvent>> {
        let at = |error: Error| error.on(key).at(self);
        if self.0.protocol == Protocol::Plain {
            return Err(self.unsupported("show the history of a key").on(key));
        }
        let until = self.0.clock.now() + REQUEST_TIMEOUT;
        let connection = self.0.connection(until).await.map_err(at)?;
        let request = Request::Extended(ExtensionRequest::History { key: &wire_key(key), space });
        let reply =
            connection.ask(&request, until).await.map_err(|no_reply| at(unavailable(no_reply)))?;
        match reply {
            OwnedReply::Json(json) => match inspect::parse_history(&json) {
                Some((events, true)) => Ok(events),
                Some((_, false)) => {
                    let message = "the server keeps no history: start it with --history 64";
                    Err(at(Error::new(ErrorKind::Unsupported, message)))
                }
                None => Err(at(unreadable_reply())),
            },
            // The server is older than this request.
            _ => Err(self.unsupported("show the history of a key").on(key)),
        }
    }

    async fn evict(&self, key: &Key, token: FencingToken, reason: &str) -> Result<()> {
        let at = |error: Error| error.on(key).at(self);
        if self.0.protocol == Protocol::Plain {
            let message = "the plain protocol cannot break a hold: stop the holder, or wait for the end of its lease; \
                           a hold at tenure serve --auth-token-file can be broken";
            return Err(at(Error::new(ErrorKind::Unsupported, message)));
        }
        if !self.capabilities().evict {
            let message = "this server does not break holds, because it requires no auth token: stop the holder, or start the \
                           server with --auth-token-file";
            return Err(at(Error::new(ErrorKind::Unsupported, message)));
        }
        let reason: String = reason.chars().filter(|c| !c.is_control()).take(50).collect();
        let (number, reason) = (token.number(), reason.as_bytes());
        if token.epoch() == 0 {
            let until = self.0.clock.now() + REQUEST_TIMEOUT;
            let connection = self.0.connection(until).await.map_err(at)?;
            for space in [KeySpace::Lock, KeySpace::Semaphore] {
                let key = &wire_key(key)[..];
                let request =
                    Request::Extended(ExtensionRequest::Break { key, space, number, reason });
                match connection.ask(&request, until).await {
                    Ok(OwnedReply::Done) => return Ok(()),
                    Ok(OwnedReply::Error(why)) if why.is_empty() => {}
                    Ok(reply) => return Err(at(unexpected_reply(&reply))),
                    Err(no_reply) => return Err(at(unknown_outcome(no_reply))),
                }
            }
        }
        let message =
            format!("no hold has the token {token}: see `tenure status` for the present holder");
        Err(at(Error::new(ErrorKind::NotHeld, message)))
    }

    async fn examine(&self, limit: Duration) -> Vec<Finding> {
        let mut findings = examine::findings(self);
        if self.0.protocol == Protocol::Extended && !self.0.dialer.has_own_connections() {
            findings.push(examine::addresses(self, self.0.clock.now() + limit).await);
        }
        findings
    }

    async fn close(&self) {
        self.0.closed.store(true, Ordering::SeqCst);
        // Holds keep their connections until their keeper tasks have ended.
        drop(self.0.current.lock().await.take());
        drop(std::mem::take(&mut *self.0.pool()));
    }
}

impl fmt::Display for LockServerStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Debug for LockServerStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Display for ServerShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.dialer, f)
    }
}

impl fmt::Debug for ServerShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl ServerShared {
    /// True if the server's tokens grow with every grant. The plain protocol does not distinguish dflockd 2.1, whose
    /// tokens grow, from 1.x, whose tokens are random. So without the extension only the user can declare it, in the
    /// URL.
    fn has_ordered_tokens(&self) -> bool {
        self.protocol == Protocol::Extended || self.dialer.options().ordered_tokens
    }
}

/// Connections.
impl ServerShared {
    /// The shared connection; made again if it has ended.
    async fn connection(self: &Arc<Self>, until: Time) -> Result<Arc<Connection>> {
        let made = async {
            let mut current = self.current.lock().await;
            if let Some(connection) = current.as_ref().filter(|connection| connection.is_open()) {
                return Ok(Arc::clone(connection));
            }
            *current = None;
            let connection = self.dial(until).await?;
            *current = Some(Arc::clone(&connection));
            Ok(connection)
        };
        tokio::select! {
            biased;
            made = made => made,
            () = self.clock.sleep_until(until) => Err(unavailable(NoReply::Unsent)),
        }
    }

    async fn dial(self: &Arc<Self>, until: Time) -> Result<Arc<Connection>> {
        if self.closed.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Shutdown, "the store was closed"));
        }
        let (connection, greeting) = self.dialer.dial(until).await?;
        if greeting.extended != self.greeting.extended {
            let message =
                "a server with another protocol answers at this address now: open the store again";
            return Err(Error::new(ErrorKind::Unavailable, message));
        }
        if self.dialer.has_choice() && greeting.instance != self.greeting.instance {
            let message = "the addresses lead to different servers, or the server has lost its holds: all addresses must lead to one server";
            return Err(Error::new(ErrorKind::Unavailable, message));
        }
        connection.attach(self);
        Ok(connection)
    }
}

/// Claims.
impl ServerShared {
    fn check(&self, claim: &Claim) -> Result<()> {
        let longest = self.greeting.max_lease;
        let refused = match claim.mode {
            Mode::Slot { limit } if limit > MAX_SEMAPHORE_SLOTS => Some((
                ErrorKind::Invalid,
                format!("a semaphore has at most {MAX_SEMAPHORE_SLOTS} slots"),
            )),
            Mode::Shared if self.protocol == Protocol::Plain => {
                Some((ErrorKind::Unsupported, "this server has no shared locks".to_owned()))
            }
            _ if claim.ttl > longest => {
                Some((ErrorKind::Invalid, format!("the server's longest lease is {longest:?}")))
            }
            _ if claim.detached && self.protocol == Protocol::Plain => {
                let what = "this server cannot keep a hold without its process".to_owned();
                Some((ErrorKind::Unsupported, what))
            }
            _ => None,
        };
        refused.map_or(Ok(()), |(kind, message)| Err(Error::new(kind, message)))
    }

    /// State of the claim if it was sent before and can still be granted, or is still held.
    fn live_claim(&self, claim: &Claim) -> Option<Arc<ClaimState>> {
        let state = self.claim_by_id(claim.id)?;
        let same = state.key == claim.key && state.space == claim.mode.space();
        let live = match state.stage() {
            ClaimStage::Held { .. } if state.detached => true,
            ClaimStage::Asked | ClaimStage::Waiting | ClaimStage::Held { .. } => {
                state.connection().is_open()
            }
            _ => false,
        };
        (same && live).then_some(state)
    }

    async fn send_claim(self: &Arc<Self>, claim: &Claim, until: Time) -> Result<Arc<ClaimState>> {
        let connection = self.connection(until).await?;
        let state = ClaimState::new(self, Arc::clone(&connection), claim, false);
        let key = &wire_key(&claim.key)[..];
        let lease = self.protocol.lease_to_wire(claim.ttl);
        let by = inspect::identity_line(&claim.by);
        let request = match self.protocol {
            Protocol::Extended => Request::Extended(ExtensionRequest::Claim {
                id: ClaimId(claim.id),
                key,
                mode: claim.mode,
                lease,
                queue: claim.queue,
                detached: claim.detached,
                by: by.as_bytes(),
            }),
            Protocol::Plain => {
                Request::Lock { key, mode: claim.mode, timeout: 0, lease: Some(lease) }
            }
        };
        connection.claim(&request, &state).map_err(unknown_outcome)?;
        Ok(state)
    }

    /// The current holder of a contended key, to name it in errors.
    async fn contended(self: &Arc<Self>, claim: &Claim, until: Time) -> Contended {
        if self.protocol == Protocol::Plain {
            return Contended::default();
        }
        match self.query(&claim.key, claim.mode.space(), until).await {
            Ok(state) => {
                let holder = state.holders.into_iter().find_map(|holder| holder.by);
                Contended { holder, version: state.version, retry_after: None, note: None }
            }
            Err(_) => Contended::default(),
        }
    }

    async fn query(self: &Arc<Self>, key: &Key, space: KeySpace, until: Time) -> Result<KeyState> {
        let connection = self.connection(until).await?;
        let request = Request::Extended(ExtensionRequest::Query { key: &wire_key(key), space });
        match connection.ask(&request, until).await {
            Ok(OwnedReply::Json(json)) => {
                inspect::parse_key(&json, space).ok_or_else(unreadable_reply)
            }
            Ok(reply) => Err(unexpected_reply(&reply)),
            Err(no_reply) => Err(unavailable(no_reply)),
        }
    }
}

/// Registry of claims.
impl ServerShared {
    fn registry(&self) -> MutexGuard<'_, ClaimRegistry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pool(&self) -> MutexGuard<'_, Vec<Arc<Connection>>> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn register(&self, state: &Arc<ClaimState>) {
        self.registry().by_id.insert(state.id, Arc::downgrade(state));
    }

    /// Removes a claim. If the claim was sent again, its id belongs to the later state.
    fn unregister(&self, state: &ClaimState) {
        let mut registry = self.registry();
        let own = |known: &Weak<ClaimState>| std::ptr::eq(known.as_ptr(), state);
        if registry.by_id.get(&state.id).is_some_and(own) {
            registry.by_id.remove(&state.id);
        }
        if let Some(number) = state.number() {
            registry.by_number.remove(&number);
        }
    }

    fn note_number(&self, number: u64, id: u128) {
        self.registry().by_number.insert(number, id);
    }

    fn claim_by_id(&self, id: u128) -> Option<Arc<ClaimState>> {
        self.registry().by_id.get(&id).and_then(Weak::upgrade)
    }

    fn claim_by_number(&self, number: u64) -> Option<Arc<ClaimState>> {
        let state = {
            let registry = self.registry();
            registry.by_id.get(registry.by_number.get(&number)?).and_then(Weak::upgrade)
        };
        state.filter(|state| state.number() == Some(number))
    }

    fn all_claims(&self) -> Vec<Arc<ClaimState>> {
        let mut claims: Vec<_> = self.registry().by_id.values().filter_map(Weak::upgrade).collect();
        // Sorted, so that a simulated run is repeatable: a hash map has no fixed order.
        claims.sort_unstable_by_key(|claim| claim.id);
        claims
    }
}

/// Watch of a key. Dropping it ends the watch at the server.
struct KeyWatch {
    connection: Arc<Connection>,
    id: u64,
}

impl KeyWatch {
    fn new(connection: Arc<Connection>) -> Option<(Self, tokio::sync::oneshot::Receiver<()>)> {
        let (id, changed) = connection.watch()?;
        Some((Self { connection, id }, changed))
    }
}

impl Drop for KeyWatch {
    fn drop(&mut self) {
        if self.connection.unwatch(self.id) {
            self.connection
                .send_without_reply(&Request::Extended(ExtensionRequest::Unwatch { id: self.id }));
        }
    }
}

/// Key as it is sent. The protocol allows no blanks in keys, and our keys contain no control characters. So a blank is
/// sent as [`WIRE_BLANK`], which sorts in the same place: below all other characters of our keys.
fn wire_key(key: &Key) -> Vec<u8> {
    wire_text(key.as_str())
}

fn wire_text(text: &str) -> Vec<u8> {
    text.bytes().map(|byte| if byte == b' ' { WIRE_BLANK } else { byte }).collect()
}

/// Byte that is sent for a blank.
const WIRE_BLANK: u8 = 0x1f;
