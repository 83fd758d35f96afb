//! The command on NATS: two of it, killed, stopped, and taking turns.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

#[path = "../../tenure/tests/services/mod.rs"]
mod services;

/// The lease, and its margin: what a killed holder costs at most, from its last renewal on.
const TTL: Duration = Duration::from_millis(2_400);
const MARGIN: Duration = Duration::from_millis(400);

struct Running {
    child: Child,
    /// Kept open: the command goes on to write its events.
    events: Option<BufReader<ChildStderr>>,
    lines: BufReader<ChildStdout>,
}

impl Running {
    fn start(url: &str, arguments: &[&str]) -> Self {
        Self::start_with(url, arguments, Stdio::inherit())
    }

    fn start_with(url: &str, arguments: &[&str], stderr: Stdio) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tenure"));
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("TENURE_") {
                command.env_remove(name);
            }
        }
        let first = [arguments[0], "--store", url];
        command.args(first).args(&arguments[1..]).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(stderr);
        let mut child = command.spawn().expect("the command starts");
        let lines = BufReader::new(child.stdout.take().expect("piped"));
        let events = child.stderr.take().map(BufReader::new);
        Self { child, events, lines }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("a line");
        line.trim_end().to_owned()
    }

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).expect("a process id");
        kill(Pid::from_raw(pid), signal).expect("a child of ours");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn bucket(name: &str) -> Option<String> {
    Some(format!("{}/cli-{name}-{}", services::nats()?, std::process::id()))
}

fn holder(url: &str) -> Running {
    let script = "echo ready; exec sleep 300";
    let mut first =
        Running::start(url, &["run", "--ttl", "2400ms", "demo", "--", "sh", "-c", script]);
    assert_eq!(first.line(), "ready");
    first
}

