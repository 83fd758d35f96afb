//! Secrets and certificates.

use std::path::PathBuf;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tempfile::TempDir;
use tenure::{Client, ErrorKind};
use tenure_server::TlsFiles;

use crate::support::{SECRET, TestServer};

#[tokio::test]
async fn the_right_secret_is_let_in_and_none_is_ever_shown() {
    let server = TestServer::start(|setup| setup.secret = Some(SECRET));
    let client = server.client().await;
    assert!(client.lock("a").try_acquire().await.expect("let in").is_held());
    for wrong in ["wrong-secret", ""] {
        let url = format!("tenure://:{wrong}@{}", server.address);
        let error = Client::connect(&url).await.expect_err("not let in");
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        assert!(!format!("{error} {error:?}").contains("wrong-secret"), "{error:?}");
        assert!(error.to_string().contains("TENURE_AUTH_TOKEN"), "{error}");
    }
    assert!(!format!("{client:?} {}", client.store()).contains("secret"));
    // A secret that the server does not require does no harm.
    let open = TestServer::start(|_| {});
    let url = format!("tenure://:wrong-secret@{}", open.address);
    Client::connect(&url).await.expect("let in");
}

/// An authority, and certificates of it, as files.
struct Papers {
    folder: TempDir,
    authority: CertifiedIssuer<'static, KeyPair>,
}

impl Papers {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let own = KeyPair::generate().expect("randomness");
        let authority = CertifiedIssuer::self_signed(params, own).expect("good parameters");
        let papers = Self { folder: TempDir::new().expect("a folder"), authority };
        std::fs::write(papers.path("ca.pem"), papers.authority.pem()).expect("a file");
        papers
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A certificate for this host, and its key.
    fn issue(&self, name: &str) -> (PathBuf, PathBuf) {
        let key = KeyPair::generate().expect("randomness");
        let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).expect("a name");
        let certificate = params.signed_by(&key, &self.authority).expect("signed");
        let paths = (self.path(&format!("{name}.pem")), self.path(&format!("{name}.key")));
        std::fs::write(&paths.0, certificate.pem()).expect("a file");
        std::fs::write(&paths.1, key.serialize_pem()).expect("a file");
        paths
    }
}

#[tokio::test]
async fn tls_with_certificates_of_both() {
    let papers = Papers::new();
    let (cert, key) = papers.issue("server");
    let files = TlsFiles { cert, key, client_ca: Some(papers.path("ca.pem")) };
    let tls = files.load().expect("good certificates");
    let server = TestServer::start(|setup| setup.tls = Some(tls));
    let (cert, key) = papers.issue("client");
    let ca = papers.path("ca.pem");
    let url = server.url();
    let trusting = format!("{url}?ca={}", ca.display());
    let known = format!("{trusting}&cert={}&key={}", cert.display(), key.display());
    let client = Client::connect(&known).await.expect("let in");
    let guard = client.lock("a").acquire().await.expect("free");
    let other = Client::connect(&known).await.expect("let in");
    assert_eq!(other.inspect("a").await.expect("shown").holders.len(), 1);
    guard.release().await.expect("released");

    let stranger = Client::connect(&trusting).await.expect_err("no certificate");
    assert!(matches!(stranger.kind(), ErrorKind::Denied | ErrorKind::Unavailable), "{stranger}");
    let others = Papers::new();
    let elsewhere = format!("{url}?ca={}", others.path("ca.pem").display());
    let error = Client::connect(&elsewhere).await.expect_err("another authority");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    let clear = url.replace("tenures", "tenure");
    let error = Client::connect(&clear).await.expect_err("not in the clear");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let missing = format!("{url}?ca={}", papers.path("none.pem").display());
    let error = Client::connect(&missing).await.expect_err("no file");
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
}
