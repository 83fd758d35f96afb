//! The server is killed with -9 under load, again and again: never two holders, and fencing numbers only grow.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

use std::collections::{BTreeMap, HashMap};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tenure_core::Random;

/// How often it is killed; `cargo xtask soak restarts` sets more.
fn rounds() -> u64 {
    std::env::var("TENURE_TEST_RESTARTS").map_or(20, |n| n.parse().expect("a number"))
}

const KEYS: u64 = 6;
const CLIENTS: u64 = 12;

#[test]
fn kill_9_under_load_gives_no_two_holders_and_no_number_twice() {
    let folder = tempfile::tempdir().unwrap();
    let address = free_address();
    let mut server = Server::start(address, folder.path());
    let stop = Arc::new(AtomicBool::new(false));
    let history = Arc::new(Mutex::new(Vec::new()));
    let clients: Vec<_> = (0..CLIENTS)
        .map(|seed| {
            let (stop, history) = (Arc::clone(&stop), Arc::clone(&history));
            thread::spawn(move || {
                Client { address, random: Random::new(seed), history, stop }.run()
            })
        })
        .collect();
    let mut random = Random::new(99);
    for _ in 0..rounds() {
        thread::sleep(Duration::from_millis(50 + random.below(450)));
        server.kill();
        server = Server::start(address, folder.path());
    }
    stop.store(true, Ordering::Relaxed);
    // Closing a connection releases its holds: all connections stay open until no client sends requests.
    let (renewed, lines): (Vec<u64>, Vec<_>) =
        clients.into_iter().map(|client| client.join().unwrap()).unzip();
    let renewed_after_a_kill: u64 = renewed.into_iter().sum();
    drop(lines);
    let history = history.lock().unwrap();
    assert!(history.len() as u64 > rounds(), "only {} grants", history.len());
    assert!(renewed_after_a_kill > 0, "no hold outlived a kill");
    check(&history);
    println!(
        "{} grants, {renewed_after_a_kill} renewed after a kill, {} kills",
        history.len(),
        rounds()
    );
}

#[test]
fn after_a_clean_restart_every_hold_renews() {
    let folder = tempfile::tempdir().unwrap();
    let address = free_address();
    let mut server = Server::start(address, folder.path());
    let mut line = Line::connect(address).unwrap();
    let keys = ["a", "b", "c"];
    let tokens: Vec<String> = keys.map(|key| token(&line.ask("l", key, "0 60").unwrap())).to_vec();
    let last = number(tokens.last().unwrap());
    let slot = token(&line.ask("sl", "pool", "0 2 60").unwrap());

    server.terminate();
    assert_eq!(server.child.0.wait().unwrap().code(), Some(0));
    assert_eq!(line.ask("ping", "", ""), None, "the connection has ended with the server");
    let _server = Server::start(address, folder.path());
    let mut line = Line::connect(address).unwrap();
    for (key, token) in keys.iter().zip(&tokens) {
        assert_eq!(line.ask("l", key, "0 60").unwrap(), "timeout", "{key} is held");
        assert_eq!(line.ask("n", key, &format!("{token} 60")).unwrap(), "ok 60");
    }
    assert_eq!(line.ask("sn", "pool", &format!("{slot} 60")).unwrap(), "ok 60");
    let other = token(&line.ask("sl", "pool", "0 2 60").unwrap());
    assert!(number(&other) > last && number(&other) > number(&slot), "numbers go on");
    assert_eq!(line.ask("r", "a", &tokens[0]).unwrap(), "ok");
    assert_eq!(line.ask("r", "a", &tokens[0]).unwrap(), "error");
}

