//! Sockets to the servers that the settings name. We open them instead of the driver, so that another process can keep
//! a connection open.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use rustix::net::{Shutdown, shutdown, sockopt};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream, lookup_host};
use tokio_postgres::config::Host;
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::{Client, Config};

use super::dial::PgDriver;
use super::failure::{self, RequestStage};
use super::settings::Settings;
use crate::{Error, ErrorKind, Result};

/// A TCP or Unix socket.
enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_read(context, into),
            Self::Unix(stream) => Pin::new(stream).poll_read(context, into),
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Unix(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_flush(context),
            Self::Unix(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Unix(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

/// Second descriptor of a connection's socket.
#[derive(Debug)]
pub(crate) struct SocketHandle {
    socket: OwnedFd,
    /// Process that opened the connection.
    pid: u32,
}

impl SocketHandle {
    /// Ends the connection, even if another process has a descriptor of its socket.
    pub(super) fn shutdown(&self) {
        // A forked copy of the process drops this handle, too. That must not end the connection of its parent.
        if self.pid == std::process::id() {
            // An error means that the connection has ended already.
            let _ = shutdown(&self.socket, Shutdown::Both);
        }
    }
}

impl crate::store::KeepOpen for SocketHandle {
    fn keep_open(&self) -> io::Result<OwnedFd> {
        self.socket.try_clone()
    }
}

/// Number of servers that the settings name.
pub(super) fn servers(settings: &Settings) -> usize {
    settings.config.get_hosts().len().max(settings.config.get_hostaddrs().len()).max(1)
}

/// Connects to the `nth` server of the settings.
pub(super) async fn connect(
    settings: &Settings,
    nth: usize,
) -> Result<(Client, PgDriver, Arc<SocketHandle>)> {
    let config = &settings.config;
    let unreachable = |error: io::Error| {
        Error::new(ErrorKind::Unavailable, "cannot connect (is the server up?)").because(error)
    };
    let port = config.get_ports().get(nth).or(config.get_ports().first()).copied().unwrap_or(5432);
    let host = config.get_hosts().get(nth);
    let (stream, descriptor, name) = match (config.get_hostaddrs().get(nth), host) {
        (None, Some(Host::Unix(folder))) => {
            let (stream, descriptor) = local(folder, port).await.map_err(unreachable)?;
            // Unix sockets have no TLS, but the driver requires a host name.
            (stream, descriptor, "localhost".to_owned())
        }
        (address, host) => {
            let name = match host {
                Some(Host::Tcp(name)) => Some(name.clone()),
                _ => None,
            };
            let address = address.map(ToString::to_string);
            let name = name.or_else(|| address.clone()).unwrap_or_else(|| "localhost".to_owned());
            let target = address.as_deref().unwrap_or(&name);
            let (stream, descriptor) = remote(target, port, config).await.map_err(unreachable)?;
            (stream, descriptor, name)
        }
    };
    let mut tls = settings.trust.connector()?;
    let tls = MakeTlsConnect::<Socket>::make_tls_connect(&mut tls, &name);
    let tls = tls.map_err(|error| {
        let message = "postgres: invalid host name for TLS";
        Error::new(ErrorKind::Invalid, message).because(error)
    })?;
    let opened = config.connect_raw(stream, tls).await;
    let (client, connection) =
        opened.map_err(|error| failure::explain(error, RequestStage::Connecting))?;
    let handle = SocketHandle { socket: descriptor, pid: std::process::id() };
    Ok((client, PgDriver::new(connection), Arc::new(handle)))
}

type Connected = io::Result<(Socket, OwnedFd)>;

async fn local(folder: &Path, port: u16) -> Connected {
    let stream = UnixStream::connect(folder.join(format!(".s.PGSQL.{port}"))).await?;
    let descriptor = stream.as_fd().try_clone_to_owned()?;
    Ok((Socket::Unix(stream), descriptor))
}

async fn remote(host: &str, port: u16, config: &Config) -> Connected {
    let mut failed = None;
    for address in lookup_host((host, port)).await? {
        match reach(address, config).await {
            Ok(connected) => return Ok(connected),
            Err(error) => failed = Some(error),
        }
    }
    Err(failed.unwrap_or_else(|| io::Error::other("the host name has no address")))
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
    Ok((Socket::Tcp(stream), descriptor))
}
