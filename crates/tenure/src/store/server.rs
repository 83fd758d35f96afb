//! Locks on a lock server: `tenure://HOST:PORT`, and `tenures://` under TLS.
//!
//! With tenure's own server one connection carries all that a process claims, waits for and holds. With a server in
//! the field that does not know our extension of the protocol the store makes do with that protocol: no shared locks,
//! no names, no list, no fencing tokens unless the URL declares that the server's are ordered, and a connection for each
//! wait. Which of the two it is shows when the store is opened, and stays.
//!
//! A hold lives on its connection: when that ends, however it does, the hold is lost at once. When the process dies, the
//! server notices and passes the lock on. Holds that were asked for as detached outlive both.

mod claim;
mod connection;
mod dial;
mod errors;
mod examine;
mod hold;
mod inspect;
mod options;
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

use self::claim::{ClaimStage, ClaimState};
use self::connection::{Connection, NoReply, OwnedReply};
use self::dial::{Dialer, Greeting};
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

/// How long a request may take that has no limit of its own, and the first connection.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// How many free connections of the plain protocol are kept.
const MAX_POOLED_CONNECTIONS: usize = 4;

/// A lock server as a store. Cloning is cheap, and a clone is the same store.
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

/// What is spoken with the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protocol {
    /// Our extension.
    Extended,
    /// The protocol of servers in the field.
    Plain,
}

impl Protocol {
    /// A lease as the server tells it.
    fn lease_from_wire(self, lease: u64) -> Duration {
        match self {
            Self::Extended => Duration::from_millis(lease),
            Self::Plain => Duration::from_secs(lease),
        }
    }

    /// A lease as the server is told: never shorter than asked for.
    fn lease_to_wire(self, ttl: Duration) -> u64 {
        let unit = match self {
            Self::Extended => Duration::from_millis(1),
            Self::Plain => Duration::from_secs(1),
        };
        u64::try_from(ttl.as_nanos().div_ceil(unit.as_nanos())).unwrap_or(u64::MAX)
    }
}

/// What all who use the store share.
struct ServerShared {
    dialer: Dialer,
    clock: Clock,
    protocol: Protocol,
    greeting: Greeting,
    /// The connection for everything; one at a time is made.
    current: tokio::sync::Mutex<Option<Arc<Connection>>>,
    /// Free connections of the plain protocol.
    pool: Mutex<Vec<Arc<Connection>>>,
    registry: Mutex<ClaimRegistry>,
    closed: AtomicBool,
}

/// Who sits where.
#[derive(Default)]
struct ClaimRegistry {
    by_id: HashMap<u128, Weak<ClaimState>>,
    by_number: HashMap<u64, u128>,
}

