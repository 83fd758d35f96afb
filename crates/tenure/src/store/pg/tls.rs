//! TLS connections, verified as libpq's `sslmode` requires.

use std::fmt;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{
    CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName, UnixTime,
};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme,
    SupportedProtocolVersion,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream};
use tokio_rustls::client::TlsStream as Encrypted;
use tokio_rustls::{Connect, TlsConnector};

use super::channel_binding;
use super::login::{LoginPid, LoginReader};
use crate::{Error, ErrorKind, Result};

/// Trusted certificates and our own.
#[derive(Clone, Debug)]
pub(crate) struct Trust {
    pub(crate) verify: Verify,
    /// File of trusted root certificates; `None` for those of the system.
    pub(crate) roots: Option<PathBuf>,
    /// Files of our own certificate and its key.
    pub(crate) client: Option<(PathBuf, PathBuf)>,
    pub(crate) revocations: Revocations,
    /// Accepted versions of TLS.
    pub(crate) versions: &'static [&'static SupportedProtocolVersion],
    /// Sends the host name in the clear, so that a proxy can find the server.
    pub(crate) sni: bool,
}

/// Lists of revoked certificates. If there is any list, every certificate below a root needs one.
#[derive(Clone, Debug)]
pub(crate) struct Revocations {
    pub(crate) file: Option<PathBuf>,
    /// Folder whose files are all read.
    pub(crate) folder: Option<PathBuf>,
}

impl Revocations {
    fn read(&self) -> Result<Vec<CertificateRevocationListDer<'static>>> {
        let mut paths: Vec<_> = self.file.iter().cloned().collect();
        if let Some(folder) = &self.folder {
            let entries = std::fs::read_dir(folder).map_err(|error| unreadable(folder, error))?;
            for entry in entries {
                paths.push(entry.map_err(|error| unreadable(folder, error))?.path());
            }
        }
        let mut lists = Vec::new();
        for path in &paths {
            let read = CertificateRevocationListDer::pem_file_iter(path)
                .and_then(Iterator::collect::<Result<Vec<_>, _>>);
            lists.extend(read.map_err(|error| unreadable(path, error))?);
        }
        // An empty list of lists would revoke nothing, and so hide a wrong path. That of an empty folder as well.
        match (self.file.as_ref().or(self.folder.as_ref()), lists.is_empty()) {
            (Some(path), true) => {
                Err(failed(&format!("{} holds no list of revoked certificates", path.display())))
            }
            _ => Ok(lists),
        }
    }
}

/// Encryption and verification of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verify {
    /// No encryption.
    Off,
    /// Encrypted if the server supports it; not verified.
    Prefer,
    /// Encrypted; not verified.
    Encrypt,
    /// Encrypted; the certificate must be signed by a trusted root.
    Ca,
    /// As `Ca`, and the certificate must name the host.
    Full,
}

impl Trust {
    /// Builds the TLS connector. Reads the files every time, because certificates are renewed while the process runs.
    /// `login_pid` is set once the login was read on the encrypted stream.
    pub(super) fn connector(&self, login_pid: LoginPid) -> Result<Tls> {
        let provider = Arc::new(ring::default_provider());
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(self.versions)
            .map_err(|error| failed("no supported TLS version").because(error))?;
        let verifier: Arc<dyn ServerCertVerifier> = match self.verify {
            Verify::Off | Verify::Prefer | Verify::Encrypt => {
                Arc::new(AnyName { roots: None, provider })
            }
            Verify::Ca => Arc::new(AnyName { roots: Some(self.verifier(&provider)?), provider }),
            Verify::Full => self.verifier(&provider)?,
        };
        let builder = builder.dangerous().with_custom_certificate_verifier(verifier);
        let client = self.client.as_ref().filter(|_| self.verify != Verify::Off);
        let mut config = match client {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => {
                let key =
                    PrivateKeyDer::from_pem_file(key).map_err(|error| unreadable(key, error))?;
                builder
                    .with_client_auth_cert(certificates(certificate)?, key)
                    .map_err(|error| failed("sslcert and sslkey do not match").because(error))?
            }
        };
        config.alpn_protocols = vec![b"postgresql".to_vec()];
        config.enable_sni = self.sni;
        let connector = TlsConnector::from(Arc::new(config));
        Ok(Tls { connector, login_pid, progress: TlsProgress::default() })
    }

