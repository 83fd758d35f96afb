//! Jobs of a worker that was killed with -9: released by its guardians, once their commands are dead.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::pg_server::Server;
use crate::queue::Queue;
use crate::services::skip::skip;
use crate::support::{Running, Scene, children, eventually, runs};

/// A command that prints its process id and runs until it is killed.
const ENDLESS: [&str; 4] = ["--", "sh", "-c", "echo $$; exec sleep 300"];

/// Much longer than a release takes, and much shorter than the lease of 5 minutes.
const SOON: Duration = Duration::from_secs(20);

#[test]
fn after_kill_9_nothing_runs_and_all_jobs_are_claimable_within_seconds() {
    const JOBS: usize = 10;
    let Some(queue) = Queue::new("killed") else { return };
    for _ in 0..JOBS {
        queue.add(&[]);
    }
    let work = [&["work", "-c", "10", &queue.table][..], &ENDLESS].concat();
    let said = fs::File::create(queue.scene.path("said")).unwrap();
    let mut killed = Running::new(queue.tenure(&work).stderr(said));
    let commands: Vec<i32> = (0..JOBS).map(|_| killed.number()).collect();
    killed.signal(Signal::SIGKILL);
    let begun = Instant::now();
    let held = format!("SELECT count(*) FROM {} WHERE locked_by IS NOT NULL", queue.table);
    eventually("all are released", || (queue.sql(&held) == "0").then_some(()));
    println!("released within {:?}", begun.elapsed());
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    assert!(!commands.iter().any(|command| runs(*command)));
    let counted = format!(
        "SELECT count(*) FROM {} WHERE attempts = 1 AND lease_token = 1 AND failed_at IS NULL \
         AND error_message LIKE 'the worker was killed%'",
        queue.table
    );
    assert_eq!(queue.sql(&counted), JOBS.to_string(), "each attempt counts");
    let told = || queue.scene.read("said").matches("outcome=retried").count();
    eventually("each release is logged", || (told() == JOBS).then_some(()));
    let again = ["work", "-q", "-c", "10", "--until-empty", &queue.table, "--", "true"];
    assert_eq!(queue.outcome(&again).0, Some(0));
    let done = format!("SELECT count(completed_at) FROM {}", queue.table);
    assert_eq!(queue.sql(&done), JOBS.to_string());
}

