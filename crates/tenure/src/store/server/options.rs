//! Options in the URL of a lock server.

use std::fmt;
use std::path::PathBuf;

use tenure_core::escape::Escape;

use crate::store::url_options::{self, UrlOption};
use crate::{Error, ErrorKind, Result};

/// Options of the URL.
const OPTIONS: &[&str] = &["auth_token_file", "ca", "cert", "fencing", "key"];
/// Default port.
const DEFAULT_PORT: u16 = 6388;
/// Maximum number of addresses of one server.
const MAX_ADDRESSES: usize = 8;
/// Longest auth token that the protocol allows.
const MAX_SECRET: usize = 65_536;
/// Environment variable of the auth token, used if the URL gives none.
const TOKEN_VARIABLE: &str = "TENURE_AUTH_TOKEN";

/// Addresses of a server and the settings of connections to it. `Display` is its URL without secrets.
#[derive(Clone, Debug)]
pub(super) struct Options {
    pub(super) addresses: Vec<Address>,
    pub(super) tls: bool,
    pub(super) secret: Option<Secret>,
    pub(super) auth_token_file: Option<PathBuf>,
    pub(super) ca: Option<PathBuf>,
    pub(super) cert: Option<PathBuf>,
    pub(super) key: Option<PathBuf>,
    /// The URL declares that the server's tokens grow with every grant, as they do in dflockd 2.1 and newer.
    pub(super) ordered_tokens: bool,
}

/// A host name or IP address, and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) host: String,
    pub(super) port: u16,
}

/// Auth token. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Secret(pub(super) Vec<u8>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.tls { "tenures://" } else { "tenure://" })?;
        for (n, address) in self.addresses.iter().enumerate() {
            write!(f, "{}{address}", if n == 0 { "" } else { "," })?;
        }
        let files = [
            ("auth_token_file", &self.auth_token_file),
            ("ca", &self.ca),
            ("cert", &self.cert),
            ("key", &self.key),
        ];
        let given = files.iter().filter_map(|(name, path)| Some((name, path.as_ref()?)));
        let given = given.map(|(name, path)| (*name, encoded(&path.to_string_lossy())));
        let ordered = self.ordered_tokens.then(|| ("fencing", "ordered".to_owned()));
        for (n, (name, value)) in given.chain(ordered).enumerate() {
            write!(f, "{}{name}={value}", if n == 0 { '?' } else { '&' })?;
        }
        Ok(())
    }
}

impl Options {
    /// Parses the URL after its scheme. `environment` returns the values of environment variables.
    pub(super) fn parse(
        tls: bool,
        rest: &str,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<Self> {
        let rest = rest.strip_prefix("//").ok_or_else(|| {
            invalid("the URL of a lock server has no host: write tenure://HOST:PORT")
        })?;
        let (place, given) = url_options::split(rest);
        let (user, hosts) = place.rsplit_once('@').map_or((None, place), |(u, h)| (Some(u), h));
        let hosts = hosts.strip_suffix('/').unwrap_or(hosts);
        let addresses = hosts.split(',').map(Address::parse).collect::<Result<Vec<_>>>()?;
        if addresses.len() > MAX_ADDRESSES {
            return Err(invalid("the URL of a lock server has too many addresses: give at most 8"));
        }
        let mut options = Self {
            addresses,
            tls,
            secret: None,
            auth_token_file: None,
            ca: None,
            cert: None,
            key: None,
            ordered_tokens: false,
        };
        options.read(given)?;
        let password = user.map(|user| user.split_once(':').map_or(user, |(_, secret)| secret));
        let password = password.map(decoded).transpose()?.filter(|secret| !secret.is_empty());
        options.secret = match (password, &options.auth_token_file) {
            (Some(_), Some(_)) => {
                return Err(invalid(
                    "the URL has both a password and auth_token_file: give one of them",
                ));
            }
            (Some(password), None) => Some(Secret::checked(&password)?),
            (None, Some(path)) => Some(Secret::read(path)?),
            (None, None) => environment(TOKEN_VARIABLE)
                .filter(|secret| !secret.trim().is_empty())
                .map(|secret| Secret::checked(secret.as_bytes()))
                .transpose()?,
        };
        Ok(options)
    }

    fn read<'a>(&mut self, options: impl Iterator<Item = UrlOption<'a>>) -> Result<()> {
        for option in options {
            let UrlOption { name, value, .. } = option;
            let slot = match name {
                "fencing" if value == "ordered" && !self.ordered_tokens => {
                    self.ordered_tokens = true;
                    continue;
                }
                "fencing" => {
                    return Err(invalid(
                        "the option fencing takes one value, once: fencing=ordered, which declares a server of dflockd 2.1 or newer",
                    ));
                }
                "auth_token_file" => &mut self.auth_token_file,
                "ca" if self.tls => &mut self.ca,
                "cert" if self.tls => &mut self.cert,
                "key" if self.tls => &mut self.key,
                "ca" | "cert" | "key" => {
                    let message = format!("the option {name} is for TLS: write tenures://");
                    return Err(invalid(&message));
                }
                _ => return Err(option.unknown("a lock server", OPTIONS)),
            };
            let path = option.decoded()?;
            if path.is_empty() || slot.is_some() {
                return Err(invalid(&format!("the option {name} takes one file, once")));
            }
            *slot = Some(path.into());
        }
        if self.cert.is_some() != self.key.is_some() {
            return Err(invalid("only one of cert and key is given: give both or neither"));
        }
        Ok(())
    }
}

