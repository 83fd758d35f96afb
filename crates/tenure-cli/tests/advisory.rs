//! The command on advisory locks of PostgreSQL, with its own options and with those of pgleaderlock.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

use std::fs::File;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

#[path = "../../tenure/tests/services/mod.rs"]
mod services;
#[allow(dead_code, reason = "shared with the tests of the other stores")]
#[path = "cli/support.rs"]
mod support;

use support::{Running, Scene, eventually};

/// A lock of the test's own.
struct Lock {
    scene: Scene,
    server: String,
    key1: i32,
    key2: i32,
}

impl Lock {
    fn new(nth: i32) -> Option<Self> {
        let server = services::postgres()?;
        let key1 = i32::try_from(std::process::id()).unwrap();
        // A name that begins with a sign would be an option.
        let key1 = if nth % 2 == 0 { key1 } else { -key1 };
        Some(Self { scene: Scene::new(), server, key1, key2: nth })
    }

    fn name(&self) -> String {
        format!("{},{}", self.key1, self.key2)
    }

    fn url(&self) -> String {
        self.server.replacen("postgres:", "postgres+advisory:", 1)
    }

    fn tenure(&self, arguments: &[&str]) -> Command {
        let mut command = self.scene.tenure(arguments);
        command.env("TENURE_STORE", self.url());
        command
    }

    fn outcome(&self, arguments: &[&str]) -> (Option<i32>, String, String) {
        let output = self.tenure(arguments).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    }

    /// pgleaderlock's own command line, but for its name.
    fn pgleaderlock(&self, more: &[&str], log: &str) -> Running {
        let (key1, key2) = (self.key1.to_string(), self.key2.to_string());
        let dsn = self.server.replacen("postgres:", "postgresql:", 1);
        let mut line = vec!["lead", "--dsn", &dsn, "--key1", &key1, "--key2", &key2];
        line.extend(["--health-interval", "5.0", "--retry-base", "0.05", "--retry-max", "0.1"]);
        line.extend(more);
        let mut command = self.scene.tenure(&line);
        Running::new(command.stderr(File::create(self.scene.path(log)).unwrap()))
    }

