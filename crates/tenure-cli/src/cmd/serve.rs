//! `tenure serve`: runs the lock server.

mod auth;
mod page;
mod watched;

use std::fs;
use std::io::{self, Read as _};
use std::net::{TcpListener, ToSocketAddrs as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use clap::Args;
use clap::builder::BoolishValueParser;
use nix::sys::signal::Signal;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tenure_server::journal::{Journal, JournalOptions, LastRun};
use tenure_server::{Engine, Handle, Server, Settings, clock};

use self::auth::AuthArgs;
use self::page::PageArgs;
use crate::args::value::{duration, duration_or_zero};
use crate::exit::{self, Exit};
use crate::notify::ServiceManager;
use crate::{notify, report, signals};

/// Lease granted to clients that do not request one, unless a flag says otherwise.
const DEFAULT_LEASE: Duration = Duration::from_secs(33);

#[derive(Args)]
#[command(after_help = exit::SERVE)]
pub(crate) struct Serve {
    /// The address to listen on
    #[arg(long, value_name = "HOST", env = "DFLOCKD_HOST", default_value = "127.0.0.1")]
    host: String,
    /// The port to listen on; 0 for any free port
    #[arg(long, value_name = "PORT", env = "DFLOCKD_PORT", default_value_t = 6388)]
    port: u16,
    /// Lease granted to clients that do not request one; by default 33s, or --max-lease if that is shorter
    #[arg(long, value_name = "DURATION", env = "DFLOCKD_DEFAULT_LEASE_TTL_S", value_parser = whole_seconds)]
    default_lease_ttl: Option<Duration>,
    /// The longest lease; longer requests are shortened
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = whole_seconds)]
    max_lease: Duration,
    /// Accepted for compatibility with old command lines and ignored: leases end by timer
    #[arg(long, value_name = "DURATION", env = "DFLOCKD_LEASE_SWEEP_INTERVAL_S", value_parser = duration, hide = true)]
    lease_sweep_interval: Option<Duration>,
    /// Accepted for compatibility with old command lines and ignored: idle keys are removed by timer
    #[arg(long, value_name = "DURATION", env = "DFLOCKD_GC_LOOP_SLEEP", value_parser = duration, hide = true)]
    gc_interval: Option<Duration>,
    /// Time that an idle key is remembered
    #[arg(long, value_name = "DURATION", env = "DFLOCKD_GC_MAX_UNUSED_TIME", default_value = "60s", value_parser = duration_or_zero)]
    gc_max_idle: Duration,
    #[command(flatten)]
    limits: Limits,
    /// Time limit for reading a request line, from its first byte; 0 for no limit
    #[arg(long, value_name = "DURATION", env = "DFLOCKD_READ_TIMEOUT_S", default_value = "23s", value_parser = duration_or_zero)]
    read_timeout: Duration,
    /// Time limit for a client to read a reply; 0 for no limit
    #[arg(long, value_name = "DURATION", env = "DFLOCKD_WRITE_TIMEOUT_S", default_value = "5s", value_parser = duration_or_zero)]
    write_timeout: Duration,
    /// Time to wait for clients to disconnect when the server is stopped
    #[arg(long, value_name = "DURATION", env = "DFLOCKD_SHUTDOWN_TIMEOUT_S", default_value = "30s", value_parser = duration_or_zero)]
    shutdown_timeout: Duration,
    /// Release the holds of a connection when it closes
    #[arg(long, value_name = "BOOL", env = "DFLOCKD_AUTO_RELEASE_ON_DISCONNECT", default_value = "true",
          num_args = 0..=1, default_missing_value = "true", require_equals = true, value_parser = BoolishValueParser::new())]
    auto_release_on_disconnect: bool,
    /// Keep the holds of a closed connection until their leases end
    #[arg(long)]
    no_auto_release_on_disconnect: bool,
    #[command(flatten)]
    data: Data,
    #[command(flatten)]
    auth: AuthArgs,
    #[command(flatten)]
    page: PageArgs,
    /// Log at level debug
    #[arg(long, env = "DFLOCKD_DEBUG", value_parser = BoolishValueParser::new())]
    debug: bool,
}

