//! A server that says what the test tells it to.

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};

use std::time::Duration;

/// How long anything may take on a busy machine.
const BOUND: Duration = Duration::from_secs(20);

pub(crate) struct Script(TcpListener);

impl Script {
    pub(crate) async fn new() -> Self {
        Self(TcpListener::bind("127.0.0.1:0").await.expect("a free port"))
    }

    pub(crate) fn address(&self) -> String {
        self.0.local_addr().expect("bound").to_string()
    }

    pub(crate) fn url(&self) -> String {
        format!("tenure://{}", self.address())
    }

    /// The next connection.
    pub(crate) async fn accept(&self) -> Peer {
        let accepted = tokio::time::timeout(BOUND, self.0.accept()).await;
        Peer::new(accepted.expect("a connection comes").expect("accepted").0)
    }

    /// The next connection, greeted as one of our servers does.
    pub(crate) async fn greeted(&self, instance: &str, max_lease_ms: u64) -> Peer {
        let mut peer = self.accept().await;
        let [command, key, about] = peer.request().await;
        assert_eq!((&*command, &*key), ("hello", "_"));
        assert!(about.len() <= 256, "servers in the field cut longer lines off: {about}");
        assert!(about.contains("\"keep\":true"), "{about}");
        peer.say(&format!(
            "ok {{\"instance\":\"{instance}\",\"auth\":false,\"auto_release\":true,\"max_lease_ms\":{max_lease_ms}}}"
        ))
        .await;
        peer
    }

    /// The next connection, told that there is no extension.
    pub(crate) async fn plain(&self) -> Peer {
        let mut peer = self.accept().await;
        assert_eq!(peer.request().await[0], "hello");
        peer.say("error").await;
        peer
    }
}

/// The other end of a connection.
pub(crate) struct Peer {
    lines: BufReader<OwnedReadHalf>,
    out: OwnedWriteHalf,
}

impl Peer {
    fn new(stream: TcpStream) -> Self {
        let (lines, out) = stream.into_split();
        Self { lines: BufReader::new(lines), out }
    }

    /// The next request: command, key and argument.
    pub(crate) async fn request(&mut self) -> [String; 3] {
        let mut lines = [const { String::new() }; 3];
        for line in &mut lines {
            let read = tokio::time::timeout(BOUND, self.lines.read_line(line)).await;
            assert_ne!(read.expect("a request comes").expect("open"), 0, "the client is gone");
            line.pop();
        }
        lines
    }

    /// The client closes the connection.
    pub(crate) async fn is_left(&mut self) {
        let mut line = String::new();
        let read = tokio::time::timeout(BOUND, self.lines.read_line(&mut line)).await;
        let read = read.expect("the client leaves");
        assert!(read.is_err() || read.is_ok_and(|read| read == 0), "{line:?} instead of the end");
    }

    pub(crate) async fn say(&mut self, line: &str) {
        self.out.write_all(format!("{line}\n").as_bytes()).await.expect("open");
    }
}
