//! The command on an object store: hand-off, loss, clocks that are wrong, and what gc leaves.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

#[path = "../../tenure/tests/object/fake.rs"]
mod fake;
#[path = "../../tenure/tests/services/mod.rs"]
mod services;

use fake::Fake;

struct Running {
    child: Child,
    lines: BufReader<ChildStdout>,
}

fn tenure(url: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tenure"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("TENURE_") {
            command.env_remove(name);
        }
    }
    command.args([arguments[0], "--store", url]).args(&arguments[1..]).stdin(Stdio::null());
    command
}

impl Running {
    fn start(url: &str, arguments: &[&str]) -> Self {
        Self::spawn(tenure(url, arguments))
    }

    fn spawn(mut command: Command) -> Self {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the command starts");
        let lines = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, lines }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("a line");
        line.trim_end().to_owned()
    }

    /// How it ended, and what it said on stderr.
    fn ended(&mut self) -> (Option<i32>, String) {
        let mut said = String::new();
        let mut stderr = self.child.stderr.take().expect("piped");
        stderr.read_to_string(&mut said).expect("text");
        (self.child.wait().expect("a child of ours").code(), said)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const POLITE: &str = "trap 'echo asked; exit 0' USR1; echo ready; while :; do sleep 0.02; done";

#[test]
fn a_waiter_has_the_holders_command_signalled_and_is_next() {
    let fake = Fake::quick();
    let url = fake.store("p");
    let arguments =
        ["run", "--ttl", "3s", "--json", "--on-request", "USR1", "k", "sh", "-c", POLITE];
    let mut first = Running::start(&url, &arguments);
    assert_eq!(first.line(), "ready");
    let mut second =
        Running::start(&url, &["run", "--ttl", "3s", "k", "sh", "-c", "echo $TENURE_TOKEN"]);
    assert_eq!(first.line(), "asked");
    let (code, said) = first.ended();
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains(r#""event":"handoff_requested""#), "{said}");
    let token: u64 = second.line().parse().expect("a token");
    assert_eq!(fake.object("p/k").expect("there")["fence"], token);
    assert_eq!(second.ended().0, Some(0));
}

#[test]
fn a_leader_steps_down_when_told_to_and_another_waits() {
    let fake = Fake::quick();
    let url = fake.store("p");
    for command in [&["--", "sh", "-c", "echo leads; exec sleep 300"][..], &[]] {
        let lead = |more: &[&str]| {
            let arguments = ["lead", "--ttl", "3s", "--json", "k"];
            Running::start(&url, &[&arguments[..4], more, &arguments[4..], command].concat())
        };
        let mut first = lead(&["--step-down-on-request"]);
        if !command.is_empty() {
            assert_eq!(first.line(), "leads");
        }
        let held = |owner: Option<&str>| {
            let record = fake.object("p/k");
            let found = record.filter(|record| record["expiresAt"] != 0.0);
            let found = found.map(|record| record["ownerId"].as_str().unwrap_or("").to_owned());
            found.filter(|found| owner != Some(found))
        };
        let before = wait_for("a leader", || held(None));
        let mut second = lead(&[]);
        wait_for("another leader", || held(Some(&before)));
        if !command.is_empty() {
            assert_eq!(second.line(), "leads");
        }
        drop((first, second));
        fake.remove("p/k");
        fake.remove("p/k.bell");
    }
}

fn wait_for<T>(what: &str, look: impl Fn() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(begun.elapsed() < Duration::from_secs(30), "{what} did not come about");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn removed_or_overwritten_lock_object_stops_the_command_with_79() {
    let fake = Fake::quick();
    let url = fake.store("p");
    for body in [None, Some("not a lock"), Some(r#"{"ownerId":"thief","expiresAt":99999999999}"#)] {
        let script = "echo $$; exec sleep 300";
        let mut run = Running::start(&url, &["run", "--ttl", "1500ms", "k", "sh", "-c", script]);
        let pid: i32 = run.line().parse().expect("a process id");
        let begun = Instant::now();
        match body {
            None => fake.remove("p/k"),
            Some(body) => fake.put("p/k", body),
        }
        let (code, said) = run.ended();
        assert_eq!(code, Some(79), "{said}");
        assert!(said.contains("no longer ours"), "{said}");
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        let gone = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), None);
        assert_eq!(gone, Err(nix::errno::Errno::ESRCH), "the command is gone");
        fake.remove("p/k");
    }
}

/// A contender whose clock is ten minutes off, in either direction: it neither steals nor waits longer than it should.
#[test]
fn a_clock_that_is_wrong_neither_steals_nor_waits() {
    let Some(library) = services::faketime() else { return };
    let fake = Fake::real();
    fake.set(|manner| manner.limited = false);
    let mut contenders = Vec::new();
    for (key, offset) in [("ahead", "+600"), ("behind", "-600")] {
        let url = fake.store("p");
        let under = |arguments: &[&str]| {
            let mut command = tenure(&url, arguments);
            command.env("LD_PRELOAD", &library).env("FAKETIME", offset);
            command.env("FAKETIME_DONT_FAKE_MONOTONIC", "1").env("DONT_FAKE_MONOTONIC", "1");
            command
        };
        let held = tenure(&url, &["acquire", "--ttl", "10s", key]).output().expect("it runs");
        assert!(held.status.success(), "{held:?}");
        let granted = Instant::now();
        // Its own idea of the time is what the test says it is.
        let mut date = Command::new("date");
        let told = date.arg("+%s").env("LD_PRELOAD", &library).env("FAKETIME", offset).output();
        let told = String::from_utf8(told.expect("date runs").stdout).expect("text");
        let told: f64 = told.trim().parse().expect("seconds");
        let off = told - fake.now();
        assert!((off.abs() - 600.0).abs() < 5.0, "the clock is not off: {off}");
        let tried = under(&["run", "--try", key, "true"]).output().expect("it runs");
        assert_eq!(tried.status.code(), Some(75), "{tried:?}");
        contenders.push((granted, Running::spawn(under(&["run", "-w", "60s", key, "echo", "in"]))));
    }
    for (granted, mut contender) in contenders {
        assert_eq!(contender.line(), "in");
        let took = granted.elapsed();
        // The lease and two seconds of slack, each time cut to whole seconds, and a look every second at worst.
        assert!(took >= Duration::from_secs(10), "stolen after {took:?}");
        assert!(took <= Duration::from_secs(10 + 2 + 2), "taken over only after {took:?}");
    }
}

#[test]
fn gc_removes_what_was_released_and_says_how_much() {
    let fake = Fake::quick();
    let url = fake.store("p");
    for key in ["a", "b"] {
        let run = tenure(&url, &["run", "--ttl", "3s", key, "true"]).status();
        assert!(run.expect("it runs").success());
    }
    let young = tenure(&url, &["gc"]).output().expect("it runs");
    assert_eq!(String::from_utf8_lossy(&young.stdout), "removed 0 objects\n");
    let written = fake.now();
    wait_for("a later time of the store", || (fake.now() > written + 0.1).then_some(()));
    let old = tenure(&url, &["gc", "--older-than", "0"]).output().expect("it runs");
    assert_eq!(String::from_utf8_lossy(&old.stdout), "removed 2 objects\n");
    assert!(fake.names().is_empty(), "{:?}", fake.names());
}

#[test]
fn the_doctor_tells_a_bucket_that_ignores_conditions() {
    let fake = Fake::quick();
    let well = tenure(&fake.store("p"), &["doctor"]).output().expect("it runs");
    let said = String::from_utf8_lossy(&well.stdout).into_owned();
    assert_eq!(well.status.code(), Some(0), "{said}");
    assert!(said.contains("create race"), "{said}");
    fake.set(|manner| manner.careless = true);
    let unwell = tenure(&fake.store("p"), &["doctor"]).output().expect("it runs");
    assert_eq!(unwell.status.code(), Some(1), "{unwell:?}");
}
