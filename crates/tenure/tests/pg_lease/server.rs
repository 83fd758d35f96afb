//! Servers of a test's own, to be stopped, set to another time, copied and promoted.

use std::fs::{self, File};
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::services;

/// A PostgreSQL server that goes with its test.
pub(crate) struct Server {
    folder: PathBuf,
    programs: PathBuf,
    /// User and group of the server if we are root: PostgreSQL refuses to run as root.
    user: Option<(u32, u32)>,
    faketime: Option<PathBuf>,
    pub(crate) port: u16,
    process: Option<Child>,
}

impl Server {
    /// A new cluster; `None` where the test has to be skipped.
    pub(crate) fn start() -> Option<Self> {
        Self::start_with(None, "")
    }

    /// One that acknowledges commits up to 10 s before they are on disk, as `synchronous_commit = off` allows.
    #[allow(dead_code, reason = "not every test program needs it")]
    pub(crate) fn start_with_lazy_commits() -> Option<Self> {
        Self::start_with(None, "synchronous_commit = off\nwal_writer_delay = 10s\n")
    }

    /// One whose clock can be set.
    pub(crate) fn start_under_faketime() -> Option<Self> {
        Self::start_with(Some(services::faketime()?), "")
    }

    pub(crate) fn start_with(faketime: Option<PathBuf>, settings: &str) -> Option<Self> {
        let programs = services::postgres_programs()?;
        let mut server = Self::prepare(programs, faketime);
        let access = "local all all trust\nhost all locked_out 127.0.0.1/32 scram-sha-256\n\
                      host all all 127.0.0.1/32 trust\nhost replication all 127.0.0.1/32 trust\n";
        run(server.program("initdb").args(["--username=postgres", "--auth=trust"]).args([
            "--encoding=UTF8",
            "--no-locale",
            "--no-sync",
            "--pgdata=data",
        ]));
        fs::write(server.folder.join("data/pg_hba.conf"), access).unwrap();
        fs::write(server.folder.join("data/postgresql.auto.conf"), settings).unwrap();
        server.set_clock("+0");
        server.up();
        Some(server)
    }

    fn prepare(programs: PathBuf, faketime: Option<PathBuf>) -> Self {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let made = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("tenure-pg-{}-{made}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir(&folder).unwrap();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o711)).unwrap();
        let root = fs::metadata(&folder).unwrap().uid() == 0;
        let user = root.then(|| (id("-u"), id("-g")));
        if let Some((user, group)) = user {
            chown(&folder, Some(user), Some(group)).unwrap();
        }
        let port = free_port();
        Self { folder, programs, user, faketime, port, process: None }
    }

    pub(crate) fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    /// Writes a file that only the server may read.
    pub(crate) fn write(&self, name: &str, text: &str) {
        let path = self.folder.join("data").join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        if let Some((user, group)) = self.user {
            chown(&path, Some(user), Some(group)).unwrap();
        }
    }

    /// A folder for files of the test's own, gone with the server.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Starts it and waits until it answers.
    pub(crate) fn up(&mut self) {
        self.spawn();
        let begun = Instant::now();
        while !self.answers() {
            assert!(begun.elapsed() < Duration::from_secs(60), "{}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Starts it without waiting for it: one in recovery may refuse connections.
    pub(crate) fn spawn(&mut self) {
        let log = File::create(self.folder.join("log")).unwrap();
        let mut postgres = self.program("postgres");
        // A socket in the folder, and one in the abstract namespace.
        let folder = self.folder.display();
        let sockets = format!("{folder},@{folder}");
        postgres.args(["-D", "data", "-p", &self.port.to_string(), "-k", &sockets]);
        for setting in ["listen_addresses=127.0.0.1", "fsync=off", "max_connections=60"] {
            postgres.args(["-c", setting]);
        }
        postgres.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        self.process = Some(postgres.spawn().unwrap());
    }

    fn answers(&self) -> bool {
        let port = self.port.to_string();
        let mut ready = self.program("pg_isready");
        ready.args(["--quiet", "--host=127.0.0.1", "--port", &port]).stdin(Stdio::null());
        ready.status().unwrap().success()
    }

    /// Ends it at once, as a crash would.
    pub(crate) fn down(&mut self) {
        if let Some(mut process) = self.process.take() {
            send("QUIT", process.id());
            process.wait().unwrap();
        }
    }

    /// Sets its clock, as far from the true time as `offset` says: `+3600`, in seconds.
    pub(crate) fn set_clock(&self, offset: &str) {
        // Read at any moment: never half written.
        let (new, file) = (self.folder.join("clock.new"), self.folder.join("clock"));
        fs::write(&new, offset).unwrap();
        fs::rename(&new, file).unwrap();
    }

    /// A standby that follows it.
    pub(crate) fn standby(&self) -> Self {
        let mut standby = Self::prepare(self.programs.clone(), None);
        let port = self.port.to_string();
        run(standby.program("pg_basebackup").args([
            "--pgdata=data",
            "--write-recovery-conf",
            "--checkpoint=fast",
            "--no-sync",
            "--host=127.0.0.1",
            "--username=postgres",
            "--port",
            &port,
        ]));
        standby.up();
        standby
    }

    /// Makes a standby the primary.
    pub(crate) fn promote(&self) {
        run(self.program("pg_ctl").args(["promote", "--pgdata=data", "--wait"]));
    }

    /// Runs statements with psql; returns the rows.
    #[allow(dead_code, reason = "not every test program needs it")]
    pub(crate) fn sql(&self, sql: &str) -> String {
        let mut psql = self.program("psql");
        psql.args([&*self.url(), "-XAtq", "-v", "ON_ERROR_STOP=1", "-c", sql]);
        let output = psql.stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "{sql}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    fn program(&self, name: &str) -> Command {
        let mut command = self.beside(&self.programs.join(name));
        // The language of the server's messages, if `lc_messages` is not `C`.
        command.env("LANGUAGE", "de");
        if let Some(library) = self.faketime.as_ref().filter(|_| name == "postgres") {
            command.env("LD_PRELOAD", library).env("FAKETIME_NO_CACHE", "1");
            command.env("FAKETIME_DONT_FAKE_MONOTONIC", "1").env("DONT_FAKE_MONOTONIC", "1");
            command.env("FAKETIME_TIMESTAMP_FILE", self.folder.join("clock"));
        }
        command
    }

    /// Another program in its folder, as its user.
    pub(crate) fn beside(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.folder);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("PG") {
                command.env_remove(name);
            }
        }
        if let Some((user, group)) = self.user {
            command.uid(user).gid(group);
        }
        command
    }

    /// What it has said since it was started.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.down();
        fs::remove_dir_all(&self.folder).ok();
    }
}

/// A free port below those that the kernel gives to clients: while the server is down, no connection can take its port.
pub(crate) fn free_port() -> u16 {
    let port = || 15_000 + u16::try_from(getrandom::u64().unwrap() % 15_000).unwrap();
    let free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    std::iter::repeat_with(port).take(1_000).find(free).expect("one of many ports is free")
}

fn run(command: &mut Command) {
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

pub(crate) fn send(signal: &str, process: u32) {
    let sent = Command::new("kill").args([&format!("-{signal}"), &process.to_string()]).status();
    assert!(sent.unwrap().success(), "{process} got no {signal}");
}

/// The user that servers run as where we are root.
fn id(what: &str) -> u32 {
    let found = ["postgres", "nobody"].iter().find_map(|name| {
        let output = Command::new("id").args([what, name]).output().ok()?;
        String::from_utf8(output.stdout).ok()?.trim().parse().ok()
    });
    found.expect("a user to run servers as")
}
