//! The other commands on a lock server: `tenure serve` in a process of its own.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::support::{Running, Scene, Server, children, eventually, runs};

/// A server and the commands that use it.
struct Served {
    scene: Scene,
    server: Server,
}

impl Served {
    fn new() -> Self {
        let scene = Scene::new();
        let server = Server::start(&scene, &[]);
        Self { scene, server }
    }

    fn start(&self, command: &str, arguments: &[&str]) -> Running {
        self.scene.start(&[&[command, "-s", &self.server.url], arguments].concat())
    }

    fn outcome(&self, command: &str, arguments: &[&str]) -> (Option<i32>, String, String) {
        self.scene.outcome(&[&[command, "-s", &self.server.url], arguments].concat())
    }

    fn state(&self, name: &str) -> Value {
        let (_, stdout, _) = self.outcome("status", &["--json", name]);
        serde_json::from_str(stdout.trim()).unwrap_or_default()
    }

    fn waiters(&self, name: &str) -> usize {
        self.state(name)["waiters"].as_array().map_or(0, Vec::len)
    }

    fn until_waiting(&self, name: &str, waiters: usize) {
        eventually("they wait", || (self.waiters(name) == waiters).then_some(()));
    }
}

/// Prints its process id and goes on.
const WORK: [&str; 4] = ["--", "sh", "-c", "echo $$; exec sleep 300"];

#[test]
fn contenders_run_one_after_the_other() {
    let served = Served::new();
    let script = "echo in >>log; sleep 0.05; echo out >>log";
    let run = || served.start("run", &["demo", "--", "sh", "-c", script]);
    let mut contenders: Vec<Running> = (0..5).map(|_| run()).collect();
    for contender in &mut contenders {
        assert_eq!(contender.code(), Some(0));
    }
    assert_eq!(served.scene.read("log"), "in\nout\n".repeat(5));
    let (code, stdout, _) = served.outcome("status", &["demo"]);
    assert_eq!((code, stdout.as_str()), (Some(75), "demo is free\n"));
    let (code, _, stderr) = served.outcome("run", &["--limit", "2", "slots", "--", "true"]);
    assert_eq!(code, Some(0), "{stderr}");
}

#[test]
fn a_try_names_the_holder() {
    let served = Served::new();
    let mut holder = served.start("run", &[&["--id", "web-1", "demo"][..], &WORK].concat());
    holder.number();
    let (code, _, stderr) = served.outcome("run", &["--try", "demo", "true"]);
    assert_eq!(code, Some(75));
    assert!(stderr.contains("web-1"), "{stderr}");
}

#[test]
fn a_killed_holder_is_succeeded_at_once_and_its_child_is_gone_by_then() {
    let served = Served::new();
    let mut worst = Duration::ZERO;
    let arguments = [&["--ttl", "60s", "demo"][..], &WORK].concat();
    let mut holder = served.start("run", &arguments);
    let mut child = holder.number();
    for _ in 0..5 {
        let mut next = served.start("run", &arguments);
        served.until_waiting("demo", 1);
        let killed = Instant::now();
        holder.signal(Signal::SIGKILL);
        let started = next.number();
        worst = worst.max(killed.elapsed());
        assert!(!runs(child), "two commands ran at once");
        (holder, child) = (next, started);
    }
    eprintln!("from kill -9 to the next command: {worst:?} at worst");
    assert!(worst < Duration::from_secs(5), "{worst:?}: the lease is a minute");
}

#[test]
fn the_guardian_keeps_the_connection_open_and_the_child_does_not() {
    let served = Served::new();
    let mut holder = served.start("run", &[&["demo"][..], &WORK].concat());
    let child = holder.number();
    let [guardian] = children(holder.id())[..] else { panic!("one guardian") };
    let sockets = |process: i32| -> Vec<_> {
        let descriptors = std::fs::read_dir(format!("/proc/{process}/fd")).unwrap().flatten();
        let files = descriptors.filter_map(|entry| std::fs::read_link(entry.path()).ok());
        files.filter(|file| file.to_string_lossy().starts_with("socket:")).collect()
    };
    let own = sockets(holder.id());
    let shared = |process| sockets(process).iter().filter(|file| own.contains(file)).count();
    assert_eq!((shared(guardian), shared(child)), (1, 0));
}

