//! Elections on advisory locks of PostgreSQL: how soon another leads after a fault, and whether two ever do.
//!
//! Every participant is a process, this program again. It writes down when it leads, until when it may, and when it has
//! ended, all on the monotonic clock of the host, which they share.

use std::env;
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tenure::election::Event;
use tenure::{Client, PgAdvisory};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_postgres::NoTls;

const TTL: Duration = Duration::from_secs(3);
const URL: &str = "TENURE_BENCH_URL";
const KEY: &str = "TENURE_BENCH_KEY";
const FOLLOWERS: &str = "TENURE_BENCH_FOLLOWERS";

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    match (env::var(URL), env::var(FOLLOWERS)) {
        (Ok(url), Ok(many)) => runtime.block_on(follow(&url, many.parse()?)),
        (Ok(url), _) => runtime.block_on(participate(&url)),
        _ => {
            let Ok(server) = env::var("TENURE_TEST_POSTGRES") else {
                println!("run it by `cargo xtask bench postgres`");
                return Ok(());
            };
            let quick = env::args().any(|argument| argument == "--quick");
            runtime.block_on(measure(&server, quick))
        }
    }
}

/// Nanoseconds of the host's monotonic clock.
fn now() -> i128 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    i128::from(time.tv_sec) * 1_000_000_000 + i128::from(time.tv_nsec)
}

/// One participant: tells when it leads, until when, and when that is over.
async fn participate(url: &str) -> Result<()> {
    let client = Client::connect(url).await?;
    let election = client.election(env::var(KEY)?).ttl(TTL).build()?;
    let mut events = election.events();
    let tell = |word: &str, at: i128| {
        let mut out = std::io::stdout().lock();
        let _ = writeln!(out, "{word} {at}");
        let _ = out.flush();
    };
    election.start().await?;
    while let Some(event) = events.next().await {
        let Event::Acquired(lead) = event else { continue };
        tell("leads", now());
        tokio::spawn(async move {
            loop {
                let until = now() + i128::try_from(lead.remaining().as_nanos()).unwrap_or(0);
                tell("until", until);
                tokio::select! {
                    biased;
                    _ = lead.ended() => break,
                    () = tokio::time::sleep(Duration::from_millis(20)) => {}
                }
            }
            tell("ended", now());
        });
    }
    Ok(())
}

/// Many followers, each with a store of its own.
async fn follow(url: &str, many: usize) -> Result<()> {
    let key = env::var(KEY)?;
    let mut elections = Vec::new();
    for _ in 0..many {
        let client = Client::connect(url).await?;
        elections.push(client.election(&key).start().await?);
        tokio::time::sleep(Duration::from_millis(150)).await;
    }
    println!("all follow");
    std::future::pending().await
}

/// What one participant has told.
#[derive(Clone, Copy, Debug, Default)]
struct Told {
    leads: Option<i128>,
    /// When it surely no longer leads, by its own deadline.
    until: i128,
    ended: Option<i128>,
}

impl Told {
    /// When it stopped to count as the leader in its own eyes.
    fn over(&self) -> i128 {
        self.ended.map_or(self.until, |ended| ended.min(self.until))
    }
}

struct Participant {
    child: Child,
    told: Arc<Mutex<Told>>,
    link: Option<Link>,
    url: String,
    key: String,
    /// What goes before the program, to start it elsewhere.
    within: Vec<String>,
}

impl Participant {
    fn start(url: &str, key: &str, link: Option<Link>, within: &[String]) -> Result<Self> {
        let url = link.as_ref().map_or(url, |link| &link.url).to_owned();
        let told = Arc::<Mutex<Told>>::default();
        let child = Self::spawn(&url, key, within, &told)?;
        let (key, within) = (key.to_owned(), within.to_vec());
        Ok(Self { child, told, link, url, key, within })
    }

