//! Opens connections, in large numbers.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Connections from one source address. The port range has 28,000 ports; some may be in `TIME_WAIT`.
const CONNECTIONS_PER_ADDRESS: usize = 5_000;

/// Maximum number of attempts to connect while the server's backlog is full.
const MAX_CONNECT_ATTEMPTS: u32 = 100;

/// Open files of this process beside its connections.
const SPARE_FILES: u64 = 64;

/// Opens a blocking connection. `number` is its number within the load: connections are spread over several loopback
/// addresses, because a single address runs out of ports.
///
/// # Errors
///
/// The server cannot be reached.
pub fn dial(target: SocketAddr, number: usize) -> Result<TcpStream> {
    for _ in 1..MAX_CONNECT_ATTEMPTS {
        match connect(target, number) {
            Ok(stream) => return Ok(stream),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => break,
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
    connect(target, number).with_context(|| format!("connecting to {target}"))
}

/// Raises this process's limit of open files for `connections` connections.
///
/// # Errors
///
/// The hard limit is too low.
pub fn raise_file_limit(connections: usize) -> Result<()> {
    let limit = getrlimit(Resource::Nofile);
    let wanted = connections as u64 + SPARE_FILES;
    let allows = |limit: Option<u64>| limit.is_none_or(|limit| limit >= wanted);
    ensure!(
        allows(limit.maximum),
        "{connections} connections exceed the hard limit of open files ({}): raise it, or request fewer connections",
        limit.maximum.unwrap_or_default()
    );
    if !allows(limit.current) {
        let raised = Rlimit { current: Some(wanted), maximum: limit.maximum };
        setrlimit(Resource::Nofile, raised).context("raising the limit of open files")?;
    }
    Ok(())
}

/// Raises this process's limit of open files to the hard limit.
///
/// # Errors
///
/// The kernel refuses its own maximum.
pub fn raise_file_limit_to_max() -> Result<()> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: maximum, maximum };
    setrlimit(Resource::Nofile, raised).context("raising the limit of open files")
}

/// Closes a connection with a reset, so that its port is free at once. A load that opens thousands of connections per
/// second would otherwise run out of ports.
///
/// # Errors
///
/// The kernel refuses the option.
pub fn close_with_reset(stream: TcpStream) -> Result<()> {
    sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).context("setting SO_LINGER")?;
    drop(stream);
    Ok(())
}

fn connect(target: SocketAddr, number: usize) -> io::Result<TcpStream> {
    let stream = match source(target, number) {
        Some(source) => {
            let (family, flags) = (AddressFamily::INET, SocketFlags::CLOEXEC);
            let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
            rustix::net::bind(&socket, &source)?;
            rustix::net::connect(&socket, &target)?;
            TcpStream::from(socket)
        }
        None => TcpStream::connect(target)?,
    };
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Source address for a connection to the loopback, another one for every 5,000 connections; `None` for the system's
/// choice.
fn source(target: SocketAddr, number: usize) -> Option<SocketAddr> {
    let IpAddr::V4(address) = target.ip() else { return None };
    let block = u8::try_from(number / CONNECTIONS_PER_ADDRESS).ok()?;
    (address.is_loopback() && block > 0)
        .then(|| SocketAddr::from((Ipv4Addr::new(127, 0, 1, block), 0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn many_connections_come_from_several_addresses() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let from = |number| dial(address, number).unwrap().local_addr().unwrap().ip();
        assert_eq!(from(0), Ipv4Addr::LOCALHOST);
        assert_eq!(from(CONNECTIONS_PER_ADDRESS), Ipv4Addr::new(127, 0, 1, 1));
        assert_eq!(from(2 * CONNECTIONS_PER_ADDRESS), Ipv4Addr::new(127, 0, 1, 2));
    }

    #[test]
    fn more_connections_than_the_system_allows_are_refused_with_the_limit() {
        if let Some(maximum) = getrlimit(Resource::Nofile).maximum {
            let error =
                raise_file_limit(usize::try_from(maximum).unwrap()).unwrap_err().to_string();
            assert!(error.contains(&maximum.to_string()), "{error}");
        }
    }
}
