//! Making connections: socket, TLS, authentication, and detection of the protocol.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tenure_core::Time;
use tenure_core::wire::{ExtensionRequest, MAX_LINE, Request};
use tokio::net::TcpStream;

use super::claim::{ServerClaims, ServerConnection};
use super::errors::{unavailable, unexpected_reply, unreadable_reply};
use super::options::{Address, Options};
use super::task::{self, ByteStream};
use super::wire::{NoReply, OwnedReply};
use crate::store::Identity;
use crate::{Clock, Error, ErrorKind, Result};

/// Longest lease of a server that speaks the plain protocol.
const MAX_PLAIN_LEASE: Duration = Duration::from_secs(24 * 60 * 60);
/// Time without any traffic after which a connection is considered dead.
#[cfg(unix)]
const DEAD_AFTER: Duration = Duration::from_secs(20);

/// Connects to one server.
pub(super) struct Dialer {
    options: Options,
    clock: Clock,
    /// Claims that pushed messages on the connections are for.
    claims: Arc<ServerClaims>,
    /// Makes the streams, if the store was opened with connections of its user.
    connect: Option<StreamFn>,
    #[cfg(feature = "tls")]
    tls: Option<tokio_rustls::TlsConnector>,
}

/// Function of the user that makes a stream to a host and a port.
pub(super) struct StreamFn(Box<StreamDynFn>);

type StreamDynFn = dyn Fn(&str, u16) -> Connecting + Send + Sync;
type Connecting = Pin<Box<dyn Future<Output = io::Result<Box<dyn ByteStream>>> + Send>>;

impl StreamFn {
    pub(super) fn new<F, Opening, S>(connect: F) -> Self
    where
        F: Fn(&str, u16) -> Opening + Send + Sync + 'static,
        Opening: Future<Output = io::Result<S>> + Send + 'static,
        S: ByteStream + 'static,
    {
        Self(Box::new(move |host, port| {
            let opening = connect(host, port);
            Box::pin(async { Ok(Box::new(opening.await?) as Box<dyn ByteStream>) })
        }))
    }
}

/// The server's description of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "independent properties of the server")]
pub(super) struct Greeting {
    /// True if it speaks tenure's extension.
    pub(super) extended: bool,
    /// Name of the server instance; empty if the server does not send it.
    pub(super) instance: String,
    pub(super) version: String,
    /// True if it keeps holds over a restart.
    pub(super) durable: bool,
    pub(super) auth: bool,
    pub(super) auto_release: bool,
    pub(super) max_lease: Duration,
}

impl Greeting {
    const PLAIN: Self = Self {
        extended: false,
        instance: String::new(),
        version: String::new(),
        durable: false,
        auth: false,
        auto_release: true,
        max_lease: MAX_PLAIN_LEASE,
    };

    fn parse(json: &[u8]) -> Option<Self> {
        let reply: Value = serde_json::from_slice(json).ok()?;
        let yes = |name| reply.get(name).and_then(Value::as_bool).unwrap_or(false);
        Some(Self {
            extended: true,
            instance: reply.get("instance")?.as_str()?.to_owned(),
            version: reply.get("version").and_then(Value::as_str).unwrap_or("?").to_owned(),
            durable: yes("durable"),
            auth: yes("auth"),
            auto_release: yes("auto_release"),
            max_lease: Duration::from_millis(reply.get("max_lease_ms")?.as_u64()?),
        })
    }
}

impl Dialer {
    #[cfg(feature = "tls")]
    pub(super) fn new(
        options: Options,
        clock: Clock,
        claims: Arc<ServerClaims>,
        connect: Option<StreamFn>,
    ) -> Result<Self> {
        let tls = options.tls.then(|| super::tls::connector(&options)).transpose()?;
        Ok(Self { options, clock, claims, connect, tls })
    }

    #[cfg(not(feature = "tls"))]
    #[expect(clippy::unnecessary_wraps, reason = "certificates can be bad")]
    pub(super) fn new(
        options: Options,
        clock: Clock,
        claims: Arc<ServerClaims>,
        connect: Option<StreamFn>,
    ) -> Result<Self> {
        Ok(Self { options, clock, claims, connect })
    }

    pub(super) fn options(&self) -> &Options {
        &self.options
    }

    /// True if a function of the user makes the connections. They may lead elsewhere than to the hosts of the URL.
    pub(super) fn has_own_connections(&self) -> bool {
        self.connect.is_some()
    }

    /// True if the server has several addresses.
    pub(super) fn has_choice(&self) -> bool {
        self.options.addresses.len() > 1
    }

