//! Servers on threads, and processes that use them.

use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tenure::{Client, conformance};
use tenure_server::{Engine, Handle, Server, Settings, TlsSetup, clock};

pub(crate) const SECRET: &str = "a secret of the tests";

/// How a server is to be.
#[derive(Default)]
pub(crate) struct Setup {
    pub(crate) settings: Settings,
    pub(crate) secret: Option<&'static str>,
    pub(crate) tls: Option<TlsSetup>,
}

/// A server on a thread of this process, at one port over all its lives.
pub(crate) struct TestServer {
    setup: Setup,
    pub(crate) address: SocketAddr,
    running: Mutex<Option<(Handle, JoinHandle<()>)>>,
}

impl TestServer {
    pub(crate) fn start(change: impl FnOnce(&mut Setup)) -> Self {
        let mut setup = Setup::default();
        change(&mut setup);
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("bound");
        let running = Mutex::new(Some(serve(&setup, listener)));
        Self { setup, address, running }
    }

    pub(crate) fn url(&self) -> String {
        let scheme = if self.setup.tls.is_some() { "tenures" } else { "tenure" };
        match self.setup.secret {
            Some(secret) => {
                format!("{scheme}://:{}@{}", secret.replace(' ', "%20"), self.address)
            }
            None => format!("{scheme}://{}", self.address),
        }
    }

    pub(crate) async fn client(&self) -> Client {
        Client::connect(&self.url()).await.expect("it listens")
    }

    /// Ends the server, and every connection with it.
    pub(crate) fn stop(&self) {
        if let Some((handle, thread)) = self.running.lock().expect("no panic").take() {
            handle.stop();
            thread.join().expect("the server ends well");
        }
    }

    pub(crate) fn restart(&self) {
        self.stop();
        let begun = Instant::now();
        let listener = loop {
            match TcpListener::bind(self.address) {
                Ok(listener) => break listener,
                Err(error) if begun.elapsed() > Duration::from_secs(10) => panic!("{error}"),
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        *self.running.lock().expect("no panic") = Some(serve(&self.setup, listener));
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.stop();
    }
}

fn serve(setup: &Setup, listener: TcpListener) -> (Handle, JoinHandle<()>) {
    let Setup { settings, secret, tls } = setup;
    let instance = u128::from(clock::wall_micros());
    let first = clock::wall_micros();
    let engine = Engine::new(settings.clone(), secret.map(str::as_bytes), instance, first);
    let config = tls.as_ref().map(|setup| Arc::clone(&setup.config));
    let (server, handle) = Server::new(listener, config, engine, Duration::ZERO).expect("a server");
    (handle, std::thread::spawn(move || server.run().expect("it serves")))
}

/// Waits until the condition holds, for much longer than it should take.
pub(crate) async fn until(what: &str, condition: impl AsyncFn() -> bool) {
    let begun = Instant::now();
    while !condition().await {
        assert!(begun.elapsed() < Duration::from_secs(20), "{what:?} did not come about");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// This program again, in the one test that does what it is told. Killed in the end.
pub(crate) struct Worker(pub(crate) Child);

const TASK: &str = "TENURE_TEST_TASK";
const URL: &str = "TENURE_TEST_URL";

impl Worker {
    pub(crate) fn command(url: &str, task: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--exact", "support::worker", "--nocapture"]).stdout(Stdio::null());
        command.env(TASK, task).env(URL, url);
        command
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// No test by itself: what the other processes of the tests do.
#[tokio::test]
async fn worker() {
    let Ok(task) = std::env::var(TASK) else { return };
    let url = std::env::var(URL).expect("the test says where");
    let client = Client::connect(&url).await.expect("it listens");
    match &*task {
        "conform" => conformance::work(Arc::clone(client.store())).await,
        other => panic!("there is no task {other}"),
    }
}
