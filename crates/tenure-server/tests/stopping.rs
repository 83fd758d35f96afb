//! While the server stops, only a client that closes its connection gives up its holds.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

use std::time::Duration;

use tenure_core::Time;
use tenure_server::{Engine, Hangup, Settings};

/// How many of two holds are left: one of the plain protocol, one of a client that wants them kept where a connection
/// breaks.
fn left(is_stopping: bool, how: Hangup) -> usize {
    let mut engine = Engine::new(Settings::default(), None, 1, 1);
    let now = Time::ZERO;
    let [plain, keeping] = [(); 2].map(|()| engine.open(None, now).unwrap());
    engine.receive(plain, b"l\na\n0 60\n", now);
    engine.receive(keeping, b"hello\n_\n{\"keep\":true}\nl\nb\n0 60\n", now);
    assert_eq!(engine.metrics(now).sizes.holds, 2);
    if is_stopping {
        engine.drain(now);
        // Refused, and then closed by the server: a client that closes after that only follows.
        engine.receive(plain, b"ping\n_\n_\n", now);
    }
    for owner in [plain, keeping] {
        engine.hang_up(owner, how, now);
    }
    engine.check();
    engine.metrics(now).sizes.holds
}

#[test]
fn a_connection_that_the_server_ends_keeps_its_holds_while_it_stops() {
    assert_eq!(left(false, Hangup::Finished), 0);
    assert_eq!(left(false, Hangup::Aborted), 1, "that of the client which wants it kept");
    assert_eq!(left(true, Hangup::Finished), 1, "that of the client which was sent away first");
    assert_eq!(left(true, Hangup::Aborted), 2);
}

#[test]
fn a_client_that_does_not_read_is_closed_and_keeps_its_holds_while_the_server_stops() {
    let mut engine = Engine::new(Settings::default(), None, 1, 1);
    let owner = engine.open(None, Time::ZERO).unwrap();
    engine.receive(owner, b"l\nk\n0 60\n", Time::ZERO);
    engine.drain(Time::ZERO);
    engine.write_blocked(owner, Time::ZERO);
    let late = Time::ZERO + Duration::from_secs(5);
    engine.handle_timeout(late);
    assert_eq!(engine.poll_close(), Some(owner));
    assert!(engine.must_close(owner, late));
    engine.hang_up(owner, Hangup::Aborted, late);
    assert_eq!(engine.metrics(late).sizes.holds, 1);
}

#[test]
fn a_hold_that_ends_while_the_server_stops_passes_to_no_waiter() {
    let mut engine = Engine::new(Settings::default(), None, 1, 1);
    let now = Time::ZERO;
    let [holder, waiter] = [(); 2].map(|()| engine.open(None, now).unwrap());
    engine.receive(holder, b"l\nk\n0 60\n", now);
    // Enqueued and not blocked: the client would never learn of a grant, because its `w` is refused from now on.
    engine.receive(waiter, b"e\nk\n60\n", now);
    engine.drain(now);
    engine.hang_up(holder, Hangup::Finished, now);
    engine.check();
    assert_eq!(engine.metrics(now).sizes.holds, 0);
}
