//! A directory to hold locks in, commands that end with their test, and waiting with a bound.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

/// How long anything may take on a busy machine.
const BOUND: Duration = Duration::from_secs(30);

/// The store of one test.
pub(crate) struct Scene {
    folder: TempDir,
}

impl Scene {
    pub(crate) fn new() -> Self {
        Self { folder: TempDir::new().unwrap() }
    }

    /// A file of the test's own.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    pub(crate) fn store(&self) -> PathBuf {
        self.path("store")
    }

    /// `tenure` with these arguments, on this store.
    pub(crate) fn tenure(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tenure"));
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("TENURE_") {
                command.env_remove(name);
            }
        }
        command.args(arguments).env("TENURE_DIR", self.store()).current_dir(self.folder.path());
        command.env("TENURE", env!("CARGO_BIN_EXE_tenure")).stdin(Stdio::null());
        command
    }

    /// The output of that, once it has ended.
    pub(crate) fn output(&self, arguments: &[&str]) -> Output {
        self.tenure(arguments).output().unwrap()
    }

    /// Exit code, stdout and stderr.
    pub(crate) fn outcome(&self, arguments: &[&str]) -> (Option<i32>, String, String) {
        let Output { status, stdout, stderr } = self.output(arguments);
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (status.code(), text(stdout), text(stderr))
    }

    pub(crate) fn start(&self, arguments: &[&str]) -> Running {
        Running::new(&mut self.tenure(arguments))
    }

    /// A holder of `name` that says `ready` and goes on until it is told to stop.
    pub(crate) fn holder(&self, name: &str) -> Running {
        let mut running =
            self.start(&["run", name, "--", "sh", "-c", "echo ready; exec sleep 300"]);
        assert_eq!(running.line(), "ready");
        running
    }

    /// How many wait for `name`.
    pub(crate) fn waiters(&self, name: &str) -> usize {
        let (_, stdout, _) = self.outcome(&["status", "--json", name]);
        let Some(line) = stdout.lines().next() else { return 0 };
        let state: serde_json::Value = serde_json::from_str(line).unwrap();
        state["waiters"].as_array().unwrap().len()
    }
}

/// A command that is killed with its test.
pub(crate) struct Running {
    child: Child,
    stdout: BufReader<ChildStdout>,
}

impl Running {
    pub(crate) fn new(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Self { child, stdout }
    }

    pub(crate) fn id(&self) -> i32 {
        self.child.id().try_into().unwrap()
    }

    /// The next line that it prints.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    pub(crate) fn number(&mut self) -> i32 {
        let line = self.line();
        line.parse().unwrap_or_else(|_| panic!("no number: {line:?}"))
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.id()), signal).unwrap();
    }

    /// The exit code, once it has ended.
    pub(crate) fn code(&mut self) -> Option<i32> {
        eventually("the command ends", || self.child.try_wait().unwrap()).code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Its guardian sees to the rest.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A lock server, killed with its test.
pub(crate) struct Server {
    process: Child,
    pub(crate) url: String,
}

impl Server {
    pub(crate) fn start(scene: &Scene, arguments: &[&str]) -> Self {
        Self::start_at(scene, 0, arguments)
    }

    /// Starts a server on this port; 0 chooses a free one.
    pub(crate) fn start_at(scene: &Scene, port: u16, arguments: &[&str]) -> Self {
        let port = port.to_string();
        let mut command = scene.tenure(&[&["serve", "--port", &port], arguments].concat());
        let process = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut server = Self { process, url: String::new() };
        let mut said = BufReader::new(server.process.stderr.take().unwrap());
        let mut line = String::new();
        while server.url.is_empty() {
            line.clear();
            assert_ne!(said.read_line(&mut line).unwrap(), 0, "the server ended");
            let address =
                line.split("listening on ").nth(1).and_then(|rest| rest.split(';').next());
            server.url = address.map(|address| format!("tenure://{address}")).unwrap_or_default();
        }
        // A pipe that is not read must not block the server.
        std::thread::spawn(move || std::io::copy(&mut said, &mut std::io::sink()));
        server
    }

    /// Waits until nothing holds `name`: a holder that is frozen has lost it by then.
    pub(crate) fn until_free(&self, scene: &Scene, name: &str) {
        let status = ["status", "-s", &self.url, name];
        eventually("it is free", || (scene.outcome(&status).0 == Some(75)).then_some(()));
    }

    pub(crate) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Looks until there is something to see.
pub(crate) fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + BOUND;
    loop {
        if let Some(seen) = look() {
            return seen;
        }
        assert!(Instant::now() < deadline, "not within {BOUND:?}: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Whether a process runs; one that only waits to be reaped does not.
pub(crate) fn runs(process: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
}

/// The children of a process.
pub(crate) fn children(process: i32) -> Vec<i32> {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let parent = |id: i32| -> Option<i32> {
        let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
        stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
    };
    processes
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|id| parent(*id) == Some(process))
        .collect()
}