/// Limits on resources.
#[derive(Args)]
#[expect(clippy::struct_field_names, reason = "as the flags are called")]
struct Limits {
    /// Maximum number of keys in use at once
    #[arg(long, value_name = "N", env = "DFLOCKD_MAX_LOCKS", default_value_t = 10_000_000)]
    max_locks: usize,
    /// Maximum number of connections; 0 for as many as the limit of open files allows
    #[arg(long, value_name = "N", env = "DFLOCKD_MAX_CONNECTIONS", default_value_t = 0)]
    max_connections: usize,
    /// Maximum number of connections from one address; 0 for three quarters of --max-connections
    #[arg(long, value_name = "N", default_value_t = 0)]
    max_connections_per_peer: usize,
    /// Maximum number of waiters per key; 0 for a million
    #[arg(long, value_name = "N", env = "DFLOCKD_MAX_WAITERS", default_value_t = 0)]
    max_waiters: usize,
    /// Maximum length of a request line
    #[arg(long, value_name = "BYTES", default_value_t = 256, value_parser = clap::value_parser!(u32).range(64..=65_536))]
    max_line: u32,
    /// Maximum number of bytes that a client may send ahead of the replies
    #[arg(long, value_name = "BYTES", default_value_t = 16_384, value_parser = clap::value_parser!(u32).range(1_024..=1_048_576))]
    max_pipelined: u32,
    /// Maximum number of wrong auth tokens per address and minute
    #[arg(long, value_name = "N", default_value_t = 10)]
    max_auth_failures: u32,
}

/// Durable state of the server.
#[derive(Args)]
#[expect(clippy::struct_field_names, reason = "the flag is --data-dir")]
struct Data {
    /// Directory to which holds are written, so that they survive a restart of the server
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Start although files of the data directory are missing or damaged. Drops all holds, and grants nothing until the
    /// longest lease has passed
    #[arg(long, requires = "data_dir")]
    accept_loss: bool,
    /// Grant only fencing tokens above this number
    #[arg(long, value_name = "N", requires = "data_dir", default_value_t = 0)]
    fence_floor: u64,
}

pub(crate) fn run(arguments: &Serve) -> Exit {
    init_logging(arguments.debug);
    match serve(arguments) {
        Ok(()) => Exit::Success,
        Err(message) => {
            report::print_line(&message);
            Exit::Failed
        }
    }
}

fn serve(arguments: &Serve) -> Result<(), String> {
    // Before any thread is started: a thread inherits the signal mask, and one that does not block these signals would
    // be killed by them.
    let signal_stream = signals::listen(&[Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP])
        .map_err(|error| format!("cannot listen for signals: {error}"))?;
    let tls = arguments.auth.tls()?;
    let secret = arguments.auth.secret()?;
    let listener = listener(arguments)?;
    arguments.auth.check_exposure(&listener)?;
    let page_listener = arguments.page.listen(secret.as_deref())?;
    let watched = arguments.page.watched()?;
    let settings = arguments.settings();
    let (mut engine, promise) = match &arguments.data.data_dir {
        Some(dir) => arguments.data.resume(dir, settings, secret.as_deref())?,
        None => in_memory_engine(settings, secret.as_deref())?,
    };
    let history_file = arguments.keep_history(&mut engine);
    let config = tls.map(|setup| setup.config);
    let (mut server, handle) = Server::new(listener, config, engine, arguments.shutdown_timeout)
        .map_err(|error| format!("cannot serve: {error}"))?;
    if let Some(file) = history_file {
        server.keep_history_in(file);
    }
    if let Some(page_listener) = page_listener {
        arguments.page.start(page_listener, watched, handle.clone())?;
    }
    let address = server.address().map_err(|error| format!("cannot serve: {error}"))?;
    report::print_line(&format!("listening on {address}; {promise}"));
    let manager = ServiceManager::from_environment().map(Arc::new);
    if let Some(manager) = &manager {
        manager.ready();
        manager.status(&format!("listening on {address}"));
        if let Some(timeout) = notify::watchdog_timeout() {
            let manager = Arc::clone(manager);
            server.set_watchdog(timeout / 2, move || manager.ping_watchdog());
        }
    }
    handle_signals(signal_stream, handle, arguments.auth.clone(), manager)?;
    server.run().map_err(|error| format!("the server stopped: {}", tenure::Error::chain_of(&error)))
}

