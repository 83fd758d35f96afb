//! Notifications to the service manager: readiness, watchdog, and a status with the current leader.
//!
//! The crate `sd-notify` does not fit: it sends on a blocking socket, so a manager that does not read would block the renewal
//! of the leadership.

use std::ffi::OsString;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// Notification socket of the service manager that started this process.
pub(crate) struct ServiceManager {
    socket: UnixDatagram,
    address: SocketAddr,
}

impl ServiceManager {
    /// The socket that `$NOTIFY_SOCKET` names.
    pub(crate) fn from_environment() -> Option<Self> {
        let name = std::env::var_os("NOTIFY_SOCKET")?;
        let socket = UnixDatagram::unbound().ok()?;
        // A manager that does not read must not block the renewal of the leadership.
        socket.set_nonblocking(true).ok()?;
        Some(Self { socket, address: address(&name)? })
    }

    /// Reports readiness: able to take over. It does not depend on leading, because a roll-out must not wait for the
    /// leadership.
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

    /// Reports progress. Must be called more often than once per [`watchdog_timeout`].
    pub(crate) fn ping_watchdog(&self) {
        self.send("WATCHDOG=1");
    }

    fn send(&self, message: &str) {
        // A manager that is gone or does not read misses the message.
        let _ = self.socket.send_to_addr(message.as_bytes(), &self.address);
    }
}

/// Time without a ping after which the manager kills this process: `$WATCHDOG_USEC`, if `$WATCHDOG_PID` is unset or
/// names this process.
pub(crate) fn watchdog_timeout() -> Option<Duration> {
    let number = |name| std::env::var(name).ok()?.parse::<u64>().ok();
    let other = std::env::var_os("WATCHDOG_PID").is_some()
        && number("WATCHDOG_PID") != Some(u64::from(std::process::id()));
    let timeout = number("WATCHDOG_USEC").map(Duration::from_micros);
    timeout.filter(|timeout| !other && !timeout.is_zero())
}

fn address(name: &OsString) -> Option<SocketAddr> {
    match name.as_bytes().strip_prefix(b"@") {
        None => SocketAddr::from_pathname(name).ok(),
        Some(name) => SocketAddr::from_abstract_name(name).ok(),
    }
}
