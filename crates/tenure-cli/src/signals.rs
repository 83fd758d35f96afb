//! Signals as bytes on a stream. No handler is installed for them, so a signal that was ignored when this process was started
//! is ignored by the child, too. CHLD is the exception: see [`stop_ignoring_child_exits`].

use std::io::{self, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;

use nix::sys::signal::{SigSet, Signal, kill, raise};
use nix::unistd::Pid;
use tokio::io::AsyncReadExt as _;
use tokio::sync::mpsc;

/// Signals that are forwarded to the child's process group while it runs.
pub(crate) const FORWARDED: [Signal; 9] = [
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGQUIT,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGWINCH,
    Signal::SIGCONT,
    Signal::SIGTSTP,
];

/// True for the signals that ask a process to end.
pub(crate) fn asks_to_stop(signal: Signal) -> bool {
    matches!(signal, Signal::SIGINT | Signal::SIGTERM | Signal::SIGHUP | Signal::SIGQUIT)
}

/// Blocks `signals` in this thread and in the threads that it starts from now on. Their numbers can be read from the
/// stream, one byte each. Must be called before any other thread is started.
///
/// A signal that was ignored from the start, as by `nohup`, stays ignored.
pub(crate) fn listen(signals: &[Signal]) -> io::Result<UnixStream> {
    let ignored = ignored();
    let blocked: SigSet = signals.iter().copied().filter(|s| !ignored.contains(*s)).collect();
    blocked.thread_block()?;
    let (read, mut write) = UnixStream::pair()?;
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        while let Ok(signal) = blocked.wait() {
            // Numbers of standard signals are below 32.
            if write.write_all(&[signal as u8]).is_err() {
                return;
            }
        }
    })?;
    Ok(read)
}

/// Makes the exits of children observable if this process was started with CHLD ignored. The kernel reaps the children of
/// such a process: waiting for one yields no status, and the guardian, which inherits the setting, would wait forever.
///
/// A handler replaces the inherited setting, because only unsafe code can restore the default. Programs that this process
/// executes start with the default.
pub(crate) fn stop_ignoring_child_exits() -> io::Result<()> {
    if ignored().contains(Signal::SIGCHLD) {
        signal_hook::flag::register(Signal::SIGCHLD as i32, Arc::default())?;
    }
    Ok(())
}

/// Blocks SIGTTOU, which a terminal sends to a background process that changes its foreground group. This process does
/// so on purpose, to give the terminal to the child and to take it back.
pub(crate) fn block_terminal_output_stop() -> nix::Result<()> {
    SigSet::from(Signal::SIGTTOU).thread_block()
}

/// Calls `spawn` with no signal blocked: the new process inherits the mask.
pub(crate) fn with_signals_unblocked<T>(spawn: impl FnOnce() -> T) -> nix::Result<T> {
    let blocked = SigSet::thread_get_mask()?;
    SigSet::empty().thread_set_mask()?;
    let spawned = spawn();
    blocked.thread_set_mask()?;
    Ok(spawned)
}

/// Raises the blocked `signal` with its default action. If that does not end this process, blocks it again.
pub(crate) fn raise_with_default_action(signal: Signal) -> nix::Result<()> {
    let set = SigSet::from(signal);
    set.thread_unblock()?;
    let raised = raise(signal);
    set.thread_block()?;
    raised
}

/// Sends INT to the own process group, which dies of it, with this process. Ctrl-C reached only the child's group, and
/// the calling shell or script decides by the signal whether to continue.
pub(crate) fn interrupt_own_group() {
    if SigSet::from(Signal::SIGINT).thread_unblock().is_ok() {
        let _ = kill(Pid::from_raw(0), Signal::SIGINT);
    }
}

/// The signals that this process ignored when it was started.
fn ignored() -> SigSet {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or_default();
    Signal::iterator().filter(|signal| mask >> (*signal as u32 - 1) & 1 == 1).collect()
}

/// A stream of signals.
pub(crate) enum Signals {
    /// Signals of this process, from [`listen`].
    System(tokio::net::UnixStream),
    /// Signals forwarded to one of several supervisors.
    Relayed(mpsc::UnboundedReceiver<Signal>),
}

impl Signals {
    /// Wraps the stream of [`listen`]. Must be called on a runtime.
    pub(crate) fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self::System(tokio::net::UnixStream::from_std(stream)?))
    }

    /// Resolves with the next signal.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing.
    pub(crate) async fn next(&mut self) -> Signal {
        let stream = match self {
            Self::System(stream) => stream,
            Self::Relayed(signals) => match signals.recv().await {
                Some(signal) => return signal,
                None => return std::future::pending().await,
            },
        };
        let mut byte = [0];
        loop {
            match stream.read(&mut byte).await {
                Ok(1) => {}
                _ => return std::future::pending().await,
            }
            if let Ok(signal) = Signal::try_from(i32::from(byte[0])) {
                return signal;
            }
        }
    }
}
