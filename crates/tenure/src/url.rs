//! Opens the store that a URL names.

use std::collections::BTreeMap;
use std::fmt;
use std::pin::Pin;
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

/// Opens a store of another crate. The URL is the caller's, with its scheme.
type OpenStore = dyn Fn(String) -> OpeningStore + Send + Sync;

type OpeningStore = Pin<Box<dyn Future<Output = Result<Arc<dyn Store>>> + Send>>;

/// URL schemes of stores of other crates.
#[derive(Clone, Default)]
pub(crate) struct Schemes(BTreeMap<String, Arc<OpenStore>>);

impl Schemes {
    pub(crate) fn add<F, Opening>(&mut self, scheme: &str, open: F)
    where
        F: Fn(String) -> Opening + Send + Sync + 'static,
        Opening: Future<Output = Result<Arc<dyn Store>>> + Send + 'static,
    {
        let open = move |url| -> OpeningStore { Box::pin(open(url)) };
        self.0.insert(scheme.to_owned(), Arc::new(open));
    }

    /// Refuses a scheme that no URL can have, or that tenure uses itself, with or without its cargo feature.
    fn check(&self) -> Result<()> {
        let is_own =
            |scheme: &str| scheme == "memory" || SCHEME_FEATURES.iter().any(|own| own.0 == scheme);
        for scheme in self.0.keys() {
            let problem = match scheme.as_str() {
                scheme if scheme.contains(':') => {
                    "is not the scheme of a URL: write it without `:` or `://`"
                }
                scheme if !is_scheme(scheme) => {
                    "is not the scheme of a URL: register the store under another name"
                }
                scheme if scheme.contains(|c: char| c.is_ascii_uppercase()) => {
                    "is not in lower case: register the store under another name"
                }
                scheme if is_own(scheme) => {
                    "belongs to a store of tenure: register the store under another name"
                }
                _ => continue,
            };
            let message = format!("`{scheme}` {problem}");
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        Ok(())
    }
}

impl fmt::Debug for Schemes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

/// Opens the store at `url`. An error repeats only the scheme of the URL: the rest may contain a password.
pub(crate) async fn open(url: &str, schemes: &Schemes) -> Result<Arc<dyn Store>> {
    schemes.check()?;
    let Some((scheme, rest)) = url.split_once(':') else {
        return Err(invalid("the URL of the store has no scheme", schemes));
    };
    if let Some(open) = schemes.0.get(scheme) {
        return open(url.to_owned()).await;
    }
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
        _ if is_scheme(scheme) => Err(unknown_scheme(scheme, schemes)),
        _ => Err(invalid("the URL of the store does not begin with a scheme", schemes)),
    }
}

fn invalid(what: &str, schemes: &Schemes) -> Error {
    let own = SUPPORTED_URLS.iter().map(|url| (*url).to_owned());
    let added = schemes.0.keys().map(|scheme| format!("{scheme}:…"));
    let supported: Vec<String> = own.chain(added).collect();
    Error::new(ErrorKind::Invalid, format!("{what}; supported: {}", supported.join(", ")))
}

/// Returns the error for a scheme that this build does not support: names the missing cargo feature, if there is one.
fn unknown_scheme(scheme: &str, schemes: &Schemes) -> Error {
    if let Some((_, feature)) = SCHEME_FEATURES.iter().find(|(known, _)| *known == scheme) {
        let what = format!(
            "this build does not support the store `{scheme}`: enable the cargo feature `{feature}`"
        );
        return invalid(&what, schemes);
    }
    let known = invalid(&format!("unknown store `{scheme}`"), schemes);
    let message = format!("{known}; `ClientBuilder::scheme` adds stores of other crates");
    Error::new(ErrorKind::Invalid, message)
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
            let error = open(url, &Schemes::default()).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{url:?}");
            let message = error.to_string();
            assert!(message.contains(part), "{url:?}: {message}");
            assert!(!message.contains("hunter2"), "{url:?}: {message}");
        }
        let message = open("x:", &Schemes::default()).await.unwrap_err().to_string();
        assert!(message.contains("memory:[NAME]"), "{message}");
    }

    #[test]
    fn missing_cargo_feature_is_named() {
        let message = unknown_scheme("tenures", &Schemes::default()).to_string();
        assert!(message.contains("cargo feature `tls`"), "{message}");
    }

    #[tokio::test]
    async fn a_scheme_of_another_crate_opens_its_store() {
        let mut schemes = Schemes::default();
        schemes.add("pigeon+post", async |url: String| {
            assert_eq!(url, "pigeon+post://coop/?ring=7");
            Ok(Arc::new(MemoryStore::new()) as Arc<dyn Store>)
        });
        assert!(open("pigeon+post://coop/?ring=7", &schemes).await.is_ok());
        let message = open("owl://tower/", &schemes).await.unwrap_err().to_string();
        assert!(message.contains("pigeon+post:…; `ClientBuilder::scheme` adds"), "{message}");
    }

    #[tokio::test]
    async fn a_scheme_of_tenure_or_without_form_is_not_registered() {
        for (scheme, part) in [
            ("postgres", "belongs to a store of tenure"),
            ("memory", "belongs to a store of tenure"),
            ("pigeon://", "write it without `:` or `://`"),
            ("", "is not the scheme of a URL"),
            ("Postgres", "is not in lower case"),
        ] {
            let mut schemes = Schemes::default();
            schemes.add(scheme, async |_| Ok(Arc::new(MemoryStore::new()) as Arc<dyn Store>));
            let error = open("memory:", &schemes).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{scheme}");
            assert!(error.to_string().contains(part), "{error}");
        }
    }
}
