//! What can be asked on the command line.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory as _, Parser, Subcommand};
use clap_complete::Shell;
use nix::sys::signal::Signal;
use tenure::election::ElectionRequest;
use tenure::retry::ExponentialBackoff;
use tenure::{Client, Handle, Key, LockRequest, PgAdvisoryStore, PgLeaseStore};

use crate::exit::{self, Exit};
use crate::report;

/// Locks, leases and leader election on the store you already run
#[derive(Parser)]
#[command(name = "tenure", version, max_term_width = 100, disable_help_subcommand = true)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Hold the lock NAME while a command runs
    Run(Run),
    /// Take part in the election of NAME; a command runs while leading
    Lead(Lead),
    /// Try once to acquire NAME and leave it held until its ttl ends; prints token and handle
    Acquire(Acquire),
    /// Renew a hold that `acquire` left
    Renew(Renew),
    /// Release a hold that `acquire` left
    Release(Release),
    /// Show who holds what, and who waits
    Status(Status),
    /// List the names in use, a line each
    Ls(crate::cmd::ls::Ls),
    /// Print every change of who holds and who waits
    Watch(crate::cmd::watch::Watch),
    /// Show what happened to a name of late
    History(crate::cmd::history::History),
    /// Show who holds what and who waits, as it changes
    Top(crate::cmd::top::Top),
    /// Break a hold by hand
    Break(crate::cmd::evict::Break),
    /// Run a command at most once per period, whoever of a fleet asks
    Once(crate::cmd::once::Once),
    /// Run a command for each job of a queue
    Work(crate::cmd::work::Work),
    /// Enqueue jobs, look at them, and change them by hand
    #[command(subcommand)]
    Job(crate::cmd::job::JobSubcommand),
    /// Print or apply the SQL of the PostgreSQL tables
    Schema(crate::cmd::schema::Schema),
    /// Probe a store: reachable, how quick, what it promises, what could be better
    Doctor(crate::cmd::doctor::Doctor),
    /// Remove what released locks left behind in a store
    Gc(crate::cmd::gc::Gc),
    /// Load a store and print rates and percentiles
    Bench(crate::cmd::bench::Bench),
    /// Run the lock server
    Serve(Box<crate::cmd::serve::Serve>),
    /// Print the completions for a shell
    #[command(after_help = exit::PRINT)]
    Completions {
        /// The shell to print them for
        shell: Shell,
    },
    /// Print the manual page
    #[command(after_help = exit::PRINT)]
    Man,
    /// Look after the command of `run`: not for people
    #[command(name = "__guard", hide = true)]
    Guard {
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<OsString>,
    },
}

impl Command {
    /// The reason to refuse the store `memory:`; `None` for any other store.
    ///
    /// Holds in the memory of a process end with that process, and no other process sees them: each command would have a
    /// store of its own. `doctor` and `bench` examine the store itself, and the commands for jobs need PostgreSQL.
    pub(crate) fn memory_store_error(&self) -> Option<String> {
        let (store, pair) = match self {
            Self::Run(run) => (&run.store, None),
            Self::Lead(lead) => (&lead.store, Some(&lead.pair)),
            Self::Acquire(acquire) => (&acquire.store, Some(&acquire.pair)),
            Self::Renew(renew) => (&renew.store, None),
            Self::Release(release) => (&release.store, None),
            Self::Status(status) => (&status.store, Some(&status.pair)),
            Self::Ls(ls) => (&ls.store, None),
            Self::Watch(watch) => (&watch.store, None),
            Self::History(history) => (&history.store, None),
            Self::Top(top) => (&top.store, None),
            Self::Break(evict) => (&evict.store, None),
            Self::Once(once) => (&once.store, None),
            Self::Gc(gc) => (&gc.store, None),
            _ => return None,
        };
        let named_otherwise = pair.is_some_and(|pair| pair.dsn().is_some());
        (store.is_memory() && !named_otherwise).then(|| {
            "the store memory: is within one process, and other processes cannot see what this command holds: use file: \
             for this host, or a store that all hosts reach (tenure://, postgres://, nats://, s3://, gs://, az://)"
                .to_owned()
        })
    }
}

#[derive(Args)]
#[command(after_help = exit::RUN)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) store: StoreUrl,
    #[command(flatten)]
    pub(crate) hold: HoldArgs,
    /// Send the command this signal when somebody waits for the lock, on stores that can tell: TERM, USR1
    #[arg(long, value_name = "SIGNAL", value_parser = signal)]
    pub(crate) on_request: Option<Signal>,
    #[command(flatten)]
    pub(crate) metrics: crate::health::MetricsArgs,
    #[command(flatten)]
    pub(crate) output: Output,
    /// The name of the lock
    pub(crate) name: Key,
    /// The command to run, with its arguments; a `--` before it is optional. It finds its fencing token in `TENURE_TOKEN`, and
    /// on NATS the revision of its record in `TENURE_REVISION`
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) command: Vec<OsString>,
}