impl Serve {
    /// The reason to refuse the flags together.
    pub(crate) fn usage_error(&self) -> Option<String> {
        let requested = self.default_lease_ttl.filter(|lease| *lease > self.max_lease)?;
        let (requested, max) =
            (humantime::format_duration(requested), humantime::format_duration(self.max_lease));
        Some(format!(
            "--default-lease-ttl is {requested}, longer than --max-lease, which is {max}: raise --max-lease as well"
        ))
    }

    /// Makes the engine record events, starting from those of the previous server. Returns the file to save them in.
    fn keep_history(&self, engine: &mut Engine) -> Option<PathBuf> {
        let max_events = self.page.history();
        if max_events == 0 {
            return None;
        }
        let file = self.data.data_dir.as_ref().map(|dir| dir.join("history"));
        let before = file.as_ref().map(|file| (fs::read_to_string(file), fs::remove_file(file)));
        // The file is removed as soon as it is read, and written only at a clean stop. If this server is killed, the
        // next one finds no file and starts with an empty history, instead of one that lacks this server's events.
        let before = before.and_then(|(text, _)| text.ok()).unwrap_or_default();
        engine.keep_history(max_events, clock::wall_micros() / 1_000, &before, clock::now());
        file
    }

    fn settings(&self) -> Settings {
        let files = raise_open_file_limit();
        let limits = &self.limits;
        let connection_limit = if limits.max_connections == 0 {
            files.saturating_sub(64).max(1)
        } else {
            limits.max_connections
        };
        let mut settings = Settings {
            default_lease: self.default_lease_ttl.unwrap_or(DEFAULT_LEASE).min(self.max_lease),
            max_lease: self.max_lease,
            auto_release: self.auto_release_on_disconnect && !self.no_auto_release_on_disconnect,
            read_timeout: Some(self.read_timeout).filter(|timeout| !timeout.is_zero()),
            write_timeout: Some(self.write_timeout).filter(|timeout| !timeout.is_zero()),
            max_connections: connection_limit,
            max_connections_per_peer: match limits.max_connections_per_peer {
                0 => (connection_limit - connection_limit / 4).max(1),
                some => some,
            },
            max_auth_failures: limits.max_auth_failures.max(1),
            max_line: limits.max_line as usize,
            max_pipelined: limits.max_pipelined as usize,
            ..Settings::default()
        };
        settings.table.max_keys = limits.max_locks;
        settings.table.max_idle = self.gc_max_idle;
        if limits.max_waiters > 0 {
            settings.table.max_waiters_per_key = limits.max_waiters;
        }
        settings
    }
}

/// An engine without durable state, and the line that describes it.
fn in_memory_engine(settings: Settings, secret: Option<&[u8]>) -> Result<(Engine, String), String> {
    let mut instance = [0; 16];
    getrandom::fill(&mut instance).map_err(|error| format!("cannot get randomness: {error}"))?;
    let engine = Engine::new(settings, secret, u128::from_ne_bytes(instance), clock::wall_micros());
    let promise = "without --data-dir a restart drops all holds, and fencing tokens are ordered only if the system clock is not set back";
    Ok((engine, promise.to_owned()))
}

