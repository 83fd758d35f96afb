//! What an operator uses: looking, breaking, running once per period, metrics, the page.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

mod boards;
mod browser;
mod http;
mod looking;
mod once;
mod page;
mod page_jobs;
#[path = "../cli/queue.rs"]
#[allow(dead_code, reason = "shared with the tests of jobs")]
mod queue;
#[allow(dead_code, reason = "shared with the tests of the other commands")]
#[path = "../cli/support.rs"]
mod support;
mod top;
mod watching;
mod working;

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use support::{Running, Scene, eventually};

#[path = "../../../tenure/tests/services/mod.rs"]
mod services;

/// What the clients of a guarded server must know.
const TOKEN: &str = "only-for-this-test";

/// A lock server with the commands that use it, killed with its test.
struct Served {
    scene: Scene,
    process: Child,
    url: String,
    /// Where it serves HTTP.
    http: String,
    said: Arc<Mutex<String>>,
}

impl Served {
    fn start(arguments: &[&str]) -> Self {
        Self::start_in(Scene::new(), arguments)
    }

    fn start_in(scene: Scene, arguments: &[&str]) -> Self {
        let mut command = scene.tenure(&[&["serve", "--port", "0"], arguments].concat());
        command.env("DFLOCKD_AUTH_TOKEN", TOKEN);
        Self::spawn(scene, command)
    }

    /// Starts a server without an auth token.
    fn start_open(arguments: &[&str]) -> Self {
        let scene = Scene::new();
        let command = scene.tenure(&[&["serve", "--port", "0"], arguments].concat());
        Self::spawn(scene, command)
    }

    fn spawn(scene: Scene, mut command: Command) -> Self {
        let mut process = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = BufReader::new(process.stderr.take().unwrap());
        let said = Arc::new(Mutex::new(String::new()));
        let (mut url, mut http) = (String::new(), String::new());
        while url.is_empty() {
            let mut line = String::new();
            assert_ne!(stderr.read_line(&mut line).unwrap(), 0, "{}", said.lock().unwrap());
            said.lock().unwrap().push_str(&line);
            if let Some(rest) = line.split("status page: ").nth(1) {
                let rest = rest.trim().trim_start_matches("http://");
                rest.trim_end_matches('/').clone_into(&mut http);
            }
            if let Some(rest) = line.split("listening on ").nth(1) {
                let address = rest.split(';').next().unwrap();
                url = format!("tenure://:{TOKEN}@{address}");
            }
        }
        let heard = Arc::clone(&said);
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                *heard.lock().unwrap() += &(line + "\n");
            }
        });
        Self { scene, process, url, http, said }
    }

    fn begin(&self, command: &str, arguments: &[&str]) -> Running {
        self.scene.start(&[&[command, "-s", &self.url], arguments].concat())
    }

    fn outcome(&self, command: &str, arguments: &[&str]) -> (Option<i32>, String, String) {
        self.scene.outcome(&[&[command, "-s", &self.url], arguments].concat())
    }

    /// Where it listens.
    fn address(&self) -> &str {
        self.url.rsplit('@').next().unwrap()
    }

    fn said(&self) -> String {
        self.said.lock().unwrap().clone()
    }

    /// Tells it to stop, and waits until it has: the scene, for the next one.
    fn stop(mut self) -> (Option<i32>, Scene) {
        kill(Pid::from_raw(self.process.id().try_into().unwrap()), Signal::SIGTERM).unwrap();
        let code = eventually("the server ends", || self.process.try_wait().unwrap()).code();
        let scene = std::mem::replace(&mut self.scene, Scene::new());
        (code, scene)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