#[test]
fn a_job_whose_every_worker_is_killed_fails_in_the_end() {
    let Some(queue) = Queue::new("killers") else { return };
    let id = queue.add(&["--max-attempts", "2"]);
    let work = [&["work", "--json", &queue.table][..], &ENDLESS].concat();
    for expected in ["AVAILABLE", "FAILED"] {
        let said = fs::File::create(queue.scene.path("said")).unwrap();
        let mut worker = Running::new(queue.tenure(&work).stderr(said));
        worker.number();
        worker.signal(Signal::SIGKILL);
        eventually(expected, || (queue.state(&id) == expected).then_some(()));
    }
    let shown = queue.show(&id);
    assert!(shown["error"].as_str().unwrap().contains("worker was killed"), "{shown}");
    let said = || queue.scene.read("said");
    eventually("the event", || said().contains(r#""outcome":"failed""#).then_some(()));
}

#[test]
fn a_job_is_not_released_before_its_command_is_dead() {
    let Some(queue) = Queue::new("undead") else { return };
    let id = queue.add(&[]);
    let work = [&["work", "-q", &queue.table][..], &ENDLESS].concat();
    let mut worker = Running::new(&mut queue.tenure(&work));
    let command = worker.number();
    // A traced process that is killed is not gone before its tracer has seen it: the guardian cannot reap it.
    let tracer = "import ctypes, sys; seize = 0x4206; \
                  print(ctypes.CDLL(None).ptrace(seize, int(sys.argv[1]), 0, 0), flush=True); \
                  sys.stdin.read()";
    let mut tracer = Command::new("python3")
        .args(["-c", tracer, &command.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut answer = String::new();
    BufReader::new(tracer.stdout.take().unwrap()).read_line(&mut answer).unwrap();
    if answer.trim() != "0" {
        tracer.wait().unwrap();
        return skip("this process may not trace its children");
    }
    worker.signal(Signal::SIGKILL);
    eventually("the command is killed", || (!runs(command)).then_some(()));
    let state = || fs::read_to_string(format!("/proc/{command}/stat")).unwrap_or_default();
    assert!(state().contains(") Z "), "it is not gone yet: {}", state());
    // Long enough for a release that does not wait.
    let killed = Instant::now();
    while killed.elapsed() < Duration::from_secs(2) {
        assert_eq!(queue.state(&id), "RUNNING", "after {:?}", killed.elapsed());
    }
    drop(tracer.stdin.take());
    tracer.wait().unwrap();
    eventually("released", || (queue.state(&id) == "AVAILABLE").then_some(()));
}

#[test]
fn a_release_is_fenced_by_the_claim() {
    let Some(queue) = Queue::new("fenced") else { return };
    let id = queue.add(&[]);
    let work = [&["work", "-q", &queue.table][..], &ENDLESS].concat();
    let mut worker = Running::new(&mut queue.tenure(&work));
    let command = worker.number();
    let guardian = children(worker.id())[0];
    // Another worker has claimed it, as after an expired lease.
    let claim = "SET lease_token = lease_token + 1, attempts = attempts + 1, locked_by = 'other', \
                 locked_until = now() + interval '1 hour'";
    queue.sql(&format!("UPDATE {} {claim}", queue.table));
    worker.signal(Signal::SIGKILL);
    eventually("the guardian and its successor end", || (!runs(guardian)).then_some(()));
    assert!(!runs(command));
    let shown = queue.show(&id);
    assert_eq!((&shown["state"], &shown["locked_by"]), (&"RUNNING".into(), &"other".into()));
    assert_eq!((&shown["attempts"], &shown["error"]), (&2.into(), &serde_json::Value::Null));
}

#[test]
fn the_password_reaches_the_release_and_nothing_else() {
    const SECRET: &str = "correct-horse";
    let Some(server) = Server::start() else { return };
    server.sql(&format!("CREATE ROLE locked_out SUPERUSER LOGIN PASSWORD '{SECRET}'"));
    let scene = Scene::new();
    let url = format!("postgres://locked_out:{SECRET}@127.0.0.1:{}/postgres", server.port);
    assert_eq!(scene.outcome(&["schema", "-s", &url, "--apply", "--queue", "jobs"]).0, Some(0));
    assert_eq!(scene.outcome(&["job", "add", "-s", &url, "jobs"]).0, Some(0));
    let script = "ls -l /proc/self/fd > descriptors; echo $$; exec sleep 300";
    let mut work = scene.tenure(&["work", "--json", "jobs", "--", "sh", "-c", script]);
    work.env("TENURE_STORE", &url).stderr(fs::File::create(scene.path("said")).unwrap());
    let mut worker = Running::new(&mut work);
    let command = worker.number();
    let guardian = children(worker.id())[0];
    for process in [guardian, command] {
        for file in ["environ", "cmdline"] {
            let content = fs::read(format!("/proc/{process}/{file}")).unwrap();
            let content = String::from_utf8_lossy(&content);
            assert!(!content.is_empty() && !content.contains(SECRET), "{file}: {content}");
        }
    }
    assert!(!scene.read("descriptors").contains("memfd"), "{}", scene.read("descriptors"));
    worker.signal(Signal::SIGKILL);
    let held = "SELECT count(*) FROM jobs WHERE locked_by IS NOT NULL";
    eventually("released", || (server.sql(held) == "0").then_some(()));
    eventually("logged", || scene.read("said").contains("job_ended").then_some(()));
    assert!(!scene.read("said").contains(SECRET), "{}", scene.read("said"));
}

#[test]
fn a_release_waits_for_a_database_that_is_away() {
    let Some(mut server) = Server::start() else { return };
    let (scene, url) = (Scene::new(), server.url());
    assert_eq!(scene.outcome(&["schema", "-s", &url, "--apply", "--queue", "jobs"]).0, Some(0));
    assert_eq!(scene.outcome(&["job", "add", "-s", &url, "jobs"]).0, Some(0));
    let work = [&["work", "-q", "-s", &url, "jobs"][..], &ENDLESS].concat();
    let mut worker = Running::new(&mut scene.tenure(&work));
    worker.number();
    let guardian = children(worker.id())[0];
    server.down();
    worker.signal(Signal::SIGKILL);
    let program = || fs::read_to_string(format!("/proc/{guardian}/cmdline")).unwrap_or_default();
    eventually("the release begins", || program().contains("__release-job").then_some(()));
    // As a service manager does with the processes that a worker leaves.
    kill(Pid::from_raw(guardian), Signal::SIGTERM).unwrap();
    server.up();
    let held = "SELECT count(*) FROM jobs WHERE locked_by IS NOT NULL";
    eventually("released", || (server.sql(held) == "0").then_some(()));
}
