//! CPU time of a local PostgreSQL server.

use std::fs;
use std::time::Duration;

use crate::Result;

/// The processes of a server, found by that of a session.
pub(crate) struct ServerCpu {
    postmaster: u32,
}

impl ServerCpu {
    /// The server to which the session of process `pid` belongs.
    pub(crate) fn of(pid: i32) -> Result<Self> {
        let postmaster =
            parent(u32::try_from(pid)?).ok_or("the server is not on this Linux host")?;
        Ok(Self { postmaster })
    }

    /// CPU time that all live processes of the server have used so far.
    pub(crate) fn read(&self) -> Result<Duration> {
        let mut used = Duration::ZERO;
        for process in fs::read_dir("/proc")? {
            let Some(pid) = process?.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            if pid == self.postmaster || parent(pid) == Some(self.postmaster) {
                // A process that has just ended is not counted.
                used += cpu_time(pid).unwrap_or_default();
            }
        }
        Ok(used)
    }
}

fn parent(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program is in parentheses, and may contain any character.
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(1)?.parse().ok()
}

/// CPU time of a process of one thread, in nanoseconds of the scheduler.
fn cpu_time(pid: u32) -> Option<Duration> {
    let times = fs::read_to_string(format!("/proc/{pid}/schedstat")).ok()?;
    times.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)
}
