//! A service that keeps one report, over a real socket.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use tenure::fence::{Gate, http};

use crate::holders::Frozen;

#[test]
fn a_service_refuses_a_stale_holder() {
    let service = Service::start();
    let old = Frozen::holding("reports");
    let old_token = http::value(old.token()).unwrap();
    assert_eq!(service.put(&[&old_token], "draft").0, 204);
    assert_eq!(service.put(&[&old_token], "draft, corrected").0, 204);

    let new_token = http::value(old.successor()).unwrap();
    assert_eq!(service.put(&[&new_token], "final").0, 204);

    let (status, why) = service.put(&[&old_token], "late");
    assert_eq!(status, 412);
    assert!(why.contains(&format!("token {old_token} is older than {new_token}")), "{why}");
    assert_eq!(service.report(), "final");
    assert_eq!(service.put(&[&new_token], "final, corrected").0, 204);
}

#[test]
fn a_service_refuses_what_carries_no_token() {
    let service = Service::start();
    assert_eq!(service.put(&["7"], "kept").0, 204);
    for (status, tokens) in [
        (428, &[][..]),
        (400, &["8", "8"]),
        (400, &["8, 9"]),
        (400, &["-8"]),
        (400, &["340282366920938463463374607431768211456"]),
        (400, &[""]),
        (428, &["0"]),
    ] {
        let (answered, why) = service.put(tokens, "lost");
        assert_eq!(answered, status, "{tokens:?}: {why}");
        assert!(why.contains(http::HEADER), "{why}");
    }
    assert_eq!(service.report(), "kept");
    assert_eq!(service.put(&["7"], "kept still").0, 204, "a refused request installs nothing");
}

/// The service and its address; it ends with the test's process.
struct Service {
    address: SocketAddr,
    report: Arc<Report>,
}

#[derive(Default)]
struct Report {
    gate: Gate,
    text: Mutex<String>,
}

impl Service {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, report) = (listener.local_addr().unwrap(), Arc::<Report>::default());
        let served = Arc::clone(&report);
        thread::spawn(move || {
            for stream in listener.incoming() {
                serve(&stream.unwrap(), &served);
            }
        });
        Self { address, report }
    }

    fn report(&self) -> String {
        self.report.text.lock().unwrap().clone()
    }

    /// Sends `PUT /report` with these fencing tokens; status and body of the answer.
    fn put(&self, tokens: &[&str], text: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        // As a client might write it: the names of headers have no case.
        let name = http::HEADER.to_uppercase();
        let header = |token: &&str| format!("{name}: {token}\r\n");
        let tokens = tokens.iter().map(header).collect::<Vec<_>>().concat();
        let length = text.len();
        write!(
            stream,
            "PUT /report HTTP/1.1\r\nhost: test\r\n{tokens}content-length: {length}\r\n\r\n{text}"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }
}

/// Answers one request, as a handler in any framework would.
fn serve(stream: &TcpStream, report: &Report) {
    let (headers, body) = request(stream);
    let tokens = headers.iter().filter(|(name, _)| name == http::HEADER).map(|(_, value)| value);
    let saved = http::token(tokens).and_then(|token| {
        let save = || *report.text.lock().unwrap() = body;
        Ok(report.gate.write(token, save)?)
    });
    let (status, body) = match saved {
        Ok(()) => (204, String::new()),
        Err(refusal) => (refusal.status(), refusal.to_string()),
    };
    let mut stream = stream;
    write!(stream, "HTTP/1.1 {status} \r\nconnection: close\r\n\r\n{body}").unwrap();
}

fn request(stream: &TcpStream) -> (Vec<(String, String)>, String) {
    let mut reader = BufReader::new(stream);
    let mut line = || {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    };
    line();
    let mut headers = Vec::new();
    while let Some((name, value)) = line().split_once(':') {
        headers.push((name.to_lowercase(), value.to_owned()));
    }
    let length = headers.iter().find(|(name, _)| name == "content-length").unwrap().1.trim();
    let mut body = vec![0; length.parse().unwrap()];
    reader.read_exact(&mut body).unwrap();
    (headers, String::from_utf8(body).unwrap())
}
