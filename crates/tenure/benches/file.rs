//! `cargo xtask bench file`: the file store against a bare `flock`, in the same run and on the same disk.
//!
//! Every figure is the median of several rounds, and the rounds of what is compared are interleaved. One JSON object a
//! line goes to standard output, a table for people to standard error.
//!
//! The bare pair opens, locks and closes a file, as `flock(1)` and most programs do; the bare hand-off passes a lock from
//! one process to another that is blocked on it.

#[cfg(all(unix, feature = "file"))]
fn main() {
    bench::main();
}

#[cfg(not(all(unix, feature = "file")))]
fn main() {
    eprintln!("the file store is not in this build");
}

#[cfg(all(unix, feature = "file"))]
mod bench {
    use std::fs::File;
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::path::{Path, PathBuf};
    use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use rustix::fs::FlockOperation;
    use tenure::store::{Answer, Claim, Mode};
    use tenure::{Client, FileStore, Key, Store};
    use tokio::runtime::{Builder, Runtime};

    const ROUNDS: usize = 9;
    const PAIRS: u32 = 5_000;
    const HAND_OFFS: u32 = 300;
    /// How many times as long as the bare lock it may take.
    const LIMIT: f64 = 3.0;
    const PEER: &str = "TENURE_BENCH_PEER";

    pub(super) fn main() {
        if let Ok(task) = std::env::var(PEER) {
            let (what, folder) = task.split_once(' ').expect("what and where");
            return peer(what, Path::new(folder));
        }
        let name = format!("tenure-bench-{}", std::process::id());
        // Not in /tmp, which may be memory.
        let folder = Path::new("/var/tmp").join(name);
        let store = FileStore::open(&folder).expect("a folder of our own");
        let client = Client::with_store(Arc::new(store.clone()));
        let runtime = runtime();
        let bare = folder.join("bare");
        File::create(&bare).expect("ours");

        let (mut flock, mut alone, mut library) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            flock.push(per(PAIRS, || (0..PAIRS).for_each(|_| drop(lock(&bare)))));
            alone.push(per(PAIRS, || runtime.block_on(store_pairs(&store))));
            library.push(per(PAIRS, || runtime.block_on(library_pairs(&client))));
        }
        let (flock, alone, library) = (median(flock), median(alone), median(library));
        inform("pair, bare flock", flock);
        inform("pair, file store", alone);
        inform("pair, library", library);
        report("pair, file store / bare flock", alone / flock);
        report("pair, library / bare flock", library / flock);

