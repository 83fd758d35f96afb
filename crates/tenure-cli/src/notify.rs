//! What a service manager is told: that we are ready, that we come around, and who leads.

use std::ffi::OsString;
#[cfg(target_os = "linux")]
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// The socket of the service manager that started us, where it listens.
pub(crate) struct ServiceManager {
    socket: UnixDatagram,
    address: SocketAddr,
}

impl ServiceManager {
    /// By `$NOTIFY_SOCKET`.
    pub(crate) fn from_environment() -> Option<Self> {
        let name = std::env::var_os("NOTIFY_SOCKET")?;
        let socket = UnixDatagram::unbound().ok()?;
        // A manager that does not read must not keep the lead from being renewed.
        socket.set_nonblocking(true).ok()?;
        Some(Self { socket, address: address(&name)? })
    }

    /// Ready to take over, which does not depend on leading: a roll-out must not wait for the lead.
    pub(crate) fn ready(&self) {
        self.send("READY=1");
    }

    pub(crate) fn stopping(&self) {
        self.send("STOPPING=1");
    }

    pub(crate) fn status(&self, text: &str) {
        let line: String = text.chars().filter(|c| !c.is_control()).collect();
        self.send(&format!("STATUS={line}"));
    }

    /// We come around. To be said more often than the manager's [patience](patience) lasts.
    pub(crate) fn ping_watchdog(&self) {
        self.send("WATCHDOG=1");
    }

    fn send(&self, message: &str) {
        // A manager that is gone needs no news.
        let _ = self.socket.send_to_addr(message.as_bytes(), &self.address);
    }
}

/// How long the manager waits for a sign of life before it ends us, where it does: by `$WATCHDOG_USEC`, which is meant for
/// the process `$WATCHDOG_PID` alone.
pub(crate) fn watchdog_timeout() -> Option<Duration> {
    let number = |name| std::env::var(name).ok()?.parse::<u64>().ok();
    let other = std::env::var_os("WATCHDOG_PID").is_some()
        && number("WATCHDOG_PID") != Some(u64::from(std::process::id()));
    let patience = number("WATCHDOG_USEC").map(Duration::from_micros);
    patience.filter(|patience| !other && !patience.is_zero())
}

fn address(name: &OsString) -> Option<SocketAddr> {
    match name.as_bytes().strip_prefix(b"@") {
        None => SocketAddr::from_pathname(name).ok(),
        #[cfg(target_os = "linux")]
        Some(name) => SocketAddr::from_abstract_name(name).ok(),
        #[cfg(not(target_os = "linux"))]
        Some(_) => None,
    }
}
