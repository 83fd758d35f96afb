//! Grammar of the command line. The doc comments of the arguments are the text of `--help`.

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
    /// Take part in the election NAME, and run a command while leading
    Lead(Lead),
    /// Acquire NAME without waiting, and keep it held after tenure exits, until its ttl ends; prints a token and a handle
    Acquire(Acquire),
    /// Renew a hold of `tenure acquire`
    Renew(Renew),
    /// Release a hold of `tenure acquire`
    Release(Release),
    /// Show all holders and waiters, one per line
    Status(Status),
    /// List the names in use, one per line, with the number of waiters
    Ls(crate::cmd::ls::Ls),
    /// Print each change of holders and waiters as it happens
    Watch(crate::cmd::watch::Watch),
    /// Show the recent events of a name
    History(crate::cmd::history::History),
    /// Show holders and waiters in the terminal, updated continuously
    Top(crate::cmd::top::Top),
    /// End the hold of another process by force
    Break(crate::cmd::evict::Break),
    /// Run a command at most once per period across a fleet
    Once(crate::cmd::once::Once),
    /// Run a command for each job of a queue in PostgreSQL
    Work(crate::cmd::work::Work),
    /// Enqueue, inspect and change jobs of a queue in PostgreSQL
    #[command(subcommand)]
    Job(crate::cmd::job::JobSubcommand),
    /// Print or apply the SQL of the PostgreSQL tables
    Schema(crate::cmd::schema::Schema),
    /// Check a store: reachability, latency, guarantees and settings
    Doctor(crate::cmd::doctor::Doctor),
    /// Delete objects that released locks left in a store
    Gc(crate::cmd::gc::Gc),
    /// Put a store under load, and print rates and latency percentiles
    Bench(crate::cmd::bench::Bench),
    /// Run the lock server
    Serve(Box<crate::cmd::serve::Serve>),
    /// Print the completion script for a shell
    #[command(after_help = exit::PRINT)]
    Completions {
        /// Shell that the script is for
        shell: Shell,
    },
    /// Print the manual page
    #[command(after_help = exit::PRINT)]
    Man,
    /// Guard the command of `run`; started by tenure itself
    #[command(name = "__guard", hide = true)]
    Guard {
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<OsString>,
    },
}

impl Command {
    /// The reason to refuse the store `memory:`; `None` for any other store.
    ///
    /// Holds in the memory of a process end with that process, and no other process sees them: each command would have
    /// its own store. `doctor` and `bench` examine the store itself, and the commands for jobs need PostgreSQL.
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
            "the store `memory:` exists only within one process, and no other process sees its holds; use file: on one \
             host, or a store that all hosts reach (tenure://, postgres://, nats://, s3://, gs://, az://)"
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
    /// Send the command this signal (TERM, USR1) when a waiter requests a hand-off. Only on stores that report waiters
    #[arg(long, value_name = "SIGNAL", value_parser = signal)]
    pub(crate) on_request: Option<Signal>,
    #[command(flatten)]
    pub(crate) metrics: crate::health::MetricsArgs,
    #[command(flatten)]
    pub(crate) output: Output,
    /// The name of the lock
    pub(crate) name: Key,
    /// The command to run, with its arguments; a `--` before it is optional. Its environment has the fencing token in
    /// `TENURE_TOKEN` and, on NATS, the revision of the record in `TENURE_REVISION`
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
    /// Time that the leadership lasts unless renewed; by default three times the health interval, or 15s
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    ttl: Option<Duration>,
    /// Interval between renewals of the leadership; by default a third of the ttl
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    health_interval: Option<Duration>,
    /// Poll with exponential backoff that starts at this pause, instead of waiting in the store's queue; 1s if only
    /// --retry-max is given
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    retry_base: Option<Duration>,
    /// The longest pause between polls; 30s by default
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    retry_max: Option<Duration>,
    /// Time in which an interrupted leadership may recover before it is reported as lost; the command is stopped
    /// in the meantime
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    reconnect_grace: Option<Duration>,
    /// Exit when the leadership is lost
    #[arg(long)]
    pub(crate) no_auto_reacquire: bool,
    /// Stop the command and step down when another participant waits to lead. Only on stores that report waiters
    #[arg(long)]
    pub(crate) step_down_on_request: bool,
    #[command(flatten)]
    pub(crate) identity: IdentityArgs,
    /// Time from TERM to KILL when the leadership ends; by default a fifth of the ttl, at most 5s
    #[arg(long, value_name = "DURATION", value_parser = duration_or_zero)]
    kill_after: Option<Duration>,
    #[command(flatten)]
    pub(crate) metrics: crate::health::MetricsArgs,
    #[command(flatten)]
    pub(crate) output: Output,
    /// The name of the election; omitted with --key1 and --key2
    #[arg(required_unless_present = "key1")]
    name: Option<Key>,
    /// The command to run while leading; without a command, every transition is logged. Its environment has the fencing
    /// token in `TENURE_TOKEN` and, on NATS, the revision of the record in `TENURE_REVISION`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) command: Vec<OsString>,
}