/// The next one, once it waits.
fn waiter(url: &str) -> Running {
    let script = "echo ran $TENURE_TOKEN";
    let arguments = ["run", "--json", "--ttl", "2400ms", "demo", "--", "sh", "-c", script];
    let mut waiter = Running::start_with(url, &arguments, Stdio::piped());
    let events = waiter.events.as_mut().expect("piped").lines();
    let mut events = events.map(|line| line.expect("an event"));
    assert!(events.any(|line| line.contains(r#""event":"waiting""#)), "it ended without a wait");
    waiter
}

#[test]
fn kill_9_of_a_holder_lets_the_next_in_after_the_lease() {
    let Some(url) = bucket("kill") else { return };
    let first = holder(&url);
    let mut next = waiter(&url);
    let killed = Instant::now();
    first.signal(Signal::SIGKILL);
    assert!(next.line().starts_with("ran "), "the next one runs");
    let took = killed.elapsed();
    eprintln!("kill -9 to the next: {took:?} with a ttl of {TTL:?}");
    assert!(took < TTL + MARGIN + Duration::from_secs(1), "{took:?}");
}

#[test]
fn a_holder_that_was_stopped_past_its_lease_wakes_up_lost() {
    let Some(url) = bucket("stop") else { return };
    let mut first = holder(&url);
    let mut next = waiter(&url);
    let stopped = Instant::now();
    first.signal(Signal::SIGSTOP);
    assert!(next.line().starts_with("ran "), "the next one runs");
    let took = stopped.elapsed();
    eprintln!("SIGSTOP to the next: {took:?} with a ttl of {TTL:?}");
    assert!(took < TTL + MARGIN + Duration::from_secs(1), "{took:?}");
    first.signal(Signal::SIGCONT);
    let status = first.child.wait().expect("it ends");
    assert_eq!(status.code(), Some(79), "lost while the command ran");
}

#[test]
fn a_clean_exit_hands_over_at_once() {
    let Some(url) = bucket("turns") else { return };
    let first = holder(&url);
    let mut next = waiter(&url);
    let stopped = Instant::now();
    first.signal(Signal::SIGTERM);
    assert!(next.line().starts_with("ran "), "the next one runs");
    let took = stopped.elapsed();
    eprintln!("SIGTERM to the next command's first line: {took:?}");
    assert!(took < Duration::from_millis(700), "{took:?}: that was a poll");
}

#[test]
fn a_hold_is_left_behind_shown_and_released_by_its_handle() {
    let Some(url) = bucket("handle") else { return };
    let mut acquire = Running::start(&url, &["acquire", "--ttl", "60s", "--json", "demo"]);
    let told: serde_json::Value = serde_json::from_str(&acquire.line()).expect("JSON");
    let handle = told["handle"].as_str().expect("a handle");
    let mut status = Running::start(&url, &["status", "--json", "demo"]);
    let shown: serde_json::Value = serde_json::from_str(&status.line()).expect("JSON");
    assert_eq!(shown["holders"][0]["token"], told["token"], "{shown}");
    let mut release = Running::start(&url, &["release", "demo", "--handle", handle]);
    assert_eq!(release.child.wait().expect("it ends").code(), Some(0));
    let mut status = Running::start(&url, &["status", "demo"]);
    assert_eq!(status.line(), "demo is free");
}

/// Exit code and what it printed.
fn doctor(url: &str) -> (Option<i32>, String) {
    let mut doctor = Running::start(url, &["doctor"]);
    let mut text = String::new();
    doctor.lines.read_to_string(&mut text).expect("a page");
    (doctor.child.wait().expect("it ends").code(), text)
}

#[test]
fn the_doctor_tells_servers_and_buckets_that_are_well_from_those_that_are_not() {
    let Some(url) = bucket("doctor") else { return };
    let (code, page) = doctor(&url);
    assert_eq!(code, Some(0), "{page}");
    for part in
        ["ok    reachable", "ok    servers", "WARN  bucket", "sync_interval", "ok    rights"]
    {
        assert!(page.contains(part), "no {part} in {page}");
    }
    let Some(cluster) = services::nats_cluster() else { return };
    let (code, page) = doctor(&format!("{cluster}/cli-doctor-{}", std::process::id()));
    assert_eq!(code, Some(0), "{page}");
    assert!(page.contains("ok    bucket") && page.contains("3 replicas"), "{page}");
    assert_eq!(doctor("nats://127.0.0.1:1/b").0, Some(125));
}

/// Makes a bucket with these settings, by the protocol of NATS itself.
fn make(url: &str, settings: &str) {
    let (server, name) = url.rsplit_once('/').expect("a bucket");
    let stream = TcpStream::connect(server.trim_start_matches("nats://")).expect("it is up");
    let mut lines = BufReader::new(stream.try_clone().expect("a second handle"));
    let body = format!(
        r#"{{"name":"KV_{name}","subjects":["$KV.{name}.>"],"max_msgs_per_subject":1,"storage":"file",
            "num_replicas":1,{settings}}}"#
    );
    let (subject, length) = (format!("$JS.API.STREAM.CREATE.KV_{name}"), body.len());
    let text = format!(
        "CONNECT {{\"verbose\":false}}\r\nSUB inbox 1\r\nPUB {subject} inbox {length}\r\n{body}\r\n"
    );
    (&stream).write_all(text.as_bytes()).expect("it listens");
    let mut reply = String::new();
    while !reply.contains("stream_create_response") {
        reply.clear();
        assert_ne!(lines.read_line(&mut reply).expect("an answer"), 0, "it hung up");
    }
    assert!(!reply.contains("\"error\""), "{reply}");
}

#[test]
fn a_bucket_that_discards_records_fails_the_doctor_and_is_used_by_no_command() {
    let Some(url) = bucket("discards") else { return };
    make(&url, r#""discard":"old","max_msgs":100"#);
    let (code, page) = doctor(&url);
    assert_eq!(code, Some(1), "{page}");
    for part in ["FAIL  settings", "discard is old", "max_msgs is 100", "--discard=new"] {
        assert!(page.contains(part), "no {part} in {page}");
    }
    let mut run = Running::start(&url, &["run", "demo", "true"]);
    assert_eq!(run.child.wait().expect("it ends").code(), Some(125));
    // Room for so many, and no more: nothing is lost.
    let url = format!("{url}-new");
    make(&url, r#""discard":"new","max_msgs":100"#);
    let (code, page) = doctor(&url);
    assert_eq!(code, Some(0), "{page}");
    assert!(page.contains("WARN  settings") && page.contains("at most 100 records"), "{page}");
}

#[test]
fn a_command_finds_the_revision_that_status_shows() {
    let Some(url) = bucket("revision") else { return };
    let shared = format!("{url}?form=nlock&ttl=30s");
    let script = "echo $TENURE_REVISION; exec sleep 300";
    for command in ["run", "lead"] {
        let arguments = [command, "--ttl", "30s", "demo", "--", "sh", "-c", script];
        let mut held = Running::start(&shared, &arguments);
        let told: u64 = held.line().parse().expect("a number");
        let mut status = Running::start(&shared, &["status", "--json", "demo"]);
        let shown: serde_json::Value = serde_json::from_str(&status.line()).expect("JSON");
        // A renewal may have raised it meanwhile.
        let now = shown["holders"][0]["revision"].as_u64().expect("a number");
        assert!(told > 0 && now >= told, "{told}: {shown}");
        held.signal(Signal::SIGTERM);
        held.child.wait().expect("it ends");
    }
    // On a store without revisions, within such a hold: that one's is not passed on.
    let folder = tempfile::tempdir().expect("a folder");
    let within = format!(
        "{} run -s file:{} inner -- sh -c 'echo \"<$TENURE_REVISION>\"'",
        env!("CARGO_BIN_EXE_tenure"),
        folder.path().display()
    );
    let mut outer = Running::start(&shared, &["run", "outer", "--", "sh", "-c", &within]);
    assert_eq!(outer.line(), "<>");
}