impl Data {
    /// An engine with the holds of the last run, and the line that describes it.
    fn resume(
        &self,
        dir: &Path,
        settings: Settings,
        secret: Option<&[u8]>,
    ) -> Result<(Engine, String), String> {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").map_err(|error| {
            format!("cannot read the boot id, which tells a reboot from a restart: {error}")
        })?;
        let options = JournalOptions {
            max_lease: settings.max_lease,
            accept_loss: self.accept_loss,
            fence_floor: self.fence_floor,
            ..JournalOptions::new(dir)
        };
        let now = clock::now();
        let opened = Journal::open(&options, boot.trim(), now, clock::wall_micros())
            .map_err(|error| tenure::Error::chain_of(&error))?;
        if let Some(repaired) = &opened.repaired {
            report::print_line(repaired);
        }
        let held = opened.holds.len();
        let embargo = opened.embargo_until.map(|until| until.since(now));
        let mut promise = match &opened.last_run {
            LastRun::Fresh => format!("a new data directory in {}", dir.display()),
            LastRun::Clean => format!("{held} holds as the last server left them"),
            LastRun::Killed => format!("{held} holds as they were when the last server was killed"),
            LastRun::Crashed(why) => format!("after a crash ({why}), {held} holds"),
            LastRun::LossAccepted(what) => format!("loss accepted ({what})"),
        };
        if let Some(embargo) = embargo.filter(|embargo| !embargo.is_zero()) {
            let seconds = Duration::from_secs(embargo.as_secs() + 1);
            let seconds = humantime::format_duration(seconds);
            promise = format!(
                "{promise}; no grants for {seconds}, the longest lease that may still be running"
            );
        }
        let engine = Engine::restore(settings, secret, opened, now).map_err(|key| {
            format!(
                "{}: two holds of {:?} contradict each other",
                dir.display(),
                String::from_utf8_lossy(&key)
            )
        })?;
        Ok((engine, promise))
    }
}

/// The listener passed by a service manager, or a new one.
fn listener(arguments: &Serve) -> Result<TcpListener, String> {
    let mut given = listenfd::ListenFd::from_env();
    if let Some(listener) = given
        .take_tcp_listener(0)
        .map_err(|error| format!("the socket given by the service manager: {error}"))?
    {
        return Ok(listener);
    }
    let Serve { host, port, .. } = arguments;
    let failed = |error: io::Error| {
        format!("cannot listen on {host}:{port}: {}", report::os_error_text(&error))
    };
    let addresses: Vec<_> = (host.as_str(), *port).to_socket_addrs().map_err(failed)?.collect();
    TcpListener::bind(&*addresses).map_err(failed)
}

/// Starts the thread that handles signals: HUP reloads certificate and token, all others stop the server.
fn handle_signals(
    mut signal_stream: UnixStream,
    handle: Handle,
    auth: AuthArgs,
    manager: Option<Arc<ServiceManager>>,
) -> Result<(), String> {
    let listen = move || {
        let mut signal = [0];
        while signal_stream.read_exact(&mut signal).is_ok() {
            if i32::from(signal[0]) == Signal::SIGHUP as i32 {
                reload(&auth, &handle);
                continue;
            }
            if let Some(manager) = &manager {
                manager.stopping();
            }
            handle.stop();
        }
    };
    thread::Builder::new()
        .name("orders".to_owned())
        .spawn(listen)
        .map(drop)
        .map_err(|error| format!("cannot start a thread: {error}"))
}

/// Reads certificate and token again. One that cannot be read stays in force as it was.
fn reload(auth: &AuthArgs, handle: &Handle) {
    match auth.tls() {
        Ok(Some(setup)) => handle.set_tls(setup.config),
        Ok(None) => {}
        Err(message) => report::print_line(&format!("keeping the old certificate: {message}")),
    }
    match auth.secret() {
        Ok(Some(secret)) => handle.set_secret(&secret),
        Ok(None) => {}
        Err(message) => report::print_line(&format!("keeping the old token: {message}")),
    }
}

/// Raises the limit of open files to its maximum. Returns the new limit, at most 2^20.
fn raise_open_file_limit() -> usize {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    let now = getrlimit(Resource::Nofile).current.unwrap_or(1 << 20);
    usize::try_from(now.min(1 << 20)).unwrap_or(1024)
}

fn init_logging(debug: bool) {
    let level = if debug {
        tracing_subscriber::filter::LevelFilter::DEBUG
    } else {
        tracing_subscriber::filter::LevelFilter::INFO
    };
    // Fails only if a subscriber is set already; there is one server per process.
    let _ = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(io::stderr)
        .with_ansi(false)
        .try_init();
}

fn whole_seconds(text: &str) -> Result<Duration, String> {
    let span = duration(text)?;
    if span.subsec_nanos() != 0 {
        return Err("must be whole seconds: the protocol has no fractions".to_owned());
    }
    Ok(span)
}
