//! Connection settings from a URL, the environment and `.pgpass`, by the rules of libpq.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr as _;
use std::time::Duration;

use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode, TargetSessionAttrs};

use self::invalid::invalid;
use super::dial::ConnectFn;
use super::tls::{Trust, Verify};
use crate::Result;
use crate::store::url_options::{self, UrlOption};

/// Connect timeout unless the URL or `PGCONNECT_TIMEOUT` sets one.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time after which the system closes a connection whose sent bytes are not acknowledged.
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(15);
/// Directory of the server's Unix socket on Debian and most distributions.
const DEFAULT_SOCKET_DIR: &str = "/var/run/postgresql";

/// Server, user and TLS settings of a connection. Neither `Debug` nor `Display` shows a password.
#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) config: Config,
    pub(crate) trust: Trust,
    pub(crate) connect_timeout: Duration,
    /// Closure that opens connections; it replaces all of the above.
    pub(crate) dial: Option<ConnectFn>,
    display_url: String,
}

/// Options of a URL that belong to the store, not to the connection.
pub(crate) type StoreOptions = Vec<(String, String)>;

impl Settings {
    /// Parses a URL, or pairs `name=value`, as libpq does. The environment fills in what the text leaves out. Options
    /// named in `own` are returned.
    pub(crate) fn parse(url: &str, own: &[&str]) -> Result<(Self, StoreOptions)> {
        Self::parse_with(url, own, &|name| std::env::var(name).ok().filter(|v| !v.is_empty()))
    }