#[test]
fn a_holder_that_renews_while_the_server_stops_has_its_hold_on_the_next_server() {
    let folder = tempfile::tempdir().unwrap();
    let address = free_address();
    // As under systemd: clients have time to leave.
    let mut server = Server::start_with(address, folder.path(), "60s");
    let [mut holder, mut pinging, mut leaving, mut asking] =
        [(); 4].map(|()| Line::connect(address).unwrap());
    let hold = |line: &mut Line, key| token(&line.ask("l", key, "0 60").unwrap());
    let [renewed, released, silent] =
        ["renewed", "released", "silent"].map(|key| hold(&mut holder, key));
    let pinged = hold(&mut pinging, "pinged");
    hold(&mut leaving, "closed");
    server.terminate();
    while asking.ask("ping", "_", "").as_deref() == Some("ok") {}

    let renewal = format!("{renewed} 60");
    assert_eq!(holder.ask("n", "renewed", &renewal).as_deref(), Some("ok 60"));
    assert_eq!(holder.ask("r", "released", &released).as_deref(), Some("ok"));
    // Any other request is refused, and ends the connection. It is the server that ends it: the hold stays.
    assert_eq!(pinging.ask("l", "other", "0 60").as_deref(), Some("error_draining"));
    assert_eq!(pinging.ask("ping", "_", ""), None, "closed by the server");
    // A connection that its client closes gives up its holds, as always.
    drop(leaving);
    // After a second signal the server no longer waits for the holder to disconnect.
    server.terminate();
    assert_eq!(server.child.0.wait().unwrap().code(), Some(0));
    assert_eq!(holder.ask("n", "renewed", &renewal), None, "closed with the server");

    let _server = Server::start(address, folder.path());
    let [mut holder, mut other] = [(); 2].map(|()| Line::connect(address).unwrap());
    for (key, token) in [("renewed", &renewed), ("silent", &silent), ("pinged", &pinged)] {
        assert_eq!(other.ask("l", key, "0 60").as_deref(), Some("timeout"), "{key} is held");
        let answer = holder.ask("n", key, &format!("{token} 60"));
        assert_eq!(answer.as_deref(), Some("ok 60"), "{key} is renewed by its old token");
    }
    for key in ["released", "closed"] {
        assert!(other.ask("l", key, "0 60").unwrap().starts_with("ok "), "{key} is free");
    }
    // The next client waits until the holder releases.
    let waiting = thread::spawn(move || other.ask("l", "renewed", "30 60"));
    assert_eq!(holder.ask("r", "renewed", &renewed).as_deref(), Some("ok"));
    let next = waiting.join().unwrap().unwrap();
    assert!(number(&token(&next)) > number(&renewed), "{next}");
}

#[test]
fn a_lead_that_comes_back_within_its_grace_runs_its_command_again() {
    let folder = tempfile::tempdir().unwrap();
    let (address, metrics) = (free_address(), free_address());
    let mut server = Server::start(address, folder.path());
    let mut lead = Command::new(env!("CARGO_BIN_EXE_tenure"))
        .args(["lead", "demo", "--store", &format!("tenure://{address}"), "--ttl", "2s"])
        .args(["--reconnect-grace", "30s", "--kill-after", "100ms"])
        .args(["--metrics", &metrics.to_string()])
        .args(["--", "sh", "-c", "echo $TENURE_TOKEN; exec sleep 600"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map(Process)
        .unwrap();
    let lines = BufReader::new(lead.0.stdout.take().unwrap()).lines();
    let (told, tokens) = mpsc::channel();
    thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| told.send(line)));
    let next = || {
        let line = tokens.recv_timeout(Duration::from_secs(30)).expect("the command begins");
        line.parse::<u128>().unwrap()
    };
    let first = next();
    assert!(page(metrics, "/leader").starts_with("HTTP/1.1 200"));
    server.kill();
    let gone = Instant::now();
    while page(metrics, "/leader").starts_with("HTTP/1.1 200")
        || page(metrics, "/metrics").contains("tenure_leader{election=\"demo\"} 1")
    {
        assert!(gone.elapsed() < Duration::from_secs(30), "it leads without a server");
        thread::sleep(Duration::from_millis(20));
    }
    let _server = Server::start(address, folder.path());
    let second = next();
    assert!(second > first, "{second} after {first}");
    assert!(page(metrics, "/leader").starts_with("HTTP/1.1 200"));
    let told = page(metrics, "/metrics");
    assert!(told.contains("tenure_leader{election=\"demo\"} 1"), "{told}");
    assert!(told.contains("tenure_leader_transitions_total{election=\"demo\"} 1"), "{told}");
    kill(Pid::from_raw(lead.0.id().cast_signed()), Signal::SIGTERM).unwrap();
    lead.0.wait().unwrap();
}