impl Lead {
    /// Takes the name of the election. If --key1 and --key2 name it, the first word belongs to the command.
    pub(crate) fn take_name(&mut self) -> Key {
        match (self.pair.key(), self.name.take()) {
            (Some(key), word) => {
                self.command.splice(0..0, word.map(|word| word.as_str().into()));
                key
            }
            (None, Some(name)) => name,
            (None, None) => unreachable!("clap requires one of the two"),
        }
    }

    /// Builds the election request of these flags.
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
            let default = ExponentialBackoff::default();
            let base = self.retry_base.unwrap_or(default.base);
            let max = self.retry_max.unwrap_or(default.max).max(base);
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

/// A lock as pgleaderlock names it: a server, and the two numbers of an advisory lock.
#[derive(Args)]
pub(crate) struct AdvisoryKeyArgs {
    /// The PostgreSQL server of an advisory lock, as a URL or as host=HOST dbname=DATABASE; with --key1, `$PG_DSN` by
    /// default
    #[arg(long, value_name = "DSN")]
    dsn: Option<String>,
    /// The first number of the advisory lock, instead of NAME
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

    /// The server, from `--dsn` or, with `--key1`, from the environment.
    fn dsn(&self) -> Option<String> {
        let variable = || self.key1.and_then(|_| std::env::var(PGLEADERLOCK_DSN_VARIABLE).ok());
        self.dsn.clone().or_else(variable).filter(|dsn| !dsn.is_empty())
    }

    /// The two numbers as a key.
    pub(crate) fn key(&self) -> Option<Key> {
        self.numbers().and_then(|(first, second)| Key::new(&format!("{first},{second}")).ok())
    }

    /// Connects to the server of [`dsn`](Self::dsn), or to `store` without one.
    pub(crate) async fn connect(&self, store: &StoreUrl) -> tenure::Result<Client> {
        match self.dsn() {
            Some(dsn) => Ok(Client::with_store(Arc::new(PgAdvisoryStore::open(&dsn)?))),
            None => store.connect().await,
        }
    }
}

/// Variable from which pgleaderlock reads its server.
const PGLEADERLOCK_DSN_VARIABLE: &str = "PG_DSN";

#[derive(Args)]
#[command(after_help = exit::ACQUIRE)]
pub(crate) struct Acquire {
    #[command(flatten)]
    pub(crate) store: StoreUrl,
    /// Time that the hold lasts unless `tenure renew` extends it
    #[arg(long, value_name = "DURATION", default_value = "15s", value_parser = duration)]
    pub(crate) ttl: Duration,
    #[command(flatten)]
    pub(crate) identity: IdentityArgs,
    /// Only test whether the lock can be acquired, and release it at once
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
        name.unwrap_or_else(|| unreachable!("clap requires one of the two"))
    }
}

#[derive(Args)]
#[command(after_help = exit::BY_HANDLE)]
pub(crate) struct Renew {
    #[command(flatten)]
    pub(crate) store: StoreUrl,
    #[command(flatten)]
    pub(crate) handle: HandleArg,
    /// Time that the hold lasts from now
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
    /// Print JSON, one object per line
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) pair: AdvisoryKeyArgs,
    /// The name of one lock; by default all names in use
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

/// The store, by URL.
#[derive(Args)]
pub(crate) struct StoreUrl {
    /// URL of the store: file:[PATH] on this host, tenure://, tenures://, postgres://, postgres+advisory://, nats://,
    /// s3://, gs:// or az://
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
    /// True if the store is the memory of this process, which no other process sees.
    fn is_memory(&self) -> bool {
        self.store.split_once(':').is_some_and(|(scheme, _)| scheme == "memory")
    }