#[test]
fn a_killed_server_is_a_loss_at_once() {
    let mut served = Served::new();
    let mut holder = served.start("run", &[&["--ttl", "60s", "demo"][..], &WORK].concat());
    let child = holder.number();
    let killed = Instant::now();
    served.server.kill();
    assert_eq!(holder.code(), Some(79));
    assert!(killed.elapsed() < Duration::from_secs(20), "that was the lease, not the connection");
    assert!(!runs(child));
    let (code, _, stderr) = served.outcome("run", &["--wait", "1s", "demo", "true"]);
    assert_eq!(code, Some(125), "{stderr}");
    assert!(stderr.contains("is the server up?"), "{stderr}");
}

#[test]
fn status_shows_host_process_note_and_waiters_in_order() {
    let served = Served::new();
    let run = |id: &str, note: &str| {
        served.start("run", &[&["--id", id, "--note", note, "demo"][..], &WORK].concat())
    };
    let mut holder = run("web-1", "deploy 42");
    holder.number();
    let second = run("web-2", "");
    served.until_waiting("demo", 1);
    let third = run("web-3", "hot fix");
    served.until_waiting("demo", 2);
    let state = served.state("demo");
    let held = &state["holders"][0];
    assert_eq!((&held["holder"], &held["note"]), (&"web-1".into(), &"deploy 42".into()));
    assert_eq!(held["pid"], holder.id());
    assert!(held["host"].as_str().is_some_and(|host| !host.is_empty()), "{state}");
    assert!(held["since"].is_string() && held["until"].is_string(), "{state}");
    let waiters: Vec<_> = (0..2).map(|place| state["waiters"][place]["pid"].clone()).collect();
    assert_eq!(waiters, [second.id(), third.id()]);
    let (_, stdout, _) = served.outcome("status", &[]);
    assert!(stdout.lines().nth(3).is_some_and(|line| line.contains("waits 2nd")), "{stdout}");
    let all = serde_json::from_str::<Value>(served.outcome("status", &["--json"]).1.trim());
    assert_eq!(all.unwrap()["name"], "demo");
}

#[test]
fn a_hold_without_a_process_is_renewed_and_released_by_its_handle() {
    let served = Served::new();
    let (code, stdout, stderr) =
        served.outcome("acquire", &["--json", "--ttl", "2s", "--id", "job", "demo"]);
    assert_eq!(code, Some(0), "{stderr}");
    let line: Value = serde_json::from_str(&stdout).unwrap();
    let handle = line["handle"].as_str().unwrap();
    let state = served.state("demo");
    assert_eq!(state["holders"][0]["token"], line["token"], "it outlives the command");
    assert_eq!(served.outcome("acquire", &["demo"]).0, Some(1));
    let (code, _, stderr) = served.outcome("renew", &["demo", "--handle", handle, "--ttl", "60s"]);
    assert_eq!(code, Some(0), "{stderr}");
    std::thread::sleep(Duration::from_millis(2100));
    assert_eq!(served.state("demo")["holders"][0]["token"], line["token"], "renewed for longer");
    assert_eq!(served.outcome("release", &["demo", "--handle", handle]).0, Some(0));
    assert_eq!(served.outcome("status", &["demo"]).0, Some(75));
    assert_eq!(served.outcome("release", &["demo", "--handle", handle]).0, Some(1));
    assert_eq!(served.outcome("renew", &["demo", "--handle", handle]).0, Some(1));
}

