//! The server on real sockets: peers that close, do not read, or send more than one read takes, also under TLS; and its
//! journal.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rcgen::{CertificateParams, CertifiedIssuer, DnType, KeyPair};
use rustix::net::{self, AddressFamily, SocketType, sockopt};
use rustls::pki_types::PrivateKeyDer;
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, StreamOwned};
use tenure_server::journal::{Journal, JournalOptions, OpenedJournal};
use tenure_server::{Engine, Handle, Server, ServerMetrics, Settings, clock};

/// Longest wait, long enough for a busy machine. Only a test that fails waits for it.
const BOUND: Duration = Duration::from_secs(20);
/// Keys that take several slices of a reply to `stats`.
const MANY_KEYS: usize = 3_000;

/// A server that runs on a thread of its own.
struct Running {
    address: SocketAddr,
    handle: Handle,
    thread: JoinHandle<std::io::Result<()>>,
}

impl Running {
    fn start(settings: Settings) -> Self {
        Self::with(Engine::new(settings, None, 1, 1), Duration::ZERO)
    }

    fn with(engine: Engine, shutdown_timeout: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        Self::on(listener, None, engine, shutdown_timeout)
    }

    fn on(
        listener: TcpListener,
        tls: Option<Arc<ServerConfig>>,
        engine: Engine,
        shutdown_timeout: Duration,
    ) -> Self {
        let address = listener.local_addr().unwrap();
        let (server, handle) = Server::new(listener, tls, engine, shutdown_timeout).unwrap();
        Self { address, handle, thread: thread::spawn(move || server.run()) }
    }

    fn client(&self) -> Client {
        Client(BufReader::new(self.connect()))
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(BOUND)).unwrap();
        stream.set_nodelay(true).unwrap();
        stream
    }

    /// Calls `meanwhile` while the server is busy: everything that it sends arrives in one turn.
    fn in_one_turn(&self, meanwhile: impl FnOnce()) {
        let (begun, has_begun) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        self.handle.run_on_engine(move |_, _| {
            begun.send(()).unwrap();
            ended.recv().unwrap();
        });
        has_begun.recv_timeout(BOUND).unwrap();
        meanwhile();
        end.send(()).unwrap();
    }

    fn metrics(&self) -> ServerMetrics {
        let (reply, answer) = mpsc::channel();
        self.handle.run_on_engine(move |engine, now| reply.send(engine.metrics(now)).unwrap());
        answer.recv_timeout(BOUND).unwrap()
    }

    /// Waits until the server's figures are as wanted.
    fn until(&self, wanted: impl Fn(&ServerMetrics) -> bool) {
        let begun = std::time::Instant::now();
        while !wanted(&self.metrics()) {
            assert!(begun.elapsed() < BOUND, "{:?}", self.metrics().sizes);
            thread::yield_now();
        }
    }

    /// Waits until the server serves no more requests, because a client does not read its replies. Returns the number
    /// of requests served, which is at least `least`.
    fn until_blocked(&self, least: u64) -> u64 {
        let mut before = 0;
        loop {
            // Each call takes a turn, in which the server would read more.
            for _ in 0..200 {
                self.metrics();
            }
            let now = self.metrics().counters.requests;
            if now == before && now >= least {
                return now;
            }
            before = now;
        }
    }

    fn stop(self) {
        self.handle.stop();
        self.handle.stop();
        self.thread.join().unwrap().unwrap();
    }
}

struct Client(BufReader<TcpStream>);