    fn spawn(url: &str, key: &str, within: &[String], told: &Arc<Mutex<Told>>) -> Result<Child> {
        let program = env::current_exe()?.display().to_string();
        let words: Vec<_> = within.iter().cloned().chain([program]).collect();
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).env(URL, url).env(KEY, key).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let out = child.stdout.take().ok_or("no stdout")?;
        let told = Arc::clone(told);
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(std::io::Result::ok) {
                let Some((word, at)) = line.split_once(' ') else { continue };
                let Ok(at) = at.parse() else { continue };
                let mut told = told.lock().expect("no panic");
                match word {
                    "leads" => *told = Told { leads: Some(at), until: i128::MAX, ended: None },
                    "until" if told.ended.is_none() => told.until = at,
                    "ended" => told.ended = Some(at),
                    _ => {}
                }
            }
        });
        Ok(child)
    }

    fn told(&self) -> Told {
        *self.told.lock().expect("no panic")
    }

    fn leads(&self) -> bool {
        let told = self.told();
        told.leads.is_some() && told.ended.is_none()
    }

    fn signal(&self, signal: &str) -> Result<()> {
        let pid = self.child.id().to_string();
        Command::new("kill").args([signal, &pid]).status()?;
        Ok(())
    }

    /// Kills it with -9 and starts another in its place.
    fn again(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        self.told = Arc::default();
        self.child = Self::spawn(&self.url, &self.key, &self.within, &self.told)?;
        Ok(())
    }
}

