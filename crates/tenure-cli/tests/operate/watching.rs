//! Stores beside the server's own keys: `--watch`.

use serde_json::{Value, json};

use crate::Served;
use crate::http::json_of;
use crate::queue::Queue;
use crate::support::{Running, Scene, eventually};

/// A job of payload 1 fails with words, any other hangs.
const SCRIPT: &str =
    "read x; [ $x != 1 ] || { echo no such report >&2; exit 1; }; echo ready; exec sleep 300";

/// A queue with a running job and a failed job, and the worker that runs them.
pub(crate) fn at_work(name: &str) -> Option<(Queue, Running)> {
    let queue = Queue::new(name)?;
    queue.add(&["--payload", "1", "--priority", "1", "--max-attempts", "1"]);
    queue.add(&["--payload", "2"]);
    queue.add(&["--payload", "0", "--delay", "1h"]);
    let work = ["work", "-q", "--grace", "0s", &queue.table, "--", "sh", "-c", SCRIPT];
    let mut working = Running::new(&mut queue.tenure(&work));
    assert_eq!(working.line(), "ready");
    Some((queue, working))
}

/// The URL of its jobs.
pub(crate) fn jobs_url(queue: &Queue) -> String {
    let sign = if queue.url.contains('?') { '&' } else { '?' };
    format!("{}{sign}queue={}", queue.url, queue.table)
}

/// The URL of the advisory locks of its server.
pub(crate) fn advisory_url(queue: &Queue) -> String {
    queue.url.replacen("postgres", "postgres+advisory", 1)
}

#[test]
fn other_stores_are_shown_without_their_secrets_and_one_that_is_down_hides_no_other() {
    let Some((queue, working)) = at_work("watched") else { return };
    let scene = Scene::new();
    let file = format!("file:{}", scene.store().display());
    let down = "nats://me:hunter2@127.0.0.1:1/locks";
    let (jobs, advisory) = (jobs_url(&queue), advisory_url(&queue));
    let mut flags = vec!["--http", "127.0.0.1:0"];
    for url in [&*file, &jobs, down, &advisory] {
        flags.extend(["--watch", url]);
    }
    let served = Served::start(&flags);
    let name = format!("election-{}", std::process::id());
    let lead = ["lead", "-q", "-s", &advisory, "--id", "web-2", &name, "--", "sh", "-c"];
    let script = "echo ready; exec sleep 300";
    let mut leader = scene.start(&[&lead[..], &[script]].concat());
    assert_eq!(leader.line(), "ready");
    let hold = ["run", "--id", "web-1", "--note", "deploy 42", "demo", "--", "sh", "-c", script];
    let mut holder = scene.start(&hold);
    assert_eq!(holder.line(), "ready");
    let _waiter = scene.start(&["run", "demo", "true"]);

    // Others may use the same server.
    let is_lead = |name: &Value| name["holders"][0]["by"]["id"] == "web-2";
    let stores = || json_of(&served.http, "/api/watched")["stores"].as_array().unwrap().clone();
    let stores = eventually("all are seen", || {
        let stores = stores();
        let seen = stores[0]["names"][0]["waiting"] == 1
            && stores[1]["counts"].is_array()
            && stores[2]["error"].is_string()
            && stores[3]["names"].as_array().is_some_and(|names| names.iter().any(is_lead));
        seen.then_some(stores)
    });
    let demo = &stores[0]["names"][0];
    assert_eq!((&demo["name"], &demo["kind"]), (&"demo".into(), &"lock".into()));
    let by = &demo["holders"][0]["by"];
    assert_eq!((&by["id"], &by["note"]), (&"web-1".into(), &"deploy 42".into()));
    assert_eq!(by["pid"], holder.id());
    assert!(demo["holders"][0]["token"].as_str().unwrap().parse::<u128>().unwrap() > 0);

    let seen = &stores[1];
    let counts = json!([
        ["AVAILABLE", 0],
        ["DELAYED", 1],
        ["RUNNING", 1],
        ["EXPIRED", 0],
        ["COMPLETED", 0],
        ["FAILED", 1]
    ]);
    assert_eq!(seen["counts"], counts);
    let (running, failed) = (&seen["running"][0], &seen["failed"][0]);
    let worker = running["worker"].as_str().unwrap();
    assert!(worker.contains(&format!(":{}:", working.id())), "{worker}");
    let left = running["left_ms"].as_u64().unwrap();
    assert!((240_000..=300_000).contains(&left), "{left} ms of a lease of 5 minutes");
    assert_eq!(failed["error"], "exit code 1: no such report");

    assert_eq!(stores[2]["store"], "nats://127.0.0.1:1/locks");
    let all = format!("{stores:?}{}", served.said());
    assert!(!all.contains("hunter2"), "{all}");
    assert_eq!(json_of(&served.http, "/api/now")["watched"], 4);
}

#[test]
fn serve_rejects_invalid_watch_urls_without_printing_secrets() {
    let scene = Scene::new();
    let serve = |arguments: &[&str]| {
        let (code, _, stderr) = scene.outcome(&[&["serve", "--port", "0"], arguments].concat());
        assert!(!stderr.contains("hunter2"), "{stderr}");
        (code, stderr)
    };
    let (code, stderr) = serve(&["--http", "0", "--watch", "pigeon://me:hunter2@coop"]);
    assert_eq!(code, Some(125), "{stderr}");
    assert!(stderr.contains("--watch: unknown store `pigeon`"), "{stderr}");
    let odd = "postgres://me:hunter2@127.0.0.1/app?queue=no%20table";
    let (code, stderr) = serve(&["--http", "0", "--watch", odd]);
    assert_eq!(code, Some(125), "{stderr}");
    assert_eq!(serve(&["--watch", "file:"]).0, Some(2), "a page is needed");
}
