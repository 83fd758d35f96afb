//! Connection settings from a URL or from pairs, a service, the environment and `.pgpass`, by the rules of libpq.
//!
//! The text is parsed once. The service file, the environment and the password file are read again for every
//! connection: a password that was changed there is used from the next connection on.

use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio_postgres::Config;
use tokio_postgres::config::{ChannelBinding, SslMode};

use self::invalid::invalid;
use self::keywords::KeywordEffect;
use self::pairs::{Pairs, Variables};
pub(crate) use self::servers::{PgServer, ServerHost};
use self::values::Values;
use super::denial::DenialLog;
use super::dial::ConnectFn;
use super::tls::{Trust, Verify};
use crate::Result;
use crate::store::url_options;

/// Connect timeout unless the settings have one.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time after which the system closes a connection whose sent bytes are not acknowledged.
pub(super) const TCP_USER_TIMEOUT: Duration = Duration::from_secs(15);

/// Source of the connections of a store. Neither `Debug` nor `Display` shows a password. Clones share the log of
/// denials.
#[derive(Clone)]
pub(crate) struct Settings {
    source: ConnectSource,
    denials: Arc<DenialLog>,
    display_url: String,
}

#[derive(Clone)]
enum ConnectSource {
    /// Pairs that the text has, and the environment that fills in the others.
    Text(Arc<Pairs>, Arc<Variables>),
    Dial(ConnectFn),
}

/// Way to open one connection.
pub(crate) enum ConnectWay<'a> {
    Dial(&'a ConnectFn),
    Servers(Box<ConnectPlan>),
}

/// Options of a URL that belong to the store, not to the connection.
pub(crate) type StoreOptions = Vec<(String, String)>;

impl Settings {
    /// Parses a URL, or pairs `name=value`, as libpq does. Options named in `own` are returned.
    pub(crate) fn parse(text: &str, own: &[&str]) -> Result<(Self, StoreOptions)> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        Self::parse_with(text, own, Arc::new(variable))
    }

    fn parse_with(
        text: &str,
        own: &[&str],
        variable: Arc<Variables>,
    ) -> Result<(Self, StoreOptions)> {
        let pairs = match uri::after_scheme(text) {
            Some(rest) => uri::parse(rest)?,
            None => conninfo::parse(text)?,
        };
        let (mut given, mut own_options) = (Pairs::new(), StoreOptions::new());
        for (name, value) in pairs {
            if own.contains(&&*name) {
                own_options.push((name, value));
                continue;
            }
            match keywords::find(&name).map(|keyword| keyword.effect) {
                None => return Err(unknown(&name)),
                Some(KeywordEffect::Ignored(reason)) => {
                    tracing::debug!(name: "tenure.option_ignored", option = name, reason);
                }
                Some(_) => given.push((name, value)),
            }
        }
        let values = Values::read(&given, &*variable)?;
        let display_url = display_url(&values, &ConnectPlan::read(&values)?.servers);
        let source = ConnectSource::Text(Arc::new(given), variable);
        Ok((Self { source, denials: Arc::default(), display_url }, own_options))
    }

    /// Determines how the next connection is opened: reads files and the environment.
    pub(crate) fn way(&self) -> Result<ConnectWay<'_>> {
        match &self.source {
            ConnectSource::Dial(dial) => Ok(ConnectWay::Dial(dial)),
            ConnectSource::Text(given, variable) => {
                let values = Values::read(given, &**variable)?;
                ConnectPlan::read(&values).map(|plan| ConnectWay::Servers(Box::new(plan)))
            }
        }
    }

    /// The same settings with another value of one keyword, unless the caller opens the connections.
    pub(crate) fn with_value(&self, keyword: &str, value: &str) -> Self {
        let mut changed = self.clone();
        if let ConnectSource::Text(given, _) = &mut changed.source {
            Arc::make_mut(given).push((keyword.to_owned(), value.to_owned()));
        }
        changed
    }

    pub(crate) fn denials(&self) -> &DenialLog {
        &self.denials
    }

    /// True if the caller opens the connections.
    pub(crate) fn is_dialled(&self) -> bool {
        matches!(self.source, ConnectSource::Dial(_))
    }

    /// True if all servers are on this host, as far as the settings tell.
    pub(crate) fn is_local(&self) -> bool {
        match self.way() {
            Ok(ConnectWay::Servers(plan)) => plan.servers.iter().all(PgServer::is_local),
            _ => false,
        }
    }
}

