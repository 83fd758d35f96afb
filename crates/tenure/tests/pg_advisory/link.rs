//! A link to the server that can fall silent, or be cut.

use std::sync::Arc;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Everything passes.
    Open,
    /// Bytes are taken and acknowledged, and go nowhere.
    Silent,
    /// Connections are closed, and no new ones are let in.
    Cut,
}

pub(crate) struct Link {
    pub(crate) url: String,
    mode: watch::Sender<Mode>,
}

impl Link {
    pub(crate) async fn to(url: &str) -> Self {
        Self::at("127.0.0.1", url).await
    }

    /// One that is reached at another address of this host.
    pub(crate) async fn at(near: &str, url: &str) -> Self {
        let listener = TcpListener::bind((near, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (before, rest) = url.rsplit_once(':').unwrap();
        let (server, database) = rest.split_once('/').unwrap();
        let target: Arc<str> = format!("127.0.0.1:{server}").into();
        let (mode, watch) = watch::channel(Mode::Open);
        tokio::spawn(async move {
            loop {
                let (near, _) = listener.accept().await.unwrap();
                let (target, mut mode) = (Arc::clone(&target), watch.clone());
                tokio::spawn(async move {
                    if *mode.borrow() == Mode::Cut {
                        return;
                    }
                    // A silent link does not answer new connections.
                    mode.wait_for(|mode| *mode != Mode::Silent).await.ok();
                    let far = TcpStream::connect(&*target).await.unwrap();
                    let (near, far) = (near.into_split(), far.into_split());
                    tokio::select! {
                        () = pass(near.0, far.1, mode.clone()) => {}
                        () = pass(far.0, near.1, mode.clone()) => {}
                        _ = mode.wait_for(|mode| *mode == Mode::Cut) => {}
                    }
                });
            }
        });
        let user = before.rsplit_once('@').unwrap().0;
        Self { url: format!("{user}@{near}:{port}/{database}"), mode }
    }

    pub(crate) fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }
}

async fn pass(
    mut from: impl tokio::io::AsyncRead + Unpin,
    mut to: impl tokio::io::AsyncWrite + Unpin,
    mode: watch::Receiver<Mode>,
) {
    let mut bytes = [0; 4096];
    let mut lost = false;
    while let Ok(read) = from.read(&mut bytes).await {
        // What was sent into silence never arrives, nor does what comes after it, nor the end of it.
        lost |= *mode.borrow() == Mode::Silent;
        if lost {
            if read == 0 {
                return std::future::pending().await;
            }
            continue;
        }
        if read == 0 || to.write_all(&bytes[..read]).await.is_err() {
            return;
        }
    }
}