impl Client {
    fn send(&mut self, request: &str) {
        self.0.get_mut().write_all(request.as_bytes()).unwrap();
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn ask(&mut self, request: &str) -> String {
        self.send(request);
        self.line()
    }

    fn hold_many_keys(&mut self) {
        for key in 0..MANY_KEYS {
            assert!(self.ask(&format!("l\nkey-{key}\n0 600\n")).starts_with("ok "));
        }
    }

    /// Sends requests with long replies and reads none, until the server can send no more.
    fn stop_reading(&mut self, server: &Running, requests: usize) {
        let mut stream = self.0.get_ref().try_clone().unwrap();
        let before = server.metrics().counters.requests;
        // On a thread of its own: the server stops reading, and the write then blocks.
        thread::spawn(move || {
            let _ = stream.write_all("q\nkey\n\n".repeat(requests).as_bytes());
        });
        // The thread may begin late.
        server.until_blocked(before + 1_000);
    }
}

/// Requests whose replies do not fit into the buffers of both sockets.
const TOO_MANY_TO_BUFFER: usize = 150_000;

/// Settings with reads so small that the replies to one read stay below the limit for a pause.
fn small_reads() -> Settings {
    Settings { max_pipelined: 512, write_timeout: None, ..Settings::default() }
}

#[test]
fn more_requests_than_one_read_takes_are_all_served() {
    let server = Running::start(Settings { max_pipelined: 64, ..Settings::default() });
    let mut client = server.client();
    assert_eq!(client.ask("ping\n_\n_\n"), "ok");
    server.in_one_turn(|| client.send(&"ping\n_\n_\n".repeat(100)));
    for _ in 0..100 {
        assert_eq!(client.line(), "ok");
    }
    server.stop();
}

#[test]
fn a_connection_is_read_again_when_its_wait_has_ended() {
    let server = Running::start(Settings { max_pipelined: 16, ..Settings::default() });
    let (mut holder, mut waiter) = (server.client(), server.client());
    holder.ask("l\nk\n0\n");
    // The last request is not in the first read, and the socket reports no later bytes.
    server.in_one_turn(|| waiter.send("l\nk\n60\nping\n_\n_\nping\n_\n_\n"));
    server.until(|metrics| metrics.sizes.waiters == 1);
    drop(holder);
    assert!(waiter.line().starts_with("ok "));
    assert_eq!((waiter.line(), waiter.line()), ("ok".to_owned(), "ok".to_owned()));
    server.stop();
}

#[test]
fn a_reply_in_slices_comes_to_its_end_though_its_client_has_stopped_sending() {
    let server = Running::start(Settings::default());
    let (mut holder, mut client) = (server.client(), server.client());
    holder.hold_many_keys();
    assert_eq!(client.ask("ping\n_\n_\n"), "ok");
    server.in_one_turn(|| {
        client.send("stats\n_\n_\n");
        client.0.get_ref().shutdown(Shutdown::Write).unwrap();
    });
    let stats = client.line();
    let stats: serde_json::Value =
        serde_json::from_str(stats.strip_prefix("ok ").unwrap()).unwrap();
    assert_eq!(stats["locks"].as_array().unwrap().len(), MANY_KEYS);
    assert_eq!(client.line(), "", "closed after the reply");
    server.stop();
}

#[test]
fn a_client_that_locks_and_closes_at_once_keeps_nothing() {
    let server = Running::start(Settings::default());
    let mut client = server.client();
    assert_eq!(client.ask("ping\n_\n_\n"), "ok");
    server.in_one_turn(|| {
        client.send("l\nk\n0 600\n");
        drop(client);
    });
    assert!(server.client().ask("l\nk\n60\n").starts_with("ok "));
    server.stop();
}

#[test]
fn a_waiter_that_closes_leaves_the_queue() {
    let server = Running::start(Settings::default());
    let (mut holder, mut waiter) = (server.client(), server.client());
    holder.ask("l\nk\n0 600\n");
    waiter.send("l\nk\n600\n");
    server.until(|metrics| metrics.sizes.waiters == 1);
    drop(waiter);
    server.until(|metrics| metrics.sizes.waiters == 0);
    server.stop();
}

#[test]
fn the_end_of_a_lease_wakes_the_server() {
    let server = Running::start(Settings::default());
    let (mut holder, mut waiter) = (server.client(), server.client());
    holder.ask("l\nk\n0 1\n");
    assert!(waiter.ask("l\nk\n600\n").starts_with("ok "));
    server.stop();
}

#[test]
fn a_client_that_reads_late_gets_every_reply() {
    let server = Running::start(small_reads());
    let mut client = server.client();
    client.ask("l\nkey\n0 600\n");
    let first = client.ask("q\nkey\n\n");
    client.stop_reading(&server, TOO_MANY_TO_BUFFER);
    for reply in 0..TOO_MANY_TO_BUFFER {
        let line = client.line();
        assert_eq!(line.split_at(20).0, first.split_at(20).0, "reply {reply}");
    }
    server.stop();
}

/// Certificate of an authority whose name has `length` characters, for `localhost`.
fn certificate(length: usize) -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::new(["localhost".to_owned()]).unwrap();
    params.distinguished_name.push(DnType::CommonName, "x".repeat(length));
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// TLS of a server with this certificate, and of its clients. The server accepts clients without a certificate.
fn tls(certificate: &CertifiedIssuer<'_, KeyPair>) -> (Arc<ServerConfig>, Arc<ClientConfig>) {
    let key = PrivateKeyDer::try_from(certificate.key().serialize_der()).unwrap();
    let chain = vec![certificate.der().clone()];
    let mut roots = RootCertStore::empty();
    roots.add(chain[0].clone()).unwrap();
    let roots = Arc::new(roots);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier =
        WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider));
    let server = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(verifier.allow_unauthenticated().build().unwrap())
        .with_single_cert(chain, key)
        .unwrap();
    let client = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    (Arc::new(server), Arc::new(client))
}

