//! A turn of the server may take long: a lease counts from when its request was read, not from when the turn began.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use tenure_server::{Engine, Handle, Server, Settings};

/// Long enough for a busy machine.
const BOUND: Duration = Duration::from_secs(30);
const LEASE: Duration = Duration::from_secs(1);

#[test]
fn a_renewal_that_arrives_while_the_server_is_busy_has_its_whole_lease() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let engine = Engine::new(Settings::default(), None, 1, 1);
    let (server, handle) = Server::new(listener, None, engine, Duration::ZERO).unwrap();
    let serving = thread::spawn(move || server.run());
    let (mut holder, mut waiter) = (connect(address), connect(address));
    let grant = ask(&mut holder, "l\nk\n0 60\n");
    let token = grant.split(' ').nth(1).unwrap();

    // While a first question keeps the server busy, a second one is put and the holder's request begins: the next turn
    // has both to do, the question first.
    let first = Busy::begin(&handle);
    let second = Busy::queue(&handle);
    holder.get_mut().write_all(b"n").unwrap();
    waiter.get_mut().write_all(b"l\nk\n60\n").unwrap();
    first.end();
    second.has_begun();
    thread::sleep(LEASE * 9 / 10);
    // The rest of the request is sent in the middle of that turn: its lease cannot have begun before.
    let sent = Instant::now();
    holder.get_mut().write_all(format!("\nk\n{token} 1\n").as_bytes()).unwrap();
    second.end();
    assert_eq!(line(&mut holder), "ok 1");

    assert!(line(&mut waiter).starts_with("ok "));
    let since = sent.elapsed();
    assert!(
        since >= LEASE,
        "two holders: the key passed on {since:?} after a renewal for {LEASE:?}"
    );
    handle.stop();
    serving.join().unwrap().unwrap();
}

/// A question that the engine is asked, and does not come to the end of.
struct Busy {
    begun: mpsc::Receiver<()>,
    end: mpsc::Sender<()>,
}

impl Busy {
    fn queue(handle: &Handle) -> Self {
        let (told, begun) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        handle.run_on_engine(move |_, _| {
            told.send(()).unwrap();
            ended.recv().unwrap();
        });
        Self { begun, end }
    }

    fn begin(handle: &Handle) -> Self {
        let busy = Self::queue(handle);
        busy.has_begun();
        busy
    }

    fn has_begun(&self) {
        self.begun.recv_timeout(BOUND).unwrap();
    }

    fn end(self) {
        self.end.send(()).unwrap();
    }
}

fn connect(address: SocketAddr) -> BufReader<TcpStream> {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(BOUND)).unwrap();
    stream.set_nodelay(true).unwrap();
    BufReader::new(stream)
}

fn ask(stream: &mut BufReader<TcpStream>, request: &str) -> String {
    stream.get_mut().write_all(request.as_bytes()).unwrap();
    line(stream)
}

fn line(stream: &mut BufReader<TcpStream>) -> String {
    let mut line = String::new();
    stream.read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}
