//! Under a service manager: its socket, and word to it.

use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};

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
