//! What the pages of the docs tell a user to type works as it stands, and the page of the command is what it says of itself.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tempfile::TempDir;

#[path = "../../tenure/tests/object/fake.rs"]
mod fake;
#[path = "../../tenure/tests/services/mod.rs"]
mod services;

/// Where the pages are.
fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs")
}

/// All pages, by name.
fn pages() -> Vec<(String, String)> {
    let files = fs::read_dir(docs()).unwrap().map(|entry| entry.unwrap().path());
    let mut pages: Vec<_> = files
        .filter(|file| file.extension().is_some_and(|extension| extension == "md"))
        .map(|file| {
            let name = file.file_name().unwrap().to_string_lossy().into_owned();
            (name, fs::read_to_string(file).unwrap())
        })
        .collect();
    pages.sort();
    pages
}

/// The shell blocks of a page, as one script: what one exports, the next has.
fn script(page: &str) -> String {
    let blocks = page.split("\n```").skip(1).step_by(2);
    blocks.filter_map(|block| block.strip_prefix("sh\n")).collect::<Vec<_>>().join("\n")
}

/// Where the hosts of the pages really are. The names are those of no real host.
struct Places {
    folder: TempDir,
    port: u16,
    /// Where a server shows its page.
    shown: u16,
    database: Option<Database>,
    cluster: Option<String>,
    /// An object store, which is found as emulators are.
    bucket: Option<fake::Fake>,
}

/// A database of the page's own.
struct Database {
    server: String,
    name: String,
}

impl Places {
    fn new(page: &str, script: &str) -> Option<Self> {
        let folder = TempDir::new().unwrap();
        for program in ["report", "report.sh", "migrate", "scheduler"] {
            let file = folder.path().join(program);
            fs::write(&file, "#!/bin/sh\necho reporting\n").unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
        }
        let database = if script.contains("db.example") {
            Some(Database::new(&services::postgres()?, page))
        } else {
            None
        };
        let cluster =
            if script.contains("nats-1") { Some(services::nats_cluster()?) } else { None };
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let bucket = script.contains("gs://").then(fake::Fake::real);
        let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let shown = other.local_addr().unwrap().port();
        Some(Self { folder, port, shown, database, cluster, bucket })
    }

    /// The script with the real places in it.
    fn fill_in(&self, script: &str) -> String {
        let here = format!("127.0.0.1:{}", self.port);
        let mut script = script
            .replace("DNS:locks.example", "IP:127.0.0.1")
            .replace("locks.example:6388", &here)
            .replace("127.0.0.1:6388", &here)
            .replace("127.0.0.1/6388", &here.replace(':', "/"))
            .replace("127.0.0.1:8388", &format!("127.0.0.1:{}", self.shown))
            .replace("--host 0.0.0.0", "")
            .replace("/etc/cron.d", &self.path("cron"));
        if let Some(Database { server, name }) = &self.database {
            let (server, _) = server.split_once('?').unwrap_or((server, ""));
            let server = server.strip_prefix("postgres://").unwrap();
            let (host, _) = server.split_once('/').unwrap();
            script = script.replace("app@db.example/app", &format!("{host}/{name}"));
        }
        if let Some(cluster) = &self.cluster {
            let hosts = cluster.strip_prefix("nats://").unwrap();
            let bucket = format!("{hosts}/pages_{}", std::process::id());
            script = script.replace("nats-1,nats-2,nats-3/locks", &bucket);
        }
        script
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    fn run(&self, page: &str, script: &str) {
        let mut shell = Command::new("sh");
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("TENURE_") {
                shell.env_remove(name);
            }
        }
        let log = self.path("log");
        let file = fs::File::create(&log).unwrap();
        shell.args(["-euc", script]).current_dir(self.folder.path()).env("PATH", path());
        shell.env("TENURE_DIR", self.path("store")).env("DFLOCKD_PORT", self.port.to_string());
        if let Some(bucket) = &self.bucket {
            shell.env("STORAGE_EMULATOR_HOST", bucket.host());
        }
        shell.stdin(Stdio::null()).stdout(file.try_clone().unwrap()).stderr(file);
        let mut child = shell.process_group(0).spawn().unwrap();
        let status = child.wait().unwrap();
        // What runs in the background belongs to the page.
        let _ = killpg(Pid::from_raw(child.id().try_into().unwrap()), Signal::SIGTERM);
        let said = fs::read_to_string(&log).unwrap();
        assert!(status.success(), "{page}: {status}\n{script}\n--- said:\n{said}");
    }
}

