//! Certificates and credentials, as nats-server's own configuration has them.

use std::path::PathBuf;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use nkeys::KeyPair;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa};
use serde_json::{Value, json};
use tempfile::TempDir;
use tenure::{Client, Error, ErrorKind};

use crate::services;
use crate::support::{Server, connect, words};

/// Files of a test's own.
struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(TempDir::new().expect("a folder"))
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, text).expect("a file of the test's own");
        path
    }

    /// A server with this configuration.
    fn server(&self, program: &str, config: &str) -> Server {
        let path = self.write("server.conf", config);
        Server::with(program, &["--jetstream", "--config", path.to_str().expect("plain")])
    }
}

async fn refused(url: &str, kind: ErrorKind) -> Error {
    let error = match Client::connect(url).await {
        Err(error) => error,
        Ok(client) => panic!("{client:?} was let in"),
    };
    assert_eq!(error.kind(), kind, "{}", words(&error));
    error
}

async fn works(url: &str) {
    let client = connect(url).await;
    let guard = client.lock("a").acquire().await.expect("free");
    guard.release().await.expect("held");
}

/// An authority, and a certificate of it for `name` with its key.
fn papers(folder: &Folder, authority: &str, names: &[&str]) {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let own = rcgen::KeyPair::generate().expect("randomness");
    let issuer = CertifiedIssuer::self_signed(params, own).expect("good parameters");
    folder.write(&format!("{authority}.pem"), &issuer.pem());
    for name in names {
        let key = rcgen::KeyPair::generate().expect("randomness");
        let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).expect("a name");
        let certificate = params.signed_by(&key, &issuer).expect("signed");
        folder.write(&format!("{name}.pem"), &certificate.pem());
        folder.write(&format!("{name}.key"), &key.serialize_pem());
    }
}

#[tokio::test]
async fn tls_with_certificates_of_the_server_and_of_both() {
    let Some(program) = services::nats_server() else { return };
    let folder = Folder::new();
    papers(&folder, "ca", &["server", "client"]);
    papers(&folder, "other", &["stranger"]);
    let path = |name: &str| folder.0.path().join(name).display().to_string();
    let tls = |verify: bool| {
        format!(
            "tls {{ cert_file: {:?}, key_file: {:?}, ca_file: {:?}, verify: {verify}, timeout: 10 }}",
            path("server.pem"),
            path("server.key"),
            path("ca.pem")
        )
    };
    let server = folder.server(&program, &tls(false));
    let url = format!("{}/b", server.url());
    works(&format!("{url}?ca={}", path("ca.pem"))).await;
    works(&format!("{url}?tls=true&ca={}", path("ca.pem"))).await;
    for (query, part) in [
        (String::new(), "check tls, ca, cert and key"),
        (format!("?ca={}", path("other.pem")), "check tls, ca, cert and key"),
    ] {
        let error = refused(&format!("{url}{query}"), ErrorKind::Unavailable).await;
        assert!(words(&error).contains(part), "{query}: {}", words(&error));
    }
    let error = refused(&format!("{url}?ca={}", path("none.pem")), ErrorKind::Invalid).await;
    assert!(words(&error).contains("none.pem"), "{}", words(&error));
    drop(server);

    let server = folder.server(&program, &tls(true));
    let url = format!("{}/b?ca={}", server.url(), path("ca.pem"));
    works(&format!("{url}&cert={}&key={}", path("client.pem"), path("client.key"))).await;
    let stranger = format!("{url}&cert={}&key={}", path("stranger.pem"), path("stranger.key"));
    for url in [&url, &stranger] {
        let error = refused(url, ErrorKind::Unavailable).await;
        assert!(!words(&error).contains("is the server up"), "{}", words(&error));
    }
    drop(server);

    let server = folder.server(&program, "");
    let error = refused(&format!("{}/b?tls=true", server.url()), ErrorKind::Unavailable).await;
    assert!(words(&error).contains("check tls"), "{}", words(&error));
}