    /// The given URL, else that of the environment, else the file store of this host.
    pub(crate) fn or_default(given: Option<&String>) -> Self {
        let store = given.cloned().or_else(|| std::env::var(STORE_VARIABLE).ok());
        Self { store: store.unwrap_or_else(|| DEFAULT_STORE.to_owned()) }
    }

    pub(crate) async fn connect(&self) -> tenure::Result<Client> {
        Client::connect(&self.store).await
    }

    /// The URL, if it names PostgreSQL with lease rows.
    pub(crate) fn postgres_url(&self) -> Option<&str> {
        let (scheme, _) = self.store.split_once(':')?;
        matches!(scheme, "postgres" | "postgresql").then_some(&*self.store)
    }

    /// The store, if it is PostgreSQL with advisory locks.
    pub(crate) fn advisory(&self) -> Option<tenure::Result<PgAdvisoryStore>> {
        let advisory = self.store.split_once(':')?.0.ends_with("+advisory");
        advisory.then(|| PgAdvisoryStore::open(&self.store))
    }

    /// The store, if it is PostgreSQL with lease rows.
    pub(crate) fn postgres(&self) -> Option<tenure::Result<PgLeaseStore>> {
        self.postgres_url().map(PgLeaseStore::open)
    }
}

/// Options of a hold.
#[derive(Args)]
pub(crate) struct HoldArgs {
    /// Fail at once if another process holds the lock
    #[arg(short = 'n', long = "try", conflicts_with = "wait")]
    pub(crate) try_once: bool,
    /// Wait at most this long, such as 500ms, 15s or 1h30m; forever by default
    #[arg(short, long, value_name = "DURATION", value_parser = duration_or_zero)]
    pub(crate) wait: Option<Duration>,
    /// Time that the hold lasts without a renewal; tenure renews it while the command runs. The file store has no leases:
    /// there, a hold lasts as long as the command
    #[arg(long, value_name = "DURATION", default_value = "15s", value_parser = duration)]
    pub(crate) ttl: Duration,
    /// Maximum time to hold the lock; the command receives TERM when only the time of --kill-after is left
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) max_hold: Option<Duration>,
    #[command(flatten)]
    pub(crate) identity: IdentityArgs,
    /// Make NAME a semaphore with at most N holders at once. A lock of the same name is separate: the two do not
    /// exclude each other
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) limit: Option<u32>,
    /// Time from TERM to KILL when the hold ends; by default a fifth of the ttl, at most 5s
    #[arg(long, value_name = "DURATION", value_parser = duration_or_zero)]
    pub(crate) kill_after: Option<Duration>,
}