impl Database {
    fn new(server: &str, page: &str) -> Self {
        let word: String = page.chars().filter(char::is_ascii_alphanumeric).collect();
        let name = format!("tenure_page_{}_{word}", std::process::id());
        let database = Self { server: server.to_owned(), name };
        database.sql(&format!("CREATE DATABASE {}", database.name));
        database
    }

    fn sql(&self, sql: &str) {
        let psql = services::postgres_programs().unwrap().join("psql");
        let output = Command::new(psql).args([&self.server, "-XAtqc", sql]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        self.sql(&format!("DROP DATABASE {} WITH (FORCE)", self.name));
    }
}

/// `tenure` is found first.
fn path() -> OsString {
    let ours = Path::new(env!("CARGO_BIN_EXE_tenure")).parent().unwrap().to_owned();
    let programs = services::postgres_programs();
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::join_paths([ours].into_iter().chain(std::env::split_paths(&path)).chain(programs))
        .unwrap()
}

#[test]
fn commands_in_the_documentation_pages_work() {
    let mut run = 0;
    for (name, page) in pages() {
        let script = script(&page);
        if script.is_empty() {
            continue;
        }
        let Some(places) = Places::new(&name, &script) else { continue };
        places.run(&name, &places.fill_in(&script));
        run += 1;
    }
    assert!(run > 0, "there are pages with commands in them");
}

/// Code on a page that no test runs becomes wrong some day.
#[test]
fn the_code_of_every_page_is_a_doctest() {
    let doctests = fs::read_to_string(docs().join("../crates/tenure-book/src/lib.rs")).unwrap();
    for (name, page) in pages() {
        let blocks = page.split("\n```").skip(1).step_by(2);
        let kinds: Vec<_> = blocks.map(|block| block.lines().next().unwrap_or_default()).collect();
        let rust = kinds.iter().any(|kind| kind.starts_with("rust"));
        assert!(
            !rust || doctests.contains(&format!("docs/{name}\"")),
            "{name}: include it in crates/tenure-book/src/lib.rs"
        );
        for kind in kinds {
            let known = ["sh", "text", "sql", "json", "rust", "rust,no_run"];
            assert!(known.contains(&kind), "{name}: a block of {kind:?}");
        }
    }
}

/// Run with `TENURE_WRITE_PAGES=1` to write it.
#[test]
fn the_page_of_the_command_is_what_the_command_says() {
    let file = docs().join("command.md");
    let page = command_page();
    if std::env::var_os("TENURE_WRITE_PAGES").is_some() {
        fs::write(&file, &page).unwrap();
    }
    let found = fs::read_to_string(&file).unwrap_or_default();
    assert!(
        found == page,
        "docs/command.md is stale: TENURE_WRITE_PAGES=1 cargo test --package tenure-cli --test pages"
    );
}

fn command_page() -> String {
    let top = help(&[]);
    let mut page = format!(
        "# The command\n\nThe output of `tenure --help` and of `--help` of each subcommand. The command itself prints this page.\n\n\
         DURATION is a number with a unit, or several: `500ms`, `15s`, `2m`, `1h30m`, `1d`; or seconds: `15`, `0.5`.\n\n\
         An invalid URL of a store, or a file that the URL names and that cannot be used, is an error of the configuration: \
         exit code 125.\n\n\
         ```text\n{top}```\n"
    );
    for name in commands(&top) {
        let said = help(&[name]);
        write!(page, "\n## {name}\n\n```text\n{said}```\n").unwrap();
        for below in commands(&said) {
            let said = help(&[name, below]);
            write!(page, "\n### {name} {below}\n\n```text\n{said}```\n").unwrap();
        }
    }
    page
}

/// The subcommands that a help text lists.
fn commands(help: &str) -> impl Iterator<Item = &str> {
    let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let names = listed.take_while(|line| !line.is_empty()).filter_map(|line| {
        // What is further to the right goes on with the line before.
        line.strip_prefix("  ").and_then(|line| line.split(' ').next())
    });
    names.filter(|name| !name.is_empty() && *name != "help")
}

fn help(command: &[&str]) -> String {
    let mut tenure = Command::new(env!("CARGO_BIN_EXE_tenure"));
    // The values of variables are not part of the page.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("TENURE_") || text.starts_with("DFLOCKD_") || text.starts_with("PG_") {
            tenure.env_remove(name);
        }
    }
    let output = tenure.args(command).arg("--help").output().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<_> = text.lines().map(str::trim_end).collect();
    format!("{}\n", lines.join("\n"))
}
