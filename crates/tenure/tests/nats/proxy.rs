//! What is between a client and its server, and can fail.

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;

/// Passes bytes on between clients and a server, until it is told not to.
pub(crate) struct Proxy {
    pub(crate) port: u16,
    link: watch::Sender<Link>,
}

/// What passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Link {
    All,
    /// What the server says waits.
    Requests,
    Nothing,
}

/// Maximum number of unread bytes that the system may buffer.
const BUFFER: u32 = 8 * 1024;

impl Proxy {
    pub(crate) async fn start(to: u16) -> Self {
        Self::at("127.0.0.1", to).await
    }

    /// One that is reached at another address of this host.
    pub(crate) async fn at(near: &str, to: u16) -> Self {
        let listener = TcpListener::bind((near, 0)).await.expect("a port");
        let port = listener.local_addr().expect("bound").port();
        let link = watch::Sender::new(Link::All);
        let told = link.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let told = told.subscribe();
                tokio::spawn(async move {
                    let server = connect(to).await;
                    let (from_client, to_client) = client.into_split();
                    let (from_server, to_server) = server.into_split();
                    let requests = |link| link != Link::Nothing;
                    tokio::join!(
                        pass(from_client, to_server, told.clone(), requests),
                        pass(from_server, to_client, told, |link| link == Link::All),
                    )
                });
            }
        });
        Self { port, link }
    }

    /// From here on nothing passes. The connections stay open and silent, as behind a firewall that forgot them.
    pub(crate) fn cut(&self) {
        self.link.send_replace(Link::Nothing);
    }

    /// Keeps back what the server says, as if the client did not read, or lets it go.
    pub(crate) fn stall(&self, stalled: bool) {
        self.link.send_replace(if stalled { Link::Requests } else { Link::All });
    }
}

async fn connect(port: u16) -> TcpStream {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_recv_buffer_size(BUFFER).expect("a small buffer");
    let address = ([127, 0, 0, 1], port).into();
    socket.connect(address).await.expect("the server is up")
}

/// Passes one direction on while `open` says so.
async fn pass(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut told: watch::Receiver<Link>,
    open: impl Fn(Link) -> bool,
) {
    let mut bytes = [0; 4096];
    while told.wait_for(|link| open(*link)).await.is_ok() {
        let read = tokio::select! {
            read = from.read(&mut bytes) => read,
            changed = told.changed() => match changed {
                Ok(()) => continue,
                Err(_) => return,
            },
        };
        let Ok(1..) = read else { break };
        let many = read.unwrap_or_default();
        // What came in before the link failed is on its way no more.
        if told.wait_for(|link| open(*link)).await.is_err()
            || to.write_all(&bytes[..many]).await.is_err()
        {
            return;
        }
    }
    let _ = to.shutdown().await;
}
