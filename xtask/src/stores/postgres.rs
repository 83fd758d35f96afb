//! PostgreSQL: a new cluster on a free port, deleted afterwards.

use std::fs::{self, File};
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use nix::sys::signal::Signal;
use nix::unistd::{Uid, User};

use super::{Environment, Running, Service, port, wait_until};
use crate::command::{self, Group};
use crate::setup::{self, Tool, apt_install};

pub(super) const SERVICE: Service =
    Service { name: "postgresql", tool: Tool { name: "postgresql", find, install }, start };

/// Environment variable with the URL of the server.
pub(super) const VARIABLE: &str = "TENURE_TEST_POSTGRES";

/// Access rules: every user of this machine may connect, for as long as the tests run.
const PG_HBA: &str = "local all all trust\nhost all all 127.0.0.1/32 trust\n";

/// Debian's folder of the server programs: off `PATH`, with one folder per major version.
const VERSIONS: &str = "/usr/lib/postgresql";

/// Settings of the server. Its data does not outlive the tests: protection against a machine crash only costs time.
const SETTINGS: &[&str] = &[
    "listen_addresses=127.0.0.1",
    "fsync=off",
    "full_page_writes=off",
    "max_connections=200",
    "timezone=UTC",
];

/// The folder of `initdb` and `postgres`: Debian's newest version, or else the folder on `PATH`.
fn find() -> Option<PathBuf> {
    newest(Path::new(VERSIONS)).or_else(|| Some(command::on_path("initdb")?.parent()?.to_owned()))
}

fn install() -> Result<()> {
    apt_install(&["postgresql"])
}

fn start(folder: &Path, _: &Environment) -> Result<Running> {
    let cluster = Cluster::start(folder, port::free)?;
    let url = cluster.url();
    // For tests that stop, freeze or promote a server: they start their own.
    let programs = cluster.programs.display().to_string();
    let environment = vec![(VARIABLE, url), ("TENURE_TEST_POSTGRES_BIN", programs)];
    Ok(Running { environment, groups: cluster.group.into_iter().collect() })
}

/// A PostgreSQL cluster. Dropping it stops the server.
pub(crate) struct Cluster {
    programs: PathBuf,
    user: Option<User>,
    folder: PathBuf,
    /// Settings beyond those of every cluster.
    settings: &'static [&'static str],
    port: u16,
    group: Option<Group>,
}

impl Cluster {
    /// Installs the programs if they are missing.
    pub(crate) fn ensure() -> Result<()> {
        setup::ensure(&SERVICE.tool).map(drop)
    }

    /// Folder of the server programs; `None` if they are not installed.
    pub(crate) fn programs() -> Option<PathBuf> {
        find()
    }

    /// Creates a cluster below `folder` and starts its server on a port from `port`.
    pub(crate) fn start(folder: &Path, port: impl Fn() -> Result<u16>) -> Result<Self> {
        Self::start_with(folder, port, &[])
    }

    /// As [`start`](Self::start), with further settings.
    pub(crate) fn start_with(
        folder: &Path,
        port: impl Fn() -> Result<u16>,
        settings: &'static [&'static str],
    ) -> Result<Self> {
        let programs = find().context("its programs are gone")?;
        let user = unprivileged_user()?;
        let folder = folder.join("postgresql");
        fs::create_dir(&folder).context("creating its folder")?;
        if let Some(user) = &user {
            chown(&folder, Some(user.uid.as_raw()), Some(user.gid.as_raw()))
                .context("changing the owner of its folder")?;
        }
        let mut cluster = Self { programs, user, folder, settings, port: 0, group: None };
        command::stdout(
            cluster
                .program("initdb")
                .args(["--username=postgres", "--auth=trust", "--encoding=UTF8", "--no-locale"])
                .args(["--no-sync", "--pgdata=data"]),
        )?;
        fs::write(cluster.folder.join("data/pg_hba.conf"), PG_HBA)
            .context("writing pg_hba.conf")?;
        let (group, port) = port::with_port_from(port, |port| {
            let program = |name| cluster.program(name);
            Ok((serve(&program, &cluster.folder, settings, port)?, port))
        })?;
        (cluster.group, cluster.port) = (Some(group), port);
        Ok(cluster)
    }

    pub(crate) fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    /// Stops the server as a crash would, leaves it down for `down`, and starts it again on its port.
    pub(crate) fn crash(&mut self, down: Duration) -> Result<()> {
        self.group = None;
        thread::sleep(down);
        let program = |name| self.program(name);
        self.group = Some(serve(&program, &self.folder, self.settings, self.port)?);
        Ok(())
    }

    fn program(&self, name: &'static str) -> Command {
        as_user(self.programs.join(name), self.user.as_ref(), &self.folder)
    }
}

