//! Azurite: Microsoft's emulator of Azure Blob Storage.

use std::fs::{self, File};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};
use nix::sys::signal::Signal;

use super::{Environment, Running, Service, port, wait_until};
use crate::command::{self, Group};
use crate::repo;
use crate::setup::Tool;

pub(super) const SERVICE: Service =
    Service { name: "azurite", tool: Tool { name: "azurite", find, install }, start };

/// The newest version that runs on Node 20.
const VERSION: &str = "3.35.0";

/// Azurite's default account, whose key is in its manual.
const ACCOUNT: &str = "devstoreaccount1";
const KEY: &str =
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";

/// Python script that creates the container `locks`.
const CREATE_CONTAINER_SCRIPT: &str = "
import base64, hashlib, hmac, sys, urllib.request
from email.utils import formatdate
port, account, key = sys.argv[1:]
date = formatdate(usegmt=True)
headers = {'x-ms-date': date, 'x-ms-version': '2021-12-02', 'content-length': '0'}
signed = ''.join(f'{name}:{headers[name]}\\n' for name in ['x-ms-date', 'x-ms-version'])
text = 'PUT' + '\\n' * 12 + signed + f'/{account}/{account}/locks\\nrestype:container'
code = hmac.new(base64.b64decode(key), text.encode(), hashlib.sha256).digest()
headers['authorization'] = f'SharedKey {account}:{base64.b64encode(code).decode()}'
url = f'http://127.0.0.1:{port}/{account}/locks?restype=container'
urllib.request.urlopen(urllib.request.Request(url, method='PUT', headers=headers))
";

fn find() -> Option<PathBuf> {
    let program = "node_modules/azurite/dist/src/blob/main.js";
    Some(folder().ok()?.join(program)).filter(|program| program.is_file())
}

fn install() -> Result<()> {
    let mut npm = Command::new("npm");
    npm.args(["install", "--silent", "--no-fund", "--no-audit", "--prefix"]).arg(folder()?);
    let shown = command::show(npm.arg(format!("azurite@{VERSION}")));
    shown.context("fetching azurite needs npm (Debian: npm)")
}

fn folder() -> Result<PathBuf> {
    Ok(repo::target()?.join("tools").join(format!("azurite-{VERSION}")))
}

fn start(folder: &Path, _: &Environment) -> Result<Running> {
    let program = find().context("its program is gone")?;
    let folder = folder.join("azurite");
    fs::create_dir(&folder).context("creating its folder")?;
    let log = folder.join("log");
    let (group, url) = port::with_free_port(|port| {
        let file = File::create(&log).context("creating its log")?;
        let mut server = Command::new("node");
        server.arg(&program).args(["--blobHost", "127.0.0.1", "--blobPort", &port.to_string()]);
        server.args([
            "--silent",
            "--inMemoryPersistence",
            "--skipApiVersionCheck",
            "--disableTelemetry",
        ]);
        server.current_dir(&folder);
        server.stdout(file.try_clone().context("sharing its log")?).stderr(file);
        let mut group = Group::spawn(&mut server, Signal::SIGKILL)?;
        let log_text = || format!("its log:\n{}", fs::read_to_string(&log).unwrap_or_default());
        wait_until(&mut group, || made_container(port)).with_context(log_text)?;
        Ok((group, format!("http://127.0.0.1:{port}/{ACCOUNT}")))
    })?;
    let connection = format!("AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={url};");
    let environment =
        vec![("TENURE_TEST_AZURE", url), ("AZURE_STORAGE_CONNECTION_STRING", connection)];
    Ok(Running { environment, groups: vec![group] })
}

/// Creates the container of the tests. True if the server confirmed it.
fn made_container(port: u16) -> bool {
    TcpStream::connect(("127.0.0.1", port)).is_ok()
        && Command::new("python3")
            .args(["-c", CREATE_CONTAINER_SCRIPT, &port.to_string(), ACCOUNT, KEY])
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
}
