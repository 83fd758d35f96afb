//! TLS: trusted authorities, and the client certificate.

use std::io;
use std::path::Path;
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto};

use super::options::Options;
use crate::{Error, ErrorKind, Result};

pub(super) fn connector(options: &Options) -> Result<TlsConnector> {
    let roots = roots(options.ca.as_deref())?;
    let provider = Arc::new(crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| invalid("cannot set up TLS").because(error))?
        .with_root_certificates(roots);
    let config = match (&options.cert, &options.key) {
        (Some(cert), Some(key)) => {
            let chain = certificates(cert)?;
            let own = PrivateKeyDer::from_pem_file(key).map_err(|error| {
                invalid(&format!("cannot read a private key from {}", key.display())).because(error)
            })?;
            config.with_client_auth_cert(chain, own).map_err(|error| {
                invalid(&format!("cannot use the certificate in {}", cert.display())).because(error)
            })?
        }
        _ => config.with_no_client_auth(),
    };
    Ok(TlsConnector::from(Arc::new(config)))
}

/// Certificate authorities from the file, or else those of the system.
fn roots(ca: Option<&Path>) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    if let Some(path) = ca {
        for certificate in certificates(path)? {
            roots.add(certificate).map_err(|error| {
                invalid(&format!("{} is not a certificate of an authority", path.display()))
                    .because(error)
            })?;
        }
    } else {
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if roots.is_empty() {
            return Err(invalid("this system has no trusted authorities: name one with ?ca=FILE"));
        }
    }
    Ok(roots)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let unreadable = || invalid(&format!("cannot read a certificate from {}", path.display()));
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<_>);
    let read: Vec<_> = read.map_err(|error| unreadable().because(error))?;
    if read.is_empty() { Err(unreadable()) } else { Ok(read) }
}

pub(super) async fn handshake(
    connector: &TlsConnector,
    host: &str,
    stream: TcpStream,
) -> Result<TlsStream<TcpStream>> {
    let name = ServerName::try_from(host.to_owned())
        .map_err(|error| invalid("the host name is not valid in a certificate").because(error))?;
    connector.connect(name, stream).await.map_err(|error| {
        let (kind, message) = if error.kind() == io::ErrorKind::InvalidData {
            let message = "the TLS handshake failed: the server's certificate must be for this host, must not be that of an authority, \
                 and must be signed by a trusted authority (?ca=FILE)";
            (ErrorKind::Denied, message)
        } else {
            let message = "the server closed the connection during the TLS handshake: does it speak TLS?";
            (ErrorKind::Unavailable, message)
        };
        Error::new(kind, message).because(error)
    })
}

fn invalid(message: &str) -> Error {
    Error::new(ErrorKind::Invalid, message)
}