    fn sql(&self, sql: &str) -> String {
        let psql = services::postgres_programs().unwrap().join("psql");
        let output = Command::new(psql).args([&self.server, "-XAtqc", sql]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    fn holders(&self) -> String {
        self.sql(&format!("SELECT count(*) FROM pg_locks WHERE granted AND {}", self.row()))
    }

    /// Ends the sessions that hold the lock or wait for it.
    fn end_sessions(&self) {
        self.sql(&format!("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE {}", self.row()));
    }

    /// SQL condition of its rows in `pg_locks`.
    fn row(&self) -> String {
        let (first, second) = (self.key1.cast_unsigned(), self.key2.cast_unsigned());
        format!("locktype = 'advisory' AND objsubid = 2 AND classid = {first} AND objid = {second}")
    }
}

#[test]
fn the_options_of_pgleaderlock_work_word_for_word() {
    let Some(lock) = Lock::new(1) else { return };
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let mut leader = lock.pgleaderlock(&["--reconnect-grace", "2.5"], "log");
        eventually("it leads", || lock.scene.read("log").contains("lock_acquired").then_some(()));
        assert_eq!(lock.holders(), "1");
        let mut follower = lock.pgleaderlock(&["--no-auto-reacquire"], "log2");
        eventually("it polls", || lock.scene.read("log2").contains("(attempt 3)").then_some(()));
        leader.signal(signal);
        assert_eq!(leader.code(), Some(0));
        eventually("the other leads", || {
            lock.scene.read("log2").contains("lock_acquired").then_some(())
        });
        follower.signal(Signal::SIGTERM);
        assert_eq!(follower.code(), Some(0));
        assert_eq!(lock.holders(), "0", "released");
        let pair = format!("key1={} key2={}", lock.key1, lock.key2);
        let log = lock.scene.read("log");
        for line in [
            format!("state_change from=stopped to=follower {pair}"),
            format!("state_change from=follower to=acquiring {pair}"),
            format!("state_change from=acquiring to=leader {pair}"),
            format!("lock_released {pair}"),
        ] {
            assert!(log.lines().any(|told| told == line), "{line} in {log}");
        }
        assert!(log.contains("lock_acquired attempt=1 token="), "{log}");
        let attempt = |log: &str| -> u32 {
            let (_, rest) = log.split_once("lock_acquired attempt=").unwrap();
            rest.split_whitespace().next().unwrap().parse().unwrap()
        };
        assert!(attempt(&lock.scene.read("log2")) > 3);
    }
}

#[test]
fn a_session_that_is_ended_is_told_as_a_failed_health_check() {
    let Some(lock) = Lock::new(2) else { return };
    let mut leader = lock.pgleaderlock(&["--no-auto-reacquire"], "log");
    eventually("it leads", || lock.scene.read("log").contains("lock_acquired").then_some(()));
    lock.end_sessions();
    assert_eq!(leader.code(), Some(79), "lost, and not to be won again");
    let log = lock.scene.read("log");
    let (before, after) = log.split_once("health_check_failed error=").unwrap();
    assert!(!before.contains("lost reason=") && after.contains("lost reason="), "{log}");
}

#[test]
fn the_server_can_come_from_the_environment_and_be_named_by_pairs() {
    let Some(lock) = Lock::new(3) else { return };
    let (_, rest) = lock.server.split_once('@').unwrap();
    let (host, port) = rest.split_once('/').unwrap().0.split_once(':').unwrap();
    let pairs = format!("host={host} port={port} user=postgres dbname='postgres'");
    let (key1, key2) = (lock.key1.to_string(), lock.key2.to_string());
    let both = ["--key1", &key1, "--key2", &key2];
    let outcome = |line: &[&str]| {
        let mut command = lock.scene.tenure(&[line, &both[..]].concat());
        let output = command.env("PG_DSN", &pairs).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    assert_eq!(outcome(&["acquire", "--check"]), (Some(0), String::new()));
    assert_eq!(outcome(&["status"]).0, Some(75), "free");
    let (code, said) = outcome(&["acquire"]);
    assert_eq!(code, Some(125), "{said}");
    assert!(said.contains("tenure run"), "{said}");
    let mut command = lock.scene.tenure(&["lead", "-q"]);
    let work = "test \"$TENURE_NAME\" = \"$1\" && exit 7";
    command.args(both).args(["--", "sh", "-c", work, "sh", &lock.name()]);
    assert_eq!(command.env("PG_DSN", &pairs).output().unwrap().status.code(), Some(7));
    for bad in [["--key1", "4294967296", "--key2", "1"], ["--key1", "1", "--key1", "1"]] {
        let output = lock.scene.tenure(&["lead"]).args(bad).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{bad:?}");
    }
    let (code, _, said) = lock.outcome(&["lead", "--dsn", "password=hunter2 hos t=x", "demo"]);
    assert_eq!(code, Some(125), "{said}");
    assert!(!said.contains("hunter2"), "{said}");
}

#[test]
fn advisory_status_shows_the_holder_and_its_waiter() {
    let Some(lock) = Lock::new(4) else { return };
    let name = lock.name();
    let hold = [
        "run",
        "--id",
        "web-1",
        "--note",
        "deploy 42",
        &name,
        "sh",
        "-c",
        "echo in; exec sleep 300",
    ];
    let mut holder = Running::new(&mut lock.tenure(&hold));
    assert_eq!(holder.line(), "in");
    let mut waiter =
        Running::new(&mut lock.tenure(&["run", "--id", "web-2", &name, "echo", "next"]));
    let shown = eventually("a waiter", || {
        let (code, shown, _) = lock.outcome(&["status", &name]);
        assert_eq!(code, Some(0));
        shown.contains("waits 1st").then_some(shown)
    });
    assert!(shown.contains("web-1") && shown.contains("web-2"), "{shown}");
    let (_, json, _) = lock.outcome(&["status", "--json", &name]);
    let json: serde_json::Value = serde_json::from_str(json.trim()).unwrap();
    assert_eq!(json["holders"][0]["note"], "deploy 42");
    assert_eq!(json["waiters"][0]["holder"], "web-2");
    let (_, list, _) = lock.outcome(&["status"]);
    assert!(list.contains(&name), "{list}");
    let (code, _, said) = lock.outcome(&["run", "-n", &name, "true"]);
    assert_eq!(code, Some(75), "{said}");
    assert!(said.contains("web-1"), "{said}");
    let begun = Instant::now();
    holder.signal(Signal::SIGKILL);
    assert_eq!(waiter.line(), "next");
    assert!(begun.elapsed() < Duration::from_secs(5), "freed with its session");
    assert_eq!(waiter.code(), Some(0));
}

#[test]
fn after_kill_9_the_command_is_gone_before_the_next_one_runs() {
    let Some(lock) = Lock::new(6) else { return };
    let name = lock.name();
    // One that does not end by itself when its parent does, and its own child.
    let work = "trap '' HUP TERM; sleep 300 & echo $!; wait";
    let mut killed = Running::new(&mut lock.tenure(&["run", &name, "sh", "-c", work]));
    let grandchild = killed.line();
    let script = format!("if test -d /proc/{grandchild}; then echo alive; else echo gone; fi");
    let mut next = Running::new(&mut lock.tenure(&["run", &name, "sh", "-c", &script]));
    eventually("a waiter", || {
        lock.outcome(&["status", &name]).1.contains("waits 1st").then_some(())
    });
    killed.signal(Signal::SIGKILL);
    assert_eq!(next.line(), "gone");
    assert_eq!(next.code(), Some(0));
}

#[test]
fn the_doctor_looks_at_the_server() {
    let Some(lock) = Lock::new(5) else { return };
    let (code, page, _) = lock.outcome(&["doctor", &lock.url()]);
    assert_eq!(code, Some(0), "{page}");
    for part in
        ["PostgreSQL", "a primary", "its own", "frozen holders", "WARN  incarnation", "terms="]
    {
        assert!(page.contains(part), "{part} in {page}");
    }
    let Some(bouncer) = services::pgbouncer() else { return };
    let pooled = bouncer.replacen("postgres:", "postgres+advisory:", 1);
    let (code, page, _) = lock.outcome(&["doctor", &pooled]);
    assert_ne!(code, Some(0), "{page}");
    assert!(page.contains("session mode"), "{page}");
    let (code, _, said) = lock.outcome(&["run", "-s", &pooled, "demo", "true"]);
    assert_eq!(code, Some(125), "{said}");
}

#[test]
fn a_pool_in_session_mode_is_well_and_serves() {
    let Some(lock) = Lock::new(10) else { return };
    let Some(pool) = services::pgbouncer_in_session_mode() else { return };
    let pool = pool.replacen("postgres:", "postgres+advisory:", 1);
    let (code, page, _) = lock.outcome(&["doctor", &pool]);
    assert_eq!(code, Some(0), "{page}");
    assert!(page.contains("each connection has a session of its own"), "{page}");
    assert!(page.contains("PgBouncer in session mode"), "{page}");
    let name = lock.name();
    let mut holder = Running::new(&mut lock.tenure(&[
        "run",
        "-s",
        &pool,
        &name,
        "sh",
        "-c",
        "echo in; exec sleep 300",
    ]));
    assert_eq!(holder.line(), "in");
    assert_eq!(lock.holders(), "1");
    assert_eq!(lock.outcome(&["run", "-n", &name, "true"]).0, Some(75), "held, past the pool too");
    holder.signal(Signal::SIGTERM);
    holder.code();
    assert_eq!(lock.holders(), "0", "released");
}

#[test]
fn the_table_of_terms_is_printed_made_counted_in_and_examined() {
    let Some(lock) = Lock::new(8) else { return };
    let table = format!("tenure_cli_terms_{}", std::process::id());
    let url = format!("{}?terms={table}", lock.url());
    let (code, page, _) = lock.outcome(&["doctor", &url]);
    assert_eq!(code, Some(1), "{page}");
    assert!(page.contains("FAIL  terms") && page.contains("tenure schema --apply"), "{page}");
    let (code, _, said) = lock.outcome(&["run", "-s", &url, &lock.name(), "true"]);
    assert_eq!(code, Some(125), "{said}");
    let (code, sql, _) = lock.outcome(&["schema", "-s", &url]);
    assert_eq!(code, Some(0));
    assert!(sql.contains("CREATE TABLE") && sql.contains(&format!("'\"{table}\"'")), "{sql}");
    for _ in 0..2 {
        let (code, _, said) = lock.outcome(&["schema", "-s", &url, "--apply"]);
        assert_eq!(code, Some(0), "{said}");
        assert_eq!(lock.outcome(&["run", "-s", &url, &lock.name(), "true"]).0, Some(0));
    }
    let (code, page, _) = lock.outcome(&["doctor", &url]);
    let counted = lock.sql(&format!("SELECT terms FROM {table}"));
    lock.sql(&format!("DROP TABLE {table}"));
    assert_eq!(code, Some(0), "{page}");
    assert!(page.contains(&format!("counted in {table}")), "{page}");
    assert!(page.contains("stored in public.tenure_incarnation"), "{page}");
    assert_eq!(counted, "2");
}

#[test]
fn names_of_a_store_with_64_bit_keys_are_numbers_or_hashed() {
    let Some(lock) = Lock::new(12) else { return };
    let url = format!("{}?key=bigint", lock.url());
    let number = -(i64::from(std::process::id()) << 33);
    let name = number.to_string();
    let command = |arguments: &[&str]| {
        let mut command = lock.tenure(arguments);
        command.env("TENURE_STORE", &url);
        command
    };
    let outcome = |arguments: &[&str]| {
        let output = command(arguments).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let mut holder =
        Running::new(&mut command(&["run", &name, "sh", "-c", "echo in; exec sleep 300"]));
    assert_eq!(holder.line(), "in");
    assert_eq!(lock.sql(&format!("SELECT pg_try_advisory_lock({number})")), "f");
    let (code, shown, _) = outcome(&["status", &name]);
    assert_eq!((code, shown.contains(&name)), (Some(0), true), "{shown}");
    assert_eq!(outcome(&["run", "-n", &name, "true"]).0, Some(75));
    assert_eq!(lock.outcome(&["run", "-n", &name, "true"]).0, Some(0), "in the other form: a name");
    holder.signal(Signal::SIGTERM);
    holder.code();

    let psql = services::postgres_programs().unwrap().join("psql");
    let mut foreign = Command::new(psql);
    foreign.args([&lock.server, "-XAtq", "-c"]);
    foreign.args([&format!("SELECT pg_try_advisory_lock({number})"), "-c", "SELECT pg_sleep(300)"]);
    // The statement ends with its client. Otherwise its snapshot would delay the concurrent indexes of other tests.
    foreign.env("PGOPTIONS", "-c client_connection_check_interval=100ms");
    let mut foreign = Running::new(&mut foreign);
    assert_eq!(foreign.line(), "t");
    let (code, shown, _) = outcome(&["status", &name]);
    assert_eq!((code, shown.contains("psql")), (Some(0), true), "{shown}");
    let (_, list, _) = outcome(&["status"]);
    assert!(list.lines().any(|line| line.contains(&name) && line.contains("psql")), "{list}");
    assert_eq!(outcome(&["run", "-n", &name, "true"]).0, Some(75));
    foreign.signal(Signal::SIGKILL);
    foreign.code();

    let dsn = format!("{}?key=bigint", lock.server);
    let pair = ["--key1", "1", "--key2", "2"];
    for (bad, expected, part) in [
        (vec!["run", "042", "true"], 2, "write 42"),
        (vec!["run", "9223372036854775808", "true"], 2, "9223372036854775807"),
        (vec!["run", "1,2", "true"], 2, "one number, or a name"),
        ([&["lead", "--dsn", &dsn], &pair[..]].concat(), 2, "one number, or a name"),
        ([&["status"], &pair[..]].concat(), 125, "one number, or a name"),
    ] {
        let (code, _, said) = outcome(&bad);
        assert_eq!(code, Some(expected), "{bad:?}: {said}");
        assert!(said.contains(part), "{bad:?}: {said}");
    }
    let (code, page, _) = outcome(&["doctor", &url]);
    assert_eq!(code, Some(0), "{page}");
    assert!(page.contains("pg_advisory_lock(bigint)"), "{page}");
}

#[test]
fn a_recovery_is_told_unless_another_may_have_led_in_between() {
    let Some(lock) = Lock::new(14) else { return };
    let table = format!("tenure_cli_recovered_{}", std::process::id());
    let url = format!("{}?terms={table}", lock.url());
    assert_eq!(lock.outcome(&["schema", "-s", &url, "--apply"]).0, Some(0));
    let (key1, key2) = (lock.key1.to_string(), lock.key2.to_string());
    let dsn = format!("{}?terms={table}", lock.server);
    let line = ["lead", "--dsn", &dsn, "--key1", &key1, "--key2", &key2, "--reconnect-grace", "20"];
    let mut command = lock.scene.tenure(&line);
    let log = File::create(lock.scene.path("log")).unwrap();
    let mut leader = Running::new(command.stderr(log));
    let times = |what: &str| lock.scene.read("log").matches(what).count();
    eventually("it leads", || (times("lock_acquired") == 1).then_some(()));
    lock.end_sessions();
    eventually("it is told", || (times("leadership_recovered key1=") == 1).then_some(()));
    assert_eq!(
        (times("lost reason="), times("lock_acquired")),
        (0, 1),
        "{}",
        lock.scene.read("log")
    );
    // Another term was counted.
    lock.sql(&format!("UPDATE {table} SET terms = terms + 1"));
    lock.end_sessions();
    eventually("it leads again", || (times("lock_acquired") == 2).then_some(()));
    leader.signal(Signal::SIGTERM);
    assert_eq!(leader.code(), Some(0));
    lock.sql(&format!("DROP TABLE {table}"));
    let log = lock.scene.read("log");
    assert_eq!((times("leadership_recovered"), times("lost reason=")), (1, 1), "{log}");
}

#[test]
fn a_loss_is_told_once_and_a_short_health_interval_needs_no_ttl() {
    let Some(lock) = Lock::new(16) else { return };
    let name = lock.name();
    let leader = ["lead", "--health-interval", "0.25", "--no-auto-reacquire", &name];
    let mut command = lock.tenure(&leader);
    let mut leader = Running::new(command.stderr(File::create(lock.scene.path("log")).unwrap()));
    eventually("it leads", || lock.scene.read("log").contains("acquired ").then_some(()));
    lock.end_sessions();
    assert_eq!(leader.code(), Some(79));
    let log = lock.scene.read("log");
    let lines = |word: &str| log.lines().filter(|line| line.starts_with(word)).count();
    assert_eq!((lines("lost"), lines("error"), lines("tenure:")), (1, 0, 0), "{log}");
}

#[test]
fn what_is_unknown_of_a_foreign_holder_is_null() {
    let Some(lock) = Lock::new(18) else { return };
    let psql = services::postgres_programs().unwrap().join("psql");
    let sql = format!("SELECT pg_advisory_lock({}, {}), pg_sleep(300)", lock.key1, lock.key2);
    let mut foreign = Command::new(psql);
    let mut foreign = Running::new(foreign.args([&lock.server, "-XAtqc", &sql]));
    eventually("a holder", || (lock.holders() == "1").then_some(()));
    let (code, json, _) = lock.outcome(&["status", "--json", &lock.name()]);
    foreign.signal(Signal::SIGTERM);
    lock.end_sessions();
    foreign.code();
    assert_eq!(code, Some(0));
    let json: serde_json::Value = serde_json::from_str(json.trim()).unwrap();
    let holder = &json["holders"][0];
    assert_eq!(holder["pid"], serde_json::Value::Null, "{holder}");
    assert_eq!(holder["token"], serde_json::Value::Null, "{holder}");
    assert_eq!(holder["host"], "127.0.0.1", "{holder}");
}
