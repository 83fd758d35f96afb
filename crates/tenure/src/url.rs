//! Opens the store that a URL names.

use std::sync::Arc;

use crate::store::Store;
#[cfg(all(unix, feature = "file"))]
use crate::store::file::FileStore;
use crate::store::memory::MemoryStore;
#[cfg(feature = "postgres")]
use crate::store::pg_advisory::PgAdvisoryStore;
#[cfg(feature = "postgres")]
use crate::store::pg_lease::PgLeaseStore;
#[cfg(feature = "server")]
use crate::store::server::LockServerStore;
use crate::{Error, ErrorKind, Result};

/// Forms of the URLs that this build supports, for error messages.
const SUPPORTED_URLS: &[&str] = &[
    #[cfg(feature = "object")]
    "az://CONTAINER/PREFIX",
    #[cfg(all(unix, feature = "file"))]
    "file:[PATH]",
    #[cfg(feature = "object")]
    "gs://BUCKET/PREFIX",
    "memory:[NAME]",
    #[cfg(feature = "nats")]
    "nats://HOST/BUCKET",
    #[cfg(feature = "postgres")]
    "postgres://[USER@HOST:PORT/DATABASE]",
    #[cfg(feature = "postgres")]
    "postgres+advisory://[USER@HOST:PORT/DATABASE]",
    #[cfg(feature = "object")]
    "s3://BUCKET/PREFIX",
    #[cfg(feature = "server")]
    "tenure://HOST:PORT",
    #[cfg(feature = "tls")]
    "tenures://HOST:PORT",
];

/// Cargo features that add stores, by URL scheme.
const SCHEME_FEATURES: &[(&str, &str)] = &[
    ("az", "object"),
    #[cfg(unix)]
    ("file", "file"),
    ("gs", "object"),
    ("nats", "nats"),
    ("postgres", "postgres"),
    ("postgres+advisory", "postgres"),
    ("postgresql", "postgres"),
    ("postgresql+advisory", "postgres"),
    ("s3", "object"),
    ("tenure", "server"),
    ("tenures", "tls"),
];

/// Opens the store at `url`. An error repeats only the scheme of the URL: the rest may contain a password.
#[cfg_attr(
    not(any(feature = "nats", feature = "server")),
    expect(clippy::unused_async, reason = "stores behind a network connect here")
)]
pub(crate) async fn open(url: &str) -> Result<Arc<dyn Store>> {
    let Some((scheme, rest)) = url.split_once(':') else {
        return Err(invalid("the URL of the store has no scheme"));
    };
    match scheme {
        #[cfg(all(unix, feature = "file"))]
        "file" => Ok(Arc::new(FileStore::parse(rest)?)),
        "memory" => Ok(Arc::new(MemoryStore::named(rest)?)),
        #[cfg(feature = "nats")]
        "nats" => Ok(Arc::new(crate::NatsStore::connect(url).await?)),
        #[cfg(feature = "object")]
        "az" | "gs" | "s3" => Ok(Arc::new(crate::BucketStore::open(url)?)),
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => Ok(Arc::new(PgLeaseStore::open(url)?)),
        #[cfg(feature = "postgres")]
        "postgres+advisory" | "postgresql+advisory" => Ok(Arc::new(PgAdvisoryStore::open(url)?)),
        #[cfg(feature = "server")]
        "tenure" => Ok(Arc::new(LockServerStore::open(false, rest).await?)),
        #[cfg(feature = "tls")]
        "tenures" => Ok(Arc::new(LockServerStore::open(true, rest).await?)),
        _ if is_scheme(scheme) => Err(unknown_scheme(scheme)),
        _ => Err(invalid("the URL of the store does not begin with a scheme")),
    }
}

fn invalid(what: &str) -> Error {
    Error::new(ErrorKind::Invalid, format!("{what}; supported: {}", SUPPORTED_URLS.join(", ")))
}

/// Returns the error for a scheme that this build does not support: names the missing cargo feature, if there is one.
fn unknown_scheme(scheme: &str) -> Error {
    match SCHEME_FEATURES.iter().find(|(known, _)| *known == scheme) {
        Some((_, feature)) => invalid(&format!(
            "this build does not support the store `{scheme}`: enable the cargo feature `{feature}`"
        )),
        None => invalid(&format!("unknown store `{scheme}`")),
    }
}

fn is_scheme(scheme: &str) -> bool {
    let rest = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'-' | b'.');
    scheme.len() <= 32
        && scheme.bytes().next().is_some_and(|b| b.is_ascii_alphabetic())
        && scheme.bytes().all(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn unknown_store_url_is_rejected_with_supported_schemes_and_without_secrets() {
        for (url, part) in [
            ("", "has no scheme"),
            ("localhost", "has no scheme"),
            ("carrier-pigeon://me:hunter2@coop/", "unknown store `carrier-pigeon`"),
            ("me:hunter2@host", "unknown store `me`"),
            ("hunter2 hunter2:", "does not begin with a scheme"),
            ("memory:a/b\n", "U+000A"),
        ] {
            let error = open(url).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{url:?}");
            let message = error.to_string();
            assert!(message.contains(part), "{url:?}: {message}");
            assert!(!message.contains("hunter2"), "{url:?}: {message}");
        }
        let message = open("x:").await.unwrap_err().to_string();
        assert!(message.contains("memory:[NAME]"), "{message}");
    }

    #[test]
    fn missing_cargo_feature_is_named() {
        let message = unknown_scheme("tenures").to_string();
        assert!(message.contains("cargo feature `tls`"), "{message}");
    }
}