#[tokio::test]
async fn an_nkey_signs_and_never_shows() {
    let Some(program) = services::nats_server() else { return };
    let folder = Folder::new();
    let (ours, others) = (KeyPair::new_user(), KeyPair::new_user());
    let config = format!("authorization {{ users = [ {{ nkey: {} }} ] }}", ours.public_key());
    let server = folder.server(&program, &config);
    let seed = |key: &KeyPair| key.seed().expect("we made it");
    let (right, wrong) = (
        folder.write("right.nk", &format!("{}\n", seed(&ours))),
        folder.write("wrong.nk", &seed(&others)),
    );
    let broken = folder.write("broken.nk", "SUANOSEED");
    let at = |path: &PathBuf| format!("{}/b?nkey={}", server.url(), path.display());
    works(&at(&right)).await;
    let error = refused(&at(&wrong), ErrorKind::Denied).await;
    assert!(words(&error).contains("authorization violation"), "{}", words(&error));
    let none = refused(&format!("{}/b", server.url()), ErrorKind::Denied).await;
    let bad = refused(&at(&broken), ErrorKind::Invalid).await;
    for error in [&error, &none, &bad] {
        let said = format!("{} {error:?}", words(error));
        for secret in [&seed(&ours), &seed(&others), "SUANOSEED"] {
            assert!(!said.contains(secret), "{said}");
        }
    }
    let missing = refused(&at(&folder.0.path().join("none.nk")), ErrorKind::Invalid).await;
    assert!(words(&missing).contains("none.nk"), "{}", words(&missing));
}

/// A statement of one key about another, signed as NATS does it.
fn signed(issuer: &KeyPair, subject: &KeyPair, about: &Value) -> String {
    let encode = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let head = encode(&json!({ "typ": "JWT", "alg": "ed25519-nkey" }));
    let body = encode(&json!({
        "jti": "of-a-test", "iat": 1_700_000_000, "iss": issuer.public_key(), "name": "test",
        "sub": subject.public_key(), "nats": about,
    }));
    let text = format!("{head}.{body}");
    let signature = issuer.sign(text.as_bytes()).expect("it has its seed");
    format!("{text}.{}", URL_SAFE_NO_PAD.encode(signature))
}

/// A `.creds` file.
fn credentials(jwt: &str, user: &KeyPair) -> String {
    let seed = user.seed().expect("we made it");
    format!(
        "-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n\
         -----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )
}

#[tokio::test]
async fn a_file_of_credentials_is_what_an_operator_signed() {
    let Some(program) = services::nats_server() else { return };
    let folder = Folder::new();
    let (operator, account, system) =
        (KeyPair::new_operator(), KeyPair::new_account(), KeyPair::new_account());
    let user = KeyPair::new_user();
    let limits = json!({
        "subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "wildcards": true,
        "conn": -1, "leaf": -1, "mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1,
    });
    let mut plain = limits.clone();
    for name in ["mem_storage", "disk_storage", "streams", "consumer"] {
        plain[name] = json!(0);
    }
    let of = |limits: &Value| json!({ "limits": limits, "type": "account", "version": 2 });
    let config = format!(
        "operator: {}\nsystem_account: {}\nresolver: MEMORY\nresolver_preload: {{\n {}: {}\n {}: {}\n}}\n",
        signed(&operator, &operator, &json!({ "type": "operator", "version": 2 })),
        system.public_key(),
        account.public_key(),
        signed(&operator, &account, &of(&limits)),
        system.public_key(),
        signed(&operator, &system, &of(&plain)),
    );
    let server = folder.server(&program, &config);
    let about = json!({ "subs": -1, "data": -1, "payload": -1, "type": "user", "version": 2 });
    let jwt = signed(&account, &user, &about);
    let right = folder.write("right.creds", &credentials(&jwt, &user));
    let at = |path: &PathBuf| format!("{}/b?creds={}", server.url(), path.display());
    works(&at(&right)).await;
    // Signed by an account that the operator does not know.
    let forged = signed(&KeyPair::new_account(), &user, &about);
    let forged = folder.write("forged.creds", &credentials(&forged, &user));
    // Another user's key with a valid JWT.
    let stolen = folder.write("stolen.creds", &credentials(&jwt, &KeyPair::new_user()));
    let garbage = folder.write("garbage.creds", "-----BEGIN NATS USER JWT-----\n");
    for (path, kind) in
        [(&forged, ErrorKind::Denied), (&stolen, ErrorKind::Denied), (&garbage, ErrorKind::Invalid)]
    {
        let error = refused(&at(path), kind).await;
        let said = format!("{} {error:?}", words(&error));
        assert!(!said.contains(&jwt) && !said.contains(&user.seed().expect("ours")), "{said}");
    }
}
