//! What is served over HTTP: metrics, health, the page's words; and what is refused.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::{Running, Scene, eventually};
use crate::{Served, TOKEN, services};

/// More names than should ever become labels.
const KEYS: usize = 10_000;
pub(crate) const HTTP: [&str; 2] = ["--http", "127.0.0.1:0"];
/// Says that it runs and goes on.
const WORK: [&str; 4] = ["--", "sh", "-c", "echo ready; exec sleep 300"];

/// A request: status, headers and body.
pub(crate) fn request(address: &str, head: &str, body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let host = if head.contains("Host:") { "" } else { "Host: localhost\r\n" };
    let length = body.len();
    write!(stream, "{head}\r\n{host}Content-Length: {length}\r\nConnection: close\r\n\r\n{body}")
        .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

pub(crate) fn get(address: &str, path: &str) -> (u16, String) {
    request(address, &format!("GET {path} HTTP/1.1"), "")
}

pub(crate) fn json_of(address: &str, path: &str) -> Value {
    let (status, body) = get(address, path);
    assert_eq!(status, 200, "{body}");
    // The body may come in pieces, each with its length before it.
    let (begin, end) = (body.find('{').unwrap(), body.rfind('}').unwrap());
    serde_json::from_str(&body[begin..=end]).unwrap()
}

/// The samples of a page of metrics; panics where it is none.
fn samples(text: &str) -> BTreeMap<String, String> {
    let mut samples = BTreeMap::new();
    let (mut families, mut current) = (BTreeMap::new(), String::new());
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert!(families.insert(name.to_owned(), kind.to_owned()).is_none(), "twice: {name}");
            name.clone_into(&mut current);
        } else if !line.starts_with('#') && !line.is_empty() {
            let (series, value) = line.rsplit_once(' ').unwrap();
            let name = series.split('{').next().unwrap();
            let kind = families.get(&current).unwrap();
            let own = match kind.as_str() {
                "histogram" => ["_bucket", "_sum", "_count"]
                    .iter()
                    .any(|end| name.strip_suffix(end) == Some(&current)),
                _ => name == current,
            };
            assert!(own, "{line} is not of {current}");
            assert!(kind != "counter" || name.ends_with("_total"), "{line}");
            assert!(value.parse::<f64>().is_ok(), "{line}");
            assert!(
                samples.insert(series.to_owned(), value.to_owned()).is_none(),
                "twice: {series}"
            );
        }
    }
    samples
}

/// Prometheus' own linter has nothing to say.
pub(crate) fn lint(text: &str) {
    let Some(promtool) = services::promtool() else { return };
    let mut child = Command::new(promtool)
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{}\n{text}", String::from_utf8_lossy(&said));
}

pub(crate) fn metrics(address: &str) -> (String, BTreeMap<String, String>) {
    let (status, text) = get(address, "/metrics");
    assert_eq!(status, 200);
    let samples = samples(&text);
    (text, samples)
}

#[test]
fn a_server_counts_and_its_labels_do_not_grow_with_its_keys() {
    let served = Served::start(&HTTP);
    let (before, _) = metrics(&served.http);
    lint(&before);
    let mut client = BufReader::new(TcpStream::connect(served.address()).unwrap());
    client.get_mut().write_all(format!("auth\n_\n{TOKEN}\n").as_bytes()).unwrap();
    for part in 0..10 {
        let ask = |n: usize| format!("l\nkey-{part}-{n}\n0 60\n");
        let requests: String = (0..KEYS / 10).map(ask).collect();
        client.get_mut().write_all(requests.as_bytes()).unwrap();
        let mut line = String::new();
        for _ in 0..KEYS / 10 + usize::from(part == 0) {
            line.clear();
            client.read_line(&mut line).unwrap();
            assert!(line.starts_with("ok"), "{line}");
        }
    }
    client.get_mut().write_all(b"l\nkey-0-0\n0\n").unwrap();
    let mut line = String::new();
    client.read_line(&mut line).unwrap();
    assert_eq!(line.trim(), "timeout");
    let (after, samples) = metrics(&served.http);
    lint(&after);
    assert_eq!(before.lines().count(), after.lines().count(), "10,000 keys grew it");
    assert!(!after.contains("key-"), "a name of a lock in {after}");
    let is = |series: &str, value: usize| {
        assert_eq!(samples[series], value.to_string(), "{series} in {after}");
    };
    is("tenure_held{store=\"server\"}", KEYS);
    is("tenure_acquire_total{store=\"server\",outcome=\"acquired\"}", KEYS);
    is("tenure_acquire_total{store=\"server\",outcome=\"held\"}", 1);
    is("tenure_acquire_wait_seconds_count{store=\"server\"}", KEYS);
    is("tenure_server_connections{store=\"server\"}", 1);
    drop(client);
    eventually("the holds end with their connection", || {
        let (_, samples) = metrics(&served.http);
        let lost = &samples["tenure_lost_total{store=\"server\",reason=\"disconnected\"}"];
        (*lost == KEYS.to_string()).then_some(())
    });
}