impl Drop for Participant {
    fn drop(&mut self) {
        let _ = self.signal("-CONT");
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What came of one fault.
struct Trial {
    /// From the fault to the next leader.
    took: Duration,
    /// From the end of the one in its own eyes to the beginning of the other; negative: two led.
    gap: i128,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    Kill,
    Terminate,
    Stop,
    Silence,
    LinkDown,
}

async fn measure(server: &str, quick: bool) -> Result<()> {
    let url = server.replacen("postgres:", "postgres+advisory:", 1);
    let (many, few) = if quick { (3, 2) } else { (20, 12) };
    println!("3 participants, ttl {TTL:?}, no options but that\n");
    println!(
        "{:<38} {:>6} {:>9} {:>9} {:>9} {:>12} {:>8}",
        "fault", "trials", "p50", "max", "min", "shortest gap", "overlaps"
    );
    for (name, fault, trials) in [
        ("SIGKILL of the leader", Fault::Kill, many),
        ("pg_terminate_backend of its session", Fault::Terminate, many),
        ("SIGSTOP of the leader", Fault::Stop, few),
        ("its link falls silent", Fault::Silence, few),
        ("its network interface goes down", Fault::LinkDown, few),
    ] {
        match run(&url, server, fault, trials).await {
            Ok(trials) => report(name, fault, &trials),
            Err(error) => println!("{name:<38} skipped: {error}"),
        }
    }
    idle(&url, server, quick).await
}

async fn run(url: &str, server: &str, fault: Fault, trials: usize) -> Result<Vec<Trial>> {
    let mut random = [0; 4];
    getrandom::fill(&mut random)?;
    let (first, second) = (i32::from_be_bytes(random), 7);
    let key = format!("{first},{second}");
    let (db, connection) = tokio_postgres::connect(server, NoTls).await?;
    tokio::spawn(connection);
    let namespaces = if fault == Fault::LinkDown { Some(Namespaces::make(3)?) } else { None };
    let mut participants = Vec::new();
    for nth in 0..3 {
        let link = match (fault, &namespaces) {
            (Fault::Silence, _) => Some(Link::to(server, "127.0.0.1").await?),
            (_, Some(_)) => Some(Link::to(server, &Namespaces::near(nth)).await?),
            _ => None,
        };
        let within = namespaces.as_ref().map_or_else(Vec::new, |_| Namespaces::within(nth));
        participants.push(Participant::start(url, &key, link, &within)?);
    }
    let mut done = Vec::new();
    for _ in 0..trials {
        let leader = leader(&participants, None).await?;
        // Both others wait in the queue.
        until("the followers", async || {
            let sql = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted \
                       AND classid::int8 = $1";
            let waiting = db.query_one(sql, &[&i64::from(first.cast_unsigned())]).await;
            waiting.is_ok_and(|row| row.get::<_, i64>(0) == 2)
        })
        .await?;
        // At any moment of its renewal.
        tokio::time::sleep(Duration::from_millis(u64::from(random[0]) * 7 % 1_000)).await;
        random[0] = random[0].wrapping_mul(37).wrapping_add(11);
        let begun = now();
        let victim = &mut participants[leader];
        match fault {
            Fault::Kill => victim.signal("-KILL")?,
            Fault::Stop => victim.signal("-STOP")?,
            Fault::Silence => victim.link.as_ref().ok_or("no link")?.silence(true),
            Fault::LinkDown => Namespaces::set(leader, "down")?,
            Fault::Terminate => {
                let sql = "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted \
                           AND classid::int8 = $1";
                db.query_one(sql, &[&i64::from(first.cast_unsigned())]).await?;
            }
        }
        let killed_at = now();
        let next = self::leader(&participants, Some((leader, begun))).await?;
        let leads = participants[next].told().leads.unwrap_or_default();
        let victim = &mut participants[leader];
        if fault == Fault::Terminate {
            until("the word of the victim", async || victim.told().ended.is_some()).await?;
        }
        let over = if fault == Fault::Kill { killed_at } else { victim.told().over() };
        done.push(Trial {
            took: Duration::from_nanos(u64::try_from(leads - begun)?),
            gap: leads - over,
        });
        match fault {
            Fault::Kill => victim.again()?,
            Fault::Stop => victim.signal("-CONT")?,
            Fault::Silence => victim.link.as_ref().ok_or("no link")?.silence(false),
            Fault::LinkDown => Namespaces::set(leader, "up")?,
            Fault::Terminate => {}
        }
        if fault != Fault::Kill {
            until("the word of the victim", async || victim.told().ended.is_some()).await?;
        }
    }
    Ok(done)
}

/// Who leads: another than this one, since then.
async fn leader(participants: &[Participant], but: Option<(usize, i128)>) -> Result<usize> {
    let begun = Instant::now();
    loop {
        let found = participants.iter().enumerate().find(|(nth, participant)| match but {
            Some((but, since)) => {
                *nth != but && participant.told().leads.is_some_and(|at| at > since)
            }
            None => participant.leads(),
        });
        if let Some((nth, _)) = found {
            return Ok(nth);
        }
        if begun.elapsed() > Duration::from_secs(60) {
            return Err("nobody leads".into());
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

async fn until(what: &str, condition: impl AsyncFn() -> bool) -> Result<()> {
    let begun = Instant::now();
    while !condition().await {
        if begun.elapsed() > Duration::from_secs(60) {
            return Err(format!("{what} did not come about").into());
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

fn report(name: &str, fault: Fault, trials: &[Trial]) {
    let mut took: Vec<_> = trials.iter().map(|trial| trial.took).collect();
    took.sort();
    let (min, p50, max) = (took[0], took[took.len() / 2], took[took.len() - 1]);
    let shortest = trials.iter().map(|trial| trial.gap).min().unwrap_or_default();
    let overlaps = trials.iter().filter(|trial| trial.gap < 0).count();
    let mut gap = String::from("-");
    if fault != Fault::Kill {
        gap.clear();
        let _ = write!(gap, "{:.2}ms", shortest as f64 / 1e6);
    }
    println!(
        "{name:<38} {:>6} {p50:>9.1?} {max:>9.1?} {min:>9.1?} {gap:>12} {overlaps:>8}",
        trials.len()
    );
}

/// What many followers cost while nothing happens.
async fn idle(url: &str, server: &str, quick: bool) -> Result<()> {
    let (db, connection) = tokio_postgres::connect(server, NoTls).await?;
    tokio::spawn(connection);
    let key = "77,77";
    let leading = Client::with_store(Arc::new(PgAdvisory::open(url)?));
    let election = leading.election(key).start().await?;
    election.wait_for_leadership(None).await?;
    let mut followers = Command::new(env::current_exe()?)
        .env(URL, url)
        .env(KEY, key)
        .env(FOLLOWERS, "100")
        .stdout(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    BufReader::new(followers.stdout.take().ok_or("no stdout")?).read_line(&mut line)?;
    // What was opened to begin with is closed by now.
    tokio::time::sleep(Duration::from_secs(12)).await;
    let span = Duration::from_secs(if quick { 16 } else { 60 });
    let sessions = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' \
                    AND pid <> pg_backend_pid()";
    let sessions: i64 = db.query_one(sessions, &[]).await?.get(0);
    let statements = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()";
    let before: i64 = db.query_one(statements, &[]).await?.get(0);
    let (begun, mut oldest, mut asked) = (Instant::now(), 0.0_f64, 1);
    while begun.elapsed() < span {
        let sql = "SELECT coalesce(max(extract(epoch FROM clock_timestamp() - query_start)), 0)::float8 \
                   FROM pg_stat_activity WHERE backend_xmin IS NOT NULL AND pid <> pg_backend_pid()";
        oldest = oldest.max(db.query_one(sql, &[]).await?.get(0));
        asked += 2;
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let after: i64 = db.query_one(statements, &[]).await?.get(0);
    followers.kill()?;
    followers.wait()?;
    election.shutdown(None).await?;
    let rate = (after - before - asked) as f64 / begun.elapsed().as_secs_f64();
    println!(
        "\n100 idle followers: {rate:.1} round trips/s together, {sessions} sessions with the leader's; VACUUM held back by {oldest:.1} s at most"
    );
    Ok(())
}

/// A link to the server that can fall silent: bytes are taken and acknowledged, and go nowhere.
struct Link {
    url: String,
    silent: watch::Sender<bool>,
}

impl Link {
    async fn to(server: &str, near: &str) -> Result<Self> {
        let listener = TcpListener::bind((near, 0)).await?;
        let port = listener.local_addr()?.port();
        let rest = server.rsplit_once(':').ok_or("no port")?.1;
        let (target, database) = rest.split_once('/').ok_or("no database")?;
        let target: Arc<str> = format!("127.0.0.1:{target}").into();
        let (silent, watch) = watch::channel(false);
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let (target, mut silent) = (Arc::clone(&target), watch.clone());
                tokio::spawn(async move {
                    let _ = silent.wait_for(|silent| !silent).await;
                    let Ok(far) = TcpStream::connect(&*target).await else { return };
                    let _ = near.set_nodelay(true).and_then(|()| far.set_nodelay(true));
                    let (near, far) = (near.into_split(), far.into_split());
                    tokio::select! {
                        () = pass(near.0, far.1, silent.clone()) => {}
                        () = pass(far.0, near.1, silent) => {}
                    }
                });
            }
        });
        let url = format!("postgres+advisory://postgres@{near}:{port}/{database}");
        Ok(Self { url, silent })
    }

    fn silence(&self, silent: bool) {
        self.silent.send_replace(silent);
    }
}

async fn pass(
    mut from: impl tokio::io::AsyncRead + Unpin,
    mut to: impl tokio::io::AsyncWrite + Unpin,
    silent: watch::Receiver<bool>,
) {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let mut bytes = [0; 4096];
    let mut lost = false;
    while let Ok(read) = from.read(&mut bytes).await {
        lost |= *silent.borrow();
        match read {
            0 if lost => return std::future::pending().await,
            0 => return,
            _ if lost => {}
            _ if to.write_all(&bytes[..read]).await.is_err() => return,
            _ => {}
        }
    }
}

/// A network of its own for each participant, whose link to us can be taken down.
struct Namespaces(usize);

impl Namespaces {
    fn make(many: usize) -> Result<Self> {
        let made = Self(many);
        for nth in 0..many {
            let (space, near, far) = (Self::name(nth), format!("tnb{nth}"), format!("tnc{nth}"));
            ip(&["netns", "add", &space])?;
            ip(&["link", "add", &near, "type", "veth", "peer", "name", &far, "netns", &space])?;
            ip(&["addr", "add", &format!("{}/30", Self::near(nth)), "dev", &near])?;
            ip(&["link", "set", &near, "up"])?;
            ip(&["-n", &space, "addr", "add", &format!("10.213.{nth}.2/30"), "dev", &far])?;
            ip(&["-n", &space, "link", "set", &far, "up"])?;
            ip(&["-n", &space, "link", "set", "lo", "up"])?;
        }
        Ok(made)
    }

    fn name(nth: usize) -> String {
        format!("tenure-bench-{nth}")
    }

    fn near(nth: usize) -> String {
        format!("10.213.{nth}.1")
    }

    fn within(nth: usize) -> Vec<String> {
        ["ip", "netns", "exec", &Self::name(nth)].map(str::to_owned).into()
    }

    fn set(nth: usize, state: &str) -> Result<()> {
        ip(&["-n", &Self::name(nth), "link", "set", &format!("tnc{nth}"), state])
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for nth in 0..self.0 {
            let _ = ip(&["link", "del", &format!("tnb{nth}")]);
            let _ = ip(&["netns", "del", &Self::name(nth)]);
        }
    }
}

fn ip(words: &[&str]) -> Result<()> {
    let output = Command::new("ip").args(words).output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("ip {}: {}", words.join(" "), said.trim()).into())
}