#[derive(Args)]
#[command(after_help = exit::LEAD)]
pub(crate) struct Lead {
    #[command(flatten)]
    pub(crate) store: StoreUrl,
    #[command(flatten)]
    pub(crate) pair: AdvisoryKeyArgs,
    /// How long the lead lasts unless renewed; three times the health interval, or 15s, by default
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    ttl: Option<Duration>,
    /// How often the lead is renewed; a third of the ttl by default
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    health_interval: Option<Duration>,
    /// Ask again after pauses that grow from this, instead of waiting at the store; 1s where only --retry-max is given
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    retry_base: Option<Duration>,
    /// The longest of those pauses; 30s by default
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    retry_max: Option<Duration>,
    /// How long a lead that broke may take to come back before it is told as lost; its command is stopped meanwhile
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    reconnect_grace: Option<Duration>,
    /// End when the lead is lost
    #[arg(long)]
    pub(crate) no_auto_reacquire: bool,
    /// Stop the command and step down when another waits to lead, on stores that can tell
    #[arg(long)]
    pub(crate) step_down_on_request: bool,
    #[command(flatten)]
    pub(crate) identity: IdentityArgs,
    /// The time from TERM to KILL when the lead ends; by default 5s, or a fifth of the ttl where that is less
    #[arg(long, value_name = "DURATION", value_parser = duration_or_zero)]
    kill_after: Option<Duration>,
    #[command(flatten)]
    pub(crate) metrics: crate::health::MetricsArgs,
    #[command(flatten)]
    pub(crate) output: Output,
    /// The name of the election; left out where --key1 and --key2 name it
    #[arg(required_unless_present = "key1")]
    name: Option<Key>,
    /// The command to run while leading; without one every change is logged. It finds its fencing token in `TENURE_TOKEN`, and
    /// on NATS the revision of its record in `TENURE_REVISION`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) command: Vec<OsString>,
}

impl Lead {
    /// The name of the election. Where numbers name it, the first word is the command's.
    pub(crate) fn take_name(&mut self) -> Key {
        match (self.pair.key(), self.name.take()) {
            (Some(key), word) => {
                self.command.splice(0..0, word.map(|word| word.as_str().into()));
                key
            }
            (None, Some(name)) => name,
            (None, None) => unreachable!("one of both is required"),
        }
    }

    /// What these flags ask of the election.
    pub(crate) fn request(&self, client: &Client, name: &Key) -> ElectionRequest {
        let mut request = client
            .election(name)
            .ttl(self.ttl())
            .stop_grace(self.kill_after())
            .auto_reacquire(!self.no_auto_reacquire);
        if let Some(interval) = self.health_interval {
            request = request.health_interval(interval);
        }
        if self.retry_base.is_some() || self.retry_max.is_some() {
            let usual = ExponentialBackoff::default();
            let base = self.retry_base.unwrap_or(usual.base);
            let max = self.retry_max.unwrap_or(usual.max).max(base);
            request = request.retry(ExponentialBackoff { base, max, multiplier: 2.0, jitter: 0.5 });
        }
        if let Some(grace) = self.reconnect_grace {
            request = request.reconnect_grace(grace);
        }
        if let Some(id) = &self.identity.id {
            request = request.id(id);
        }
        match &self.identity.note {
            Some(note) => request.note(note),
            None => request,
        }
    }

    pub(crate) fn ttl(&self) -> Duration {
        let from_health = || self.health_interval.map(|interval| interval.saturating_mul(3));
        self.ttl.or_else(from_health).unwrap_or(Duration::from_secs(15))
    }

    pub(crate) fn kill_after(&self) -> Duration {
        kill_after(self.kill_after, self.ttl())
    }
}

/// pgleaderlock's way to name a lock: a server, and the two numbers of an advisory lock.
#[derive(Args)]
pub(crate) struct AdvisoryKeyArgs {
    /// The PostgreSQL server of an advisory lock, as a URL or as host=HOST dbname=DATABASE; `$PG_DSN` where --key1 is given
    #[arg(long, value_name = "DSN")]
    dsn: Option<String>,
    /// The first number of the advisory lock, in place of NAME
    #[arg(long, value_name = "N", requires = "key2", allow_negative_numbers = true)]
    key1: Option<i32>,
    /// The second number of the advisory lock
    #[arg(long, value_name = "N", requires = "key1", allow_negative_numbers = true)]
    key2: Option<i32>,
}