#[test]
fn a_client_that_reads_late_under_tls_gets_every_reply() {
    const REQUEST: &str = "q\nkey\n\n";
    // As many as fit into one TLS record. The server decrypts all of them at once: when it serves the last ones, no
    // bytes are left in the socket, so no event of the system reports them.
    const REQUESTS: usize = (16 << 10) / REQUEST.len();
    let (server_config, client_config) = tls(&certificate(9));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    // A buffer that takes a few replies. Connections inherit its size.
    sockopt::set_socket_send_buffer_size(&listener, 4096).unwrap();
    let engine = Engine::new(small_reads(), None, 1, 1);
    let server = Running::on(listener, Some(server_config), engine, Duration::ZERO);
    let session = ClientConnection::new(client_config, "localhost".try_into().unwrap()).unwrap();
    let mut client = BufReader::new(StreamOwned::new(session, server.connect()));
    let mut line = String::new();
    for request in ["l\nkey\n0 600\n", REQUEST] {
        line.clear();
        client.get_mut().write_all(request.as_bytes()).unwrap();
        client.read_line(&mut line).unwrap();
    }
    let first = line.split_at(20).0.to_owned();
    let before = server.metrics().counters.requests;
    client.get_mut().write_all(REQUEST.repeat(REQUESTS).as_bytes()).unwrap();
    let answered = server.until_blocked(before + 1) - before;
    assert!(answered < REQUESTS as u64, "the replies fit into the buffers of the sockets");
    for reply in 0..REQUESTS {
        line.clear();
        client.read_line(&mut line).unwrap_or_else(|error| panic!("reply {reply}: {error}"));
        assert_eq!(line.split_at(20).0, first, "reply {reply}");
    }
    server.stop();
}

#[test]
fn a_handshake_larger_than_the_send_buffer_is_completed() {
    // The server sends the long name three times: as the subject and the issuer of its certificate, and as an authority
    // that may have signed a certificate of the client.
    let (server_config, client_config) = tls(&certificate(15_000));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    sockopt::set_socket_send_buffer_size(&listener, 4096).unwrap();
    let engine = Engine::new(Settings::default(), None, 1, 1);
    let server = Running::on(listener, Some(server_config), engine, Duration::ZERO);
    let session = ClientConnection::new(client_config, "localhost".try_into().unwrap()).unwrap();
    // A small window keeps the kernel from taking more than the buffer of the server has room for.
    let socket = net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    sockopt::set_socket_recv_buffer_size(&socket, 2048).unwrap();
    net::connect(&socket, &server.address).unwrap();
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(BOUND)).unwrap();
    let mut client = BufReader::new(StreamOwned::new(session, stream));
    client.get_mut().write_all(b"ping\n_\n_\n").unwrap();
    let mut line = String::new();
    client.read_line(&mut line).unwrap();
    assert_eq!(line, "ok\n");
    server.stop();
}

