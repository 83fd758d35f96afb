//! The server as all clones of a store see it: its greeting, and the connections to it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tenure_core::Time;

use super::claim::{ClaimState, ServerClaims, ServerConnection};
use super::dial::{Dialer, Greeting, StreamFn};
use super::errors::unavailable;
use super::options::Options;
use super::pool::FreeConnections;
use super::wire::{NoReply, Protocol};
use crate::store::Claim;
use crate::{Clock, Error, ErrorKind, Result};

/// Time limit of the first connection, and of a request that has no limit of its own.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// State that the clones of a store share.
pub(super) struct ServerShared {
    pub(super) dialer: Dialer,
    pub(super) clock: Clock,
    pub(super) protocol: Protocol,
    pub(super) greeting: Greeting,
    /// The shared connection. The lock ensures that only one is made at a time.
    current: tokio::sync::Mutex<Option<Arc<ServerConnection>>>,
    /// Free connections of the plain protocol.
    pub(super) pool: Arc<FreeConnections<ClaimState>>,
    pub(super) claims: Arc<ServerClaims>,
    closed: AtomicBool,
}

impl ServerShared {
    /// Connects to the server.
    pub(super) async fn open(
        options: Options,
        clock: Clock,
        connect: Option<StreamFn>,
    ) -> Result<Self> {
        let claims = Arc::<ServerClaims>::default();
        let dialer = Dialer::new(options, clock.clone(), Arc::clone(&claims), connect)?;
        let until = clock.now() + REQUEST_TIMEOUT;
        let (first, greeting) = dialer.dial(until).await?;
        let protocol = if greeting.extended { Protocol::Extended } else { Protocol::Plain };
        Ok(Self {
            dialer,
            clock,
            protocol,
            greeting,
            current: tokio::sync::Mutex::new(Some(first)),
            pool: Arc::new(FreeConnections::new()),
            claims,
            closed: AtomicBool::new(false),
        })
    }

    /// True if the server's tokens grow with every grant. The plain protocol does not distinguish dflockd 2.1, whose
    /// tokens grow, from 1.x, whose tokens are random. So without the extension only the user can declare it, in the
    /// URL.
    pub(super) fn has_ordered_tokens(&self) -> bool {
        self.protocol == Protocol::Extended || self.dialer.options().ordered_tokens
    }

    /// The shared connection; made again if it has ended.
    pub(super) async fn connection(&self, until: Time) -> Result<Arc<ServerConnection>> {
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

    async fn dial(&self, until: Time) -> Result<Arc<ServerConnection>> {
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
        Ok(connection)
    }

    /// A connection of the plain protocol that no other claim uses.
    pub(super) async fn free_connection(&self, until: Time) -> Result<Arc<ServerConnection>> {
        match self.pool.take() {
            Some(connection) => Ok(connection),
            None => self.dial(until).await,
        }
    }

    /// State of a claim that is about to be sent on a connection, which may be its own.
    pub(super) fn new_claim(
        &self,
        connection: Arc<ServerConnection>,
        claim: &Claim,
        own_connection: bool,
    ) -> Arc<ClaimState> {
        let pool = own_connection.then(|| Arc::clone(&self.pool));
        ClaimState::new(&self.claims, connection, self.protocol, claim, pool)
    }

    /// Makes no connection from now on. Holds keep their connections until their keeper tasks have ended.
    pub(super) async fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.pool.close();
        drop(self.current.lock().await.take());
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
