//! Clients that mean no good, beside one that does.

use std::io::{ErrorKind, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::{Client, Server, connect, eventually, many_files};

/// An honest client goes on: each of its answers within seconds, whatever else the machine does.
fn goes_on(honest: &mut Client<TcpStream>) {
    let began = Instant::now();
    for _ in 0..20 {
        honest.send("l honest 5");
        let token = honest.token();
        assert_eq!(honest.ask(&format!("r honest {token}")), "ok");
    }
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
}

/// Sends until `enough` bytes are accepted, for at most 20 s. True if the connection was closed.
fn flood(stream: &mut TcpStream, bytes: &[u8], enough: usize) -> bool {
    stream.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
    let mut sent = 0;
    let deadline = Instant::now() + Duration::from_secs(20);
    while sent < enough && Instant::now() < deadline {
        match stream.write(bytes) {
            Ok(some) => sent += some,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(_) => return true,
        }
    }
    false
}

#[test]
fn incomplete_requests_time_out_without_delaying_other_clients() {
    let server = Server::start(&["--read-timeout", "500ms"]);
    let mut honest = server.client();
    let mut slow: Vec<_> = (0..200).map(|_| server.client()).collect();
    for (number, client) in slow.iter_mut().enumerate() {
        let half = [&b"l"[..], b"l\nk", b"l\nk\n", b"l\nk\n10", &[b'x'; 300]][number % 5];
        client.0.get_mut().write_all(half).unwrap();
    }
    goes_on(&mut honest);
    for client in &mut slow {
        assert_eq!(client.line(), "error");
        assert!(client.is_closed());
    }
    assert_eq!(honest.ask("q k").matches("\"held\":0").count(), 1, "nothing was granted");
}

#[test]
fn client_that_never_reads_is_disconnected_and_memory_stays_bounded() {
    let server = Server::start(&["--write-timeout", "500ms"]);
    let mut honest = server.client();
    for key in 0..500 {
        assert!(honest.ask(&format!("l key-{key} 0 600")).starts_with("ok "));
    }
    let before = server.memory();
    for question in ["stats\n_\n_\n", "q\nkey-1\n\n", "ping\n_\n_\n"] {
        let mut deaf = connect(server.address);
        assert!(flood(&mut deaf, question.repeat(2000).as_bytes(), usize::MAX), "{question:?}");
        goes_on(&mut honest);
    }
    let grown = server.memory().saturating_sub(before);
    assert!(grown < 64 * 1024, "{grown} kB more");
}

#[test]
fn a_flood_beside_an_honest_client() {
    let server = Server::start(&[]);
    let mut honest = server.client();
    let address = server.address;
    let floods: Vec<_> = (0..3)
        .map(|_| {
            std::thread::spawn(move || {
                let mut stream = connect(address);
                let mut reader = stream.try_clone().unwrap();
                let read = std::thread::spawn(move || {
                    let _ = std::io::copy(&mut reader, &mut std::io::sink());
                });
                let requests = "l\nflood\n0\nping\n_\n_\n".repeat(500);
                flood(&mut stream, requests.as_bytes(), 4 << 20);
                let _ = stream.shutdown(std::net::Shutdown::Both);
                read.join().unwrap();
            })
        })
        .collect();
    while floods.iter().any(|flood| !flood.is_finished()) {
        goes_on(&mut honest);
    }
    goes_on(&mut honest);
}

#[test]
fn garbage_does_no_harm() {
    let server = Server::start(&["--read-timeout", "500ms"]);
    let mut honest = server.client();
    let mut state = 1_u64;
    for _ in 0..200 {
        let garbage: Vec<u8> = (0..2000)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                state.to_be_bytes()[0]
            })
            .collect();
        let _ = connect(server.address).write_all(&garbage);
    }
    let hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03GET / HTTP/1.1\r\nHost: x\r\n\r\n";
    let mut client = server.client();
    client.0.get_mut().write_all(hello).unwrap();
    assert_eq!(client.line(), "error", "a browser is told so");
    goes_on(&mut honest);
}

#[test]
fn thousands_of_connections_come_and_go() {
    let many = 3000.min(many_files().saturating_sub(500));
    let server = Server::start(&["--max-connections", "10000"]);
    let mut honest = server.client();
    let mut all: Vec<_> = (0..many).map(|_| server.client()).collect();
    for (number, client) in all.iter_mut().enumerate() {
        client.send(&format!("l {} 0", number % 100));
    }
    let granted = all.iter_mut().map(Client::line).filter(|line| line.starts_with("ok")).count();
    assert_eq!(granted, many.min(100));
    goes_on(&mut honest);
    drop(all);
    eventually("all are gone", || {
        let stats = honest.ask("stats _");
        (stats.contains("\"connections\":1,") && stats.contains("\"locks\":[]")).then_some(())
    });
}

#[test]
fn as_many_connections_as_allowed() {
    let server = Server::start(&["--max-connections", "3", "--max-connections-per-peer", "3"]);
    let mut first: Vec<_> = (0..3).map(|_| server.client()).collect();
    for client in &mut first {
        assert_eq!(client.ask("ping _"), "ok");
    }
    assert!(server.client().is_closed(), "one too many is closed without a word");
    drop(first.pop());
    eventually("there is room again", || {
        let mut client = server.client();
        let _ = client.0.get_mut().write_all(b"ping\n_\n_\n");
        client.try_line().is_ok_and(|line| line == "ok").then_some(())
    });
}

#[test]
fn too_few_files_is_not_the_end() {
    let mut command = Command::new("sh");
    let script = "ulimit -n 40; exec \"$TENURE\" serve --port 0 --max-connections 1000";
    command.args(["-c", script]).env("TENURE", env!("CARGO_BIN_EXE_tenure"));
    let server = Server::spawn(&mut command);
    let mut honest = server.client();
    assert_eq!(honest.ask("ping _"), "ok");
    let crowd: Vec<_> = (0..60).map(|_| connect(server.address)).collect();
    let mut patient = server.client();
    patient.send("ping _");
    eventually("it cannot accept", || server.said().contains("cannot_accept").then_some(()));
    goes_on(&mut honest);
    drop(crowd);
    assert_eq!(patient.line(), "ok", "and accepts again, also who came before there was room");
    goes_on(&mut honest);
}
