//! Options of the URL: cloud, bucket, prefix and polling intervals.

use std::fmt;
use std::time::Duration;

use tenure_core::object::ClockResolution;

use crate::store::url_options::{self, UrlOption};
use crate::{Error, ErrorKind, Result};

/// Options of the URL; `grain` is for tests.
const OPTIONS: &[&str] = &["account", "anonymous", "bell", "endpoint", "look", "poll", "region"];

/// Cloud that a bucket belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cloud {
    Google,
    Amazon,
    Azure,
}

/// A parsed URL. It contains no secrets: credentials are found in the same places as by the cloud's own tools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Options {
    pub(super) cloud: Cloud,
    pub(super) bucket: String,
    /// Empty, or with a slash at its end.
    pub(super) prefix: String,
    /// Interval at which an owner polls the bell.
    pub(super) bell: Duration,
    /// Interval at which a waiter polls the lock.
    pub(super) poll: Duration,
    /// Interval at which an owner also polls the record, for waiters that ring no bell.
    pub(super) record_poll: Option<Duration>,
    /// Resolution of the store's timestamps.
    pub(super) grain: ClockResolution,
    /// Address of the store, if it is not the cloud's own.
    pub(super) endpoint: Option<String>,
    pub(super) region: Option<String>,
    pub(super) account: Option<String>,
    /// True to send requests without credentials.
    pub(super) anonymous: bool,
}

impl Cloud {
    pub(super) fn scheme(self) -> &'static str {
        match self {
            Self::Google => "gs",
            Self::Amazon => "s3",
            Self::Azure => "az",
        }
    }
}

/// Shortest polling interval: a shorter one would only cost requests.
const MIN_POLL: Duration = Duration::from_millis(20);
const MAX_POLL: Duration = Duration::from_secs(3_600);

impl Options {
    /// Parses the part of a URL after `gs:`, `s3:` or `az:`.
    pub(super) fn parse(cloud: Cloud, rest: &str) -> Result<Self> {
        let rest = rest.strip_prefix("//").unwrap_or(rest);
        let (place, given) = url_options::split(rest);
        let (bucket, prefix) = place.split_once('/').unwrap_or((place, ""));
        let letter = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
        if bucket.is_empty() || bucket.len() > 222 || !bucket.bytes().all(letter) {
            return Err(invalid(
                cloud,
                &format!(
                    "write {}://BUCKET/PREFIX, where a bucket's name has only letters, digits, -, _ and .",
                    cloud.scheme()
                ),
            ));
        }
        let prefix = prefix.trim_end_matches('/');
        let valid = |part: &str| !matches!(part, "" | "." | "..");
        let forbidden = |c: char| c.is_control() || matches!(c, '#' | '[' | ']' | '*' | '?' | '\\');
        if !prefix.is_empty() && (!prefix.split('/').all(valid) || prefix.contains(forbidden)) {
            return Err(invalid(cloud, "a prefix is a path such as locks/nightly"));
        }
        if prefix.len() > 500 {
            return Err(invalid(cloud, "the prefix has more than 500 bytes"));
        }
        let mut options = Self {
            cloud,
            bucket: bucket.to_owned(),
            prefix: if prefix.is_empty() { String::new() } else { format!("{prefix}/") },
            bell: Duration::from_millis(500),
            poll: Duration::from_millis(250),
            record_poll: None,
            grain: ClockResolution::SECOND,
            endpoint: None,
            region: None,
            account: None,
            anonymous: false,
        };
        for option in given {
            options.set(option)?;
        }
        Ok(options)
    }

    fn set(&mut self, option: UrlOption<'_>) -> Result<()> {
        let UrlOption { name, value, .. } = option;
        let cloud = self.cloud;
        let span = || {
            let span = humantime::parse_duration(value).ok();
            span.filter(|span| (MIN_POLL..=MAX_POLL).contains(span)).ok_or_else(|| {
                invalid(cloud, &format!("{name} is a duration such as 500ms, from 20ms to 1h"))
            })
        };
        match name {
            "bell" => self.bell = span()?,
            "poll" => self.poll = span()?,
            "look" => self.record_poll = Some(span()?),
            "grain" => {
                let span = humantime::parse_duration(value).ok();
                let span = span.filter(|span| (Duration::from_millis(1)..=SECOND).contains(span));
                let span = span.ok_or_else(|| invalid(cloud, "grain is from 1ms to 1s"))?;
                self.grain = ClockResolution(span);
            }
            "endpoint" => {
                let url = value.trim_end_matches('/');
                if !url.starts_with("http://") && !url.starts_with("https://")
                    || url.contains(['@', '#'])
                {
                    return Err(invalid(cloud, "endpoint is http://HOST:PORT or https://HOST"));
                }
                self.endpoint = Some(url.to_owned());
            }
            "region" => self.region = Some(value.to_owned()),
            "account" => self.account = Some(value.to_owned()),
            "anonymous" => self.anonymous = option.flag()?,
            _ => return Err(option.unknown("an object store", OPTIONS)),
        }
        Ok(())
    }
}

const SECOND: Duration = Duration::from_secs(1);

/// Value of the first of these environment variables that is not empty.
pub(super) fn variable(names: &[&str]) -> Option<String> {
    names.iter().find_map(|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
}

impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let prefix = self.prefix.trim_end_matches('/');
        let slash = if prefix.is_empty() { "" } else { "/" };
        write!(f, "{}://{}{slash}{prefix}", self.cloud.scheme(), self.bucket)
    }
}

fn invalid(cloud: Cloud, what: &str) -> Error {
    let message = format!("invalid URL of an object store ({}:): {what}", cloud.scheme());
    Error::new(ErrorKind::Invalid, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_name_bucket_prefix_and_options() {
        let options =
            Options::parse(Cloud::Google, "//b/locks/x/?bell=2s&poll=1s&look=2s").unwrap();
        assert_eq!((&*options.bucket, &*options.prefix), ("b", "locks/x/"));
        assert_eq!((options.bell, options.poll), (SECOND * 2, SECOND));
        assert_eq!(options.record_poll, Some(SECOND * 2));
        assert_eq!(options.to_string(), "gs://b/locks/x");
        let options = Options::parse(Cloud::Amazon, "//b?endpoint=http://h:1/&region=eu").unwrap();
        assert_eq!(options.endpoint.as_deref(), Some("http://h:1"));
        assert_eq!((&*options.prefix, options.to_string()), ("", "s3://b".to_owned()));
    }

    #[test]
    fn invalid_options_are_refused() {
        for (url, part) in [
            ("//", "bucket's name"),
            ("//b c", "bucket's name"),
            ("//b/a//c", "path"),
            ("//b/../c", "path"),
            ("//b?poll=1ms", "poll"),
            ("//b?bell=soon", "bell"),
            ("//b?grain=2s", "grain"),
            ("//b?endpoint=ftp://x", "endpoint"),
            ("//b?endpoint=http://me:hunter2@h", "endpoint"),
            ("//b?hunter2=1", "options"),
        ] {
            let error = Options::parse(Cloud::Azure, url).unwrap_err().to_string();
            assert!(error.contains(part) && !error.contains("hunter2"), "{url}: {error}");
        }
    }
}
