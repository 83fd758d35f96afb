//! Options of the URL: servers, credentials, bucket and its settings.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use tenure_core::escape::Escape;

use crate::store::url_options::{self, UrlOption};
use crate::{Error, ErrorKind, Result};

/// Options of the URL.
const OPTIONS: &[&str] =
    &["ca", "cert", "creds", "fair", "form", "key", "monitor", "nkey", "replicas", "tls", "ttl"];
/// Bucket of a URL that names none.
const DEFAULT_BUCKET: &str = "tenure";
const DEFAULT_PORT: u16 = 4222;
/// Default monitoring port of servers.
const MONITOR_PORT: u16 = 8222;

/// A parsed URL. `Debug` and `Display` hide its secrets.
#[derive(Clone, Default)]
pub(super) struct Options {
    /// `host:port`, one or several.
    pub(super) servers: Vec<String>,
    pub(super) bucket: String,
    pub(super) layout: Option<RequestedLayout>,
    pub(super) replicas: Option<usize>,
    pub(super) ttl: Option<Duration>,
    /// Every claim waits in order of arrival.
    pub(super) fair: bool,
    pub(super) credentials: Credentials,
    pub(super) tls: bool,
    pub(super) ca: Option<PathBuf>,
    /// Files of the client certificate and its key.
    pub(super) certificate: Option<(PathBuf, PathBuf)>,
    /// `host:port` of monitoring ports.
    pub(super) monitors: Vec<String>,
}

/// Layout that the URL requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestedLayout {
    Native,
    Nlock,
}

/// Credentials for the server.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) enum Credentials {
    #[default]
    None,
    Token(String),
    User(String, String),
    /// A file with an nkey seed.
    Nkey(PathBuf),
    /// A `.creds` file.
    File(PathBuf),
}

impl Options {
    /// Parses the part of a URL after `nats:`. `fallback` is the value of `$NATS_URL`, for a URL that names no server.
    pub(super) fn parse(rest: &str, fallback: Option<&str>) -> Result<Self> {
        let rest = rest.strip_prefix("//").unwrap_or(rest);
        let (location, given) = url_options::split(rest);
        let (authority, bucket) = match location.rsplit_once('/') {
            Some((authority, bucket)) => (authority, bucket),
            None => (location, ""),
        };
        let mut options = Self {
            bucket: checked_bucket(non_empty_or(bucket, DEFAULT_BUCKET))?,
            ..Self::default()
        };
        options.parse_authority(authority)?;
        if options.servers.is_empty() {
            options.parse_fallback(fallback.unwrap_or_default())?;
        }
        let mut client_files = (None, None);
        for option in given {
            options.set_option(option, &mut client_files)?;
        }
        options.certificate = match client_files {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            _ => return Err(invalid("only one of cert and key is given: give both or neither")),
        };
        Ok(options)
    }

    /// Parses `[user:password@|token@]host[:port],…`. The first credentials apply to all servers.
    fn parse_authority(&mut self, authority: &str) -> Result<()> {
        for server in authority.split(',').map(str::trim).filter(|server| !server.is_empty()) {
            let host = match server.rsplit_once('@') {
                None => server,
                Some((credentials, host)) => {
                    if self.credentials == Credentials::None {
                        self.credentials = match credentials.split_once(':') {
                            Some((user, password)) => {
                                Credentials::User(decode(user)?, decode(password)?)
                            }
                            None => Credentials::Token(decode(credentials)?),
                        };
                    }
                    host
                }
            };
            self.servers.push(parse_address(host, DEFAULT_PORT)?);
        }
        Ok(())
    }

    /// Parses `$NATS_URL` as other NATS programs do; this host if it is empty.
    fn parse_fallback(&mut self, urls: &str) -> Result<()> {
        for url in urls.split(',').filter(|url| !url.trim().is_empty()) {
            let (scheme, rest) = url.trim().split_once("://").unwrap_or(("nats", url.trim()));
            self.tls |= scheme == "tls";
            self.parse_authority(rest.trim_end_matches('/'))?;
        }
        if self.servers.is_empty() {
            self.servers.push(format!("127.0.0.1:{DEFAULT_PORT}"));
        }
        Ok(())
    }

    fn set_option(
        &mut self,
        option: UrlOption<'_>,
        client_files: &mut (Option<PathBuf>, Option<PathBuf>),
    ) -> Result<()> {
        let value = &*option.decoded()?;
        match option.name {
            "form" => {
                self.layout = Some(match value {
                    "nlock" => RequestedLayout::Nlock,
                    "tenure" => RequestedLayout::Native,
                    _ => return Err(invalid("form is nlock or tenure")),
                });
            }
            "replicas" => {
                let number = value.parse().ok().filter(|number| (1..=5).contains(number));
                self.replicas = Some(number.ok_or_else(|| invalid("replicas is 1 to 5"))?);
            }
            "ttl" => {
                let ttl = humantime::parse_duration(value).ok().filter(|ttl| !ttl.is_zero());
                self.ttl = Some(ttl.ok_or_else(|| invalid("ttl is a duration such as 30s"))?);
            }
            "creds" => self.credentials = Credentials::File(value.into()),
            "nkey" => self.credentials = Credentials::Nkey(value.into()),
            "tls" => self.tls = option.flag()?,
            "fair" => self.fair = option.flag()?,
            "monitor" => {
                let hosts = value.split(',').map(str::trim).filter(|host| !host.is_empty());
                self.monitors =
                    hosts.map(|host| parse_address(host, MONITOR_PORT)).collect::<Result<_>>()?;
            }
            "ca" => self.ca = Some(value.into()),
            "cert" => client_files.0 = Some(value.into()),
            "key" => client_files.1 = Some(value.into()),
            _ => return Err(option.unknown("a NATS store", OPTIONS)),
        }
        Ok(())
    }
}

impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "nats://{}/{}", self.servers.join(","), self.bucket)
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Parses a host with an optional port.
fn parse_address(host: &str, default_port: u16) -> Result<String> {
    // The colon before a port comes after the brackets of an IPv6 address, which contain other colons.
    let port_part = host.rsplit_once(']').map_or(host, |(_, after)| after);
    let valid = |c: char| c.is_ascii_alphanumeric() || "-._:[]".contains(c);
    if host.is_empty() || !host.chars().all(valid) {
        return Err(invalid("a server is HOST or HOST:PORT"));
    }
    Ok(if port_part.contains(':') { host.to_owned() } else { format!("{host}:{default_port}") })
}

fn non_empty_or<'a>(text: &'a str, default: &'a str) -> &'a str {
    if text.is_empty() { default } else { text }
}

fn checked_bucket(bucket: &str) -> Result<String> {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_');
    if !bucket.bytes().all(allowed) || bucket.len() > 200 {
        return Err(invalid("a bucket's name has letters, digits, - and _"));
    }
    Ok(bucket.to_owned())
}

/// Decodes percent-encoding, which passwords in URLs need.
fn decode(text: &str) -> Result<String> {
    let bytes = Escape::PERCENT.decode(text);
    let bytes = bytes.ok_or_else(|| invalid("% is followed by two hexadecimal digits"))?;
    String::from_utf8(bytes).map_err(|_| invalid("percent-encoded text must be UTF-8"))
}

/// Error for a bad URL. The message repeats nothing of the URL, which may contain a password.
fn invalid(what: &str) -> Error {
    let message = format!("invalid URL of a NATS store: {what}");
    Error::new(ErrorKind::Invalid, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_name_servers_bucket_and_options() {
        let options =
            Options::parse("//h1,h2:4223,[::1]/locks?replicas=3&ttl=30s&form=nlock", None).unwrap();
        assert_eq!(options.servers, ["h1:4222", "h2:4223", "[::1]:4222"]);
        assert_eq!((&*options.bucket, options.replicas), ("locks", Some(3)));
        assert_eq!(
            (options.ttl, options.layout),
            (Some(Duration::from_secs(30)), Some(RequestedLayout::Nlock))
        );
        assert_eq!(options.to_string(), "nats://h1:4222,h2:4223,[::1]:4222/locks");
        let options = Options::parse("//h/b?monitor=h,[::1]:1", None).unwrap();
        assert_eq!(options.monitors, ["h:8222", "[::1]:1"]);
    }

    #[test]
    fn without_a_server_the_environment_is_used_and_then_this_host() {
        let options = Options::parse("", None).unwrap();
        assert_eq!(options.to_string(), "nats://127.0.0.1:4222/tenure");
        let options = Options::parse("///b", Some("tls://me:pw@a,nats://b:1")).unwrap();
        assert_eq!(options.to_string(), "nats://a:4222,b:1/b");
        assert!(options.tls && options.credentials == Credentials::User("me".into(), "pw".into()));
    }

    #[test]
    fn credentials_are_taken_as_nats_users_write_them_and_never_shown() {
        let parse = |url| Options::parse(url, None).unwrap();
        let options = parse("//me:hunt%40er2@h/b");
        assert!(options.credentials == Credentials::User("me".into(), "hunt@er2".into()));
        assert!(parse("//hunter2@h/b").credentials == Credentials::Token("hunter2".into()));
        assert!(
            parse("//h/b?creds=/etc/a.creds").credentials
                == Credentials::File("/etc/a.creds".into())
        );
        for shown in [options.to_string(), format!("{options:?}")] {
            assert!(!shown.contains("er2") && !shown.contains("me"), "{shown}");
        }
    }

    #[test]
    fn invalid_urls_are_refused_without_secrets() {
        for (url, part) in [
            ("//me:hunter2@h/b?replicas=9", "1 to 5"),
            ("//me:hunter2@h/b?ttl=soon", "duration"),
            ("//me:hunter2@h/b?hunter2=1", "options"),
            ("//me:hunter2@h/b?form=zk", "nlock or tenure"),
            ("//me:hunter2@h/b.c", "letters"),
            ("//me:hunter2%zz@h/b", "hexadecimal"),
            ("//me:hunter2@/b", "HOST"),
            ("//h/b?cert=x", "both or neither"),
            ("//h/b?fair=perhaps", "true or false"),
            ("//h/b?monitor=http://hunter2/", "HOST"),
        ] {
            let error = Options::parse(url, None).unwrap_err().to_string();
            assert!(error.contains(part) && !error.contains("hunter2"), "{url}: {error}");
        }
    }
}
