//! Locks on a lock server: `tenure://HOST:PORT`, and `tenures://` under TLS.
//!
//! With tenure's own server, one connection carries all claims, waits and holds of a process. With a server that does
//! not know tenure's protocol extension (such as dflockd), the store uses the plain protocol: no shared locks, no
//! names, no list, no fencing tokens unless the URL declares that the server's tokens are ordered, and one connection
//! per wait. The protocol is determined when the store is opened and does not change afterwards.
//!
//! A hold is bound to its connection: when the connection ends, for whatever reason, the hold is lost at once. When the
//! process dies, the server notices it and grants the lock to the next waiter. Detached holds outlive both.
//!
//! The modules are layers. Each imports only modules of the lines below it, or further right in its own line:
//!
//! ```text
//! server                       the store
//! join, examine, watch         its operations
//! place, hold                  the wait of a claim; its hold
//! query, inspect               requests about keys; parsing of their replies
//! shared, dial, tls            the connections to the server
//! task                         the task of a connection
//! claim                        the state of a claim
//! pool, connection             connections, as their users see them
//! errors, options, wire        errors, the URL, the protocol
//! ```

mod claim;
mod connection;
mod dial;
mod errors;
mod examine;
mod hold;
mod inspect;
mod join;
mod options;
mod place;
mod pool;
mod query;
mod shared;
mod task;
#[cfg(feature = "tls")]
mod tls;
mod watch;
mod wire;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::{FencingToken, Key};
use tokio::io::{AsyncRead, AsyncWrite};

use self::dial::StreamFn;
use self::hold::ServerHold;
use self::options::Options;
use self::shared::{REQUEST_TIMEOUT, ServerShared};
use self::wire::Protocol;
use super::{
    Answer, Capabilities, Claim, Finding, Handle, Handoff, HistoryEvent, Hold, KeySpace, KeyState,
    Liveness, QueueKind, Store, Version,
};
use crate::{Clock, Error, ErrorKind, Result};

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
        Ok(Self(Arc::new(ServerShared::open(options, clock, connect).await?)))
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
        join::join(&self.0, claim, until).await.map_err(at)
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
        watch::changed(&self.0, key, space, since).await.map_err(at)
    }

    async fn inspect(&self, key: &Key, space: KeySpace) -> Result<KeyState> {
        let until = self.0.clock.now() + REQUEST_TIMEOUT;
        let shown = query::state(&self.0, key, space, until).await;
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
        query::list(&self.0, space, prefix, after).await
    }

    async fn history(&self, key: &Key, space: KeySpace) -> Result<Vec<HistoryEvent>> {
        let history = match self.0.protocol {
            Protocol::Extended => query::history(&self.0, key, space).await?,
            Protocol::Plain => None,
        };
        history.ok_or_else(|| self.unsupported("show the history of a key").on(key))
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
        query::evict(&self.0, key, token, reason).await
    }

    async fn examine(&self, limit: Duration) -> Vec<Finding> {
        let mut findings = examine::findings(&self.0);
        if self.0.protocol == Protocol::Extended && !self.0.dialer.has_own_connections() {
            findings.push(examine::addresses(&self.0, self.0.clock.now() + limit).await);
        }
        findings
    }

    async fn close(&self) {
        self.0.close().await;
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
