//! Commands at a lock server without our extension, whose fencing numbers have no order that is known.

use std::net::TcpListener;
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::Value;
use tenure_server::{Engine, Handle, Server, Settings, clock};

use crate::support::{Running, Scene};

/// A server that speaks the plain protocol, on a thread of the test.
struct Plain {
    scene: Scene,
    url: String,
    running: Option<(Handle, JoinHandle<()>)>,
}

impl Plain {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("tenure://{}", listener.local_addr().unwrap());
        let settings = Settings { extension: false, ..Settings::default() };
        let engine = Engine::new(settings, None, 1, clock::wall_micros());
        let (server, handle) = Server::new(listener, None, engine, Duration::ZERO).unwrap();
        let thread = std::thread::spawn(move || server.run().unwrap());
        Self { scene: Scene::new(), url, running: Some((handle, thread)) }
    }

    fn outcome(&self, command: &str, arguments: &[&str]) -> (Option<i32>, String, String) {
        self.scene.outcome(&[&[command, "-s", &self.url], arguments].concat())
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        if let Some((handle, thread)) = self.running.take() {
            handle.stop();
            let _ = thread.join();
        }
    }
}

/// Prints the token, or that there is none.
const TOKEN: [&str; 5] = ["demo", "--", "sh", "-c", "echo ${TENURE_TOKEN-none}"];

#[test]
fn the_command_has_no_token_unless_the_url_declares_order() {
    let plain = Plain::start();
    for command in ["run", "lead"] {
        let (code, stdout, stderr) = plain.outcome(command, &TOKEN);
        assert_eq!((code, stdout.as_str()), (Some(0), "none\n"), "{command}: {stderr}");
    }
    let ordered = format!("{}?fencing=ordered", plain.url);
    let mut last = 0;
    for _ in 0..3 {
        let arguments = [&["run", "-s", &ordered], &TOKEN[..]].concat();
        let (code, stdout, stderr) = plain.scene.outcome(&arguments);
        let token = stdout.trim().parse::<u128>().unwrap_or_default();
        assert!(code == Some(0) && token > last, "{last}, then {stdout}: {stderr}");
        last = token;
    }
    let odd = format!("{}?fencing=random", plain.url);
    let (code, _, stderr) = plain.scene.outcome(&["run", "-s", &odd, "demo", "true"]);
    assert!(code == Some(125) && stderr.contains("fencing=ordered"), "{code:?}: {stderr}");
}

#[test]
fn the_token_of_a_hold_around_it_is_not_taken_for_its_own() {
    let plain = Plain::start();
    let inner =
        "\"$TENURE\" run -s \"$0\" demo -- sh -c 'echo ${TENURE_TOKEN-none} $TENURE_AROUND'";
    let (code, stdout, stderr) =
        plain.scene.outcome(&["run", "outer", "--", "sh", "-c", inner, &plain.url]);
    assert_eq!(code, Some(0), "{stderr}");
    let (token, around) = stdout.trim().split_once(' ').unwrap();
    assert_eq!(token, "none");
    assert!(around.contains(",outer,") && !around.contains(",demo,"), "{around}");
}

#[test]
fn plain_server_output_shows_that_holds_have_no_token() {
    let plain = Plain::start();
    let work = ["demo", "--", "sh", "-c", "echo ready; exec sleep 300"];
    let arguments = [&["run", "-s", &plain.url, "--json"], &work[..]].concat();
    let err = std::fs::File::create(plain.scene.path("events")).unwrap();
    let mut holder = Running::new(plain.scene.tenure(&arguments).stderr(err));
    assert_eq!(holder.line(), "ready");
    let events = plain.scene.read("events");
    let event: Value = serde_json::from_str(events.lines().next().unwrap()).unwrap();
    assert_eq!((&event["event"], &event["token"]), (&"acquired".into(), &Value::Null));

    let (code, stdout, _) = plain.outcome("status", &["demo"]);
    assert_eq!(code, Some(0));
    let lines: Vec<_> = stdout.lines().collect();
    assert!(lines[1].ends_with('-') && lines[2].contains("no fencing token"), "{stdout}");
    let (_, stdout, _) = plain.outcome("status", &["--json", "demo"]);
    let state: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((&state["fencing"], &state["holders"][0]["token"]), (&"none".into(), &Value::Null));

    let (code, _, stderr) = plain.outcome("break", &["demo", "--token", "0", "--reason", "hangs"]);
    assert!(code == Some(125) && stderr.contains("plain protocol"), "{code:?}: {stderr}");
    let (code, stdout, _) = plain.outcome("doctor", &[]);
    assert_eq!(code, Some(0), "a warning is no failure");
    assert!(
        stdout.contains("WARN  fencing tokens") && stdout.contains("?fencing=ordered"),
        "{stdout}"
    );
    let (_, stdout, _) = plain.outcome("doctor", &["--json"]);
    let mut findings = stdout.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let finding = findings.find(|finding| finding["what"] == "fencing tokens").unwrap();
    assert_eq!(finding["verdict"], "warning");
}
