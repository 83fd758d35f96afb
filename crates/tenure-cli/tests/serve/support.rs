//! A server that ends with its test, and clients that wait with a bound.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tempfile::TempDir;

/// How long anything may take on a busy machine.
pub(crate) const BOUND: Duration = Duration::from_secs(30);

/// `tenure serve` with these arguments, without what the test's own environment says.
pub(crate) fn serve(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tenure"));
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if ["TENURE_", "DFLOCKD_", "LISTEN_", "NOTIFY_", "WATCHDOG_"]
            .iter()
            .any(|own| name.starts_with(own))
        {
            command.env_remove(name);
        }
    }
    command.arg("serve").args(arguments).stdin(Stdio::null()).stdout(Stdio::null());
    command
}

/// A server that is killed with its test.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    child: Child,
    said: Arc<Mutex<String>>,
}

impl Server {
    /// On a free port.
    pub(crate) fn start(arguments: &[&str]) -> Self {
        Self::spawn(serve(&["--port", "0"]).args(arguments))
    }

    /// Waits until it listens.
    pub(crate) fn spawn(command: &mut Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut text = String::new();
        let address = loop {
            let mut line = String::new();
            assert!(stderr.read_line(&mut line).unwrap() > 0, "it does not listen: {text}");
            text += &line;
            if let Some((_, rest)) = line.split_once("listening on ") {
                break rest.split_once(';').unwrap().0.parse().unwrap();
            }
        };
        let said = Arc::new(Mutex::new(text));
        let heard = Arc::clone(&said);
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                *heard.lock().unwrap() += &(line + "\n");
            }
        });
        Self { address, child, said }
    }

    pub(crate) fn client(&self) -> Client<TcpStream> {
        Client::new(connect(self.address))
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().try_into().unwrap()), signal).unwrap();
    }

    /// What it has printed so far.
    pub(crate) fn said(&self) -> String {
        self.said.lock().unwrap().clone()
    }

    /// The exit code, once it has ended.
    pub(crate) fn code(&mut self) -> Option<i32> {
        eventually("the server ends", || self.child.try_wait().unwrap()).code()
    }

    /// Kilobytes of memory in use.
    pub(crate) fn memory(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How a command that does not get to serve ends: its code, and what it says.
pub(crate) fn refused(command: &mut Command) -> (Option<i32>, String) {
    let output = command.stderr(Stdio::piped()).output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

pub(crate) fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(BOUND)).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

/// One side of a conversation.
pub(crate) struct Client<S: Read + Write>(pub(crate) BufReader<S>);

impl<S: Read + Write> Client<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self(BufReader::new(stream))
    }

    /// Sends a request: command, key, argument.
    pub(crate) fn send(&mut self, request: &str) {
        let mut parts = request.splitn(3, ' ');
        let mut part = || parts.next().unwrap_or_default();
        let text = format!("{}\n{}\n{}\n", part(), part(), part());
        self.0.get_mut().write_all(text.as_bytes()).unwrap();
    }

    /// The next line; empty where the connection is closed.
    pub(crate) fn line(&mut self) -> String {
        self.try_line().unwrap()
    }

    pub(crate) fn try_line(&mut self) -> std::io::Result<String> {
        let mut line = String::new();
        self.0.read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    }

    pub(crate) fn ask(&mut self, request: &str) -> String {
        self.send(request);
        self.line()
    }

    /// The token of a lock that is granted, now or later.
    pub(crate) fn token(&mut self) -> String {
        let line = self.line();
        let token = line.strip_prefix("ok ").and_then(|rest| rest.split(' ').next());
        token.filter(|token| token.len() == 32).unwrap_or_else(|| panic!("{line:?}")).to_owned()
    }

    /// Takes locks on these keys, all at once, for long.
    pub(crate) fn hold_all(&mut self, keys: &[String]) {
        let requests: Vec<String> = keys.iter().map(|key| format!("l\n{key}\n0 600\n")).collect();
        self.0.get_mut().write_all(requests.concat().as_bytes()).unwrap();
        for _ in keys {
            self.token();
        }
    }

    /// Whether the other side has closed.
    pub(crate) fn is_closed(&mut self) -> bool {
        self.try_line().is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset)
            || matches!(self.0.fill_buf(), Ok([]))
    }
}

/// A folder for one test's files.
pub(crate) struct Files(TempDir);

impl Files {
    pub(crate) fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A file that only its owner can read; its path.
    pub(crate) fn write(&self, name: &str, text: &str) -> String {
        use std::os::unix::fs::PermissionsExt as _;
        let path = self.path(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        path.to_str().unwrap().to_owned()
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

/// As many open files as the system allows this test.
pub(crate) fn many_files() -> usize {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    usize::try_from(getrlimit(Resource::Nofile).current.unwrap_or(1 << 20)).unwrap()
}
