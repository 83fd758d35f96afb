//! Taking part in elections.

use std::fs::File;
use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::support::{Running, Scene, Server, eventually, runs};

/// Command of a leader: prints its own process id.
const WORK: [&str; 4] = ["--", "sh", "-c", "echo $$; exec sleep 300"];

fn participant(scene: &Scene, arguments: &[&str], log: &str) -> Running {
    let log = File::create(scene.path(log)).unwrap();
    Running::new(scene.tenure(&[&["lead"], arguments].concat()).stderr(log))
}

#[test]
fn every_change_is_logged_until_it_is_told_to_stop() {
    let scene = Scene::new();
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let mut lead = participant(&scene, &["demo"], "log");
        eventually("it leads", || scene.read("log").contains("acquired").then_some(()));
        lead.signal(signal);
        assert_eq!(lead.code(), Some(0));
        let log = scene.read("log");
        let lines: Vec<_> = log.lines().filter(|line| !line.starts_with("acquired ")).collect();
        assert_eq!(
            lines,
            [
                "state_change from=stopped to=follower name=demo",
                "state_change from=follower to=acquiring name=demo",
                "state_change from=acquiring to=leader name=demo",
                "state_change from=leader to=releasing name=demo",
                "state_change from=releasing to=stopped name=demo",
                "released name=demo",
                "stopped reason=\"a stop was requested\" name=demo",
            ]
        );
        assert_eq!(scene.outcome(&["status", "demo"]).0, Some(75));
    }
}

#[test]
fn the_log_tells_a_command_that_ended_from_a_requested_stop() {
    let scene = Scene::new();
    for (command, code, reason) in [
        (&["sh", "-c", "exit 4"][..], 4, "the command ended"),
        (&["/no/such/program"], 127, "the command could not be started"),
    ] {
        let (got, _, stderr) = scene.outcome(&[&["lead", "demo", "--"], command].concat());
        assert_eq!(got, Some(code), "{stderr}");
        let last = stderr.lines().last().unwrap();
        assert_eq!(last, format!("stopped reason={reason:?} name=demo"), "{stderr}");
    }
    let mut leader = participant(&scene, &[&["demo"][..], &WORK].concat(), "log");
    leader.number();
    leader.signal(Signal::SIGTERM);
    assert_eq!(leader.code(), Some(143));
    let log = scene.read("log");
    assert!(log.ends_with("stopped reason=\"a stop was requested\" name=demo\n"), "{log}");
}

#[test]
fn lead_prints_json_events_and_quiet_prints_nothing() {
    let scene = Scene::new();
    let (code, _, stderr) = scene.outcome(&["lead", "--json", "demo", "--", "sh", "-c", "exit 4"]);
    assert_eq!(code, Some(4));
    let names: Vec<String> = stderr
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .map(|event| event["event"].as_str().unwrap().to_owned())
        .filter(|name| name != "state_change")
        .collect();
    assert_eq!(names, ["acquired", "released", "stopped"]);
    let (code, _, stderr) = scene.outcome(&["lead", "-q", "demo", "--", "sh", "-c", "exit 4"]);
    assert_eq!((code, stderr.as_str()), (Some(4), ""));
}

#[test]
fn another_leads_once_the_leader_and_its_command_are_gone() {
    let scene = Scene::new();
    let arguments = [&["demo"][..], &WORK].concat();
    let mut leader = participant(&scene, &arguments, "log0");
    let mut child = leader.number();
    let mut worst = Duration::ZERO;
    for round in 1..=10 {
        let mut follower = participant(&scene, &arguments, &format!("log{round}"));
        eventually("it follows", || (scene.waiters("demo") == 1).then_some(()));
        let killed = Instant::now();
        leader.signal(Signal::SIGKILL);
        let next = follower.number();
        worst = worst.max(killed.elapsed());
        assert!(!runs(child), "two commands ran at once");
        (leader, child) = (follower, next);
    }
    eprintln!("from kill -9 of the leader to the next one's command: {worst:?} at worst");
    assert!(worst < Duration::from_secs(5), "{worst:?}");
    leader.signal(Signal::SIGTERM);
    assert_eq!(leader.code(), Some(143));
}

#[test]
fn a_leader_that_lost_stops_its_command_and_leads_again_later() {
    let scene = Scene::new();
    let server = Server::start(&scene, &[]);
    let arguments = [&["-s", &server.url, "--ttl", "600ms", "demo"][..], &WORK].concat();
    let mut leader = participant(&scene, &arguments, "log");
    let first = leader.number();
    leader.signal(Signal::SIGSTOP);
    eventually("its command is gone", || (!runs(first)).then_some(()));
    server.until_free(&scene, "demo");
    leader.signal(Signal::SIGCONT);
    let second = leader.number();
    assert!(first != second && runs(second));
    let log = scene.read("log");
    assert!(log.contains("\nlost reason="), "{log}");
    assert_eq!(log.matches("acquired token=").count(), 2, "{log}");
    leader.signal(Signal::SIGTERM);
    assert_eq!(leader.code(), Some(143));
}

#[test]
fn one_that_is_not_to_lead_again_ends_with_its_lead() {
    let scene = Scene::new();
    let server = Server::start(&scene, &[]);
    let flags = ["-s", &server.url, "--ttl", "600ms", "--no-auto-reacquire", "demo"];
    let mut leader = participant(&scene, &[&flags[..], &WORK].concat(), "log");
    let child = leader.number();
    leader.signal(Signal::SIGSTOP);
    eventually("its command is gone", || (!runs(child)).then_some(()));
    server.until_free(&scene, "demo");
    leader.signal(Signal::SIGCONT);
    assert_eq!(leader.code(), Some(79), "{}", scene.read("log"));
}

#[test]
fn service_manager_is_notified_of_readiness_and_the_current_leader() {
    let scene = Scene::new();
    let mut leader = participant(&scene, &[&["--id", "first", "demo"][..], &WORK].concat(), "log");
    leader.number();
    let manager = UnixDatagram::bind(scene.path("manager")).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let heard = || {
        let mut bytes = [0; 512];
        let read = manager.recv(&mut bytes).expect("word in time");
        String::from_utf8(bytes[..read].to_vec()).unwrap()
    };
    let log = File::create(scene.path("log2")).unwrap();
    let mut command =
        scene.tenure(&["lead", "--id", "second", "demo", "--", "sh", "-c", "env; exit 0"]);
    command.env("NOTIFY_SOCKET", scene.path("manager")).env("WATCHDOG_USEC", "1").stderr(log);
    let mut follower = Running::new(&mut command);
    assert_eq!(heard(), "READY=1");
    let leads = format!("STATUS=standing by: first (pid {}) leads", leader.id());
    assert_eq!(heard(), leads);
    leader.signal(Signal::SIGKILL);
    while heard() != "STATUS=leading" {}
    assert_eq!(heard(), "STOPPING=1");
    let mut environment = Vec::new();
    for _ in 0..200 {
        environment.push(follower.line());
    }
    assert!(environment.contains(&"TENURE_ROLE=leader".to_owned()), "{environment:?}");
    for ours in ["NOTIFY_SOCKET", "WATCHDOG_"] {
        assert!(!environment.iter().any(|line| line.starts_with(ours)), "{environment:?}");
    }
    assert_eq!(follower.code(), Some(0));
}
