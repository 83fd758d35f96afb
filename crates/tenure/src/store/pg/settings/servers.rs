//! The servers that the settings name.

use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use super::invalid::invalid;
use super::values::Values;
use crate::Result;

/// Directory of the server's Unix socket on Debian and most distributions.
pub(super) const DEFAULT_SOCKET_DIR: &str = "/var/run/postgresql";
const DEFAULT_PORT: u16 = 5432;

/// One server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PgServer {
    /// Host as it is named in certificates and password files.
    pub(crate) host: ServerHost,
    /// Address to connect to, instead of the address of the host.
    pub(crate) address: Option<IpAddr>,
    pub(crate) port: u16,
}

/// A host name or address, or the folder of a Unix socket.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ServerHost {
    Name(String),
    /// Folder of the socket. One that begins with `@` is in the abstract namespace.
    Socket(PathBuf),
}

impl PgServer {
    /// True if connections to this server stay within this host.
    pub(crate) fn is_local(&self) -> bool {
        match (&self.host, self.address) {
            (_, Some(address)) => address.is_loopback(),
            (ServerHost::Socket(_), None) => true,
            (ServerHost::Name(name), None) => {
                name == "localhost" || name.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
            }
        }
    }

    /// True if connections go through a Unix socket.
    pub(crate) fn is_socket(&self) -> bool {
        self.address.is_none() && matches!(self.host, ServerHost::Socket(_))
    }
}

/// Host and port, as messages name a server.
impl fmt::Display for PgServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            ServerHost::Name(name) if name.contains(':') => write!(f, "[{name}]:{}", self.port),
            ServerHost::Name(name) => write!(f, "{name}:{}", self.port),
            ServerHost::Socket(folder) => write!(f, "{}:{}", folder.display(), self.port),
        }
    }
}

/// Reads `host`, `hostaddr` and `port`, each a list. There is at least one server.
pub(super) fn read(values: &Values<'_>) -> Result<Vec<PgServer>> {
    let list = |name: &str| -> Vec<String> {
        let text = values.get(name);
        text.iter().flat_map(|text| text.split(',')).map(str::to_owned).collect()
    };
    let (hosts, addresses, ports) = (list("host"), list("hostaddr"), list("port"));
    let count = if addresses.is_empty() { hosts.len().max(1) } else { addresses.len() };
    if !addresses.is_empty() && !hosts.is_empty() && hosts.len() != count {
        let message = format!(
            "{} hosts and {count} addresses are given: give as many in host as in hostaddr",
            hosts.len()
        );
        return Err(invalid(&message));
    }
    if ports.len() > 1 && ports.len() != count {
        let message = format!(
            "{} ports are given for {count} servers: give one port, or one per server",
            ports.len()
        );
        return Err(invalid(&message));
    }
    (0..count)
        .map(|nth| {
            let named = |list: &[String]| list.get(nth).filter(|text| !text.is_empty()).cloned();
            let address = named(&addresses).map(|text| text.parse()).transpose().map_err(|_| {
                invalid("invalid hostaddr: give numeric addresses, and names in host")
            })?;
            let port = if ports.len() == 1 { ports.first() } else { ports.get(nth) };
            Ok(PgServer { host: host(named(&hosts), address), address, port: parse_port(port)? })
        })
        .collect()
}

fn host(named: Option<String>, address: Option<IpAddr>) -> ServerHost {
    match (named, address) {
        // A socket's folder is no name for a certificate.
        (Some(name), Some(address)) if is_socket(&name) => ServerHost::Name(address.to_string()),
        (Some(name), None) if is_socket(&name) => ServerHost::Socket(name.into()),
        (Some(name), _) => ServerHost::Name(name),
        (None, Some(address)) => ServerHost::Name(address.to_string()),
        (None, None) if cfg!(unix) && Path::new(DEFAULT_SOCKET_DIR).is_dir() => {
            ServerHost::Socket(DEFAULT_SOCKET_DIR.into())
        }
        (None, None) => ServerHost::Name("localhost".to_owned()),
    }
}

fn is_socket(host: &str) -> bool {
    cfg!(unix) && host.starts_with(['/', '@'])
}

/// Port number. The error does not repeat the text: it may be part of a password that was not escaped.
fn parse_port(text: Option<&String>) -> Result<u16> {
    match text.map(|text| text.trim()).filter(|text| !text.is_empty()) {
        None => Ok(DEFAULT_PORT),
        Some(text) => {
            let port = text.parse().ok().filter(|port| *port > 0);
            port.ok_or_else(|| invalid("invalid port: give a number between 1 and 65535"))
        }
    }
}