impl Address {
    fn parse(text: &str) -> Result<Self> {
        let bad =
            || invalid("invalid URL of a lock server: write tenure://HOST or tenure://HOST:PORT");
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (host, rest) = rest.split_once(']').ok_or_else(bad)?;
                host.parse::<std::net::Ipv6Addr>().map_err(|_| bad())?;
                (host, rest.strip_prefix(':').or((rest.is_empty()).then_some("")))
            }
            None => match text.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (text, Some("")),
            },
        };
        let port = match port.ok_or_else(bad)? {
            "" => DEFAULT_PORT,
            port => port.parse().ok().filter(|port| *port != 0).ok_or_else(bad)?,
        };
        let named = |c: char| c.is_alphanumeric() || matches!(c, '.' | '-' | '_' | ':');
        if host.is_empty() || host.len() > 253 || !host.chars().all(named) {
            return Err(bad());
        }
        Ok(Self { host: host.to_owned(), port })
    }
}

impl Secret {
    fn read(path: &PathBuf) -> Result<Self> {
        let text = std::fs::read(path).map_err(|error| {
            let message = format!("cannot read the token in {}", path.display());
            Error::new(ErrorKind::Invalid, message).because(error)
        })?;
        Self::checked(&text)
    }

    /// Trims blanks, and refuses line breaks, which the protocol cannot send.
    fn checked(secret: &[u8]) -> Result<Self> {
        let secret = secret.trim_ascii();
        if secret.is_empty() || secret.len() > MAX_SECRET || secret.contains(&b'\n') {
            return Err(invalid("the auth token must be one line of 1 to 65536 bytes"));
        }
        Ok(Self(secret.to_vec()))
    }
}

fn invalid(message: &str) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

/// Decodes `%XX`. An error does not quote the text: it may be part of a secret.
fn decoded(text: &str) -> Result<Vec<u8>> {
    let bytes = Escape::PERCENT.decode(text);
    bytes.ok_or_else(|| invalid("the URL has a % that two hexadecimal digits do not follow"))
}

fn encoded(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/:@".contains(&byte);
    Escape::PERCENT.encode(text.as_bytes(), is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(tls: bool, rest: &str) -> Result<Options> {
        Options::parse(tls, rest, |_| None)
    }

    #[test]
    fn addresses_are_read_and_shown() {
        for (rest, shown) in [
            ("//localhost", "tenure://localhost:6388"),
            ("//localhost:7000/", "tenure://localhost:7000"),
            ("//[::1]:7000,b", "tenure://[::1]:7000,b:6388"),
            ("//[::1]", "tenure://[::1]:6388"),
        ] {
            assert_eq!(parse(false, rest).unwrap().to_string(), shown, "{rest}");
        }
        for rest in ["", "localhost", "//", "//:7000", "//a:0", "//a:b", "//[::1", "//[x]", "//a,"]
        {
            assert_eq!(parse(false, rest).unwrap_err().kind(), ErrorKind::Invalid, "{rest}");
        }
    }

    #[test]
    fn secrets_are_read_and_never_shown() {
        for rest in ["//:hun%2Fter2@h", "//me:hun%2Fter2@h", "//hun%2Fter2@h"] {
            let options = parse(false, rest).unwrap();
            assert_eq!(options.secret, Some(Secret(b"hun/ter2".to_vec())), "{rest}");
            assert!(!format!("{options} {options:?}").contains("ter2"));
        }
        let by_variable = Options::parse(false, "//h", |name| {
            (name == "TENURE_AUTH_TOKEN").then(|| " hunter2\n".to_owned())
        });
        assert_eq!(by_variable.unwrap().secret, Some(Secret(b"hunter2".to_vec())));
        for rest in [
            "//:hunter2%0@h",
            "//:hunter2@h/x",
            "//:hunter2@h?no=hunter2",
            "//:hunter2@h?ca=hunter2",
        ] {
            let error = parse(false, rest).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn options_are_known_by_name() {
        let options = parse(true, "//h?ca=/a%20b&cert=c&key=d").unwrap();
        assert_eq!(options.to_string(), "tenures://h:6388?ca=/a%20b&cert=c&key=d");
        for (rest, shown) in [
            ("//h?fencing=ordered", "tenures://h:6388?fencing=ordered"),
            ("//h?fencing=ordered&ca=a", "tenures://h:6388?ca=a&fencing=ordered"),
        ] {
            let options = parse(true, rest).unwrap();
            assert!(options.ordered_tokens);
            assert_eq!(options.to_string(), shown);
        }
        for (tls, rest, part) in [
            (true, "//h?colour=red", "\"colour\""),
            (false, "//h?ca=x", "tenures://"),
            (true, "//h?cert=x", "cert and key"),
            (true, "//h?ca=", "ca takes one file"),
            (false, "//h?fencing", "fencing=ordered"),
            (false, "//h?fencing=none", "fencing=ordered"),
            (false, "//h?fencing=Ordered", "fencing=ordered"),
            (false, "//h?fencing=ordered&fencing=ordered", "once"),
            (true, "//h?ca=a&ca=b", "ca takes one file"),
            (false, "//:x@h?auth_token_file=y", "give one of them"),
            (false, "//h?auth_token_file=/nonexistent/x", "/nonexistent/x"),
        ] {
            let error = parse(tls, rest).unwrap_err();
            assert!(error.to_string().contains(part), "{rest}: {error}");
        }
    }
}