impl LockServerStore {
    /// Connects to the server that the rest of a URL after its scheme names.
    pub(crate) async fn open(tls: bool, rest: &str) -> Result<Self> {
        let options = Options::parse(tls, rest, |name| std::env::var(name).ok())?;
        let clock = Clock::system();
        let dialer = Dialer::new(options, clock.clone())?;
        let until = clock.now() + REQUEST_TIMEOUT;
        let (first, greeting) = dialer.dial(until).await?;
        let dialect = if greeting.extended { Protocol::Extended } else { Protocol::Plain };
        let shared = Arc::new(ServerShared {
            dialer,
            clock,
            protocol: dialect,
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
            names: extended,
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
        let (seat, known) = match self.0.live_claim(claim) {
            Some(seat) => (seat, true),
            None => (self.0.send_claim(claim, until).await.map_err(at)?, false),
        };
        let stage = seat.wait_answered(until).await;
        let (seat, stage) = match stage {
            // The plain protocol has another request for those who wait.
            Some(ClaimStage::Busy)
                if claim.queue && !seat.own_connection && self.0.protocol == Protocol::Plain =>
            {
                let seat = self.0.enqueue(claim, until).await.map_err(at)?;
                let stage = seat.wait_answered(until).await;
                (seat, stage)
            }
            stage => (seat, stage),
        };
        match stage {
            Some(ClaimStage::Held { token, lease }) => {
                if lease < claim.ttl {
                    // Letting go of the seat gives it back.
                    let message =
                        format!("the server keeps a hold for {lease:?} at most: ask for that");
                    return Err(at(Error::new(ErrorKind::Invalid, message)));
                }
                let counts = if known { LeaseStart::FromConfirm } else { LeaseStart::FromRequest };
                Ok(Answer::Granted(hold::grant(seat, token, counts)))
            }
            Some(ClaimStage::Waiting) => Ok(Answer::Queued(Box::new(hold::ServerPlace(seat)))),
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
            let message = "this is no handle of a lock server";
            Error::new(ErrorKind::Invalid, message).on(key).at(self)
        })?;
        Ok(Box::new(ServerHold::resumed(Arc::clone(&self.0), key.clone(), space, token)))
    }

    async fn changed(&self, key: &Key, space: KeySpace, since: Version) -> Result<()> {
        let at = |error: Error| error.on(key).at(self);
        if self.0.protocol == Protocol::Plain {
            return Err(self.unsupported("tell of changes").on(key));
        }
        let until = self.0.clock.now() + REQUEST_TIMEOUT;
        let link = self.0.connection(until).await.map_err(at)?;
        let (watch, told) = KeyWatch::new(link).ok_or_else(|| at(unavailable(NoReply::Unsent)))?;
        // What is no version of this server's is another than any of its own.
        let seen = u64::try_from(since.0).unwrap_or(u64::MAX);
        let (id, key) = (watch.id, &wire_key(key)[..]);
        let request = Request::Extended(ExtensionRequest::Watch { key, space, seen, id });
        match watch.connection.ask(&request, until).await {
            Ok(OwnedReply::Done) => told.await.map_err(|_| at(unavailable(NoReply::Disconnected))),
            Ok(said) => Err(at(unexpected_reply(&said))),
            Err(silence) => Err(at(unavailable(silence))),
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
        // No key begins so.
        if prefix.len() > Key::MAX_BYTES || prefix.chars().any(char::is_control) {
            return Ok(Vec::new());
        }
        if after.is_some_and(|after| Key::new(after).is_err()) {
            return Err(Error::new(ErrorKind::Invalid, "a list goes on after a key").at(self));
        }
        let mut after = after.map(wire_text);
        loop {
            let until = self.0.clock.now() + REQUEST_TIMEOUT;
            let link = self.0.connection(until).await.map_err(|error| error.at(self))?;
            let prefix = &wire_text(prefix)[..];
            let request = Request::Extended(ExtensionRequest::List {
                prefix,
                space,
                after: after.as_deref(),
            });
            let said =
                link.ask(&request, until).await.map_err(|silence| unavailable(silence).at(self))?;
            let OwnedReply::Json(json) = said else { return Err(unexpected_reply(&said).at(self)) };
            let (page, next) =
                inspect::parse_page(&json, space).ok_or_else(|| unreadable_reply().at(self))?;
            // An empty page says that nothing follows: not while there are keys that are none to us.
            if !page.is_empty() || next.is_none() {
                return Ok(page);
            }
            after = next;
        }
    }

    async fn history(&self, key: &Key, space: KeySpace) -> Result<Vec<HistoryEvent>> {
        let at = |error: Error| error.on(key).at(self);
        if self.0.protocol == Protocol::Plain {
            return Err(self.unsupported("remember what happened").on(key));
        }
        let until = self.0.clock.now() + REQUEST_TIMEOUT;
        let link = self.0.connection(until).await.map_err(at)?;
        let request = Request::Extended(ExtensionRequest::History { key: &wire_key(key), space });
        let said = link.ask(&request, until).await.map_err(|silence| at(unavailable(silence)))?;
        match said {
            OwnedReply::Json(json) => match inspect::parse_history(&json) {
                Some((events, true)) => Ok(events),
                Some((_, false)) => {
                    let message =
                        "the server does not remember what happened: start it with --history 64";
                    Err(at(Error::new(ErrorKind::Unsupported, message)))
                }
                None => Err(at(unreadable_reply())),
            },
            // One that is older than this question.
            _ => Err(self.unsupported("remember what happened").on(key)),
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
            let what =
                "break a hold unless its server asks for a token (tenure serve --auth-token-file)";
            return Err(self.unsupported(what).on(key));
        }
        let reason: String = reason.chars().filter(|c| !c.is_control()).take(50).collect();
        let (number, reason) = (token.number(), reason.as_bytes());
        if token.epoch() == 0 {
            let until = self.0.clock.now() + REQUEST_TIMEOUT;
            let link = self.0.connection(until).await.map_err(at)?;
            for space in [KeySpace::Lock, KeySpace::Semaphore] {
                let key = &wire_key(key)[..];
                let request =
                    Request::Extended(ExtensionRequest::Break { key, space, number, reason });
                match link.ask(&request, until).await {
                    Ok(OwnedReply::Done) => return Ok(()),
                    Ok(OwnedReply::Error(why)) if why.is_empty() => {}
                    Ok(said) => return Err(at(unexpected_reply(&said))),
                    Err(silence) => return Err(at(unknown_outcome(silence))),
                }
            }
        }
        let message = format!("no hold has the token {token}: look at who holds it now");
        Err(at(Error::new(ErrorKind::NotHeld, message)))
    }

    async fn examine(&self, limit: Duration) -> Vec<Finding> {
        let mut findings = super::examine::basics(self, limit).await;
        if !findings.iter().any(Finding::is_unreachable) {
            findings.extend(examine::findings(self));
            if self.0.protocol == Protocol::Extended {
                findings.push(examine::addresses(self, self.0.clock.now() + limit).await);
            }
        }
        findings
    }

    async fn close(&self) {
        self.0.closed.store(true, Ordering::SeqCst);
        // Holds keep their connections until their keepers are done.
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
    /// Whether the server's tokens grow with every grant. Nothing in the plain protocol tells dflockd 2.1, whose tokens
    /// do, from 1.x, whose tokens are random: without our extension only the user can say so, in the URL.
    fn has_ordered_tokens(&self) -> bool {
        self.protocol == Protocol::Extended || self.dialer.options().ordered_tokens
    }
}

/// Connections.
impl ServerShared {
    /// The connection for everything, made anew where it has ended.
    async fn connection(self: &Arc<Self>, until: Time) -> Result<Arc<Connection>> {
        let made = async {
            let mut current = self.current.lock().await;
            if let Some(link) = current.as_ref().filter(|link| link.is_open()) {
                return Ok(Arc::clone(link));
            }
            *current = None;
            let link = self.dial(until).await?;
            *current = Some(Arc::clone(&link));
            Ok(link)
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
        let (link, greeting) = self.dialer.dial(until).await?;
        if greeting.extended != self.greeting.extended {
            let message = "another kind of server answers there now: connect anew";
            return Err(Error::new(ErrorKind::Unavailable, message));
        }
        if self.dialer.has_choice() && greeting.instance != self.greeting.instance {
            let message = "the addresses lead to different servers, or the server has forgotten what it held: several addresses are for one server only";
            return Err(Error::new(ErrorKind::Unavailable, message));
        }
        link.attach(self);
        Ok(link)
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
                Some((ErrorKind::Unsupported, "this server cannot share a lock".to_owned()))
            }
            _ if claim.ttl > longest => Some((
                ErrorKind::Invalid,
                format!("the server keeps a hold for {longest:?} at most"),
            )),
            _ if claim.detached && self.protocol == Protocol::Plain => {
                let what = "this server keeps no hold without its process".to_owned();
                Some((ErrorKind::Unsupported, what))
            }
            _ => None,
        };
        refused.map_or(Ok(()), |(kind, message)| Err(Error::new(kind, message)))
    }

    /// Where the claim sits that was sent before, if it may still get or have something there.
    fn live_claim(&self, claim: &Claim) -> Option<Arc<ClaimState>> {
        let seat = self.claim_by_id(claim.id)?;
        let same = seat.key == claim.key && seat.space == claim.mode.space();
        let live = match seat.stage() {
            ClaimStage::Held { .. } if seat.detached => true,
            ClaimStage::Asked | ClaimStage::Waiting | ClaimStage::Held { .. } => {
                seat.connection().is_open()
            }
            _ => false,
        };
        (same && live).then_some(seat)
    }

    async fn send_claim(self: &Arc<Self>, claim: &Claim, until: Time) -> Result<Arc<ClaimState>> {
        let link = self.connection(until).await?;
        let seat = ClaimState::new(self, Arc::clone(&link), claim, false);
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
        link.claim(&request, &seat).map_err(unknown_outcome)?;
        Ok(seat)
    }

    /// Who holds it, for whom it is held against.
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
        let link = self.connection(until).await?;
        let request = Request::Extended(ExtensionRequest::Query { key: &wire_key(key), space });
        match link.ask(&request, until).await {
            Ok(OwnedReply::Json(json)) => {
                inspect::parse_key(&json, space).ok_or_else(unreadable_reply)
            }
            Ok(said) => Err(unexpected_reply(&said)),
            Err(silence) => Err(unavailable(silence)),
        }
    }
}

/// Seats.
impl ServerShared {
    fn registry(&self) -> MutexGuard<'_, ClaimRegistry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pool(&self) -> MutexGuard<'_, Vec<Arc<Connection>>> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn register(&self, seat: &Arc<ClaimState>) {
        self.registry().by_id.insert(seat.id, Arc::downgrade(seat));
    }