impl AdvisoryKeyArgs {
    pub(crate) fn numbers(&self) -> Option<(i32, i32)> {
        self.key1.zip(self.key2)
    }

    /// The server that was named so.
    fn dsn(&self) -> Option<String> {
        let variable = || self.key1.and_then(|_| std::env::var(PGLEADERLOCK_DSN_VARIABLE).ok());
        self.dsn.clone().or_else(variable).filter(|dsn| !dsn.is_empty())
    }

    /// The two numbers as a key.
    pub(crate) fn key(&self) -> Option<Key> {
        self.numbers().and_then(|(first, second)| Key::new(&format!("{first},{second}")).ok())
    }

    /// A client of the server that was named so, or else of the store.
    pub(crate) async fn connect(&self, store: &StoreUrl) -> tenure::Result<Client> {
        match self.dsn() {
            Some(dsn) => Ok(Client::with_store(Arc::new(PgAdvisoryStore::open(&dsn)?))),
            None => store.connect().await,
        }
    }
}

/// Where pgleaderlock looks for its server.
const PGLEADERLOCK_DSN_VARIABLE: &str = "PG_DSN";

#[derive(Args)]
#[command(after_help = exit::ACQUIRE)]
pub(crate) struct Acquire {
    #[command(flatten)]
    pub(crate) store: StoreUrl,
    /// How long the hold lasts unless renewed
    #[arg(long, value_name = "DURATION", default_value = "15s", value_parser = duration)]
    pub(crate) ttl: Duration,
    #[command(flatten)]
    pub(crate) identity: IdentityArgs,
    /// Only see whether it could be acquired: give it back at once
    #[arg(long)]
    pub(crate) check: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) pair: AdvisoryKeyArgs,
    /// The name of the lock
    #[arg(required_unless_present = "key1", conflicts_with = "key1")]
    name: Option<Key>,
}

impl Acquire {
    pub(crate) fn name(&self) -> Key {
        let name = self.pair.key().or_else(|| self.name.clone());
        name.unwrap_or_else(|| unreachable!("one of both is required"))
    }
}

#[derive(Args)]
#[command(after_help = exit::BY_HANDLE)]
pub(crate) struct Renew {
    #[command(flatten)]
    pub(crate) store: StoreUrl,
    #[command(flatten)]
    pub(crate) handle: HandleArg,
    /// How long the hold lasts from now
    #[arg(long, value_name = "DURATION", default_value = "15s", value_parser = duration)]
    pub(crate) ttl: Duration,
    /// The name of the lock
    pub(crate) name: Key,
}

#[derive(Args)]
#[command(after_help = exit::BY_HANDLE)]
pub(crate) struct Release {
    #[command(flatten)]
    pub(crate) store: StoreUrl,
    #[command(flatten)]
    pub(crate) handle: HandleArg,
    /// The name of the lock
    pub(crate) name: Key,
}

#[derive(Args)]
#[command(after_help = exit::STATUS)]
pub(crate) struct Status {
    #[command(flatten)]
    pub(crate) store: StoreUrl,
    /// Print JSON, one object a line
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) pair: AdvisoryKeyArgs,
    /// The name of one lock; without it, all that are in use
    #[arg(conflicts_with = "key1")]
    name: Option<Key>,
}

impl Status {
    pub(crate) fn name(&self) -> Option<Key> {
        self.pair.key().or_else(|| self.name.clone())
    }
}

const STORE_VARIABLE: &str = "TENURE_STORE";
const DEFAULT_STORE: &str = "file:";

/// Where holds live.
#[derive(Args)]
pub(crate) struct StoreUrl {
    /// Where holds live, as a URL; this host's own store by default
    #[arg(
        short,
        long,
        value_name = "URL",
        env = STORE_VARIABLE,
        hide_env_values = true,
        default_value = DEFAULT_STORE
    )]
    store: String,
}

impl StoreUrl {
    /// Whether the store is the memory of this process, which no other process sees.
    fn is_memory(&self) -> bool {
        self.store.split_once(':').is_some_and(|(scheme, _)| scheme == "memory")
    }

    /// What was given, else what the environment says, else this host's own.
    pub(crate) fn or_default(given: Option<&String>) -> Self {
        let store = given.cloned().or_else(|| std::env::var(STORE_VARIABLE).ok());
        Self { store: store.unwrap_or_else(|| DEFAULT_STORE.to_owned()) }
    }

    pub(crate) async fn connect(&self) -> tenure::Result<Client> {
        Client::connect(&self.store).await
    }

