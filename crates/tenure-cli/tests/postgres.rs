//! The command on lease rows of PostgreSQL, through PgBouncer in transaction mode.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

use std::process::Command;
use std::time::{Duration, Instant};

#[path = "../../tenure/tests/services/mod.rs"]
mod services;
#[allow(dead_code, reason = "shared with the tests of the other stores")]
#[path = "cli/support.rs"]
mod support;

use support::{Running, Scene, eventually};

/// A table of the test's own, reached through the pooler.
struct Table {
    scene: Scene,
    url: String,
    schema: String,
}

impl Table {
    fn new(name: &str) -> Option<Self> {
        let url = services::pgbouncer()?;
        let schema = format!("tenure_cli_{}_{name}", std::process::id());
        let url = format!("{url}?table={schema}.locks");
        let table = Self { scene: Scene::new(), url, schema };
        assert_eq!(table.outcome(&["schema", "--apply"]).0, Some(0));
        Some(table)
    }

    fn tenure(&self, arguments: &[&str]) -> Command {
        let mut command = self.scene.tenure(arguments);
        command.env("TENURE_STORE", &self.url);
        command
    }

    fn outcome(&self, arguments: &[&str]) -> (Option<i32>, String, String) {
        let output = self.tenure(arguments).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    }

    fn sql(&self, sql: &str) -> String {
        let (server, _) = self.url.split_once('?').unwrap();
        let psql = services::postgres_programs().unwrap().join("psql");
        let output = Command::new(psql).args([server, "-XAtqc", sql]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        self.sql(&format!("DROP SCHEMA {} CASCADE", self.schema));
    }
}

#[test]
fn contenders_exclude_each_other() {
    const CONTENDERS: usize = 4;
    const RUNS: usize = 8;
    let Some(table) = Table::new("contend") else { return };
    let count = table.scene.path("count");
    std::fs::write(&count, "0\n").unwrap();
    let step = "read n < count; sleep 0.01; echo $((n + 1)) > count";
    std::thread::scope(|scope| {
        for _ in 0..CONTENDERS {
            scope.spawn(|| {
                for _ in 0..RUNS {
                    let (code, _, stderr) =
                        table.outcome(&["run", "-q", "count", "--", "sh", "-c", step]);
                    assert_eq!(code, Some(0), "{stderr}");
                }
            });
        }
    });
    assert_eq!(table.scene.read("count").trim(), (CONTENDERS * RUNS).to_string());
}

#[test]
fn after_kill_9_the_next_runs_when_the_lease_ends() {
    let Some(table) = Table::new("kill") else { return };
    let ttl = Duration::from_secs(3);
    let holder = ["run", "--ttl", "3s", "key", "--", "sh", "-c", "echo ready; exec sleep 300"];
    let mut killed = Running::new(&mut table.tenure(&holder));
    assert_eq!(killed.line(), "ready");
    let mut next =
        Running::new(&mut table.tenure(&["run", "--ttl", "3s", "key", "--", "echo", "in"]));
    // It has asked and been refused: it waits.
    eventually("a waiter", || {
        let sessions =
            "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%jsonb_array_elements%'";
        (table.sql(sessions).trim() != "0").then_some(())
    });
    let begun = Instant::now();
    killed.signal(nix::sys::signal::Signal::SIGKILL);
    assert_eq!(next.line(), "in");
    let took = begun.elapsed();
    assert_eq!(next.code(), Some(0));
    assert!(took < ttl + Duration::from_secs(1), "the next ran after {took:?}");
}

#[test]
fn a_hold_is_left_shown_renewed_and_released_by_its_handle() {
    let Some(table) = Table::new("handle") else { return };
    let (code, stdout, _) = table.outcome(&["acquire", "--ttl", "60s", "--note", "deploy", "key"]);
    assert_eq!(code, Some(0));
    let handle =
        stdout.lines().find_map(|line| line.strip_prefix("export TENURE_HANDLE=")).unwrap();
    let (code, shown, _) = table.outcome(&["status", "key"]);
    assert_eq!(code, Some(0));
    assert!(!shown.contains(handle), "{shown}");
    let row = table.sql(&format!("SELECT holder_note, counter FROM {}.locks", table.schema));
    assert_eq!(row.trim(), "deploy|1", "readable to who looks at the table");
    assert_eq!(table.outcome(&["acquire", "key"]).0, Some(1));
    assert_eq!(table.outcome(&["renew", "key", "--handle", handle]).0, Some(0));
    assert_eq!(table.outcome(&["release", "key", "--handle", handle]).0, Some(0));
    assert_eq!(table.outcome(&["release", "key", "--handle", handle]).0, Some(1));
    assert_eq!(table.outcome(&["status", "key"]).0, Some(75));
}

#[test]
fn the_schema_is_printed_applied_twice_and_refused_where_it_does_not_fit() {
    let Some(table) = Table::new("schema") else { return };
    let (code, printed, _) = table.outcome(&["schema"]);
    assert_eq!(code, Some(0));
    assert!(printed.contains(&format!("\"{}\".\"locks\"", table.schema)), "{printed}");
    table.sql(&printed);
    assert_eq!(table.outcome(&["schema", "--apply"]).0, Some(0), "twice");
    table.sql(&format!("ALTER TABLE {}.locks ADD COLUMN more int", table.schema));
    let (code, _, stderr) = table.outcome(&["schema", "--apply"]);
    assert_eq!(code, Some(125), "{stderr}");
    assert!(stderr.contains("nothing was changed"), "{stderr}");

    let missing = table.url.replace(".locks", ".none");
    let (code, _, stderr) = table.outcome(&["run", "-s", &missing, "key", "true"]);
    assert_eq!(code, Some(125), "{stderr}");
    assert!(stderr.contains("tenure schema --locks --apply"), "{stderr}");
    let (code, _, stderr) = table.outcome(&["schema", "--apply", "-s", "memory:"]);
    assert_eq!(code, Some(2), "{stderr}");
    assert_eq!(table.outcome(&["schema", "-s", "file:"]).0, Some(0), "the default table");
}

#[test]
fn the_doctor_looks_at_the_table() {
    let Some(table) = Table::new("doctor") else { return };
    let Some(server) = services::postgres() else { return };
    let name = format!("{}.locks", table.schema);
    let (code, page, _) = table.outcome(&["doctor"]);
    assert_eq!(code, Some(0), "{page}");
    let kept = format!("stored in {}.tenure_incarnation", table.schema);
    let rights = format!("sufficient on {name}");
    for part in ["ok    reachable", "PostgreSQL", "a primary", &rights, &kept] {
        assert!(page.contains(part), "{part} in {page}");
    }
    let role = format!("{}_lazy", table.schema);
    table.sql(&format!(
        "CREATE ROLE {role} LOGIN SUPERUSER; ALTER ROLE {role} SET synchronous_commit = off; \
         DROP TABLE {}.tenure_incarnation",
        table.schema
    ));
    let lazy = server.replacen("postgres@", &format!("{role}@"), 1);
    let (code, page, _) = table.outcome(&["doctor", &format!("{lazy}?table={name}")]);
    table.sql(&format!("DROP ROLE {role}"));
    assert_eq!(code, Some(0), "{page}");
    for part in ["ok    synchronous_commit", "off: tenure raises it", "WARN  incarnation"] {
        assert!(page.contains(part), "{part} in {page}");
    }
    assert!(page.contains("run `tenure schema --locks --apply`"), "{page}");
    assert_eq!(table.outcome(&["schema", "--locks", "--apply"]).0, Some(0));
    let missing = table.url.replace(".locks", ".none");
    let (code, page, _) = table.outcome(&["doctor", &missing]);
    assert_eq!(code, Some(1), "{page}");
    assert!(page.contains("FAIL") && page.contains("tenure schema --locks --apply"), "{page}");
    // A role that may look, and no more.
    let role = format!("{}_poor", table.schema);
    table.sql(&format!(
        "CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA {} TO {role}; GRANT SELECT ON {name} TO {role}",
        table.schema
    ));
    let poor = server.replacen("postgres@", &format!("{role}@"), 1);
    let (code, page, _) = table.outcome(&["doctor", &format!("{poor}?table={name}")]);
    table.sql(&format!("DROP OWNED BY {role}; DROP ROLE {role}"));
    assert_eq!(code, Some(1), "{page}");
    assert!(page.contains(&format!("GRANT SELECT, INSERT, UPDATE ON {name}")), "{page}");
    // A table that is not understood.
    table.sql(&format!("COMMENT ON TABLE {name} IS 'tenure locks, version 99'"));
    let (code, page, _) = table.outcome(&["doctor", "--json"]);
    assert_eq!(code, Some(1), "{page}");
    let failed = page.lines().filter(|line| line.contains("\"failed\"")).collect::<String>();
    assert!(failed.contains("version 99"), "{page}");
}

/// Ends by itself when it is asked for the lock.
const POLITE: &str = "trap 'exit 0' USR1; echo ready; while :; do sleep 0.05; done";

#[test]
fn a_waiter_is_shown_and_its_request_reaches_the_holder() {
    let Some(table) = Table::new("request") else { return };
    let hold =
        ["run", "--id", "web-1", "--ttl", "3s", "--on-request", "USR1", "key", "sh", "-c", POLITE];
    let mut holder = Running::new(&mut table.tenure(&hold));
    assert_eq!(holder.line(), "ready");
    // One that learns of no request, to look at the waiter for as long as it takes.
    let keep = ["run", "--ttl", "3s", "kept", "sh", "-c", "echo ready; exec sleep 300"];
    let mut keeper = Running::new(&mut table.tenure(&keep));
    assert_eq!(keeper.line(), "ready");
    let wait = |name| ["run", "--id", "web-2", "--ttl", "3s", name, "echo", "next"];
    let mut waits = Running::new(&mut table.tenure(&wait("kept")));
    for command in [&["status", "kept"][..], &["status"], &["ls", "--json"]] {
        let shown = eventually("a waiter", || {
            let (code, shown, _) = table.outcome(command);
            assert_eq!(code, Some(0));
            shown.contains("web-2").then_some(shown)
        });
        assert!(command[0] == "ls" || shown.contains("waits 1st"), "{command:?}: {shown}");
    }
    let mut next = Running::new(&mut table.tenure(&wait("key")));
    assert_eq!(next.line(), "next");
    assert_eq!((holder.code(), next.code()), (Some(0), Some(0)));
    keeper.signal(nix::sys::signal::Signal::SIGTERM);
    assert_eq!(waits.line(), "next");
}

#[test]
fn a_follower_that_is_stopped_leaves_no_mark() {
    let Some(table) = Table::new("leave") else { return };
    let mut leader =
        Running::new(&mut table.tenure(&["lead", "key", "sh", "-c", "echo in; exec sleep 300"]));
    assert_eq!(leader.line(), "in");
    let mut follower = Running::new(&mut table.tenure(&["lead", "key"]));
    let marks = || table.sql(&format!("SELECT count(*) FROM {}.locks_waiters", table.schema));
    eventually("the follower waits", || (marks().trim() == "1").then_some(()));
    // The removal of the mark takes a while: the command must wait for it.
    let waiters = format!("{}.locks_waiters", table.schema);
    let slow = format!("BEGIN; LOCK TABLE {waiters} IN EXCLUSIVE MODE; SELECT pg_sleep(1); COMMIT");
    let psql = services::postgres_programs().unwrap().join("psql");
    let (server, _) = table.url.split_once('?').unwrap();
    let mut slow = Running::new(Command::new(psql).args([server, "-XAtqc", &slow]));
    eventually("a locked table", || {
        let sql = format!(
            "SELECT count(*) FROM pg_locks WHERE mode = 'ExclusiveLock' AND granted AND relation = '{waiters}'::regclass"
        );
        (table.sql(&sql).trim() == "1").then_some(())
    });
    follower.signal(nix::sys::signal::Signal::SIGTERM);
    assert_eq!(follower.code(), Some(0));
    assert_eq!(marks().trim(), "0");
    assert_eq!(slow.code(), Some(0));
}