/// What is served there.
fn page(address: SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

/// One hold as its client saw it: it may act from `from` to `until`, and at no other time.
#[derive(Clone, Debug)]
struct Hold {
    key: String,
    number: u64,
    from: Instant,
    until: Instant,
}

/// Panics if two holds of a key overlap, or a number was given out twice or fell.
fn check(history: &[Hold]) {
    let mut numbers = HashMap::new();
    let mut keys: BTreeMap<&str, Vec<&Hold>> = BTreeMap::new();
    for hold in history {
        assert!(numbers.insert(hold.number, hold).is_none(), "{} was given out twice", hold.number);
        keys.entry(&hold.key).or_default().push(hold);
    }
    for holds in keys.values_mut() {
        holds.sort_by_key(|hold| hold.from);
        for pair in holds.windows(2) {
            assert!(pair[0].number < pair[1].number, "numbers fell: {pair:#?}");
            assert!(pair[0].until <= pair[1].from, "two holders: {pair:#?}");
        }
    }
}

struct Client {
    address: SocketAddr,
    random: Random,
    history: Arc<Mutex<Vec<Hold>>>,
    stop: Arc<AtomicBool>,
}

impl Client {
    /// Acquires locks until `stop` is set. Returns the number of holds it renewed on a new connection, and its last
    /// connection.
    fn run(mut self) -> (u64, Option<Line>) {
        let mut renewed = 0;
        let mut line = None;
        while !self.stop.load(Ordering::Relaxed) {
            let Some(open) = line.as_mut() else {
                line = Line::connect(self.address);
                if line.is_none() {
                    thread::sleep(Duration::from_millis(5));
                }
                continue;
            };
            let key = format!("key-{}", self.random.below(KEYS));
            let lease = Duration::from_secs(1 + self.random.below(3));
            let sent = Instant::now();
            match open.ask("l", &key, &format!("1 {}", lease.as_secs())) {
                Some(reply) if reply.starts_with("ok ") => {
                    let token = token(&reply);
                    let hold = Hold {
                        key,
                        number: number(&token),
                        from: Instant::now(),
                        until: sent + lease,
                    };
                    line = self.hold(line, hold, &token, lease, &mut renewed);
                }
                Some(reply) => assert_eq!(reply, "timeout"),
                None => line = None,
            }
        }
        (renewed, line)
    }

    /// Holds for a while, through kills of the server, and then ends the hold in one of several ways.
    fn hold(
        &mut self,
        mut line: Option<Line>,
        mut hold: Hold,
        token: &str,
        lease: Duration,
        renewed: &mut u64,
    ) -> Option<Line> {
        for _ in 0..self.random.below(4) {
            thread::sleep(Duration::from_millis(self.random.below(150)));
            let fresh = line.is_none();
            line = line.or_else(|| Line::connect(self.address));
            let Some(open) = line.as_mut() else { continue };
            let sent = Instant::now();
            match open.ask("n", &hold.key, &format!("{token} {}", lease.as_secs())) {
                Some(reply) if reply.starts_with("ok ") => {
                    hold.until = sent + lease;
                    *renewed += u64::from(fresh);
                }
                Some(reply) => {
                    let late = Instant::now() >= hold.until;
                    assert!(late, "{reply:?} to the renewal of a hold that runs: {hold:?}");
                    break;
                }
                None => line = None,
            }
        }
        // Released, or left to its lease.
        if self.random.below(4) > 0
            && let Some(open) = line.as_mut()
        {
            hold.until = hold.until.min(Instant::now());
            if open.ask("r", &hold.key, token).is_none() {
                line = None;
            }
        }
        self.history.lock().unwrap().push(hold);
        line
    }
}

/// A connection that speaks the protocol; `None` to every question once it is broken.
struct Line {
    stream: BufReader<TcpStream>,
}

impl Line {
    fn connect(address: SocketAddr) -> Option<Self> {
        let stream = TcpStream::connect(address).ok()?;
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        Some(Self { stream: BufReader::new(stream) })
    }

    fn ask(&mut self, command: &str, key: &str, argument: &str) -> Option<String> {
        self.stream
            .get_mut()
            .write_all(format!("{command}\n{key}\n{argument}\n").as_bytes())
            .ok()?;
        let mut reply = String::new();
        match self.stream.read_line(&mut reply) {
            Ok(0) => None,
            Ok(_) => Some(reply.strip_suffix('\n')?.to_owned()),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                panic!("no reply to {command} {key} {argument}")
            }
            Err(_) => None,
        }
    }
}

fn token(reply: &str) -> String {
    reply.split(' ').nth(1).unwrap_or_else(|| panic!("{reply:?} is no grant")).to_owned()
}

fn number(token: &str) -> u64 {
    u64::from_str_radix(&token[..16], 16).unwrap()
}

fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

struct Server {
    child: Process,
}

/// Does not outlive its test.
struct Process(Child);

impl Server {
    /// A server with its data in `folder`, once it listens.
    fn start(address: SocketAddr, folder: &Path) -> Self {
        Self::start_with(address, folder, "0")
    }

    /// The same, which gives its clients this long to leave when it stops.
    fn start_with(address: SocketAddr, folder: &Path, shutdown_timeout: &str) -> Self {
        let data: PathBuf = folder.join("data");
        let mut child = Command::new(env!("CARGO_BIN_EXE_tenure"))
            .args(["serve", "--host", "127.0.0.1", "--shutdown-timeout", shutdown_timeout])
            .args(["--port", &address.port().to_string()])
            .arg("--data-dir")
            .arg(data)
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        stderr.read_line(&mut line).unwrap();
        if !line.contains("listening on") {
            stderr.read_to_string(&mut line).unwrap();
            panic!("{line}");
        }
        thread::spawn(move || std::io::copy(&mut stderr, &mut std::io::sink()));
        Self { child: Process(child) }
    }

    fn terminate(&self) {
        kill(Pid::from_raw(self.child.0.id().cast_signed()), Signal::SIGTERM).unwrap();
    }

    fn kill(&mut self) {
        self.child.0.kill().unwrap();
        self.child.0.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