#[test]
fn the_page_is_told_of_a_change_within_a_second_or_so() {
    let served = Served::start(&HTTP);
    let mut stream = BufReader::new(TcpStream::connect(&served.http).unwrap());
    stream.get_mut().set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.get_mut().write_all(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut next = move || loop {
        let mut line = String::new();
        assert!(stream.read_line(&mut line).unwrap() > 0, "the stream ended");
        if let Some(data) = line.strip_prefix("data: ") {
            return serde_json::from_str::<Value>(data).unwrap();
        }
    };
    assert_eq!(next()["rows"], json!([]));
    let work = ["--id", "web-1", "--note", "deploy 42", "demo"];
    let mut holder = served.begin("run", &[&work[..], &WORK].concat());
    assert_eq!(holder.line(), "ready");
    let began = Instant::now();
    let row = loop {
        let now = next();
        if let Some(row) = now["rows"].get(0) {
            break row.clone();
        }
    };
    eprintln!("the page saw it after {:?}", began.elapsed());
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    assert_eq!((&row["name"], &row["kind"]), (&"demo".into(), &"lock".into()));
    let by = &row["holder"]["by"];
    assert_eq!((&by["id"], &by["note"]), (&"web-1".into(), &"deploy 42".into()));
    assert_eq!(by["pid"], holder.id());
    let _waiter = served.begin("run", &["demo", "--", "true"]);
    let waiting = |now: Value| now["rows"][0]["waiting"] == 1;
    eventually("the page sees who waits", || waiting(next()).then_some(()));
    let none = json_of(&served.http, "/api/now?filter=nothing-like-it");
    assert_eq!(none["keys"], 0);
}

#[test]
fn http_break_requires_the_auth_token_fencing_token_and_reason() {
    let served = Served::start(&HTTP);
    let mut holder = served.begin("run", &[&["demo"][..], &WORK].concat());
    assert_eq!(holder.line(), "ready");
    let seen = json_of(&served.http, "/api/key?name=demo&kind=lock");
    let fence: u64 = seen["view"]["holders"][0]["fence"].as_str().unwrap().parse().unwrap();
    assert_eq!(seen["events"][0]["what"], "granted");
    let break_it = |token: &str, fence: u64, reason: &str| {
        let head = format!(
            "POST /api/break HTTP/1.1\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json"
        );
        let body =
            json!({ "name": "demo", "kind": "lock", "token": fence.to_string(), "reason": reason });
        request(&served.http, &head, &body.to_string())
    };
    assert_eq!(break_it("wrong", fence, "stuck").0, 401);
    assert_eq!(break_it(TOKEN, fence + 1, "stuck").0, 409, "it changed hands meanwhile");
    assert_eq!(break_it(TOKEN, fence, "  ").0, 400);
    let (status, _) = request(&served.http, "POST /api/break HTTP/1.1", "{}");
    assert!(status == 400 || status == 415, "{status}");
    assert_eq!(json_of(&served.http, "/api/now")["rows"][0]["held"], 1, "nothing was changed");
    assert_eq!(break_it(TOKEN, fence, "stuck").0, 204);
    assert_eq!(holder.code(), Some(79));
    let events = json_of(&served.http, "/api/key?name=demo&kind=lock")["events"].clone();
    let last = events.as_array().unwrap().last().unwrap().clone();
    assert_eq!((&last["what"], &last["text"]), (&"broken".into(), &"stuck".into()));
    assert!(served.said().contains("stuck"), "{}", served.said());
    assert!(!served.said().contains(TOKEN));
}

#[test]
fn a_leader_that_is_asked_to_steps_down() {
    let served = Served::start(&HTTP);
    let script = "echo $TENURE_TOKEN; exec sleep 300";
    let lead = ["--quiet", "--step-down-on-request", "demo", "--", "sh", "-c", script];
    let mut leader = served.begin("lead", &lead);
    let first: u128 = leader.line().parse().unwrap();
    let ask = |name: &str, token: &str, fence: u64, reason: &str| {
        let head = format!(
            "POST /api/step-down HTTP/1.1\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json"
        );
        let body =
            json!({ "name": name, "kind": "lock", "token": fence.to_string(), "reason": reason });
        request(&served.http, &head, &body.to_string())
    };
    let fence = |name: &str| -> u64 {
        let seen = json_of(&served.http, &format!("/api/key?name={name}&kind=lock"));
        seen["view"]["holders"][0]["fence"].as_str().unwrap().parse().unwrap()
    };
    let held = fence("demo");
    assert_eq!(ask("demo", "wrong", held, "maintenance").0, 401);
    assert_eq!(ask("demo", TOKEN, held + 1, "maintenance").0, 409, "it changed hands meanwhile");
    assert_eq!(ask("demo", TOKEN, held, "  ").0, 400);
    assert_eq!(fence("demo"), held, "nothing was changed");
    assert_eq!(ask("demo", TOKEN, held, "maintenance").0, 204);
    let second: u128 = leader.line().parse().unwrap();
    assert!(second > first, "nobody else wanted to, and it leads anew: {first}, {second}");
    let seen = json_of(&served.http, "/api/key?name=demo&kind=lock");
    let what: Vec<&Value> =
        seen["events"].as_array().unwrap().iter().map(|event| &event["what"]).collect();
    assert_eq!(what, ["granted", "handoff_requested", "released", "granted"]);
    assert_eq!(seen["events"][1]["text"], "maintenance");
    assert!(served.said().contains("handoff_requested") && served.said().contains("maintenance"));
    assert!(!served.said().contains(TOKEN));
    let (_, svg, _) = served.outcome("history", &["--svg", "demo"]);
    assert_eq!(svg.matches("<rect").count(), 3, "the ground and two holds: {svg}");

    // A client of the plain protocol has no ear for it.
    let mut plain = BufReader::new(TcpStream::connect(served.address()).unwrap());
    plain.get_mut().write_all(format!("auth\n_\n{TOKEN}\nl\nplain\n0 60\n").as_bytes()).unwrap();
    let mut line = String::new();
    while !line.ends_with(" 60\n") {
        assert!(plain.read_line(&mut line).unwrap() > 0, "{line}");
    }
    let (status, why) = ask("plain", TOKEN, fence("plain"), "maintenance");
    assert_eq!(status, 409, "{why}");
    assert!(why.contains("cannot be notified"), "{why}");
}

#[test]
fn http_page_rejects_unsafe_address_missing_token_and_foreign_host() {
    let scene = Scene::new();
    let serve = |arguments: &[&str]| {
        let (code, _, stderr) = scene.outcome(&[&["serve", "--port", "0"], arguments].concat());
        assert_eq!(code, Some(125), "{stderr}");
        stderr
    };
    assert!(serve(&["--http", "0.0.0.0:0"]).contains("can be reached from other hosts"));
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    let _still = std::net::TcpListener::bind(&taken);
    assert!(serve(&["--http", &taken]).contains("cannot listen on"));
    assert!(serve(&["--http", "nonsense"]).contains("--http"));

    // Beyond this host, a client must present the token. On this host, a request with a foreign host name is refused.
    let served = Served::start(&["--http", "0.0.0.0:0"]);
    let port = served.http.rsplit(':').next().unwrap();
    let address = format!("127.0.0.1:{port}");
    assert_eq!(get(&address, "/metrics").0, 401);
    assert_eq!(get(&address, "/api/now").0, 401);
    let known = format!("GET /metrics HTTP/1.1\r\nAuthorization: Bearer {TOKEN}");
    assert_eq!(request(&address, &known, "").0, 200);
    for path in ["/livez", "/readyz", "/", "/page.js"] {
        assert_eq!(get(&address, path).0, 200, "{path}");
    }
    let named = "GET /livez HTTP/1.1\r\nHost: locks.example";
    assert_eq!(request(&address, named, "").0, 200, "who asks for the token may have any name");
    let served = Served::start(&HTTP);
    let foreign = "GET /api/now HTTP/1.1\r\nHost: evil.example";
    assert_eq!(request(&served.http, foreign, "").0, 421);
}

#[test]
fn a_participant_shows_whether_it_leads_and_is_ready_while_it_does_not() {
    let scene = Scene::new();
    let lead = |id: &str| {
        let arguments =
            ["lead", "--metrics", "127.0.0.1:0", "--id", id, "demo", "--", "sleep", "300"];
        shown(&mut scene.tenure(&arguments))
    };
    let (leader, first) = lead("one");
    eventually("it leads", || (get(&first, "/leader").0 == 200).then_some(()));
    let (_follower, second) = lead("two");
    eventually("the second is ready", || (get(&second, "/readyz").0 == 200).then_some(()));
    assert_eq!(get(&second, "/leader").0, 503);
    assert_eq!(get(&second, "/livez").0, 200);
    let (text, samples) = metrics(&first);
    lint(&text);
    assert_eq!(samples["leader_election_master_status{name=\"demo\"}"], "1");
    assert_eq!(samples["tenure_leader{election=\"demo\"}"], "1");
    assert_eq!(samples["tenure_held{store=\"file\",class=\"election\"}"], "1");
    eventually("the wait of the second is counted", || {
        let (_, samples) = metrics(&second);
        let waiting = samples
            .get("tenure_waiting{store=\"file\",class=\"election\"}")
            .is_some_and(|one| one == "1");
        let oldest =
            samples.get("tenure_waiting_oldest_seconds{store=\"file\",class=\"election\"}");
        (waiting && oldest.is_some_and(|oldest| oldest != "0")).then_some(())
    });
    drop(leader);
    eventually("the second leads", || (get(&second, "/leader").0 == 200).then_some(()));
    let (text, samples) = metrics(&second);
    lint(&text);
    assert_eq!(samples["tenure_leader_transitions_total{election=\"demo\"}"], "1");
    let (code, _, stderr) = scene.outcome(&["run", "--metrics", &second, "x", "true"]);
    assert_eq!(code, Some(125), "{stderr}");
    assert!(stderr.contains("--metrics: cannot listen on"), "{stderr}");
}

#[test]
fn history_is_printed_and_survives_a_clean_restart() {
    let scene = Scene::new();
    let data = scene.path("data").display().to_string();
    let flags = ["--data-dir", &data, "--history", "8"];
    let served = Served::start_in(scene, &flags);
    for _ in 0..6 {
        assert_eq!(served.outcome("run", &["--id", "web-1", "demo", "true"]).0, Some(0));
    }
    let told = |served: &Served| {
        let (code, stdout, stderr) = served.outcome("history", &["--json", "demo"]);
        assert_eq!(code, Some(0), "{stderr}");
        let lines = stdout.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.collect::<Vec<_>>()
    };
    let before = told(&served);
    assert_eq!(before.len(), 8, "a ring of as many as were asked for: {before:?}");
    assert_eq!((&before[0]["event"], &before[0]["holder"]), (&"granted".into(), &"web-1".into()));
    assert_eq!(before[7]["event"], "released");
    let (_, svg, _) = served.outcome("history", &["--svg", "demo"]);
    assert!(svg.starts_with("<svg") && svg.matches("<rect").count() == 5, "{svg}");
    let (code, scene) = served.stop();
    assert_eq!(code, Some(0));
    let served = Served::start_in(scene, &flags);
    assert_eq!(told(&served), before);
    let (_, table, _) = served.outcome("history", &["demo"]);
    assert_eq!(table.lines().count(), 9, "{table}");
}

#[test]
fn a_server_that_remembers_nothing_says_so() {
    let served = Served::start(&[]);
    let (code, _, stderr) = served.outcome("history", &["demo"]);
    assert_eq!(code, Some(125));
    assert!(stderr.contains("--history"), "{stderr}");
    let scene = Scene::new();
    let (code, _, stderr) = scene.outcome(&["history", "demo"]);
    assert_eq!(code, Some(125));
    assert!(stderr.contains("keeps no history"), "{stderr}");
}

/// Starts a command with `--metrics`; where these are.
pub(crate) fn shown(command: &mut Command) -> (Killed, String) {
    let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let child = Killed(child);
    let mut line = String::new();
    while !line.contains("metrics are on http://") {
        line.clear();
        assert!(stderr.read_line(&mut line).unwrap() > 0, "it ended");
    }
    std::thread::spawn(move || std::io::copy(&mut stderr, &mut std::io::sink()));
    let address = line.split("http://").nth(1).unwrap().split('/').next().unwrap().to_owned();
    (child, address)
}

/// A process that ends with its test.
pub(crate) struct Killed(std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts many clients that claim the same name, for the page to show.
pub(crate) fn crowd(served: &Served, name: &str, size: usize) -> Vec<Running> {
    let mut crowd = Vec::new();
    for number in 1..=size {
        let id = format!("web-{number}");
        let flags = ["--id", &id, "--note", "deploy 42", "--ttl", "15s", name];
        let mut next = served.begin("run", &[&flags[..], &WORK].concat());
        if number == 1 {
            assert_eq!(next.line(), "ready");
        }
        crowd.push(next);
    }
    crowd
}
