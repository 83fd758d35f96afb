//! TLS and the token, as a user meets them.

use std::io::Write as _;
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::sync::Arc;

use nix::sys::signal::Signal;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};
use rustix::io::ioctl_fionread;
use rustix::net::sockopt::set_socket_recv_buffer_size;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use crate::support::{Client, Files, Server, connect, eventually, refused, serve};

type Tls = StreamOwned<ClientConnection, TcpStream>;

/// An authority, and the files that it gave out.
struct Authority {
    files: Files,
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let files = Files::new();
        files.write("ca.pem", &issuer.pem());
        Self { files, issuer }
    }

    /// Makes `NAME.pem` and `NAME.key`; the last year that it is valid in.
    fn issue(&self, name: &str, until: i32) -> (String, String) {
        let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        params.not_before = date_time_ymd(2001, 1, 1);
        params.not_after = date_time_ymd(until, 1, 1);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let cert = self.files.write(&format!("{name}.pem"), &certificate.pem());
        (cert, self.files.write(&format!("{name}.key"), &key.serialize_pem()))
    }

    fn ca(&self) -> String {
        self.files.path("ca.pem").to_str().unwrap().to_owned()
    }

    /// A client that trusts this authority, with a certificate or without.
    fn client(&self, server: &Server, own: Option<&(String, String)>) -> Client<Tls> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(self.ca()).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let config = match own {
            None => builder.with_no_client_auth(),
            Some((cert, key)) => builder
                .with_client_auth_cert(
                    vec![CertificateDer::from_pem_file(cert).unwrap()],
                    PrivateKeyDer::from_pem_file(key).unwrap(),
                )
                .unwrap(),
        };
        let name = "localhost".try_into().unwrap();
        let session = ClientConnection::new(Arc::new(config), name).unwrap();
        Client::new(StreamOwned::new(session, connect(server.address)))
    }
}

/// The certificate that a client was shown.
fn shown(client: &mut Client<Tls>) -> Vec<u8> {
    assert_eq!(client.ask("ping _"), "ok");
    client.0.get_ref().conn.peer_certificates().unwrap()[0].to_vec()
}

#[test]
fn a_session_under_tls_with_a_token() {
    let authority = Authority::new();
    let (cert, key) = authority.issue("server", 4000);
    let server = Server::start(&["--tls-cert", &cert, "--tls-key", &key, "--auth-token", "hush"]);
    let mut client = authority.client(&server, None);
    assert_eq!(client.ask("auth _ hush"), "ok");
    client.send("l k 0 33");
    let token = client.token();
    let mut waiter = authority.client(&server, None);
    assert_eq!(waiter.ask("auth _ hush"), "ok");
    waiter.send("l k 60");
    assert_eq!(client.ask(&format!("r k {token}")), "ok");
    waiter.token();
    let mut stranger = authority.client(&server, None);
    assert_eq!(stranger.ask("auth _ psst"), "error_auth");
    assert_eq!(stranger.line(), "", "closed properly, with a word of farewell");
    // In the clear there is nothing to be had.
    let mut plain = server.client();
    plain.send("ping _");
    assert!(!plain.try_line().is_ok_and(|line| line == "ok"));
}