    /// Connects to the first address that answers.
    pub(super) async fn dial(&self, until: Time) -> Result<(Arc<ServerConnection>, Greeting)> {
        tokio::runtime::Handle::try_current().map_err(|error| {
            let message = "a connection needs a tokio runtime: connect from within one";
            Error::new(ErrorKind::Invalid, message).because(error)
        })?;
        let mut failed = None;
        let addresses = &self.options.addresses;
        for (tried, address) in (0..).zip(addresses) {
            // Divides the time left among the addresses left, so that one that hangs leaves time for the rest.
            let now = self.clock.now();
            let remaining = u32::try_from(addresses.len()).unwrap_or(u32::MAX) - tried;
            let until = now + until.since(now) / remaining;
            let made = if let Some(connect) = &self.connect {
                self.attempt(address, self.connect_by(connect, address), until).await
            } else {
                let stream = TcpStream::connect((&*address.host, address.port));
                self.attempt(address, self.connect(address, stream), until).await
            };
            match made {
                Ok(made) => return Ok(made),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        Err(failed.unwrap_or_else(|| unavailable(NoReply::Unsent)).at(self))
    }

    /// Connects to `at`, one of the socket addresses that `address` resolves to.
    pub(super) async fn dial_at(
        &self,
        address: &Address,
        at: SocketAddr,
        until: Time,
    ) -> Result<(Arc<ServerConnection>, Greeting)> {
        self.attempt(address, self.connect(address, TcpStream::connect(at)), until).await
    }

    async fn attempt(
        &self,
        address: &Address,
        connecting: impl Future<Output = Result<Arc<ServerConnection>>>,
        until: Time,
    ) -> Result<(Arc<ServerConnection>, Greeting)> {
        let attempt = async {
            let connection = connecting.await?;
            let greeting = self.greet(&connection, until).await?;
            Ok((connection, greeting))
        };
        tokio::select! {
            biased;
            made = attempt => made,
            () = self.clock.sleep_until(until) => {
                let message = format!("cannot connect to {address} in time (is the server up?)");
                Err(Error::new(ErrorKind::Unavailable, message))
            }
        }
    }

    async fn connect(
        &self,
        address: &Address,
        stream: impl Future<Output = io::Result<TcpStream>>,
    ) -> Result<Arc<ServerConnection>> {
        let cannot = |error| cannot_connect(address, error);
        let stream = stream.await.map_err(cannot)?;
        set_socket_options(&stream).map_err(cannot)?;
        #[cfg(unix)]
        let fd = std::os::fd::AsFd::as_fd(&stream).try_clone_to_owned().map_err(cannot)?;
        #[cfg(feature = "tls")]
        if let Some(tls) = &self.tls {
            let stream = super::tls::handshake(tls, &address.host, stream).await?;
            return Ok(task::start(
                stream,
                #[cfg(unix)]
                Some(fd),
                &self.clock,
                &self.claims,
            ));
        }
        Ok(task::start(
            stream,
            #[cfg(unix)]
            Some(fd),
            &self.clock,
            &self.claims,
        ))
    }

    /// Connects by a function of the user.
    async fn connect_by(
        &self,
        StreamFn(connect): &StreamFn,
        address: &Address,
    ) -> Result<Arc<ServerConnection>> {
        let stream = connect(&address.host, address.port).await;
        let stream = stream.map_err(|error| cannot_connect(address, error))?;
        Ok(task::start(
            stream,
            #[cfg(unix)]
            None,
            &self.clock,
            &self.claims,
        ))
    }

    /// Authenticates, and asks whether the server speaks tenure's extension.
    async fn greet(&self, connection: &ServerConnection, until: Time) -> Result<Greeting> {
        if let Some(secret) = &self.options.secret {
            match connection
                .ask(&Request::Auth { secret: &secret.0 }, until)
                .await
                .map_err(unavailable)?
            {
                OwnedReply::Done => {}
                // A server that requires no authentication.
                OwnedReply::Error(why) if why.is_empty() => {}
                reply => return Err(unexpected_reply(&reply)),
            }
        }
        let about = client_description();
        let hello = Request::Extended(ExtensionRequest::Hello { about: about.as_bytes() });
        match connection.ask(&hello, until).await.map_err(unavailable)? {
            OwnedReply::Json(json) => Greeting::parse(&json).ok_or_else(unreadable_reply),
            OwnedReply::Error(why) if why.is_empty() => {
                connection.enable_pings();
                Ok(Greeting::PLAIN)
            }
            reply => Err(unexpected_reply(&reply)),
        }
    }
}

impl fmt::Display for Dialer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.options, f)
    }
}

fn cannot_connect(address: &Address, error: io::Error) -> Error {
    let message = format!("cannot connect to {address} (is the server up?)");
    Error::new(ErrorKind::Unavailable, message).because(error)
}

/// Description of this client, in a line that is short enough for servers of the plain protocol.
fn client_description() -> String {
    let by = Identity::of_process().map(|by| by.id.clone()).unwrap_or_default();
    let pid = std::process::id();
    let whole = json!({ "holder": by, "pid": pid, "keep": true }).to_string();
    if whole.len() <= MAX_LINE { whole } else { json!({ "pid": pid, "keep": true }).to_string() }
}

/// Disables delays, and enables the detection of dead connections.
fn set_socket_options(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    #[cfg(unix)]
    {
        use rustix::net::sockopt;
        sockopt::set_socket_keepalive(stream, true)?;
        sockopt::set_tcp_keepidle(stream, DEAD_AFTER / 2)?;
        sockopt::set_tcp_keepintvl(stream, DEAD_AFTER / 4)?;
        sockopt::set_tcp_keepcnt(stream, 2)?;
    }
    #[cfg(target_os = "linux")]
    {
        let millis = u32::try_from(DEAD_AFTER.as_millis()).unwrap_or(u32::MAX);
        rustix::net::sockopt::set_tcp_user_timeout(stream, millis)?;
    }
    Ok(())
}