    /// The URL, where it is one of PostgreSQL.
    pub(crate) fn postgres_url(&self) -> Option<&str> {
        let (scheme, _) = self.store.split_once(':')?;
        matches!(scheme, "postgres" | "postgresql").then_some(&*self.store)
    }

    /// The store, where it is advisory locks of PostgreSQL.
    pub(crate) fn advisory(&self) -> Option<tenure::Result<PgAdvisoryStore>> {
        let advisory = self.store.split_once(':')?.0.ends_with("+advisory");
        advisory.then(|| PgAdvisoryStore::open(&self.store))
    }

    /// The store, where it is PostgreSQL.
    pub(crate) fn postgres(&self) -> Option<tenure::Result<PgLeaseStore>> {
        self.postgres_url().map(PgLeaseStore::open)
    }
}

/// How to hold.
#[derive(Args)]
#[expect(clippy::struct_field_names, reason = "the flag is --max-hold")]
pub(crate) struct HoldArgs {
    /// Do not wait for another holder
    #[arg(short = 'n', long = "try", conflicts_with = "wait")]
    pub(crate) try_once: bool,
    /// Wait this long at most; for ever by default
    #[arg(short, long, value_name = "DURATION", value_parser = duration_or_zero)]
    pub(crate) wait: Option<Duration>,
    /// How long the hold lasts unless renewed; on the file store it lasts as long as the command, whatever this says
    #[arg(long, value_name = "DURATION", default_value = "15s", value_parser = duration)]
    pub(crate) ttl: Duration,
    /// The longest time to hold: the command is stopped before
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) max_hold: Option<Duration>,
    #[command(flatten)]
    pub(crate) identity: IdentityArgs,
    /// Make NAME a semaphore that this many may hold at once; a lock of the same name is another thing, and they do not exclude each other
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) limit: Option<u32>,
    /// The time from TERM to KILL when the hold ends; by default 5s, or a fifth of the ttl where that is less
    #[arg(long, value_name = "DURATION", value_parser = duration_or_zero)]
    pub(crate) kill_after: Option<Duration>,
}

impl HoldArgs {
    /// What these flags ask of the store.
    pub(crate) fn request(&self, client: &Client, name: &Key) -> LockRequest {
        let request = match self.limit {
            Some(limit) => client.semaphore(name, limit),
            None => client.lock(name),
        };
        let mut request =
            self.identity.apply_to(request.ttl(self.ttl).stop_grace(self.kill_after()));
        if let Some(max) = self.max_hold {
            request = request.max_hold(max);
        }
        match self.wait {
            Some(wait) => request.timeout(wait),
            None => request,
        }
    }

    pub(crate) fn kill_after(&self) -> Duration {
        kill_after(self.kill_after, self.ttl)
    }
}

/// Who holds, for others to read.
#[derive(Args)]
pub(crate) struct IdentityArgs {
    /// Who we are to others; host:pid:nonce by default
    #[arg(long, value_name = "ID")]
    pub(crate) id: Option<String>,
    /// A text for others to read beside the holder's name
    #[arg(long, value_name = "TEXT")]
    pub(crate) note: Option<String>,
}

impl IdentityArgs {
    pub(crate) fn apply_to(&self, mut request: LockRequest) -> LockRequest {
        if let Some(id) = &self.id {
            request = request.id(id);
        }
        match &self.note {
            Some(note) => request.note(note),
            None => request,
        }
    }
}

/// What to tell while it goes on.
#[derive(Args, Clone, Copy)]
pub(crate) struct Output {
    /// Say nothing but why it failed
    #[arg(short, long)]
    pub(crate) quiet: bool,
    /// Print events as JSON lines on stderr
    #[arg(long)]
    pub(crate) json: bool,
}

/// The secret of a hold, kept out of process lists where the user wants it so.
#[derive(Args)]
pub(crate) struct HandleArg {
    /// The handle that `acquire` printed; `-` reads it from stdin
    #[arg(long, value_name = "HANDLE", env = "TENURE_HANDLE", hide_env_values = true)]
    handle: String,
}

impl HandleArg {
    pub(crate) fn read(&self) -> std::io::Result<Handle> {
        if self.handle != "-" {
            return Ok(Handle::new(&self.handle));
        }
        let mut line = String::new();
        std::io::stdin().read_line(&mut line)?;
        Ok(Handle::new(line.trim_end_matches(['\n', '\r'])))
    }
}

/// The time that a command has to stop.
pub(crate) fn kill_after(requested: Option<Duration>, ttl: Duration) -> Duration {
    requested.unwrap_or_else(|| (ttl / 5).min(Duration::from_secs(5)))
}