impl HoldArgs {
    /// Builds the lock request of these flags.
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

/// Identity of the holder, as other clients read it.
#[derive(Args)]
pub(crate) struct IdentityArgs {
    /// Identity shown to other clients; host:pid:nonce by default
    #[arg(long, value_name = "ID")]
    pub(crate) id: Option<String>,
    /// Text shown to other clients next to the identity
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

/// Output on stderr while a command runs.
#[derive(Args, Clone, Copy)]
pub(crate) struct Output {
    /// Print only errors; a lock that another process holds is not an error
    #[arg(short, long)]
    pub(crate) quiet: bool,
    /// Print events as JSON lines on stderr
    #[arg(long)]
    pub(crate) json: bool,
}

/// The secret of a hold. The environment and stdin keep it out of process lists.
#[derive(Args)]
pub(crate) struct HandleArg {
    /// The handle that `tenure acquire` printed; `-` reads it from stdin
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

/// Time that a command has to stop.
pub(crate) fn kill_after(requested: Option<Duration>, ttl: Duration) -> Duration {
    requested.unwrap_or_else(|| (ttl / 5).min(Duration::from_secs(5)))
}

/// Prints help if it was requested, else one line that names the error.
pub(crate) fn report_usage_error(error: &clap::Error) -> Exit {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            let _ = error.print();
            Exit::Success
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let message = error.render().to_string();
            let command = usage(&message).map_or("tenure", command_of_usage);
            report::print_line(&format!(
                "a command is required; `{command} --help` lists the commands"
            ));
            Exit::Usage
        }
        _ => {
            report::print_line(&one_line(error.kind(), &error.render().to_string()));
            Exit::Usage
        }
    }
}

/// The first paragraph of clap's message as one line, followed by the usage or by the command that prints it.
fn one_line(kind: ErrorKind, message: &str) -> String {
    let paragraph = message.split("\n\n").next().unwrap_or_default();
    let words = paragraph.trim_start_matches("error:").split_whitespace();
    let mut line = words.collect::<Vec<_>>().join(" ");
    if let Some(usage) = usage(message) {
        let command = command_of_usage(usage);
        // For an unknown flag, clap's usage shows a flag that resembles it: of no help if it does not.
        let _ = match kind {
            ErrorKind::InvalidSubcommand => write!(line, "; `{command} --help` lists the commands"),
            ErrorKind::UnknownArgument => write!(line, "; `{command} --help` lists the options"),
            _ => write!(line, "; usage: {usage}"),
        };
    }
    line
}

/// The usage in a message of clap.
fn usage(message: &str) -> Option<&str> {
    message.lines().rev().find_map(|line| line.trim().strip_prefix("Usage: "))
}

/// The command without its arguments: `tenure job` of `tenure job [OPTIONS] <COMMAND>`.
fn command_of_usage(usage: &str) -> &str {
    let arguments = usage.find(['<', '[', '-']).unwrap_or(usage.len());
    usage[..arguments].trim_end()
}

/// The grammar, for completions and the manual page.
pub(crate) fn grammar() -> clap::Command {
    Arguments::command()
}

/// Parses a duration above zero: `15s`, `500ms`, `1h30m`, or seconds as `timeout` takes them: `15`, `0.5`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    match duration_or_zero(text)? {
        Duration::ZERO => Err("the duration must be greater than 0".to_owned()),
        duration => Ok(duration),
    }
}

/// Parses a signal: its name, with or without SIG, or its number.
fn signal(text: &str) -> Result<Signal, String> {
    let upper = text.to_ascii_uppercase();
    let name = if upper.starts_with("SIG") { upper } else { format!("SIG{upper}") };
    let number = text.parse().ok().and_then(|number: i32| Signal::try_from(number).ok());
    let found = name.parse().ok().or(number);
    found.ok_or_else(|| "unknown signal: use a name such as TERM, or a number".to_owned())
}

pub(crate) fn duration_or_zero(text: &str) -> Result<Duration, String> {
    use humantime::DurationError;

    const FORMS: &str = "use 15s, 500ms, 1h30m, or a number of seconds";
    const TOO_LARGE: &str = "the number is too large";
    let plain = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    let parsed = if plain {
        let seconds = text.parse().map_err(|_| format!("not a number: {FORMS}"))?;
        Duration::try_from_secs_f64(seconds).map_err(|_| TOO_LARGE.to_owned())
    } else {
        humantime::parse_duration(text).map_err(|error| match error {
            DurationError::UnknownUnit { unit, .. } if !unit.is_empty() => {
                format!("unknown unit `{unit}`")
            }
            DurationError::NumberOverflow => TOO_LARGE.to_owned(),
            _ => "not a duration".to_owned(),
        })
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
    fn usage_errors_are_reported_in_one_line() {
        let complaint = |line: &[&str]| {
            let error = Arguments::try_parse_from(line).err().unwrap();
            one_line(error.kind(), &error.render().to_string())
        };
        let missing = complaint(&["tenure", "run", "a"]);
        assert!(missing.contains("required") && missing.contains("<COMMAND>"), "{missing}");
        let bad = complaint(&["tenure", "run", "--ttl", "soon", "a", "true"]);
        assert!(bad.contains("soon") && bad.contains("--ttl") && bad.contains("15s"), "{bad}");
        let flag = complaint(&["tenure", "run", "--tri", "a", "true"]);
        assert!(flag.ends_with("; `tenure run --help` lists the options"), "{flag}");
        let command = complaint(&["tenure", "job", "steal"]);
        assert!(command.ends_with("; `tenure job --help` lists the commands"), "{command}");
        for line in [missing, bad, flag, command] {
            assert!(!line.contains('\n') && !line.starts_with(' '), "{line:?}");
        }
    }
}