#[test]
fn long_replies_reach_a_client_that_reads_late() {
    const REPLIES: usize = 100;
    let server = Running::start(Settings { write_timeout: None, ..Settings::default() });
    let (mut holder, mut client) = (server.client(), server.client());
    holder.hold_many_keys();
    client.send(&"stats\n_\n_\n".repeat(REPLIES));
    for _ in 0..50 * REPLIES {
        server.metrics();
    }
    for _ in 0..REPLIES {
        assert!(client.line().ends_with('}'));
    }
    assert_eq!(client.ask("ping\n_\n_\n"), "ok");
    server.stop();
}

/// A server whose client holds a key and does not read, and the waiter for that key.
fn holder_that_does_not_read(hello: &str, write_timeout: Duration) -> (Running, Client, Client) {
    let server = Running::start(Settings { write_timeout: Some(write_timeout), ..small_reads() });
    let (mut client, mut waiter) = (server.client(), server.client());
    client.ask(&format!("hello\n_\n{hello}\n"));
    client.ask("l\nkey\n0 600\n");
    waiter.send("l\nkey\n600\n");
    server.until(|metrics| metrics.sizes.waiters == 1);
    client.stop_reading(&server, TOO_MANY_TO_BUFFER);
    (server, client, waiter)
}

#[test]
fn a_hold_of_a_client_that_does_not_read_passes_to_the_next_waiter_at_once() {
    let (server, _client, mut waiter) = holder_that_does_not_read("{}", Duration::from_secs(2));
    // Nothing else happens at the server that could make it send the grant.
    assert!(waiter.line().starts_with("ok "));
    server.stop();
}

#[test]
fn a_hold_stays_if_the_server_closes_the_connection_of_a_client_that_keeps_holds() {
    let keep = r#"{"keep":true}"#;
    let (server, _client, _waiter) = holder_that_does_not_read(keep, Duration::from_millis(200));
    server.until(|metrics| metrics.connections == 1);
    let sizes = server.metrics().sizes;
    assert_eq!((sizes.holds, sizes.waiters), (1, 1));
    server.stop();
}

#[test]
fn a_second_stop_does_not_wait_for_clients() {
    let engine = Engine::new(Settings::default(), None, 1, 1);
    let server = Running::with(engine, Duration::from_secs(3600));
    let mut client = server.client();
    assert_eq!(client.ask("ping\n_\n_\n"), "ok");
    server.stop();
}

fn open_journal(folder: &Path) -> OpenedJournal {
    let mut options = JournalOptions::new(folder);
    options.segment_bytes = 4096;
    Journal::open(&options, "boot", clock::now(), clock::wall_micros()).unwrap()
}

fn with_journal(folder: &Path) -> Running {
    let engine = Engine::restore(Settings::default(), None, open_journal(folder), clock::now());
    Running::with(engine.unwrap(), Duration::ZERO)
}

#[test]
fn a_grant_is_in_the_journal_when_its_reply_arrives() {
    let folder = tempfile::tempdir().unwrap();
    let [data, copy] = ["data", "copy"].map(|name| folder.path().join(name));
    let server = with_journal(&data);
    let mut client = server.client();
    assert!(client.ask("l\nk\n0 600\n").starts_with("ok "));
    // A copy of the files is what a server that is killed now would leave.
    std::fs::create_dir(&copy).unwrap();
    for entry in std::fs::read_dir(&data).unwrap() {
        let from = entry.unwrap().path();
        std::fs::copy(&from, copy.join(from.file_name().unwrap())).unwrap();
    }
    assert_eq!(open_journal(&copy).holds.len(), 1);
    server.stop();
}

#[test]
fn a_server_whose_journal_cannot_be_written_answers_no_grant_and_stops() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    let server = with_journal(&data);
    let mut client = server.client();
    assert!(client.ask("l\nfirst\n0 600\n").starts_with("ok "));
    // The open segment has room for a few grants. The next segment cannot be created.
    std::fs::remove_dir_all(&data).unwrap();
    let requests: Vec<String> = (0..1_000).map(|key| format!("l\nkey-{key}\n0 600\n")).collect();
    client.send(&requests.concat());
    let mut replies = String::new();
    let _ = client.0.read_to_string(&mut replies);
    assert!(replies.lines().count() < 1_000, "all were answered");
    assert!(server.thread.join().unwrap().is_err());
}
