//! Sockets to the servers that the settings name. We open them instead of the driver, so that another process can keep
//! a connection open.

use std::ffi::OsStr;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use rustix::net::{Shutdown, shutdown, sockopt};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream, lookup_host};
use tokio_postgres::config::SslMode;
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::{Client, Config};

use super::dial::PgDriver;
use super::failure::{self, RequestStage};
use super::login::{LoginPid, LoginReader};
use super::settings::{ConnectPlan, PgServer, ServerHost, TCP_USER_TIMEOUT};
use super::tls::{TlsProgress, Trust, Verify};
use crate::{Clock, Error, ErrorKind, Result};

/// A socket, and the reader of the login on it.
struct Socket {
    stream: SocketStream,
    login: LoginReader,
}

/// A TCP or Unix socket.
enum SocketStream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Self { stream, login } = self.get_mut();
        let before = into.filled().len();
        let read = match stream {
            SocketStream::Tcp(stream) => Pin::new(stream).poll_read(context, into),
            SocketStream::Unix(stream) => Pin::new(stream).poll_read(context, into),
        };
        login.read(&into.filled()[before..]);
        read
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().stream {
            SocketStream::Tcp(stream) => Pin::new(stream).poll_write(context, bytes),
            SocketStream::Unix(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().stream {
            SocketStream::Tcp(stream) => Pin::new(stream).poll_flush(context),
            SocketStream::Unix(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().stream {
            SocketStream::Tcp(stream) => Pin::new(stream).poll_shutdown(context),
            SocketStream::Unix(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

/// Second descriptor of a connection's socket.
#[derive(Debug)]
pub(crate) struct SocketHandle {
    socket: OwnedFd,
    /// Process that opened the connection.
    pid: u32,
    /// Times of a TCP socket that the settings leave to us.
    own_times: OwnTimes,
}

/// Times of a TCP socket that are ours to choose, because the settings have none of their own.
#[derive(Clone, Copy, Debug)]
struct OwnTimes {
    keepalive: bool,
    user_timeout: bool,
}

impl OwnTimes {
    fn of(config: &Config, stream: &SocketStream) -> Self {
        let is_tcp = matches!(stream, SocketStream::Tcp(_));
        Self {
            keepalive: is_tcp && !has_keepalive_times(config),
            user_timeout: config.get_tcp_user_timeout() == Some(&TCP_USER_TIMEOUT),
        }
    }
}

/// True if the settings turn keepalive off, or have times for it.
fn has_keepalive_times(config: &Config) -> bool {
    !config.get_keepalives()
        || config.get_keepalives_idle() != Config::new().get_keepalives_idle()
        || config.get_keepalives_interval().is_some()
        || config.get_keepalives_retries().is_some()
}

/// Number of probes without an answer after which the system ends a connection.
const KEEPALIVE_PROBES: u32 = 3;

impl SocketHandle {
    /// Asks the system to end the connection if the other host is silent for about `span`, while this one sends nothing.
    /// The probes cost the server's processes nothing. Settings of the user's own stay as they are.
    pub(crate) fn end_after_silence(&self, span: Duration) -> io::Result<()> {
        if !self.own_times.keepalive {
            return Ok(());
        }
        let (idle, interval) = keepalive_times(span);
        sockopt::set_tcp_keepidle(&self.socket, idle)?;
        sockopt::set_tcp_keepintvl(&self.socket, interval)?;
        sockopt::set_tcp_keepcnt(&self.socket, KEEPALIVE_PROBES)?;
        // If there is a user timeout, Linux ends the connection by that, and not by the number of probes.
        #[cfg(target_os = "linux")]
        if self.own_times.user_timeout {
            let all = TCP_USER_TIMEOUT.min(idle + interval * KEEPALIVE_PROBES);
            let all = u32::try_from(all.as_millis()).unwrap_or(u32::MAX);
            sockopt::set_tcp_user_timeout(&self.socket, all)?;
        }
        Ok(())
    }

    /// Ends the connection, even if another process has a descriptor of its socket.
    pub(super) fn shutdown(&self) {
        // A forked copy of the process drops this handle, too. That must not end the connection of its parent.
        if self.pid == std::process::id() {
            // An error means that the connection has ended already.
            let _ = shutdown(&self.socket, Shutdown::Both);
        }
    }
}

/// Time before the first probe, and the time between two, so that a silence of `span` ends a connection. The system
/// counts whole seconds, and refuses 0: below six seconds it takes longer than the span.
fn keepalive_times(span: Duration) -> (Duration, Duration) {
    let seconds = |span: Duration| Duration::from_secs(span.as_secs().max(1));
    let idle = seconds(span / 2);
    (idle, seconds(span.saturating_sub(idle) / KEEPALIVE_PROBES))
}

impl crate::store::KeepOpen for SocketHandle {
    fn keep_open(&self) -> io::Result<OwnedFd> {
        self.socket.try_clone()
    }
}

/// A connection on a socket of ours.
pub(super) struct OpenedSocket {
    pub(super) client: Client,
    pub(super) driver: PgDriver,
    pub(super) handle: Arc<SocketHandle>,
    /// Process of the session, as the server announced it at login.
    pub(super) login_pid: Option<i32>,
}

/// Connects to the `nth` server of the plan.
///
/// `sslmode=prefer` falls back to a connection without encryption, as in libpq, if the handshake fails or the server
/// refuses the encrypted login: its access rules may accept only others. If that fails as well, the first error tells
/// more.
pub(super) async fn connect(plan: &ConnectPlan, nth: usize, clock: &Clock) -> Result<OpenedSocket> {
    let trust = plan.trust(nth);
    let mut progress = TlsProgress::default();
    match login(plan, nth, &trust, &mut progress, clock).await {
        Err(error) if trust.verify == Verify::Prefer && may_be_plain(&error, &progress) => {
            let unencrypted = Trust { verify: Verify::Off, ..trust };
            let opened = login(plan, nth, &unencrypted, &mut progress, clock).await;
            opened.map_err(|_| error)
        }
        opened => opened,
    }
}

fn may_be_plain(error: &Error, progress: &TlsProgress) -> bool {
    let is_denied = failure::code(error).is_some_and(|code| code.starts_with("28"));
    progress.has_failed() || progress.is_encrypted() && is_denied
}

/// Connects and logs in, encrypted as `trust` says.
async fn login(
    plan: &ConnectPlan,
    nth: usize,
    trust: &Trust,
    progress: &mut TlsProgress,
    clock: &Clock,
) -> Result<OpenedSocket> {
    let unreachable = |error: io::Error| {
        Error::new(ErrorKind::Unavailable, "cannot connect (is the server up?)").because(error)
    };
    let mut config = plan.config(nth);
    if trust.verify == Verify::Off {
        config.ssl_mode(SslMode::Disable);
    }
    let PgServer { host, address, port } = &plan.servers[nth];
    let (stream, descriptor, name) = match (host, address) {
        (ServerHost::Socket(folder), None) => {
            let stream = local(folder, *port).await.map_err(unreachable)?;
            check_peer(&stream, plan.required_peer.as_deref())?;
            let descriptor = stream.as_fd().try_clone_to_owned().map_err(unreachable)?;
            // Unix sockets have no TLS, but the driver requires a host name.
            (SocketStream::Unix(stream), descriptor, "localhost".to_owned())
        }
        (host, address) => {
            let name = match host {
                ServerHost::Name(name) => name.clone(),
                ServerHost::Socket(folder) => folder.display().to_string(),
            };
            let target = address.map_or_else(|| name.clone(), |address| address.to_string());
            let (stream, descriptor) =
                remote(&target, *port, &config, clock).await.map_err(unreachable)?;
            (stream, descriptor, name)
        }
    };
    let own_times = OwnTimes::of(&config, &stream);
    let login_pid = LoginPid::default();
    let stream = Socket { stream, login: LoginReader::of_socket(login_pid.clone()) };
    let mut tls = trust.connector(login_pid.clone())?;
    *progress = tls.progress();
    let tls = MakeTlsConnect::<Socket>::make_tls_connect(&mut tls, &name);
    let tls = tls.map_err(|error| {
        let message = "postgres: invalid host name for TLS";
        Error::new(ErrorKind::Invalid, message).because(error)
    })?;
    let opened = config.connect_raw(stream, tls).await;
    let (client, connection) =
        opened.map_err(|error| failure::explain(error, RequestStage::Connecting))?;
    let handle = SocketHandle { socket: descriptor, pid: std::process::id(), own_times };
    let handle = Arc::new(handle);
    let driver = PgDriver::new(connection);
    Ok(OpenedSocket { client, driver, handle, login_pid: login_pid.get() })
}

type Connected = io::Result<(SocketStream, OwnedFd)>;

async fn local(folder: &Path, port: u16) -> io::Result<UnixStream> {
    let path = folder.join(format!(".s.PGSQL.{port}"));
    match path.as_os_str().as_bytes() {
        // In the abstract namespace, where names begin with a zero byte.
        [b'@', name @ ..] => {
            let name = [b"\0", name].concat();
            UnixStream::connect(OsStr::from_bytes(&name)).await
        }
        _ => UnixStream::connect(path).await,
    }
}

/// Fails unless the server's process runs as the required user.
fn check_peer(stream: &UnixStream, required: Option<&str>) -> Result<()> {
    let Some(required) = required else { return Ok(()) };
    let denied = |message: String| Error::new(ErrorKind::Denied, message);
    let peer = stream.peer_cred().map_err(|error| {
        denied("requirepeer: the user of the server's process is unknown".to_owned()).because(error)
    })?;
    let users = std::fs::read_to_string("/etc/passwd").map_err(|error| {
        denied("requirepeer: the users of this host cannot be read".to_owned()).because(error)
    })?;
    match user_name(&users, peer.uid()) {
        Some(name) if name == required => Ok(()),
        Some(name) => {
            Err(denied(format!("requirepeer is {required}, but the server's process is {name}'s")))
        }
        None => Err(denied(format!(
            "requirepeer is {required}, but the server's process is that of user {}, which /etc/passwd does not name",
            peer.uid()
        ))),
    }
}

/// Name of a user in the text of `/etc/passwd`.
fn user_name(users: &str, uid: u32) -> Option<&str> {
    users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(uid)).then_some(name)
    })
}

/// Time after which the next address of a host name is tried as well: one that is silent must not use up the time of
/// all.
const ADDRESS_HEAD_START: Duration = Duration::from_millis(500);

async fn remote(host: &str, port: u16, config: &Config, clock: &Clock) -> Connected {
    let addresses = lookup_host((host, port)).await?;
    reach_first(addresses, config, clock).await
}

/// Connects to the first address that answers.
async fn reach_first(
    addresses: impl Iterator<Item = SocketAddr>,
    config: &Config,
    clock: &Clock,
) -> Connected {
    let mut failed = io::Error::other("the host name has no address");
    let mut attempts = FuturesUnordered::new();
    let mut addresses = addresses.peekable();
    while let Some(address) = addresses.next() {
        attempts.push(reach(address, config));
        let next = clock.now() + ADDRESS_HEAD_START;
        tokio::select! {
            biased;
            Some(reached) = attempts.next() => match reached {
                Ok(connected) => return Ok(connected),
                Err(error) => failed = error,
            },
            () = clock.sleep_until(next), if addresses.peek().is_some() => {}
        }
    }
    while let Some(reached) = attempts.next().await {
        match reached {
            Ok(connected) => return Ok(connected),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

async fn reach(address: SocketAddr, config: &Config) -> Connected {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    // The system counts whole seconds, and refuses 0.
    let at_least_1s = |span: Duration| span.max(Duration::from_secs(1));
    if config.get_keepalives() {
        sockopt::set_socket_keepalive(&stream, true)?;
        sockopt::set_tcp_keepidle(&stream, at_least_1s(config.get_keepalives_idle()))?;
        if let Some(interval) = config.get_keepalives_interval() {
            sockopt::set_tcp_keepintvl(&stream, at_least_1s(interval))?;
        }
        if let Some(count) = config.get_keepalives_retries() {
            sockopt::set_tcp_keepcnt(&stream, count)?;
        }
    }
    #[cfg(target_os = "linux")]
    if let Some(limit) = config.get_tcp_user_timeout() {
        let limit = u32::try_from(limit.as_millis()).unwrap_or(u32::MAX);
        sockopt::set_tcp_user_timeout(&stream, limit)?;
    }
    let descriptor = stream.as_fd().try_clone_to_owned()?;
    Ok((SocketStream::Tcp(stream), descriptor))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silence_ends_a_connection_within_its_span_if_that_is_long_enough() {
        let seconds = |(idle, interval): (Duration, Duration)| (idle.as_secs(), interval.as_secs());
        for (ttl, times) in [(1, (1, 1)), (3, (1, 1)), (6, (3, 1)), (15, (7, 2)), (120, (60, 20))] {
            let found = seconds(keepalive_times(Duration::from_secs(ttl)));
            assert_eq!(found, times, "{ttl} s");
        }
        assert_eq!(seconds(keepalive_times(Duration::from_millis(500))), (1, 1));
    }

    #[test]
    fn keepalive_times_of_the_user_are_left_alone() {
        for (text, theirs) in [
            ("host=h", false),
            ("host=h keepalives=1", false),
            ("host=h keepalives=0", true),
            ("host=h keepalives_idle=600", true),
            ("host=h keepalives_interval=60", true),
            ("host=h keepalives_retries=9", true),
        ] {
            let config: Config = text.parse().unwrap();
            assert_eq!(has_keepalive_times(&config), theirs, "{text}");
        }
    }

    #[test]
    fn users_are_found_by_their_number() {
        let users = "root:x:0:0:root:/root:/bin/sh\npostgres:x:101:104::/:\nbroken\n";
        assert_eq!(user_name(users, 101), Some("postgres"));
        assert_eq!(user_name(users, 104), None);
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn an_address_that_is_silent_does_not_use_up_the_time() {
        let at = |host: &str| format!("{host}:0").parse().unwrap();
        let listen = |address: SocketAddr, backlog: u32| {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.bind(address).unwrap();
            socket.listen(backlog).unwrap()
        };
        // A queue that is full answers no further connection.
        let (full, other) = (listen(at("127.0.0.1"), 0), listen(at("127.0.0.1"), 8));
        let silent = full.local_addr().unwrap();
        let _queued = TcpStream::connect(silent).await.unwrap();
        let (config, clock) = (Config::new(), Clock::system());
        let begun = clock.now();
        let addresses = [silent, other.local_addr().unwrap()];
        let connected = reach_first(addresses.into_iter(), &config, &clock).await.unwrap();
        let SocketStream::Tcp(stream) = connected.0 else { panic!("not TCP") };
        assert_eq!(stream.peer_addr().unwrap(), addresses[1]);
        assert!(clock.now().since(begun) >= ADDRESS_HEAD_START, "the first was tried first");
        let refused = reach_first([at("127.0.0.1")].into_iter(), &config, &clock).await;
        assert!(refused.is_err());
    }

    #[tokio::test]
    async fn a_peer_of_another_user_is_denied() {
        let (one, _other) = UnixStream::pair().unwrap();
        let uid = one.peer_cred().unwrap().uid();
        let users = std::fs::read_to_string("/etc/passwd").unwrap();
        if let Some(name) = user_name(&users, uid) {
            check_peer(&one, Some(name)).unwrap();
        }
        check_peer(&one, None).unwrap();
        let error = check_peer(&one, Some("no-such-user")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied);
    }
}
