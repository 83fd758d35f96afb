//! A participant: this program again, and what it tells.

use std::env;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tenure::Client;
use tenure::election::Event;

use crate::network::Link;
use crate::{KEY, Result, TTL, URL};

/// Nanoseconds of the host's monotonic clock.
pub(crate) fn now() -> i128 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    i128::from(time.tv_sec) * 1_000_000_000 + i128::from(time.tv_nsec)
}

/// One participant: tells when it leads, until when, and when that is over.
pub(crate) async fn participate(url: &str) -> Result<()> {
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
pub(crate) async fn follow(url: &str, many: usize) -> Result<()> {
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
pub(crate) struct Told {
    pub(crate) leads: Option<i128>,
    /// When it surely no longer leads, by its own deadline.
    until: i128,
    pub(crate) ended: Option<i128>,
}

impl Told {
    /// When it stopped to count as the leader in its own eyes.
    pub(crate) fn over(&self) -> i128 {
        self.ended.map_or(self.until, |ended| ended.min(self.until))
    }
}

pub(crate) struct Participant {
    child: Child,
    told: Arc<Mutex<Told>>,
    pub(crate) link: Option<Link>,
    url: String,
    key: String,
    /// What goes before the program, to start it elsewhere.
    within: Vec<String>,
}

impl Participant {
    pub(crate) fn start(
        url: &str,
        key: &str,
        link: Option<Link>,
        within: &[String],
    ) -> Result<Self> {
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

    pub(crate) fn told(&self) -> Told {
        *self.told.lock().expect("no panic")
    }

    pub(crate) fn leads(&self) -> bool {
        let told = self.told();
        told.leads.is_some() && told.ended.is_none()
    }

    pub(crate) fn signal(&self, signal: &str) -> Result<()> {
        let pid = self.child.id().to_string();
        Command::new("kill").args([signal, &pid]).status()?;
        Ok(())
    }

    /// Kills it with -9 and starts another in its place.
    pub(crate) fn again(&mut self) -> Result<()> {
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
