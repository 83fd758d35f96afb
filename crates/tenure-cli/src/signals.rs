//! Signals as bytes to be read: no handler ever runs, so what was ignored when we were started the child ignores too.

use std::io::{self, Write as _};
use std::os::unix::net::UnixStream;
use std::thread;

use nix::sys::signal::{SigSet, Signal, kill, raise};
use nix::unistd::Pid;
use tokio::io::AsyncReadExt as _;
use tokio::sync::mpsc;

/// What reaches the command: forwarded to the child's group while it runs.
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

/// Blocks `signals` in this thread and those that it starts from now on; their numbers can be read from the stream, a
/// byte each. To be called before any other thread is there.
///
/// A signal that was ignored from the start, as `nohup` does, stays so.
pub(crate) fn listen(signals: &[Signal]) -> io::Result<UnixStream> {
    let ignored = ignored();
    let heeded: SigSet = signals.iter().copied().filter(|s| !ignored.contains(*s)).collect();
    heeded.thread_block()?;
    let (read, mut write) = UnixStream::pair()?;
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        while let Ok(signal) = heeded.wait() {
            // Numbers of standard signals are below 32.
            if write.write_all(&[signal as u8]).is_err() {
                return;
            }
        }
    })?;
    Ok(read)
}

/// Blocks what a terminal sends to those who touch it from the background: we do so on purpose, to pass it on.
pub(crate) fn block_terminal_output_stop() -> nix::Result<()> {
    SigSet::from(Signal::SIGTTOU).thread_block()
}

/// Calls `spawn` with no signal blocked: what it starts inherits that.
pub(crate) fn with_signals_unblocked<T>(spawn: impl FnOnce() -> T) -> nix::Result<T> {
    let blocked = SigSet::thread_get_mask()?;
    SigSet::empty().thread_set_mask()?;
    let spawned = spawn();
    blocked.thread_set_mask()?;
    Ok(spawned)
}

/// Takes `signal`, blocked until now, with its default effect; where that does not end us, blocks it again.
pub(crate) fn raise_with_default_action(signal: Signal) -> nix::Result<()> {
    let set = SigSet::from(signal);
    set.thread_unblock()?;
    let raised = raise(signal);
    set.thread_block()?;
    raised
}

/// Sends INT to our own process group, which dies of it, us among them: Ctrl-C reached the child's group only, and a shell
/// or script around us decides by it whether to go on.
pub(crate) fn interrupt_own_group() {
    if SigSet::from(Signal::SIGINT).thread_unblock().is_ok() {
        let _ = kill(Pid::from_raw(0), Signal::SIGINT);
    }
}

/// The signals that this process was told to ignore when it was started.
fn ignored() -> SigSet {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or_default();
    Signal::iterator().filter(|signal| mask >> (*signal as u32 - 1) & 1 == 1).collect()
}

/// The signals that [`listen`] gave, one after the other, or those that somebody passes on.
pub(crate) enum Signals {
    /// Ours.
    System(tokio::net::UnixStream),
    /// Passed on to one of several who look after a child.
    Relayed(mpsc::UnboundedReceiver<Signal>),
}

impl Signals {
    /// To be called on a runtime.
    pub(crate) fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self::System(tokio::net::UnixStream::from_std(stream)?))
    }

    /// The next signal.
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
