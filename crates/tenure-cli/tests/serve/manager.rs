//! Under a service manager: its socket, and word to it.

use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::support::{BOUND, Files, Server, serve};

#[test]
fn the_socket_of_the_manager_is_used() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // The shell becomes the server, so its number is the one the socket is meant for.
    let script = "LISTEN_PID=$$ LISTEN_FDS=1 exec \"$TENURE\" serve --port 1 3<&0 </dev/null";
    let mut command = Command::new("sh");
    command.args(["-c", script]).env("TENURE", env!("CARGO_BIN_EXE_tenure"));
    let server = Server::spawn(command.stdin(Stdio::from(OwnedFd::from(listener))));
    assert_eq!(server.address, address);
    assert_eq!(server.client().ask("ping _"), "ok");
}

#[test]
fn the_manager_hears_when_it_is_ready_and_when_it_stops() {
    let files = Files::new();
    let path = files.path("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(BOUND)).unwrap();
    let hear = || {
        let mut buffer = [0; 256];
        let length = manager.recv(&mut buffer).unwrap();
        String::from_utf8(buffer[..length].to_vec()).unwrap()
    };
    let mut server = Server::spawn(serve(&["--port", "0"]).env("NOTIFY_SOCKET", &path));
    assert_eq!(hear(), "READY=1");
    assert_eq!(server.client().ask("ping _"), "ok", "ready means that it serves");
    assert_eq!(hear(), format!("STATUS=listening on {}", server.address));
    server.signal(Signal::SIGTERM);
    assert_eq!(hear(), "STOPPING=1");
    assert_eq!(server.code(), Some(0));
}

/// A service manager that listens; what it hears.
struct Manager {
    files: Files,
    socket: UnixDatagram,
}

impl Manager {
    fn new() -> Self {
        let files = Files::new();
        let socket = UnixDatagram::bind(files.path("notify")).unwrap();
        Self { files, socket }
    }

    /// A server that it started, and that has said where it listens.
    fn start(&self, environment: &[(&str, &str)]) -> Server {
        let mut command = serve(&["--port", "0"]);
        command.env("NOTIFY_SOCKET", self.files.path("notify"));
        let server = Server::spawn(command.envs(environment.iter().copied()));
        assert_eq!(self.hear(BOUND).unwrap(), "READY=1");
        assert!(self.hear(BOUND).unwrap().starts_with("STATUS="));
        server
    }

    /// The next word, if it comes in time.
    fn hear(&self, bound: Duration) -> Option<String> {
        self.socket.set_read_timeout(Some(bound)).unwrap();
        let mut buffer = [0; 256];
        let length = self.socket.recv(&mut buffer).ok()?;
        Some(String::from_utf8(buffer[..length].to_vec()).unwrap())
    }
}

#[test]
fn a_manager_that_watches_hears_that_it_comes_around_and_nothing_while_it_does_not() {
    const PATIENCE: Duration = Duration::from_millis(400);
    let manager = Manager::new();
    let mut server = manager.start(&[("WATCHDOG_USEC", "400000")]);
    let began = Instant::now();
    for _ in 0..10 {
        assert_eq!(manager.hear(BOUND).unwrap(), "WATCHDOG=1");
    }
    // Twice in its patience, whether or not there is anything to serve.
    let took = began.elapsed();
    assert!(took > PATIENCE * 3 && took < PATIENCE * 15, "{took:?}");
    server.signal(Signal::SIGSTOP);
    while manager.hear(PATIENCE * 2).is_some() {}
    assert_eq!(manager.hear(PATIENCE * 3), None, "it is stopped");
    server.signal(Signal::SIGCONT);
    assert_eq!(manager.hear(BOUND).unwrap(), "WATCHDOG=1");
    server.signal(Signal::SIGTERM);
    while manager.hear(BOUND).unwrap() != "STOPPING=1" {}
    assert_eq!(server.code(), Some(0));
}

#[test]
fn no_watchdog_ping_without_a_watchdog_for_this_process() {
    for environment in [&[("WATCHDOG_USEC", "2000"), ("WATCHDOG_PID", "1")][..], &[]] {
        let manager = Manager::new();
        let server = manager.start(environment);
        assert_eq!(server.client().ask("ping _"), "ok");
        assert_eq!(manager.hear(Duration::from_millis(300)), None, "{environment:?}");
    }
}