/// Settings for connections that the caller opens.
impl From<ConnectFn> for Settings {
    fn from(dial: ConnectFn) -> Self {
        let (source, display_url) = (ConnectSource::Dial(dial), "postgres:".to_owned());
        Self { source, denials: Arc::default(), display_url }
    }
}

/// Property that a server must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WantedServer {
    Any,
    /// It accepts writes.
    ReadWrite,
    /// It is not in recovery.
    Primary,
}

/// Everything that one connection needs. It contains passwords, so it has no `Debug`.
pub(crate) struct ConnectPlan {
    /// Servers in the order in which they are tried; at least one.
    pub(crate) servers: Vec<PgServer>,
    /// Password for each server.
    passwords: Vec<Option<String>>,
    config: Config,
    trust: Trust,
    pub(crate) wanted: WantedServer,
    pub(crate) connect_timeout: Duration,
    /// User that the server's process must run as, behind a Unix socket.
    #[cfg(unix)]
    pub(crate) required_peer: Option<String>,
}

impl ConnectPlan {
    fn read(values: &Values<'_>) -> Result<Self> {
        let servers = servers::read(values)?;
        let config = driver_config(values)?;
        let (user, database) =
            (config.get_user().unwrap_or_default(), config.get_dbname().unwrap_or_default());
        let passwords = if let Some(password) = values.get("password") {
            vec![Some(password); servers.len()]
        } else {
            let path = values.get("passfile").map(PathBuf::from);
            let path = path.or_else(|| values.home_file(".pgpass"));
            let text = path.as_deref().and_then(passfile::read).unwrap_or_default();
            servers.iter().map(|server| passfile::find(&text, server, database, user)).collect()
        };
        Ok(Self {
            wanted: wanted(values, servers.len() > 1)?,
            connect_timeout: match values.number("connect_timeout")? {
                Some(seconds) if seconds > 0 => Duration::from_secs(seconds.unsigned_abs().into()),
                // Without a limit in libpq. Here it is the default.
                _ => CONNECT_TIMEOUT,
            },
            trust: encryption::trust(values, servers.iter().all(PgServer::is_socket))?,
            #[cfg(unix)]
            required_peer: values.get("requirepeer"),
            servers,
            passwords,
            config,
        })
    }

    /// Settings of the driver for one server.
    pub(crate) fn config(&self, nth: usize) -> Config {
        let mut config = self.config.clone();
        config.ssl_mode(match self.trust(nth).verify {
            Verify::Off => SslMode::Disable,
            Verify::Prefer => SslMode::Prefer,
            Verify::Encrypt | Verify::Ca | Verify::Full => SslMode::Require,
        });
        if let Some(Some(password)) = self.passwords.get(nth) {
            config.password(password);
        }
        config
    }

    /// TLS settings for one server. A Unix socket needs no encryption.
    pub(crate) fn trust(&self, nth: usize) -> Trust {
        let trust = self.trust.clone();
        match self.servers.get(nth) {
            Some(server) if server.is_socket() => Trust { verify: Verify::Off, ..trust },
            _ => trust,
        }
    }
}

impl ConnectWay<'_> {
    /// Number that changes with the servers, the user and the passwords. Equal for all connections that the caller
    /// opens.
    pub(crate) fn fingerprint(&self, state: &RandomState) -> u64 {
        match self {
            Self::Dial(_) => 0,
            Self::Servers(plan) => {
                state.hash_one((&plan.servers, &plan.passwords, plan.config.get_user()))
            }
        }
    }
}

