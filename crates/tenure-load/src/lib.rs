//! Load generator for servers of the lock protocol, with an echo server as the baseline. It runs on one thread.
//!
//! An absolute figure of one server on one machine means little: the machine's noise exceeds the differences of
//! interest. So the [echo] gets the same load in the same run. The results to compare are the ratio to the echo, and
//! the server's CPU time per request, which a noisy neighbour affects least.
//!
//! Every load checks every reply. A wrong reply ends the load with an error and without a result.

#![forbid(unsafe_code)]

pub mod bulk;
pub mod caller;
pub mod dial;
pub mod echo;
pub mod figures;
pub mod fleet;
pub mod loads;
pub mod process;
pub mod wire;

use std::net::SocketAddr;

use process::Process;

/// The server under load.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Address of the server.
    pub address: SocketAddr,
    /// Process of the server, to measure its CPU time and memory.
    pub process: Option<Process>,
    /// True if the server's fencing numbers grow. Those of the echo, and of servers older than fencing, do not.
    pub fenced: bool,
}

impl Target {
    /// The process, for loads that measure nothing else.
    ///
    /// # Errors
    ///
    /// No process was given.
    pub fn needs_process(&self) -> anyhow::Result<Process> {
        self.process.ok_or_else(|| anyhow::anyhow!("this load needs the server's --pid"))
    }
}
