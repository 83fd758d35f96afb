//! Measures servers that speak the lock protocol: loads from one thread, and a bare echo to compare with.
//!
//! A figure of one server on one machine says little: the machine's own noise is larger than what we look for. So the
//! same load is put on the [echo] in the same run, and what counts is the ratio, and the server's processor time
//! for each request, which a noisy neighbour changes least.
//!
//! Every load checks every reply. A server that answers wrongly is not slow or fast, it is wrong: the load ends with an
//! error and no figure.

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
    /// Where it listens.
    pub address: SocketAddr,
    /// Its process, where its processor time and memory are wanted.
    pub process: Option<Process>,
    /// Whether the fences of its tokens grow. Those of an echo, and of servers older than fences, do not.
    pub fenced: bool,
}

impl Target {
    /// The process, for loads that measure nothing without it.
    ///
    /// # Errors
    ///
    /// When none was named.
    pub fn needs_process(&self) -> anyhow::Result<Process> {
        self.process.ok_or_else(|| anyhow::anyhow!("this load needs the server's --pid"))
    }
}
