//! The servers under load: our server and the echo server, started here, and peers that already run.

use std::ffi::OsString;
use std::fs::{self, File};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;

use anyhow::{Context as _, Result};
use nix::sys::signal::Signal;

use crate::command::Group;
use crate::stores::{port, wait_until};

/// A running server.
pub(super) struct Target {
    pub(super) address: String,
    pub(super) pid: u32,
    /// Address of its metrics, if they were requested.
    pub(super) http: Option<String>,
    /// Ends the server when dropped; `None` for a peer.
    _group: Option<Group>,
}

/// A kind of server that can be measured.
pub(super) struct Contender {
    pub(super) name: String,
    kind: ContenderKind,
    /// Server for the loads that measure rates; the same in all repetitions.
    steady: Option<Target>,
}

enum ContenderKind {
    Echo { program: PathBuf },
    Ours { program: PathBuf },
    Peer(Peer),
}

/// A server that was started outside this bench.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Peer {
    name: String,
    address: String,
    pid: u32,
}

impl Contender {
    pub(super) fn echo(program: PathBuf) -> Self {
        Self { name: "echo".to_owned(), kind: ContenderKind::Echo { program }, steady: None }
    }

    pub(super) fn ours(program: PathBuf) -> Self {
        Self { name: "tenure".to_owned(), kind: ContenderKind::Ours { program }, steady: None }
    }

    pub(super) fn peer(peer: Peer) -> Self {
        Self { name: peer.name.clone(), kind: ContenderKind::Peer(peer), steady: None }
    }

    pub(super) fn is_echo(&self) -> bool {
        matches!(self.kind, ContenderKind::Echo { .. })
    }

    pub(super) fn is_peer(&self) -> bool {
        matches!(self.kind, ContenderKind::Peer(_))
    }

    /// Starts a new server; a peer is used as it is.
    pub(super) fn fresh(&self, folder: &Path, http: bool) -> Result<Target> {
        let http = http.then(port::free).transpose()?.map(|port| format!("127.0.0.1:{port}"));
        let (program, arguments): (_, &[&str]) = match &self.kind {
            ContenderKind::Echo { program } => (program, &["echo"]),
            // `--max-locks` is above the number of keys of any load.
            ContenderKind::Ours { program } => {
                (program, &["serve", "--max-locks", "2000000", "--shutdown-timeout", "1"])
            }
            ContenderKind::Peer(Peer { address, pid, .. }) => {
                return Ok(Target {
                    address: address.clone(),
                    pid: *pid,
                    http: None,
                    _group: None,
                });
            }
        };
        let log = folder.join(format!("{}.log", self.name));
        let command = |port: u16| {
            let mut command = Command::new(program);
            command.args(arguments).args(["--port", &port.to_string()]).current_dir(folder);
            command.args(http.iter().flat_map(|http| ["--http", http]));
            // The user's own settings of a server must not change the figures.
            let setting = |name: &OsString| name.to_string_lossy().starts_with("DFLOCKD_");
            for (name, _) in std::env::vars_os().filter(|(name, _)| setting(name)) {
                command.env_remove(name);
            }
            command
        };
        let target = start(command, &log).with_context(|| format!("starting {}", self.name))?;
        Ok(Target { http, ..target })
    }

    /// The server for rates, started at the first call.
    pub(super) fn steady(&mut self, folder: &Path) -> Result<&Target> {
        let target = match self.steady.take() {
            Some(target) => target,
            None => self.fresh(folder, false)?,
        };
        Ok(self.steady.insert(target))
    }
}

impl FromStr for Peer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = || {
            let (name, rest) = text.split_once('=')?;
            let (address, pid) = rest.rsplit_once(':')?;
            let named = !name.is_empty() && name != "echo" && name != "tenure";
            (named && address.contains(':')).then_some(())?;
            Some(Self { name: name.into(), address: address.into(), pid: pid.parse().ok()? })
        };
        parts().ok_or_else(|| format!("{text:?} is not NAME=HOST:PORT:PID"))
    }
}

/// Starts a server on a free port and waits until it answers. An error contains its log.
fn start(command: impl Fn(u16) -> Command, log: &Path) -> Result<Target> {
    port::with_free_port(|port| {
        let file = File::create(log).context("creating its log")?;
        let mut command = command(port);
        command.stdout(file.try_clone().context("sharing its log")?).stderr(file);
        let mut group = Group::spawn(&mut command, Signal::SIGTERM)?;
        let address = format!("127.0.0.1:{port}");
        wait_until(&mut group, || TcpStream::connect(&address).is_ok()).with_context(|| {
            format!("its log:\n{}", fs::read_to_string(log).unwrap_or_default())
        })?;
        Ok(Target { address, pid: group.pid(), http: None, _group: Some(group) })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_has_a_name_an_address_and_a_process() {
        let peer = "go=127.0.0.1:6388:4711".parse::<Peer>().unwrap();
        let (name, address) = ("go".to_owned(), "127.0.0.1:6388".to_owned());
        assert_eq!(peer, Peer { name, address, pid: 4711 });
        for wrong in ["", "go", "go=6388:4711", "=1.1.1.1:1:1", "echo=1.1.1.1:1:1", "a=b:1:x"] {
            assert!(wrong.parse::<Peer>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_server_that_does_not_start_gives_its_log() {
        let folder = crate::stores::Folder::create("bench-target").unwrap();
        let command = |_| {
            let mut command = Command::new("sh");
            command.args(["-c", "echo no such command serve; exit 2"]);
            command
        };
        let Err(error) = start(command, &folder.path().join("log")) else { panic!() };
        assert!(format!("{error:#}").contains("no such command serve"), "{error:#}");
    }
}