/// Prints help where it was asked for, else one line that says what is wrong.
pub(crate) fn report_usage_error(error: &clap::Error) -> Exit {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            let _ = error.print();
            Exit::Success
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            report::print_line("give a command; `tenure --help` lists them");
            Exit::Usage
        }
        _ => {
            report::print_line(&one_line(&error.render().to_string()));
            Exit::Usage
        }
    }
}

/// The first paragraph of clap's message as one line, with where to read on.
fn one_line(message: &str) -> String {
    let paragraph = message.split("\n\n").next().unwrap_or_default();
    let words = paragraph.trim_start_matches("error:").split_whitespace();
    let mut line = words.collect::<Vec<_>>().join(" ");
    let help = message.lines().rev().find_map(|line| line.trim().strip_prefix("Usage: "));
    if let Some(usage) = help {
        let _ = write!(line, "; usage: {usage}");
    }
    line
}

/// The grammar, for completions and the manual page.
pub(crate) fn grammar() -> clap::Command {
    Arguments::command()
}

/// A duration of some length: `15s`, `500ms`, `1h30m`, or seconds as `timeout` takes them: `15`, `0.5`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    match duration_or_zero(text)? {
        Duration::ZERO => Err("a duration of 0 makes no sense here: give more".to_owned()),
        duration => Ok(duration),
    }
}

/// A signal by its name, with or without SIG, or by its number.
fn signal(text: &str) -> Result<Signal, String> {
    let upper = text.to_ascii_uppercase();
    let name = if upper.starts_with("SIG") { upper } else { format!("SIG{upper}") };
    let number = text.parse().ok().and_then(|number: i32| Signal::try_from(number).ok());
    let found = name.parse().ok().or(number);
    found.ok_or_else(|| "no such signal: give a name such as TERM, or a number".to_owned())
}

pub(crate) fn duration_or_zero(text: &str) -> Result<Duration, String> {
    const FORMS: &str = "give it as 15s, 500ms, 1h30m, or in seconds: 15";
    let plain = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    let parsed = if plain {
        let seconds = text.parse().map_err(|_| format!("not a number: {FORMS}"))?;
        Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
    } else {
        humantime::parse_duration(text).map_err(|error| error.to_string())
    };
    parsed.map_err(|error| format!("{error}: {FORMS}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grammar_holds_together() {
        grammar().debug_assert();
    }

    #[test]
    fn durations_are_what_people_write() {
        for (text, ms) in [
            ("15s", 15_000),
            ("500ms", 500),
            ("2m", 120_000),
            ("1h30m", 5_400_000),
            ("15", 15_000),
            ("0.25", 250),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in
            ["", "soon", "15 parsecs", "-1s", ".", "1.2.3", "0", "0s", "99999999999999999999"]
        {
            assert!(duration(text).is_err(), "{text}");
        }
        assert_eq!(duration_or_zero("0"), Ok(Duration::ZERO));
    }

    #[test]
    fn signals_are_named_as_people_do() {
        for text in ["TERM", "sigterm", "15"] {
            assert_eq!(signal(text), Ok(Signal::SIGTERM), "{text}");
        }
        for text in ["", "SIG", "stop now", "4711", "-1"] {
            assert!(signal(text).is_err(), "{text}");
        }
    }

    #[test]
    fn all_after_the_name_is_the_command() {
        for line in [
            &["tenure", "run", "a", "sh", "-c", "x"][..],
            &["tenure", "run", "a", "--", "sh", "-c", "x"],
            &["tenure", "run", "--ttl", "5s", "a", "sh", "-c", "x"],
        ] {
            let Command::Run(run) = Arguments::try_parse_from(line).unwrap().command else {
                panic!("{line:?}");
            };
            assert_eq!(run.name.as_str(), "a");
            assert_eq!(run.command, ["sh", "-c", "x"], "{line:?}");
        }
    }

    #[test]
    fn what_is_wrong_is_said_in_one_line() {
        let complaint = |line: &[&str]| {
            one_line(&Arguments::try_parse_from(line).err().unwrap().render().to_string())
        };
        let missing = complaint(&["tenure", "run", "a"]);
        assert!(missing.contains("required") && missing.contains("<COMMAND>"), "{missing}");
        let bad = complaint(&["tenure", "run", "--ttl", "soon", "a", "true"]);
        assert!(bad.contains("soon") && bad.contains("--ttl") && bad.contains("15s"), "{bad}");
        for line in [missing, bad] {
            assert!(!line.contains('\n') && !line.starts_with(' '), "{line:?}");
        }
    }
}
