//! PgBouncer in front of the PostgreSQL that was started before it: pools in transaction mode, and one in session mode.

use std::fs::{self, File};
use std::net::TcpStream;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use nix::sys::signal::Signal;

use super::{Environment, Running, Service, port, postgres, wait_until};
use crate::command::{self, Group};
use crate::setup::{Tool, apt_install};

pub(super) const SERVICE: Service =
    Service { name: "pgbouncer", tool: Tool { name: "pgbouncer", find, install }, start };

/// Debian's path of the program, which is off the `PATH` of most users.
const DEBIAN: &str = "/usr/sbin/pgbouncer";

fn find() -> Option<PathBuf> {
    command::on_path("pgbouncer")
        .or_else(|| Some(DEBIAN.into()).filter(|path: &PathBuf| path.is_file()))
}

fn install() -> Result<()> {
    apt_install(&["pgbouncer"])
}

fn start(folder: &Path, before: &Environment) -> Result<Running> {
    let program = find().context("its program is gone")?;
    let server = before.iter().find(|(name, _)| *name == postgres::VARIABLE);
    let server = server.and_then(|(_, url)| url.rsplit_once(':')?.1.split('/').next());
    let server: u16 =
        server.and_then(|port| port.parse().ok()).context("PostgreSQL has no port")?;
    let user = postgres::unprivileged_user()?;
    let folder = folder.join("pgbouncer");
    fs::create_dir(&folder).context("creating its folder")?;
    fs::write(folder.join("users"), "\"postgres\" \"\"\n").context("writing its users")?;
    if let Some(user) = &user {
        chown(&folder, Some(user.uid.as_raw()), Some(user.gid.as_raw()))
            .context("changing the owner of its folder")?;
    }
    let serve = |port: u16| -> Result<(Group, u16)> {
        fs::write(folder.join("settings"), settings(server, port))
            .context("writing its settings")?;
        let log = folder.join("log");
        let file = File::create(&log).context("creating its log")?;
        let mut pgbouncer = postgres::as_user(program.clone(), user.as_ref(), &folder);
        pgbouncer.arg("settings").stdout(file.try_clone().context("sharing its log")?).stderr(file);
        // SIGTERM is its immediate shutdown.
        let mut group = Group::spawn(&mut pgbouncer, Signal::SIGTERM)?;
        wait_until(&mut group, || TcpStream::connect(("127.0.0.1", port)).is_ok()).with_context(
            || format!("its log:\n{}", fs::read_to_string(&log).unwrap_or_default()),
        )?;
        Ok((group, port))
    };
    let (group, port) = port::with_free_port(serve)?;
    let url = format!("postgres://postgres@127.0.0.1:{port}/postgres");
    // For tests that change the mode of a pool: they start their own.
    let program = program.display().to_string();
    let environment =
        vec![("TENURE_TEST_PGBOUNCER", url), ("TENURE_TEST_PGBOUNCER_PROGRAM", program)];
    Ok(Running { environment, groups: vec![group] })
}

/// Settings with the database `session` as a pool in session mode, and every other database in transaction mode.
///
/// No startup parameter is ignored: a client that sends an unknown one is refused, as it would be in production.
fn settings(server: u16, port: u16) -> String {
    format!(
        "[databases]
session = host=127.0.0.1 port={server} dbname=postgres pool_mode=session
* = host=127.0.0.1 port={server}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = users
pool_mode = transaction
default_pool_size = 8
max_client_conn = 500
"
    )
}