    fn verifier(&self, provider: &Arc<CryptoProvider>) -> Result<Arc<WebPkiServerVerifier>> {
        let mut roots = RootCertStore::empty();
        match &self.roots {
            Some(path) => {
                for certificate in certificates(path)? {
                    roots.add(certificate).map_err(|error| unreadable(path, error))?;
                }
            }
            None => {
                roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            }
        }
        WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider))
            .with_crls(self.revocations.read()?)
            .enforce_revocation_expiration()
            .build()
            .map_err(|error| {
                failed("no root certificate to verify the server: give sslrootcert").because(error)
            })
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read {
        Ok(found) if !found.is_empty() => Ok(found),
        Ok(_) => Err(failed(&format!("{} holds no certificate", path.display()))),
        Err(error) => Err(unreadable(path, error)),
    }
}

fn unreadable(path: &Path, error: impl std::error::Error + Send + Sync + 'static) -> Error {
    failed(&format!("cannot use {}", path.display())).because(error)
}

fn failed(what: &str) -> Error {
    Error::new(ErrorKind::Invalid, format!("postgres: {what}"))
}

/// Verifier that ignores the host name. With roots it accepts every certificate that a root signed. Without roots it
/// accepts every certificate, because `require` and `prefer` ask for encryption only.
#[derive(Debug)]
struct AnyName {
    roots: Option<Arc<WebPkiServerVerifier>>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for AnyName {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        use CertificateError::{NotValidForName, NotValidForNameContext};
        let Some(roots) = &self.roots else { return Ok(ServerCertVerified::assertion()) };
        // The chain is verified before the name, so an error about the name means that the chain is valid.
        match roots.verify_server_cert(certificate, between, name, ocsp, now) {
            Err(rustls::Error::InvalidCertificate(
                NotValidForName | NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            verdict => verdict,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let known = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signed, known)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let known = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signed, known)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// TLS connector, in the form that the driver needs.
#[derive(Clone)]
pub(super) struct Tls {
    connector: TlsConnector,
    login_pid: LoginPid,
    progress: TlsProgress,
}

/// Progress of a handshake, read after a login that failed.
#[derive(Clone, Debug, Default)]
pub(super) struct TlsProgress(Arc<(AtomicBool, AtomicBool)>);

impl TlsProgress {
    /// True if the server agreed to encryption, and the handshake failed.
    pub(super) fn has_failed(&self) -> bool {
        self.0.0.load(Ordering::Relaxed) && !self.is_encrypted()
    }

    /// True if the connection is encrypted.
    pub(super) fn is_encrypted(&self) -> bool {
        self.0.1.load(Ordering::Relaxed)
    }
}

impl Tls {
    pub(super) fn progress(&self) -> TlsProgress {
        self.progress.clone()
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> MakeTlsConnect<S> for Tls {
    type Stream = PgTlsStream<S>;
    type TlsConnect = ToHost;
    type Error = rustls::pki_types::InvalidDnsNameError;

    fn make_tls_connect(&mut self, host: &str) -> Result<ToHost, Self::Error> {
        let host = ServerName::try_from(host)?.to_owned();
        Ok(ToHost { tls: self.clone(), host })
    }
}

/// TLS connector for one host.
pub(super) struct ToHost {
    tls: Tls,
    host: ServerName<'static>,
}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> TlsConnect<S> for ToHost {
    type Stream = PgTlsStream<S>;
    type Error = std::io::Error;
    type Future = Handshake<S>;

    fn connect(self, stream: S) -> Handshake<S> {
        let Tls { connector, login_pid, progress } = self.tls;
        progress.0.0.store(true, Ordering::Relaxed);
        Handshake(connector.connect(self.host, stream), login_pid, progress)
    }
}

/// A TLS handshake in progress.
pub(super) struct Handshake<S>(Connect<S>, LoginPid, TlsProgress);

impl<S: AsyncRead + AsyncWrite + Unpin> Future for Handshake<S> {
    type Output = std::io::Result<PgTlsStream<S>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let handshake = Pin::new(&mut self.0).poll(context);
        handshake.map_ok(|stream| {
            self.2.0.1.store(true, Ordering::Relaxed);
            let login = LoginReader::decrypted(self.1.clone());
            PgTlsStream { stream, login }
        })
    }
}

/// An encrypted stream.
pub(super) struct PgTlsStream<S> {
    stream: Encrypted<S>,
    login: LoginReader,
}

impl<S: AsyncRead + AsyncWrite + Unpin> TlsStream for PgTlsStream<S> {
    fn channel_binding(&self) -> ChannelBinding {
        let certificates = self.stream.get_ref().1.peer_certificates().unwrap_or_default();
        match certificates.first().and_then(channel_binding::end_point) {
            Some(hash) => ChannelBinding::tls_server_end_point(hash),
            None => ChannelBinding::none(),
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for PgTlsStream<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let Self { stream, login } = self.get_mut();
        let before = into.filled().len();
        let read = Pin::new(stream).poll_read(context, into);
        login.read(&into.filled()[before..]);
        read
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for PgTlsStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls")
    }
}