        let mut bare_peer = Peer::start("bare", &folder);
        let mut file_peer = Peer::start("file", &folder);
        let (mut flock, mut library) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            flock.push(bare_hand_offs(&bare, &mut bare_peer));
            library.push(runtime.block_on(hand_offs(&client, &mut file_peer)));
        }
        let (flock, library) = (median(flock), median(library));
        inform("hand-off, bare flock", flock);
        inform("hand-off, library", library);
        report("hand-off, library / bare flock", library / flock);
        drop((bare_peer, file_peer, client, store));
        std::fs::remove_dir_all(&folder).expect("ours");
    }

    fn lock(path: &Path) -> File {
        let file = File::open(path).expect("there");
        rustix::fs::flock(&file, FlockOperation::LockExclusive).expect("a local disk");
        file
    }

    async fn store_pairs(store: &FileStore) {
        let limit = Duration::from_secs(1);
        let mut claim = Claim::new(
            0,
            Key::new("reports/nightly").expect("a key"),
            Mode::Exclusive,
            Duration::from_secs(15),
            Arc::default(),
        );
        for id in 0..PAIRS {
            claim.id = id.into();
            match store.claim(&claim, limit).await.expect("an answer") {
                Answer::Granted(mut grant) => grant.hold.release(limit).await.expect("ours"),
                other => panic!("not granted: {other:?}"),
            }
        }
    }

    async fn library_pairs(client: &Client) {
        for _ in 0..PAIRS {
            let guard = client.lock("reports/nightly").acquire().await.expect("free");
            guard.release().await.expect("ours");
        }
    }

    /// Another process that takes the lock when told to, and says when it had it.
    struct Peer {
        child: Child,
        say: ChildStdin,
        hear: BufReader<ChildStdout>,
    }

    impl Peer {
        fn start(what: &str, folder: &Path) -> Self {
            let mut child = Command::new(std::env::current_exe().expect("this program"))
                .env(PEER, format!("{what} {}", folder.display()))
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .expect("this program can be started again");
            let (say, hear) =
                (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
            Self { child, say, hear: BufReader::new(hear) }
        }

        fn wait(&mut self) {
            writeln!(self.say, "wait").expect("the peer listens");
        }

        /// When it had the lock, in ns on the clock that both share.
        fn had(&mut self) -> f64 {
            let mut line = String::new();
            self.hear.read_line(&mut line).expect("the peer speaks");
            line.trim().parse().expect("a number")
        }
    }

    impl Drop for Peer {
        fn drop(&mut self) {
            self.child.kill().ok();
            self.child.wait().ok();
        }
    }

    fn peer(what: &str, folder: &Path) {
        let runtime = runtime();
        let client = Client::with_store(Arc::new(FileStore::open(folder).expect("there")));
        let bare: PathBuf = folder.join("bare");
        for _ in std::io::stdin().lines() {
            let had = if what == "bare" {
                let locked = lock(&bare);
                let had = now();
                drop(locked);
                had
            } else {
                runtime.block_on(async {
                    let guard = client.lock("hand-off").acquire().await.expect("its turn");
                    let had = now();
                    guard.release().await.expect("ours");
                    had
                })
            };
            println!("{had}");
        }
    }

    /// Microseconds from letting go here to having it there.
    fn bare_hand_offs(bare: &Path, peer: &mut Peer) -> f64 {
        let mut took = Vec::new();
        for _ in 0..HAND_OFFS {
            let locked = lock(bare);
            peer.wait();
            std::thread::sleep(Duration::from_micros(500));
            let began = now();
            drop(locked);
            took.push((peer.had() - began) / 1e3);
        }
        median(took)
    }

    async fn hand_offs(client: &Client, peer: &mut Peer) -> f64 {
        let mut took = Vec::new();
        for _ in 0..HAND_OFFS {
            let guard = client.lock("hand-off").acquire().await.expect("free");
            peer.wait();
            while client.inspect("hand-off").await.expect("there").waiters.is_empty() {
                std::thread::sleep(Duration::from_micros(100));
            }
            std::thread::sleep(Duration::from_micros(500));
            let began = now();
            guard.release().await.expect("ours");
            took.push((peer.had() - began) / 1e3);
        }
        median(took)
    }

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_all().build().expect("a runtime can be built")
    }

    #[expect(clippy::cast_precision_loss, reason = "53 bits of nanoseconds are a hundred days")]
    fn now() -> f64 {
        tenure::Clock::system().now().as_nanos() as f64
    }

    /// Microseconds for each of so many.
    fn per(count: u32, work: impl FnOnce()) -> f64 {
        let begun = Instant::now();
        work();
        begun.elapsed().as_secs_f64() * 1e6 / f64::from(count)
    }

    fn median(mut figures: Vec<f64>) -> f64 {
        figures.sort_by(f64::total_cmp);
        figures[figures.len() / 2]
    }

    /// Prints a ratio with its limit.
    fn report(what: &str, figure: f64) {
        let verdict = if figure <= LIMIT { "within" } else { "ABOVE" };
        eprintln!("{what:<36} {figure:>14.2} times        {verdict} {LIMIT}");
        println!(
            r#"{{"bench":"file","what":"{what}","unit":"times","figure":{figure:.3},"limit":{LIMIT}}}"#
        );
    }

    /// Prints a figure that has no limit.
    fn inform(what: &str, figure: f64) {
        eprintln!("{what:<36} {figure:>14.2} µs");
        println!(r#"{{"bench":"file","what":"{what}","unit":"µs","figure":{figure:.3}}}"#);
    }
}
