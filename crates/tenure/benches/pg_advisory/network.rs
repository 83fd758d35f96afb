//! Links that fall silent, and networks whose only link goes down.

use std::process::Command;
use std::sync::Arc;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::Result;

/// A link to the server that can fall silent: bytes are taken and acknowledged, and go nowhere.
pub(crate) struct Link {
    pub(crate) url: String,
    silent: watch::Sender<bool>,
}

impl Link {
    pub(crate) async fn to(server: &str, near: &str) -> Result<Self> {
        let listener = TcpListener::bind((near, 0)).await?;
        let port = listener.local_addr()?.port();
        let rest = server.rsplit_once(':').ok_or("no port")?.1;
        let (target, database) = rest.split_once('/').ok_or("no database")?;
        let target: Arc<str> = format!("127.0.0.1:{target}").into();
        let (silent, watch) = watch::channel(false);
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let (target, mut silent) = (Arc::clone(&target), watch.clone());
                tokio::spawn(async move {
                    let _ = silent.wait_for(|silent| !silent).await;
                    let Ok(far) = TcpStream::connect(&*target).await else { return };
                    let _ = near.set_nodelay(true).and_then(|()| far.set_nodelay(true));
                    let (near, far) = (near.into_split(), far.into_split());
                    tokio::select! {
                        () = pass(near.0, far.1, silent.clone()) => {}
                        () = pass(far.0, near.1, silent) => {}
                    }
                });
            }
        });
        let url = format!("postgres+advisory://postgres@{near}:{port}/{database}");
        Ok(Self { url, silent })
    }

    pub(crate) fn silence(&self, silent: bool) {
        self.silent.send_replace(silent);
    }
}

async fn pass(
    mut from: impl tokio::io::AsyncRead + Unpin,
    mut to: impl tokio::io::AsyncWrite + Unpin,
    silent: watch::Receiver<bool>,
) {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let mut bytes = [0; 4096];
    let mut lost = false;
    while let Ok(read) = from.read(&mut bytes).await {
        lost |= *silent.borrow();
        match read {
            0 if lost => return std::future::pending().await,
            0 => return,
            _ if lost => {}
            _ if to.write_all(&bytes[..read]).await.is_err() => return,
            _ => {}
        }
    }
}

/// A network of its own for each participant, whose link to us can be taken down.
pub(crate) struct Namespaces(usize);

impl Namespaces {
    pub(crate) fn make(many: usize) -> Result<Self> {
        let made = Self(many);
        for nth in 0..many {
            let (space, near, far) = (Self::name(nth), format!("tnb{nth}"), format!("tnc{nth}"));
            ip(&["netns", "add", &space])?;
            ip(&["link", "add", &near, "type", "veth", "peer", "name", &far, "netns", &space])?;
            ip(&["addr", "add", &format!("{}/30", Self::near(nth)), "dev", &near])?;
            ip(&["link", "set", &near, "up"])?;
            ip(&["-n", &space, "addr", "add", &format!("10.213.{nth}.2/30"), "dev", &far])?;
            ip(&["-n", &space, "link", "set", &far, "up"])?;
            ip(&["-n", &space, "link", "set", "lo", "up"])?;
        }
        Ok(made)
    }

    fn name(nth: usize) -> String {
        format!("tenure-bench-{nth}")
    }

    pub(crate) fn near(nth: usize) -> String {
        format!("10.213.{nth}.1")
    }

    pub(crate) fn within(nth: usize) -> Vec<String> {
        ["ip", "netns", "exec", &Self::name(nth)].map(str::to_owned).into()
    }

    pub(crate) fn set(nth: usize, state: &str) -> Result<()> {
        ip(&["-n", &Self::name(nth), "link", "set", &format!("tnc{nth}"), state])
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for nth in 0..self.0 {
            let _ = ip(&["link", "del", &format!("tnb{nth}")]);
            let _ = ip(&["netns", "del", &Self::name(nth)]);
        }
    }
}

fn ip(words: &[&str]) -> Result<()> {
    let output = Command::new("ip").args(words).output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("ip {}: {}", words.join(" "), said.trim()).into())
}
