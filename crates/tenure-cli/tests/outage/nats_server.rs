//! NATS servers of a test's own.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use super::pg_server::free_port;
use super::services;
use super::support::{Scene, eventually};

/// A server that ends with its test.
pub(crate) struct NatsServer {
    program: String,
    folder: PathBuf,
    arguments: Vec<String>,
    pub(crate) port: u16,
    process: Option<Child>,
}

impl NatsServer {
    /// A server that is not started yet; `None` where the test has to be skipped.
    pub(crate) fn new(scene: &Scene, name: &str, arguments: &[&str]) -> Option<Self> {
        let arguments = arguments.iter().map(|&argument| argument.to_owned()).collect();
        let (program, folder) = (services::nats_server()?, scene.path(name));
        Some(Self { program, folder, arguments, port: free_port(), process: None })
    }

    /// Starts it and waits until it greets.
    pub(crate) fn up(&mut self) {
        let mut server = Command::new(&self.program);
        server.args(["--addr", "127.0.0.1", "--port", &self.port.to_string(), "--jetstream"]);
        server.arg("--store_dir").arg(&self.folder).args(&self.arguments);
        server.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.process = Some(server.spawn().unwrap());
        eventually("the server greets", || {
            let mut first = [0; 5];
            TcpStream::connect(("127.0.0.1", self.port)).ok()?.read_exact(&mut first).ok()?;
            (&first == b"INFO ").then_some(())
        });
    }

    /// Deletes the stream of a bucket.
    pub(crate) fn delete_bucket(&self, bucket: &str) {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        let request = format!(
            "CONNECT {{\"verbose\":false}}\r\nSUB reply 1\r\nPUB $JS.API.STREAM.DELETE.KV_{bucket} reply 0\r\n\r\n"
        );
        (&stream).write_all(request.as_bytes()).unwrap();
        let mut lines = BufReader::new(stream).lines().map(Result::unwrap);
        assert!(lines.any(|line| line.contains("\"success\":true")), "{bucket} was not deleted");
    }
}

impl Drop for NatsServer {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}
