//! Hand-off between two processes, of ours and of the plain flow.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tenure::{Client, Guard};

use crate::fake::Fake;
use crate::{Limit, ROLE, STORE, report};

const HAND_OFFS: u32 = 20;

pub(super) fn measure() {
    let (took, most) = hand_offs("ours");
    report("hand-off, request to guard, mean, s", took, Limit::AtMost(0.6));
    report("hand-off, request to guard, longest, s", most, Limit::None);
    let (took, most) = hand_offs("plain");
    report("hand-off of the plain flow, mean, s", took, Limit::None);
    report("hand-off of the plain flow, longest, s", most, Limit::None);
}

/// A participant: acquires the lock on command, and releases it when a hand-off is requested.
pub(super) async fn ours() {
    let store = std::env::var(STORE).expect("told by the parent");
    let client = Client::connect(&store).await.expect("a good URL");
    for line in std::io::stdin().lines().map_while(Result::ok) {
        assert_eq!(line, "acquire");
        let asked = Instant::now();
        let guard: Guard = client.lock("bench").acquire().await.expect("granted");
        println!("{}", asked.elapsed().as_secs_f64());
        guard.handoff_requested().await;
        guard.release().await.expect("ours");
    }
}

/// The plain flow: one object is written three times, the owner looks every 2 s, the waiter every 1 s.
pub(super) fn plain() {
    let host = std::env::var(STORE).expect("told by the parent");
    let id = std::process::id().to_string();
    let write = |generation: &str, waiter: Option<&str>, owner: &str| {
        let record = json!({
            "ownerId": owner, "expiresAt": 9e9, "waitingOwnerId": waiter, "waiterExpiresAt": 9e9,
        });
        let path = format!(
            "/upload/storage/v1/b/locks/o?uploadType=media&name=plain&ifGenerationMatch={generation}"
        );
        ask(&host, "POST", &path, &record.to_string()).0
    };
    for line in std::io::stdin().lines().map_while(Result::ok) {
        assert_eq!(line, "acquire");
        let asked = Instant::now();
        loop {
            let (status, generation, record) = look(&host);
            let owner = record["ownerId"].as_str().unwrap_or_default().to_owned();
            let done = match status {
                404 => write("0", None, &id) == 200,
                _ if record["waitingOwnerId"].is_null() => {
                    write(&generation, Some(&id), &owner);
                    false
                }
                _ => false,
            };
            if done {
                break;
            }
            std::thread::sleep(Duration::from_secs(1));
        }
        println!("{}", asked.elapsed().as_secs_f64());
        loop {
            std::thread::sleep(Duration::from_secs(2));
            let (_, generation, record) = look(&host);
            if record["waitingOwnerId"].is_string() {
                let path = format!("/storage/v1/b/locks/o/plain?ifGenerationMatch={generation}");
                assert_eq!(ask(&host, "DELETE", &path, "").0, 204);
                break;
            }
        }
    }
}

fn look(host: &str) -> (u16, String, Value) {
    let (status, head, body) = ask(host, "GET", "/storage/v1/b/locks/o/plain?alt=media", "");
    let generation = head.lines().find_map(|line| line.strip_prefix("x-goog-generation: "));
    let record = serde_json::from_str(&body).unwrap_or_default();
    (status, generation.unwrap_or("0").to_owned(), record)
}

fn ask(host: &str, method: &str, path: &str, body: &str) -> (u16, String, String) {
    let address = host.strip_prefix("http://").expect("a plain address");
    let mut stream = TcpStream::connect(address).expect("the fake listens");
    let length = body.len();
    let asked = format!("{method} {path} HTTP/1.1\r\ncontent-length: {length}\r\n\r\n{body}");
    stream.write_all(asked.as_bytes()).expect("sent");
    stream.shutdown(std::net::Shutdown::Write).expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("answered");
    let (head, body) = answer.split_once("\r\n\r\n").expect("an answer");
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    (status.expect("a status"), head.to_owned(), body.to_owned())
}

/// A process that takes part.
struct Party {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Party {
    fn start(role: &str, store: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.env(ROLE, role).env(STORE, store).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("it can be started again");
        let orders = child.stdin.take().expect("piped");
        let answers = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, orders, answers }
    }

    /// How long it waited for the lock, in seconds.
    fn acquire(&mut self) -> f64 {
        writeln!(self.orders, "acquire").expect("it listens");
        let mut line = String::new();
        self.answers.read_line(&mut line).expect("it answers");
        line.trim().parse().expect("a number")
    }
}

impl Drop for Party {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The mean and the longest of many hand-offs to and fro.
fn hand_offs(role: &str) -> (f64, f64) {
    let fake = Fake::real();
    let store = if role == "ours" { fake.store("b") } else { fake.host().to_owned() };
    let (mut one, mut two) = (Party::start(role, &store), Party::start(role, &store));
    one.acquire();
    let (mut sum, mut most) = (0.0, 0.0_f64);
    let mut random = tenure_core::Random::new(7);
    for _ in 0..HAND_OFFS {
        // Requests come at any time between two renewals of the owner, which come every 5 s.
        std::thread::sleep(Duration::from_millis(1_200 + random.below(5_000)));
        let took = two.acquire();
        (sum, most) = (sum + took, most.max(took));
        std::mem::swap(&mut one, &mut two);
    }
    (sum / f64::from(HAND_OFFS), most)
}