/// Settings of the driver that all servers share.
fn driver_config(values: &Values<'_>) -> Result<Config> {
    let mut config = Config::new();
    let user = match values.get("user") {
        Some(user) => user,
        None => whoami::username().map_err(|error| {
            invalid("no user is given, and this process has no user name").because(error)
        })?,
    };
    config.dbname(values.get("dbname").unwrap_or_else(|| user.clone())).user(user);
    if let Some(options) = values.get("options") {
        config.options(options);
    }
    let name = values.get("application_name").or_else(|| values.get("fallback_application_name"));
    config.application_name(name.as_deref().unwrap_or("tenure"));
    config.channel_binding(
        match values.word("channel_binding", &["disable", "prefer", "require"])? {
            Some(0) => ChannelBinding::Disable,
            Some(2) => ChannelBinding::Require,
            _ => ChannelBinding::Prefer,
        },
    );
    config.keepalives(values.number("keepalives")? != Some(0));
    // Zero and less mean the default of the system.
    let positive = |name| -> Result<Option<u32>> {
        let number = values.number(name)?.filter(|number| *number > 0);
        Ok(number.map(i32::unsigned_abs))
    };
    if let Some(seconds) = positive("keepalives_idle")? {
        config.keepalives_idle(Duration::from_secs(seconds.into()));
    }
    if let Some(seconds) = positive("keepalives_interval")? {
        config.keepalives_interval(Duration::from_secs(seconds.into()));
    }
    if let Some(count) = positive("keepalives_count")? {
        config.keepalives_retries(count);
    }
    match (values.number("tcp_user_timeout")?, positive("tcp_user_timeout")?) {
        (None, _) => {
            config.tcp_user_timeout(TCP_USER_TIMEOUT);
        }
        (_, Some(milliseconds)) => {
            config.tcp_user_timeout(Duration::from_millis(milliseconds.into()));
        }
        (Some(_), None) => {}
    }
    Ok(config)
}

/// Property that `target_session_attrs` asks for.
fn wanted(values: &Values<'_>, several: bool) -> Result<WantedServer> {
    let words = ["any", "read-write", "primary", "prefer-standby", "read-only", "standby"];
    match values.word("target_session_attrs", &words)? {
        // Of several servers, the primary: locks need it. A role whose transactions are read-only by default is no
        // reason to refuse the server, as it is none with one server.
        None | Some(0) if several => Ok(WantedServer::Primary),
        None | Some(0) => Ok(WantedServer::Any),
        Some(1) => Ok(WantedServer::ReadWrite),
        // The last one prefers a standby, and accepts the primary. Locks need the primary.
        Some(2 | 3) => Ok(WantedServer::Primary),
        Some(_) => Err(invalid(
            "target_session_attrs selects a read-only server: locks need a writable server (read-write)",
        )),
    }
}

/// Error for an option that neither libpq nor the store has. A text that cannot be an option may be part of a password
/// that was not escaped, and is not shown.
fn unknown(name: &str) -> crate::Error {
    let name = if url_options::is_shown(name) { format!(" {name:?}") } else { String::new() };
    invalid(&format!("unknown option{name} in the connection settings"))
}

/// URL without the password.
fn display_url(values: &Values<'_>, servers: &[PgServer]) -> String {
    let with_port = values.get("port").is_some();
    let shown = servers.iter().map(|server| {
        let host = match &server.host {
            ServerHost::Name(name) if name.contains(':') => format!("[{name}]"),
            ServerHost::Name(name) => name.clone(),
            ServerHost::Socket(folder) => Path::display(folder).to_string().replace('/', "%2F"),
        };
        if with_port { format!("{host}:{}", server.port) } else { host }
    });
    let shown: Vec<_> = shown.collect();
    let user = values.get("user").map(|user| format!("{user}@")).unwrap_or_default();
    let database = values.get("dbname").map(|name| format!("/{name}")).unwrap_or_default();
    format!("postgres://{user}{}{database}", shown.join(","))
}

impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.display_url)
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.display_url)
    }
}

mod conninfo;
mod encryption;
mod invalid;
mod keywords;
mod pairs;
mod passfile;
mod servers;
mod service;
#[cfg(test)]
mod tests;
mod uri;
mod values;
