//! TLS certificates: reads them and checks them before the server uses them.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use x509_parser::prelude::{FromDer as _, X509Certificate};

/// Files of a server's TLS identity.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// Certificate chain, as PEM.
    pub cert: PathBuf,
    /// Private key of the certificate, as PEM.
    pub key: PathBuf,
    /// Authorities that client certificates must be signed by; `None` if clients need no certificate.
    pub client_ca: Option<PathBuf>,
}

/// A certificate or key that cannot be used.
#[derive(Debug)]
pub struct TlsError {
    path: PathBuf,
    kind: TlsErrorKind,
}

#[derive(Debug)]
enum TlsErrorKind {
    Unreadable(pem::Error),
    Empty,
    NotACertificate,
    NotYet(String),
    Expired(String),
    Refused(Box<dyn std::error::Error + Send + Sync>),
}

impl fmt::Display for TlsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display();
        match &self.kind {
            TlsErrorKind::Unreadable(pem::Error::NoItemsFound) => {
                write!(f, "{path}: no certificate or key found: give a PEM file")
            }
            TlsErrorKind::Unreadable(_) => write!(f, "{path}: cannot be read as PEM"),
            TlsErrorKind::Empty => write!(f, "{path}: no certificate found: give a PEM file"),
            TlsErrorKind::NotACertificate => {
                write!(f, "{path}: the certificate cannot be parsed")
            }
            TlsErrorKind::NotYet(from) => {
                write!(f, "{path}: the certificate is not valid before {from}")
            }
            TlsErrorKind::Expired(until) => {
                write!(f, "{path}: the certificate expired on {until}: renew it")
            }
            TlsErrorKind::Refused(_) => write!(f, "{path}: cannot be used"),
        }
    }
}

impl std::error::Error for TlsError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.kind {
            TlsErrorKind::Unreadable(pem::Error::NoItemsFound) => None,
            TlsErrorKind::Unreadable(error) => Some(error),
            TlsErrorKind::Refused(error) => Some(&**error),
            _ => None,
        }
    }
}

/// TLS configuration of a server.
#[derive(Debug)]
pub struct TlsSetup {
    /// For [`Server::new`](crate::Server::new) or [`Handle::set_tls`](crate::Handle::set_tls).
    pub config: Arc<ServerConfig>,
    /// Remaining validity of the certificate.
    pub valid_for: Duration,
    /// True if it is the certificate of an authority. Many clients, tenure's included, reject such a certificate from a
    /// server.
    pub is_authority: bool,
}

impl TlsFiles {
    /// Reads and checks the files.
    ///
    /// # Errors
    ///
    /// A file is unreadable, has no certificate, or its certificate is expired or not yet valid; or the key belongs to
    /// another certificate.
    pub fn load(&self) -> Result<TlsSetup, TlsError> {
        let chain = certificates(&self.cert)?;
        let (valid_for, is_authority) = check_validity(&chain[0])
            .map_err(|why| TlsError { path: self.cert.clone(), kind: why })?;
        let key = PrivateKeyDer::from_pem_file(&self.key).map_err(|error| TlsError {
            path: self.key.clone(),
            kind: TlsErrorKind::Unreadable(error),
        })?;
        let refused = |path: &Path, error: Box<dyn std::error::Error + Send + Sync>| TlsError {
            path: path.to_owned(),
            kind: TlsErrorKind::Refused(error),
        };
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let versions = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| refused(&self.cert, error.into()))?;
        let verified = match &self.client_ca {
            None => versions.with_no_client_auth(),
            Some(path) => {
                let mut roots = RootCertStore::empty();
                for certificate in certificates(path)? {
                    roots.add(certificate).map_err(|error| refused(path, error.into()))?;
                }
                let verifier =
                    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                let verifier = verifier.build().map_err(|error| refused(path, error.into()))?;
                versions.with_client_cert_verifier(verifier)
            }
        };
        let config = verified
            .with_single_cert(chain, key)
            .map_err(|error| refused(&self.key, error.into()))?;
        Ok(TlsSetup { config: Arc::new(config), valid_for, is_authority })
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let failed = |why| TlsError { path: path.to_owned(), kind: why };
    let found =
        CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let found = found.map_err(|error| failed(TlsErrorKind::Unreadable(error)))?;
    if found.is_empty() { Err(failed(TlsErrorKind::Empty)) } else { Ok(found) }
}

/// Remaining validity of a certificate, and true if it belongs to an authority.
fn check_validity(certificate: &CertificateDer<'_>) -> Result<(Duration, bool), TlsErrorKind> {
    let Ok((_, parsed)) = X509Certificate::from_der(certificate) else {
        return Err(TlsErrorKind::NotACertificate);
    };
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let now = i64::try_from(since_1970.as_secs()).unwrap_or(i64::MAX);
    let validity = parsed.validity();
    if now < validity.not_before.timestamp() {
        return Err(TlsErrorKind::NotYet(validity.not_before.to_string()));
    }
    match u64::try_from(validity.not_after.timestamp() - now) {
        Ok(left) => Ok((Duration::from_secs(left), parsed.is_ca())),
        Err(_) => Err(TlsErrorKind::Expired(validity.not_after.to_string())),
    }
}