#[test]
fn openssl_gets_on_with_it() {
    if Command::new("openssl").arg("version").output().is_err() {
        assert!(std::env::var_os("TENURE_TEST_SERVICES").is_none(), "openssl is required here");
        crate::skip::skip("there is no openssl here");
        return;
    }
    let authority = Authority::new();
    let (cert, key) = authority.issue("server", 4000);
    let server = Server::start(&["--tls-cert", &cert, "--tls-key", &key]);
    for version in ["-tls1_2", "-tls1_3"] {
        let mut openssl = Command::new("openssl")
            .args(["s_client", "-quiet", "-no_ign_eof", "-verify_return_error", version])
            .args(["-servername", "localhost", "-CAfile", &authority.ca()])
            .args(["-connect", &server.address.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut stdin = openssl.stdin.take().unwrap();
        let mut answers = std::io::BufReader::new(openssl.stdout.take().unwrap());
        stdin.write_all(b"l\nk\n0\nping\n_\n_\n").unwrap();
        let mut line = String::new();
        std::io::BufRead::read_line(&mut answers, &mut line).unwrap();
        assert!(line.starts_with("ok ") && line.ends_with(" 33\n"), "{version}: {line:?}");
        line.clear();
        std::io::BufRead::read_line(&mut answers, &mut line).unwrap();
        assert_eq!(line, "ok\n", "{version}");
        drop(stdin);
        openssl.wait().unwrap();
        eventually("its lock is free again", || {
            let answer = authority.client(&server, None).ask("q k");
            answer.contains("\"held\":0").then_some(())
        });
    }
}

#[test]
fn only_clients_with_a_certificate_are_let_in_where_one_is_asked_for() {
    let (authority, other) = (Authority::new(), Authority::new());
    let (cert, key) = authority.issue("server", 4000);
    let arguments = ["--tls-cert", &cert, "--tls-key", &key, "--tls-client-ca", &authority.ca()];
    let server = Server::start(&arguments);
    let own = authority.issue("client", 4000);
    assert_eq!(authority.client(&server, Some(&own)).ask("ping _"), "ok");
    for bad in [None, Some(other.issue("client", 4000)), Some(authority.issue("old", 2002))] {
        let mut client = authority.client(&server, bad.as_ref());
        let _ = client.0.get_mut().write_all(b"ping\n_\n_\n");
        assert!(!client.try_line().is_ok_and(|line| line == "ok"), "{bad:?}");
    }
    assert_eq!(authority.client(&server, Some(&own)).ask("ping _"), "ok");
}

#[test]
fn certificates_that_cannot_serve_are_refused_by_name() {
    let authority = Authority::new();
    let (cert, key) = authority.issue("server", 4000);
    let (_, other_key) = authority.issue("other", 4000);
    let (expired, expired_key) = authority.issue("expired", 2002);
    let absent = authority.files.path("absent.pem").to_str().unwrap().to_owned();
    let empty = authority.files.write("empty.pem", "nothing\n");
    for (cert, key, named, why) in [
        (&expired, &expired_key, &expired, "expired"),
        (&absent, &key, &absent, "cannot be read"),
        (&empty, &key, &empty, "PEM"),
        (&cert, &absent, &absent, "cannot be read"),
        (&cert, &other_key, &other_key, "cannot be used"),
    ] {
        let (code, said) =
            refused(&mut serve(&["--port", "0", "--tls-cert", cert, "--tls-key", key]));
        assert_eq!(code, Some(125), "{said}");
        assert!(said.contains(named.as_str()) && said.contains(why), "{said}");
    }
    for flags in [["--tls-cert", &cert], ["--tls-key", &key]] {
        let (code, said) = refused(serve(&["--port", "0"]).args(flags));
        assert!(code.is_some_and(|code| code != 0), "one without the other: {said}");
    }
    let (code, _) = refused(serve(&["--port", "0"]).env("DFLOCKD_TLS_CERT", &cert));
    assert!(code.is_some_and(|code| code != 0), "also in the environment");
}

#[test]
fn a_hangup_reloads_certificate_and_token_and_bad_ones_change_nothing() {
    let authority = Authority::new();
    let (cert, key) = authority.issue("server", 4000);
    let token = authority.files.write("token", "old");
    let arguments = ["--tls-cert", &cert, "--tls-key", &key, "--auth-token-file", &token];
    let server = Server::start(&arguments);
    let mut early = authority.client(&server, None);
    assert_eq!(early.ask("auth _ old"), "ok");
    let before = shown(&mut early);

    authority.issue("server", 4001);
    authority.files.write("token", "new");
    server.signal(Signal::SIGHUP);
    eventually("the new token is in force", || {
        (authority.client(&server, None).ask("auth _ new") == "ok").then_some(())
    });
    let mut late = authority.client(&server, None);
    assert_eq!(late.ask("auth _ new"), "ok");
    assert_ne!(shown(&mut late), before, "another certificate");
    assert_eq!(early.ask("ping _"), "ok", "who was there stays");

    authority.files.write("server.pem", "gone");
    std::fs::remove_file(&token).unwrap();
    server.signal(Signal::SIGHUP);
    eventually("it says what stays", || {
        let said = server.said();
        let both =
            said.contains("keeping the old certificate") && said.contains("keeping the old token");
        both.then_some(())
    });
    assert_eq!(authority.client(&server, None).ask("auth _ new"), "ok");
}

/// What `openssl req -x509` makes unless told otherwise: a certificate that signs itself as an authority.
#[test]
fn a_certificate_that_clients_do_not_take_is_complained_of() {
    let authority = Authority::new();
    let key = authority.files.write("ca.key", &authority.issuer.key().serialize_pem());
    let server = Server::start(&["--tls-cert", &authority.ca(), "--tls-key", &key]);
    eventually("it says so", || server.said().contains("CA:FALSE").then_some(()));
    let (cert, key) = authority.issue("server", 4000);
    let server = Server::start(&["--tls-cert", &cert, "--tls-key", &key]);
    eventually("it listens", || server.said().contains("listening").then_some(()));
    assert!(!server.said().contains("CA:FALSE"), "{}", server.said());
}

#[test]
fn long_tls_reply_reaches_a_slow_reader_in_full() {
    let authority = Authority::new();
    let (cert, key) = authority.issue("server", 4000);
    let server = Server::start(&["--tls-cert", &cert, "--tls-key", &key]);
    let mut client = authority.client(&server, None);
    let keys: Vec<_> = (0..30_000).map(|key| format!("{key:0>200}")).collect();
    for keys in keys.chunks(1000) {
        client.hold_all(keys);
    }
    let mut reader = authority.client(&server, None);
    set_socket_recv_buffer_size(&reader.0.get_ref().sock, 16 * 1024).unwrap();
    reader.send("stats _");
    // Until its answer has filled every buffer between us: the bytes to read no longer grow.
    let pending = || ioctl_fionread(&reader.0.get_ref().sock).unwrap();
    let (mut before, mut looks_alike) = (0, 0);
    eventually("a full buffer", || {
        let now = pending();
        looks_alike = if now > 0 && now == before { looks_alike + 1 } else { 0 };
        before = now;
        (looks_alike == 20).then_some(())
    });
    let stats = reader.line();
    assert_eq!(stats.matches("\"key\"").count(), keys.len(), "{} bytes", stats.len());
    assert_eq!(reader.ask("ping _"), "ok");
}