    /// Forgets a seat that goes; the number of a claim that came again belongs to its later seat.
    fn unregister(&self, seat: &ClaimState) {
        let mut desk = self.registry();
        let own = |known: &Weak<ClaimState>| std::ptr::eq(known.as_ptr(), seat);
        if desk.by_id.get(&seat.id).is_some_and(own) {
            desk.by_id.remove(&seat.id);
        }
        if let Some(number) = seat.number() {
            desk.by_number.remove(&number);
        }
    }

    fn note_number(&self, number: u64, id: u128) {
        self.registry().by_number.insert(number, id);
    }

    fn claim_by_id(&self, id: u128) -> Option<Arc<ClaimState>> {
        self.registry().by_id.get(&id).and_then(Weak::upgrade)
    }

    fn claim_by_number(&self, number: u64) -> Option<Arc<ClaimState>> {
        let seat = {
            let desk = self.registry();
            desk.by_id.get(desk.by_number.get(&number)?).and_then(Weak::upgrade)
        };
        seat.filter(|seat| seat.number() == Some(number))
    }

    fn all_claims(&self) -> Vec<Arc<ClaimState>> {
        self.registry().by_id.values().filter_map(Weak::upgrade).collect()
    }
}

/// A watch that is ended when nobody wants it any more.
struct KeyWatch {
    connection: Arc<Connection>,
    id: u64,
}

impl KeyWatch {
    fn new(link: Arc<Connection>) -> Option<(Self, tokio::sync::oneshot::Receiver<()>)> {
        let (id, told) = link.watch()?;
        Some((Self { connection: link, id }, told))
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

/// A key as it is sent. The protocol has no blanks in keys, and our keys have no control characters: one stands for the
/// other, in the same place of the order.
fn wire_key(key: &Key) -> Vec<u8> {
    wire_text(key.as_str())
}

fn wire_text(text: &str) -> Vec<u8> {
    text.bytes().map(|byte| if byte == b' ' { WIRE_BLANK } else { byte }).collect()
}

/// What is sent for a blank.
const WIRE_BLANK: u8 = 0x1f;