#[test]
fn a_killed_leader_is_succeeded() {
    let served = Served::new();
    let arguments = [&["--ttl", "60s", "demo"][..], &WORK].concat();
    let mut leader = served.start("lead", &arguments);
    let child = leader.number();
    let mut follower = served.start("lead", &arguments);
    served.until_waiting("demo", 1);
    let killed = Instant::now();
    leader.signal(Signal::SIGKILL);
    follower.number();
    assert!(!runs(child), "two led at once");
    let took = killed.elapsed();
    assert!(took < Duration::from_secs(5), "{took:?}: the lease is a minute");
    follower.signal(Signal::SIGTERM);
    assert_eq!(follower.code(), Some(143), "as its command ended");
    assert_eq!(served.outcome("status", &["demo"]).0, Some(75));
}

#[test]
fn frozen_holder_and_child_write_nothing_after_the_next_holder_starts() {
    let served = Served::new();
    let script = "echo $$; while :; do echo old >>log; sleep 0.01; done";
    let run = ["--ttl", "2s", "demo", "--", "sh", "-c"];
    let mut old = served.start("run", &[&run[..], &[script]].concat());
    let child = old.number();
    let mut next =
        served.start("run", &[&run[..], &["echo new >>log; echo $$; exec sleep 300"]].concat());
    served.until_waiting("demo", 1);
    let group = nix::unistd::Pid::from_raw(child);
    let frozen = Instant::now();
    old.signal(Signal::SIGSTOP);
    nix::sys::signal::killpg(group, Signal::SIGSTOP).unwrap();
    next.number();
    let took = frozen.elapsed();
    assert!(took < Duration::from_millis(2500), "the next ran only after {took:?}");
    // The child was killed while it was frozen, or is killed before it runs again.
    let _ = nix::sys::signal::killpg(group, Signal::SIGCONT);
    old.signal(Signal::SIGCONT);
    assert_eq!(old.code(), Some(79));
    assert!(!runs(child));
    let log = served.scene.read("log");
    assert_eq!(log.lines().last(), Some("new"), "the old one wrote after the new one");
}

#[test]
fn auth_token_is_required_and_hidden_from_the_child() {
    let scene = Scene::new();
    std::fs::write(scene.path("token"), "hunter2\n").unwrap();
    let server = Server::start(&scene, &["--auth-token-file", "token"]);
    let with = |variable: Option<&str>, url: &str, arguments: &[&str]| {
        let mut command = scene.tenure(&[&["run", "-s", url, "demo", "--"], arguments].concat());
        if let Some(token) = variable {
            command.env("TENURE_AUTH_TOKEN", token);
        }
        let output = command.output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let url = &server.url;
    let (code, stdout, stderr) = with(Some("hunter2"), url, &["env"]);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stdout.contains("TENURE_TOKEN=") && !stdout.contains("hunter2"), "{stdout}");
    let by_file = format!("{url}?auth_token_file=token");
    let (code, stdout, stderr) = with(None, &by_file, &["env"]);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stdout.contains(&format!("TENURE_STORE={by_file}\n")), "{stdout}");
    let in_url = url.replace("//", "//:hunter2@");
    let (code, stdout, stderr) = with(None, &in_url, &["env"]);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(!stdout.contains("hunter2"), "{stdout}");
    for (variable, url) in [(None, url), (Some("wrong hunter"), url)] {
        let (code, _, stderr) = with(variable, url, &["true"]);
        assert_eq!(code, Some(125), "{stderr}");
        assert!(stderr.contains("TENURE_AUTH_TOKEN") && !stderr.contains("hunter"), "{stderr}");
    }
}

#[test]
fn a_shell_takes_over_what_acquire_prints() {
    let served = Served::new();
    let script = r#"eval "$("$TENURE" acquire --ttl 60s demo)" && "$TENURE" renew demo && "$TENURE" release demo && echo "$TENURE_TOKEN""#;
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", script]).env("TENURE", env!("CARGO_BIN_EXE_tenure"));
    let output = shell.env("TENURE_STORE", &served.server.url).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).trim().parse::<u128>().is_ok());
    assert_eq!(served.outcome("status", &["demo"]).0, Some(75), "released");
}
