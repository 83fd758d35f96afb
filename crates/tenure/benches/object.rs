//! `cargo xtask bench object`: hand-off between two processes on a store that takes one write a second and name, beside the
//! plain flow in the same run; and the requests that holding and waiting cost.
//!
//! The store is a fake of Google's JSON API in this process, so a request takes next to nothing: what is left is what the
//! protocol costs. Add three round trips for the real one.

#[cfg(feature = "object")]
#[path = "../tests/object/fake.rs"]
mod fake;

#[cfg(feature = "object")]
fn main() {
    bench::main();
}

#[cfg(not(feature = "object"))]
fn main() {
    eprintln!("object stores are not in this build");
}

#[cfg(feature = "object")]
mod bench {
    use std::io::{BufRead as _, BufReader, Read as _, Write as _};
    use std::net::TcpStream;
    use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
    use std::time::{Duration, Instant};

    use serde_json::{Value, json};
    use tenure::{Client, Guard};

    use super::fake::{Fake, Op};

    const HAND_OFFS: u32 = 20;
    /// What a process is told to be.
    const ROLE: &str = "TENURE_BENCH_ROLE";
    const STORE: &str = "TENURE_BENCH_STORE";
    /// How long requests are counted.
    const COUNTED: Duration = Duration::from_secs(30);

    pub(super) fn main() {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        let runtime = runtime.expect("a runtime can be built");
        match std::env::var(ROLE).as_deref() {
            Ok("ours") => runtime.block_on(ours()),
            Ok("plain") => plain(),
            _ => {
                let (took, most) = hand_offs("ours");
                report("hand-off, request to guard, mean, s", took, took <= 0.6);
                report("hand-off, request to guard, longest, s", most, true);
                let (took, most) = hand_offs("plain");
                report("hand-off of the plain flow, mean, s", took, true);
                report("hand-off of the plain flow, longest, s", most, true);
                runtime.block_on(requests());
            }
        }
    }

    /// A participant: takes the lock when told to, and gives it up when somebody asks.
    async fn ours() {
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
    fn plain() {
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
                    let path =
                        format!("/storage/v1/b/locks/o/plain?ifGenerationMatch={generation}");
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
            // Requests come at any time between two renewals of the owner.
            std::thread::sleep(Duration::from_millis(1_200 + random.below(3_000)));
            let took = two.acquire();
            (sum, most) = (sum + took, most.max(took));
            std::mem::swap(&mut one, &mut two);
        }
        (sum / f64::from(HAND_OFFS), most)
    }

    /// What holding and waiting cost, scaled to an hour.
    async fn requests() {
        let fake = Fake::real();
        let ttl = Duration::from_secs(60);
        let one = Client::connect(&fake.store("b")).await.expect("a good URL");
        let two = Client::connect(&fake.store("b")).await.expect("a good URL");
        let guard = one.lock("bench").ttl(ttl).acquire().await.expect("free");
        let (reads, writes) = count(&fake, "").await;
        report("an idle holder, looks at the bell an hour", reads, reads <= 7_500.0);
        report("an idle holder (ttl 60s), writes an hour", writes, writes <= 250.0);
        let waiting = tokio::spawn(two.lock("bench").ttl(ttl).acquire());
        guard.handoff_requested().await;
        let (reads, writes) = count(&fake, "").await;
        report(
            "a waiter and its holder, reads an hour in the first minute",
            reads,
            reads <= 15_500.0,
        );
        report("a waiter and its holder, writes an hour", writes, writes <= 1_200.0);
        guard.release().await.expect("ours");
        drop(waiting.await.expect("no panic"));
    }

    async fn count(fake: &Fake, end: &str) -> (f64, f64) {
        fake.seen();
        tokio::time::sleep(COUNTED).await;
        let seen = fake.seen();
        let hour = 3_600.0 / COUNTED.as_secs_f64();
        let of = |ops: &[Op]| {
            let seen = seen.iter().filter(|(op, name, _)| ops.contains(op) && name.ends_with(end));
            f64::from(u32::try_from(seen.count()).unwrap_or(u32::MAX)) * hour
        };
        (of(&[Op::Read]), of(&[Op::Write, Op::Delete]))
    }

    fn report(what: &str, figure: f64, met: bool) {
        println!("{what:<64} {figure:>10.3}  {}", if met { "" } else { "MISSED" });
    }
}
