//! moto: an emulator of S3. It runs on one thread: with several, its conditional writes are not atomic.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};
use nix::sys::signal::Signal;

use super::{Environment, Running, Service, port, wait_until};
use crate::command::{self, Group};
use crate::repo;
use crate::setup::Tool;

pub(super) const SERVICE: Service =
    Service { name: "moto", tool: Tool { name: "moto", find, install }, start };

const VERSION: &str = "5.1.22";

/// Python script of the server, on one thread.
const SERVER_SCRIPT: &str = "
import sys
from werkzeug.serving import run_simple
from moto.server import DomainDispatcherApplication, create_backend_app
application = DomainDispatcherApplication(create_backend_app)
run_simple('127.0.0.1', int(sys.argv[1]), application, threaded=False)
";

fn find() -> Option<PathBuf> {
    Some(folder().ok()?.join("moto/server.py")).filter(|server| server.is_file())
}

fn install() -> Result<()> {
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
    pip.args(["--root-user-action=ignore", "--target"]).arg(folder()?);
    command::show(pip.arg(format!("moto[s3,server]=={VERSION}")))
}

fn folder() -> Result<PathBuf> {
    Ok(repo::target()?.join("tools").join(format!("moto-{VERSION}")))
}

fn start(folder: &Path, _: &Environment) -> Result<Running> {
    let modules = self::folder()?;
    let log = folder.join("moto.log");
    let (group, url) = port::with_free_port(|port| {
        let file = File::create(&log).context("creating its log")?;
        let mut server = Command::new("python3");
        server.args(["-c", SERVER_SCRIPT, &port.to_string()]).env("PYTHONPATH", &modules);
        server.stdout(file.try_clone().context("sharing its log")?).stderr(file);
        let mut group = Group::spawn(&mut server, Signal::SIGKILL)?;
        let log_text = || format!("its log:\n{}", fs::read_to_string(&log).unwrap_or_default());
        wait_until(&mut group, || made_bucket(port)).with_context(log_text)?;
        Ok((group, format!("http://127.0.0.1:{port}")))
    })?;
    let environment = vec![
        ("TENURE_TEST_S3", url),
        // Any value works: moto does not check signatures.
        ("AWS_ACCESS_KEY_ID", "tests".to_owned()),
        ("AWS_SECRET_ACCESS_KEY", "tests".to_owned()),
    ];
    Ok(Running { environment, groups: vec![group] })
}

/// Creates the bucket of the tests. True if the server confirmed it.
fn made_bucket(port: u16) -> bool {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let wait = Duration::from_secs(5);
    let Ok(mut stream) = TcpStream::connect_timeout(&address, wait) else { return false };
    let request = "PUT /locks HTTP/1.1\r\nhost: s3.amazonaws.com\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    let mut answer = [0; 12];
    stream.set_read_timeout(Some(wait)).is_ok()
        && stream.write_all(request.as_bytes()).is_ok()
        && stream.read_exact(&mut answer).is_ok()
        && answer.ends_with(b"200")
}
