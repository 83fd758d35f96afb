//! The thread that serves says that it comes around, and falls silent where it does not.

use std::net::TcpListener;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use tenure_server::{Engine, Server, Settings};

const EVERY: Duration = Duration::from_millis(50);
/// Long enough for a busy machine.
const BOUND: Duration = Duration::from_secs(30);

#[test]
fn a_server_that_is_stuck_is_silent_and_one_that_idles_is_not() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let engine = Engine::new(Settings::default(), None, 1, 1);
    let (mut server, handle) = Server::new(listener, None, engine, Duration::ZERO).unwrap();
    let (beat, beats) = mpsc::channel();
    server.set_watchdog(EVERY, move || beat.send(()).unwrap());
    let serving = thread::spawn(move || server.run());
    for _ in 0..5 {
        beats.recv_timeout(BOUND).expect("an idle server comes around");
    }
    // The engine is asked something that it does not come to the end of.
    let (stuck, is_stuck) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    handle.run_on_engine(move |_, _| {
        stuck.send(()).unwrap();
        released.recv().unwrap();
    });
    is_stuck.recv_timeout(BOUND).unwrap();
    while beats.try_recv().is_ok() {}
    assert!(beats.recv_timeout(EVERY * 10).is_err(), "it is stuck, and says that it is not");
    release.send(()).unwrap();
    beats.recv_timeout(BOUND).expect("it goes on");
    handle.stop();
    serving.join().unwrap().unwrap();
}