    fn parse_with(
        url: &str,
        own: &[&str],
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> Result<(Self, StoreOptions)> {
        let written;
        let url = if url.starts_with("postgres:") || url.starts_with("postgresql:") {
            url
        } else {
            written = conninfo::as_url(url)?;
            &written
        };
        let (base, given) = url_options::split(url);
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for option in given {
            if own.contains(&option.name) || HANDLED_OPTIONS.contains(&option.name) {
                ours.push((option.name.to_owned(), option.decoded()?));
            } else {
                theirs.push(option);
            }
        }
        let own_options = ours
            .iter()
            .filter(|(name, _)| own.contains(&&**name))
            .cloned()
            .collect::<StoreOptions>();
        let option = |name: &str, fallback: &str| {
            let given = ours.iter().rev().find(|(known, _)| known == name);
            given.map(|(_, value)| value.clone()).or_else(|| variable(fallback))
        };
        let mut config = driver_config(base, &theirs)?;
        complete(&mut config, variable)?;
        let trust = trust(&option, &config, variable)?;
        config.ssl_mode(trust.mode());
        session(&mut config, option("target_session_attrs", "PGTARGETSESSIONATTRS").as_deref())?;
        let shown = display_url(&config);
        if config.get_password().is_none()
            && let Some(file) = option("passfile", "PGPASSFILE")
                .map(PathBuf::from)
                .or_else(|| variable("HOME").map(|home| Path::new(&home).join(".pgpass")))
            && let Some(password) = passfile(&file, &config)
        {
            config.password(password);
        }
        // The driver's own timeout would cover the socket only.
        let connect_timeout = match option("connect_timeout", "PGCONNECT_TIMEOUT") {
            Some(text) => match text.trim().parse() {
                Ok(0) => CONNECT_TIMEOUT,
                Ok(seconds) => Duration::from_secs(seconds),
                Err(_) => return Err(invalid("invalid connect_timeout: give a number of seconds")),
            },
            None => CONNECT_TIMEOUT,
        };
        Ok((Self { config, trust, connect_timeout, dial: None, display_url: shown }, own_options))
    }
}

/// Settings for connections that the caller opens.
impl From<ConnectFn> for Settings {
    fn from(dial: ConnectFn) -> Self {
        let trust = Trust { verify: Verify::Off, roots: None, client: None };
        let (dial, shown) = (Some(dial), "postgres:".to_owned());
        Self {
            config: Config::new(),
            trust,
            connect_timeout: CONNECT_TIMEOUT,
            dial,
            display_url: shown,
        }
    }
}

/// Options that the driver does not support, or supports only in part: we handle them.
const HANDLED_OPTIONS: &[&str] = &[
    "sslmode",
    "sslrootcert",
    "sslcert",
    "sslkey",
    "passfile",
    "connect_timeout",
    "target_session_attrs",
];

fn driver_config(base: &str, options: &[UrlOption<'_>]) -> Result<Config> {
    let texts: Vec<_> = options.iter().map(|option| option.text).collect();
    let url =
        if texts.is_empty() { base.to_owned() } else { format!("{base}?{}", texts.join("&")) };
    let mut config = Config::from_str(&url).map_err(|_| {
        let names = options.iter().map(|option| option.name);
        let names: Vec<_> = names.filter(|name| url_options::is_shown(name)).collect();
        let hint = match names[..] {
            [] => String::new(),
            _ => format!(" or one of its options ({})", names.join(", ")),
        };
        invalid(&format!(
            "the URL{hint} cannot be read: write postgres://USER@HOST:PORT/DATABASE?OPTION=VALUE, with %XX for special \
             characters"
        ))
    })?;
    if !options.iter().any(|option| option.name == "tcp_user_timeout") {
        config.tcp_user_timeout(TCP_USER_TIMEOUT);
    }
    Ok(config)
}

/// Fills in what the URL leaves out, from the environment.
fn complete(config: &mut Config, variable: &dyn Fn(&str) -> Option<String>) -> Result<()> {
    let ports = |text: &str| -> Result<Vec<u16>> {
        let parsed = text.split(',').map(|port| port.trim().parse());
        parsed.collect::<Result<_, _>>().map_err(|_| invalid("invalid PGPORT: give a port number"))
    };
    if config.get_hosts().is_empty() && config.get_hostaddrs().is_empty() {
        let hosts = variable("PGHOST").unwrap_or_else(|| {
            if Path::new(DEFAULT_SOCKET_DIR).is_dir() {
                DEFAULT_SOCKET_DIR.to_owned()
            } else {
                "localhost".to_owned()
            }
        });
        for host in hosts.split(',') {
            config.host(host.trim());
        }
    }
    if config.get_ports().is_empty()
        && let Some(text) = variable("PGPORT")
    {
        for port in ports(&text)? {
            config.port(port);
        }
    }
    if config.get_user().is_none()
        && let Some(user) = variable("PGUSER")
    {
        config.user(user);
    }
    if config.get_password().is_none()
        && let Some(password) = variable("PGPASSWORD")
    {
        config.password(password);
    }
    if config.get_dbname().is_none()
        && let Some(name) = variable("PGDATABASE")
    {
        config.dbname(name);
    }
    if config.get_options().is_none()
        && let Some(options) = variable("PGOPTIONS")
    {
        config.options(options);
    }
    if config.get_application_name().is_none() {
        config.application_name(variable("PGAPPNAME").as_deref().unwrap_or("tenure"));
    }
    Ok(())
}

fn trust(
    option: &dyn Fn(&str, &str) -> Option<String>,
    config: &Config,
    variable: &dyn Fn(&str) -> Option<String>,
) -> Result<Trust> {
    let home = |name: &str| {
        let home = variable("HOME")?;
        Some(Path::new(&home).join(".postgresql").join(name)).filter(|path| path.is_file())
    };
    let given = option("sslrootcert", "PGSSLROOTCERT");
    let system = given.as_deref() == Some("system");
    let roots = match given {
        Some(_) if system => None,
        Some(path) => Some(PathBuf::from(path)),
        None => home("root.crt"),
    };
    let mode = option("sslmode", "PGSSLMODE");
    let verify = match mode.as_deref() {
        None if system => Verify::Full,
        Some("disable") => Verify::Off,
        // libpq's `allow` tries without encryption first. That protects no more than `prefer`, so they are the same
        // here.
        None | Some("allow" | "prefer") => Verify::Prefer,
        Some("require") if roots.is_some() => Verify::Ca,
        Some("require") => Verify::Encrypt,
        Some("verify-ca") => Verify::Ca,
        Some("verify-full") => Verify::Full,
        Some(_) => {
            return Err(invalid(
                "invalid sslmode; supported: disable, allow, prefer, require, verify-ca, verify-full",
            ));
        }
    };
    let local = !config.get_hosts().is_empty()
        && config.get_hosts().iter().all(|host| !matches!(host, Host::Tcp(_)));
    let verify = if local { Verify::Off } else { verify };
    let certificate = option("sslcert", "PGSSLCERT").map(PathBuf::from);
    let key = option("sslkey", "PGSSLKEY").map(PathBuf::from);
    let certificate = certificate.or_else(|| home("postgresql.crt"));
    let key = key.or_else(|| home("postgresql.key"));
    if certificate.is_some() != key.is_some() && verify != Verify::Off {
        return Err(invalid("only one of sslcert and sslkey is given: give both or neither"));
    }
    Ok(Trust { verify, roots, client: certificate.zip(key) })
}

fn session(config: &mut Config, attributes: Option<&str>) -> Result<()> {
    let several = config.get_hosts().len().max(config.get_hostaddrs().len()) > 1;
    config.target_session_attrs(match attributes {
        // Of several servers, the writable one.
        None if several => TargetSessionAttrs::ReadWrite,
        None | Some("any" | "prefer-standby") => TargetSessionAttrs::Any,
        Some("read-write" | "primary") => TargetSessionAttrs::ReadWrite,
        Some(_) => {
            return Err(invalid(
                "target_session_attrs selects a read-only server: locks need a writable server (read-write)",
            ));
        }
    });
    Ok(())
}

/// Password for this server in the `.pgpass` file. The file is ignored if other users may read it.
fn passfile(path: &Path, config: &Config) -> Option<String> {
    let metadata = std::fs::metadata(path).ok()?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        if metadata.permissions().mode() & 0o077 != 0 {
            tracing::warn!(name: "tenure.passfile_ignored", path = %path.display(), "other users may read it");
            return None;
        }
    }
    if !metadata.is_file() || metadata.len() > 1 << 20 {
        return None;
    }
    let text = std::fs::read_to_string(path).ok()?;
    let user = config.get_user()?;
    let database = config.get_dbname().unwrap_or(user);
    let hosts = config.get_hosts().iter().map(|host| match host {
        Host::Tcp(name) => name.clone(),
        #[cfg(unix)]
        Host::Unix(path) if path == Path::new(DEFAULT_SOCKET_DIR) => "localhost".to_owned(),
        #[cfg(unix)]
        Host::Unix(path) => path.display().to_string(),
    });
    let ports = config.get_ports();
    for (at, host) in hosts.enumerate() {
        let port = ports.get(at).or(ports.first()).copied().unwrap_or(5432).to_string();
        let found = text.lines().find_map(|line| matching(line, [&host, &port, database, user]));
        if found.is_some() {
            return found;
        }
    }
    None
}

/// Password of a line `host:port:database:user:password` if it matches; `*` matches anything and `\` escapes.
fn matching(line: &str, wanted: [&str; 4]) -> Option<String> {
    if line.starts_with('#') {
        return None;
    }
    let (mut fields, mut field, mut escaped) = (Vec::new(), String::new(), false);
    for c in line.chars() {
        match c {
            _ if std::mem::take(&mut escaped) => field.push(c),
            '\\' => escaped = true,
            ':' if fields.len() < wanted.len() => fields.push(std::mem::take(&mut field)),
            _ => field.push(c),
        }
    }
    let fits = fields.len() == wanted.len()
        && fields.iter().zip(wanted).all(|(field, wanted)| field == "*" || field == wanted);
    fits.then_some(field)
}

/// URL without the password.
fn display_url(config: &Config) -> String {
    let ports = config.get_ports();
    let mut hosts: Vec<_> = config
        .get_hosts()
        .iter()
        .map(|host| match host {
            Host::Tcp(name) => name.clone(),
            #[cfg(unix)]
            Host::Unix(path) => path.display().to_string().replace('/', "%2F"),
        })
        .collect();
    if hosts.is_empty() {
        hosts.extend(config.get_hostaddrs().iter().map(ToString::to_string));
    }
    let servers: Vec<_> = hosts
        .iter()
        .enumerate()
        .map(|(at, host)| match ports.get(at).or(ports.first()) {
            Some(port) => format!("{host}:{port}"),
            None => host.clone(),
        })
        .collect();
    let user = config.get_user().map(|user| format!("{user}@")).unwrap_or_default();
    let database = config.get_dbname().map(|name| format!("/{name}")).unwrap_or_default();
    format!("postgres://{user}{}{database}", servers.join(","))
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

impl Trust {
    fn mode(&self) -> SslMode {
        match self.verify {
            Verify::Off => SslMode::Disable,
            Verify::Prefer => SslMode::Prefer,
            Verify::Encrypt | Verify::Ca | Verify::Full => SslMode::Require,
        }
    }
}

mod conninfo;
mod invalid;
#[cfg(test)]
mod tests;
