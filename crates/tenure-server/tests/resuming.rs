//! Connections that waited are read again in the order in which their waits ended.

use std::time::Duration;

use tenure_core::Time;
use tenure_server::{Engine, Settings};

#[test]
fn connections_go_on_in_the_order_in_which_their_waits_ended() {
    let mut engine = Engine::new(Settings::default(), None, 1, 1);
    let now = Time::ZERO;
    let holder = engine.open(None, now).unwrap();
    engine.receive(holder, b"l\nk\n0\n", now);
    let waiters: Vec<_> = (0..5).map(|_| engine.open(None, now).unwrap()).collect();
    for waiter in &waiters {
        engine.receive(*waiter, b"l\nk\n1\n", now);
    }
    engine.handle_timeout(now + Duration::from_secs(1));
    let resumed: Vec<_> = std::iter::from_fn(|| engine.poll_resumed()).collect();
    assert_eq!(resumed, waiters);
}
