//! The table of docs/promise.md and `tenure doctor` agree: each case that a probe can see names lines of the doctor, and
//! the doctor of that store prints them.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

use std::collections::{BTreeMap, BTreeSet};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;
use tenure_server::{Engine, Server, Settings, clock};

#[path = "../../tenure/tests/object/fake.rs"]
#[allow(dead_code, reason = "shared with tests that need more of it")]
mod fake;
#[path = "../../tenure/tests/services/mod.rs"]
#[allow(dead_code, reason = "shared with tests that need more of it")]
mod services;

/// The heading above the table.
const HEADING: &str = "## When two can believe it, by store";

/// A case in which two clients can believe that they hold a lock.
#[derive(Debug)]
struct Case {
    store: String,
    when: String,
    /// Lines of the doctor that show it; none if the page says that no probe can see it.
    lines: Vec<String>,
}

fn cases() -> Vec<Case> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/promise.md");
    let page = std::fs::read_to_string(page).unwrap();
    let (_, section) = page.split_once(HEADING).expect("the heading is there");
    let rows = section.lines().skip_while(|line| !line.starts_with('|'));
    let rows = rows.take_while(|line| line.starts_with('|')).skip(2);
    let mut cases: Vec<Case> = Vec::new();
    for row in rows {
        let cells: Vec<_> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [store, when, _, _, seen] = cells[..] else { panic!("five cells: {row}") };
        let lines = match seen {
            "no" => Vec::new(),
            seen => seen.split(", ").map(|line| name_in(line, row)).collect(),
        };
        let store = match (store, cases.last()) {
            ("", Some(above)) => above.store.clone(),
            (store, _) => store.to_owned(),
        };
        cases.push(Case { store, when: when.to_owned(), lines });
    }
    assert!(cases.len() > 20, "the table was not found: {cases:?}");
    cases
}

/// The name of one of the doctor's lines, without its quotes.
fn name_in(quoted: &str, row: &str) -> String {
    let name = quoted.strip_prefix('`').and_then(|rest| rest.strip_suffix('`'));
    name.unwrap_or_else(|| panic!("neither `no` nor names in backquotes: {row}")).to_owned()
}

/// The output of the command, with no store but the one that it names.
fn tenure(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tenure"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("TENURE_") {
            command.env_remove(name);
        }
    }
    command.args(arguments).stdin(Stdio::null()).output().unwrap()
}

/// The names of the lines that the doctor printed.
fn doctor(url: &str) -> BTreeSet<String> {
    let output = tenure(&["doctor", "--json", url]);
    let text = String::from_utf8(output.stdout).unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(!text.is_empty(), "{url}: {complaint}");
    let line = |line: &str| serde_json::from_str::<Value>(line).unwrap()["what"].clone();
    text.lines().map(|text| line(text).as_str().unwrap().to_owned()).collect()
}

/// Lease rows in a schema of their own.
struct LeaseRows {
    server: String,
    schema: String,
}

impl LeaseRows {
    fn new(server: &str) -> Self {
        let rows =
            Self { server: server.to_owned(), schema: format!("promise_{}", std::process::id()) };
        let made = tenure(&["schema", "--locks", "--apply", "--store", &rows.url()]);
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        rows
    }

    fn url(&self) -> String {
        format!("{}?table={}.locks", self.server, self.schema)
    }
}

impl Drop for LeaseRows {
    fn drop(&mut self) {
        let Some(programs) = services::postgres_programs() else { return };
        let sql = format!("DROP SCHEMA {} CASCADE", self.schema);
        let dropped =
            Command::new(programs.join("psql")).args([&self.server, "-Xqc", &sql]).output();
        assert!(dropped.is_ok_and(|output| output.status.success()), "{sql}");
    }
}

/// A lock server on a thread that ends with the test's process.
fn lock_server(settings: Settings) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("tenure://{}", listener.local_addr().unwrap());
    let engine = Engine::new(settings, None, 1, clock::wall_micros());
    let (server, _) = Server::new(listener, None, engine, Duration::ZERO).unwrap();
    std::thread::spawn(move || server.run());
    url
}

#[test]
fn every_case_that_a_probe_can_see_has_a_line_of_the_doctor() {
    let (Some(postgres), Some(nats)) = (services::postgres(), services::nats()) else { return };
    let advisory = postgres.replacen("postgres", "postgres+advisory", 1);
    assert_ne!(advisory, postgres);
    let rows = LeaseRows::new(&postgres);
    let (folder, bucket) = (TempDir::new().unwrap(), fake::Fake::quick());
    let plain = Settings { extension: false, ..Settings::default() };
    let printed = BTreeMap::from([
        ("file", doctor(&format!("file:{}", folder.path().display()))),
        ("lock server", doctor(&lock_server(Settings::default()))),
        ("a plain dflockd", doctor(&lock_server(plain))),
        ("PostgreSQL advisory locks", doctor(&advisory)),
        ("PostgreSQL lease rows", doctor(&rows.url())),
        ("NATS", doctor(&format!("{nats}/promise-{}", std::process::id()))),
        ("object stores", doctor(&bucket.store("promise/"))),
    ]);
    for case in cases() {
        for line in &case.lines {
            let printed = printed.get(&*case.store).expect("a doctor for each store");
            let Case { store, when, .. } = &case;
            assert!(printed.contains(line), "{store}, {when}: no line {line} in {printed:?}");
        }
    }
}