/// Starts the server on `port` and waits until it answers. An error contains its log.
fn serve(
    program: &dyn Fn(&'static str) -> Command,
    folder: &Path,
    settings: &[&str],
    port: u16,
) -> Result<Group> {
    let log = folder.join("log");
    let file = File::create(&log).context("creating its log")?;
    let mut postgres = program("postgres");
    postgres.args(["-D", "data", "-p", &port.to_string()]);
    let settings = SETTINGS.iter().chain(settings).flat_map(|setting| ["-c", setting]);
    postgres.arg("-k").arg(folder).args(settings);
    postgres.stdout(file.try_clone().context("sharing its log")?).stderr(file);
    // SIGQUIT is PostgreSQL's immediate shutdown: no checkpoint, and its backends end with it.
    let mut group = Group::spawn(&mut postgres, Signal::SIGQUIT)?;

    let port = port.to_string();
    let ready = || {
        let mut command = program("pg_isready");
        let command = command.args(["--quiet", "--host=127.0.0.1", "--port", &port]);
        command.stdin(Stdio::null()).status().is_ok_and(|status| status.success())
    };
    wait_until(&mut group, ready)
        .with_context(|| format!("its log:\n{}", fs::read_to_string(&log).unwrap_or_default()))?;
    Ok(group)
}

/// User that PostgreSQL runs as, since it refuses to run as root; `None` if we are not root.
pub(super) fn unprivileged_user() -> Result<Option<User>> {
    if !Uid::effective().is_root() {
        return Ok(None);
    }
    for name in ["postgres", "nobody"] {
        if let Some(user) = User::from_name(name).context("looking up a user")? {
            return Ok(Some(user));
        }
    }
    anyhow::bail!(
        "PostgreSQL does not run as root, and there is neither a user postgres nor nobody"
    )
}

pub(super) fn as_user(program: PathBuf, user: Option<&User>, folder: &Path) -> Command {
    let mut command = Command::new(program);
    command.current_dir(folder);
    // The developer's own PGPORT, PGDATA and so on must not reach this cluster.
    for (name, _) in
        std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("PG"))
    {
        command.env_remove(name);
    }
    if let Some(user) = user {
        command.uid(user.uid.as_raw()).gid(user.gid.as_raw());
    }
    command
}

/// The programs of the highest version below `versions`, compared by number: 9 is older than 15.
fn newest(versions: &Path) -> Option<PathBuf> {
    let folders = fs::read_dir(versions).ok()?.flatten();
    let numbered = folders.filter_map(|folder| {
        let version: u32 = folder.file_name().to_str()?.parse().ok()?;
        let programs = folder.path().join("bin");
        ["initdb", "postgres"]
            .iter()
            .all(|name| programs.join(name).is_file())
            .then_some((version, programs))
    });
    numbered.max().map(|(_, programs)| programs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stores::Folder;

    #[test]
    fn the_newest_complete_version_is_found_by_number() {
        let folder = Folder::create("versions").unwrap();
        for (version, programs) in [("9", 2), ("15", 2), ("17", 1), ("common", 2)] {
            let bin = folder.path().join(version).join("bin");
            fs::create_dir_all(&bin).unwrap();
            for name in ["initdb", "postgres"].iter().take(programs) {
                fs::write(bin.join(name), "").unwrap();
            }
        }
        assert_eq!(newest(folder.path()), Some(folder.path().join("15/bin")));
        assert_eq!(newest(&folder.path().join("nowhere")), None);
    }
}
