//! A server that is driven turn by turn. Its thread is stopped, in logical time, between any two readings of its clock,
//! or a client is gone when the server replies.

use std::cell::RefCell;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Instant;

use rustix::net::sockopt;

use super::*;
use crate::Settings;

const LEASE: Duration = Duration::from_secs(15);
/// Longest wait, long enough for a busy machine. Only a test that fails waits for it.
const BOUND: Duration = Duration::from_secs(30);
/// Time for which the thread is stopped.
const STOP: Duration = Duration::from_secs(10);

thread_local! {
    static CLOCK: RefCell<FakeClock> = const { RefCell::new(FakeClock { now: Time::ZERO, stop: None }) };
}

/// A clock that stands still until the thread is stopped.
struct FakeClock {
    now: Time,
    /// Number of readings after which the thread is stopped, and a function to run before it continues.
    stop: Option<(usize, Box<dyn FnOnce()>)>,
}

fn fake_now() -> Time {
    let (now, meanwhile) = CLOCK.with_borrow_mut(|clock| {
        let now = clock.now;
        let meanwhile = match clock.stop.take() {
            Some((0, meanwhile)) => {
                clock.now = clock.now + STOP;
                Some(meanwhile)
            }
            later => {
                clock.stop = later.map(|(readings, meanwhile)| (readings - 1, meanwhile));
                None
            }
        };
        (now, meanwhile)
    });
    if let Some(meanwhile) = meanwhile {
        meanwhile();
    }
    now
}

/// A server that is driven turn by turn, and its only client.
struct Harness {
    server: Server,
    client: TcpStream,
    /// Bytes that the client received and has not parsed.
    received: String,
}

impl Harness {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        client.set_nodelay(true).unwrap();
        client.set_nonblocking(true).unwrap();
        let engine = Engine::new(Settings::default(), None, 1, 1);
        let (mut server, _) = Server::new(listener, None, engine, Duration::ZERO).unwrap();
        server.network.clock = fake_now;
        Self { server, client, received: String::new() }
    }

    /// Runs one turn, as `run` does. True if there were events.
    fn turn(&mut self) -> bool {
        self.server.timeout();
        let Server { network, events, .. } = &mut self.server;
        network.wait(Some(Duration::from_millis(100)), events).unwrap();
        let has_events = !self.server.events.is_empty();
        self.server.turn().unwrap();
        has_events
    }

    /// Reads the next reply.
    fn line(&mut self) -> String {
        let begun = Instant::now();
        loop {
            if let Some((line, rest)) = self.received.split_once('\n') {
                let line = line.to_owned();
                self.received = rest.to_owned();
                return line;
            }
            assert!(begun.elapsed() < BOUND, "no reply");
            self.turn();
            let mut bytes = [0; 1024];
            if let Ok(read) = self.client.read(&mut bytes) {
                self.received += std::str::from_utf8(&bytes[..read]).unwrap();
            }
        }
    }

    /// Remaining lease of the only hold.
    fn left(&mut self) -> Duration {
        let (rows, _) = self.server.engine.key_rows(0, 64, CLOCK.with_borrow(|clock| clock.now));
        rows[0].holder.as_ref().unwrap().left
    }
}

/// Sends a renewal while the thread is stopped after `readings` readings of the clock, and returns the remaining lease.
/// `None` if the clock was read less often.
fn left_of_a_renewal_sent_after(readings: usize) -> Option<Duration> {
    let mut harness = Harness::new();
    harness.client.write_all(b"l\nk\n0 60\n").unwrap();
    let token = harness.line().split(' ').nth(1).unwrap().to_owned();
    // The first byte of the request: the server has something to read in the turn in which it is stopped.
    harness.client.write_all(b"n").unwrap();
    let mut client = harness.client.try_clone().unwrap();
    let rest = format!("\nk\n{token} {}\n", LEASE.as_secs());
    let meanwhile = Box::new(move || client.write_all(rest.as_bytes()).unwrap());
    CLOCK.with_borrow_mut(|clock| clock.stop = Some((readings, meanwhile)));
    while harness.turn() {}
    if CLOCK.with_borrow_mut(|clock| clock.stop.take()).is_some() {
        return None;
    }
    assert_eq!(harness.line(), format!("ok {}", LEASE.as_secs()));
    Some(harness.left())
}

#[test]
fn a_lease_counts_from_after_its_request_was_sent_wherever_the_server_was_stopped() {
    let mut readings = 0;
    while let Some(left) = left_of_a_renewal_sent_after(readings) {
        assert_eq!(
            left,
            LEASE,
            "the server was stopped after {} readings of the clock",
            readings + 1
        );
        readings += 1;
    }
    assert!(readings >= 3, "the clock was read {readings} times in a turn");
}

#[test]
fn a_hold_of_a_broken_connection_is_granted_to_the_next_waiter_in_the_same_turn() {
    let mut harness = Harness::new();
    harness.client.write_all(b"l\nk\n0 60\n").unwrap();
    assert!(harness.line().starts_with("ok "));
    let mut waiter = TcpStream::connect(harness.server.address().unwrap()).unwrap();
    waiter.set_read_timeout(Some(BOUND)).unwrap();
    waiter.write_all(b"l\nk\n60\n").unwrap();
    let begun = Instant::now();
    while harness.server.engine.metrics(fake_now()).sizes.waiters == 0 {
        assert!(begun.elapsed() < BOUND, "no waiter");
        harness.turn();
    }
    harness.client.write_all(b"ping\n_\n_\n").unwrap();
    let Harness { mut server, client: holder, .. } = harness;
    server.network.wait(Some(BOUND), &mut server.events).unwrap();
    assert_eq!(server.events.len(), 1, "the request of the holder");
    // Reset after the events of the turn were taken: the server serves the request, and its reply cannot be sent.
    sockopt::set_socket_linger(&holder, Some(Duration::ZERO)).unwrap();
    drop(holder);
    server.turn().unwrap();
    // There is no further turn: a running server may now sleep for seconds.
    let mut grant = [0; 3];
    waiter.read_exact(&mut grant).expect("the waiter is granted the lock");
    assert_eq!(&grant, b"ok ");
}
