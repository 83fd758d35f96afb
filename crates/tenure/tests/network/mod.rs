//! Networks of a test's own, to be cut off. Shared by the tests of every store.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::services::skip::skip;

/// A network with one link to ours, gone with the test.
pub(crate) struct Network {
    name: String,
    near: String,
    far: String,
    /// Where it reaches this host.
    pub(crate) address: String,
}

impl Network {
    /// `None` where the machine allows none: then `what` is skipped, with the reason on stderr.
    pub(crate) fn make(what: &str) -> Option<Self> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        // Others may test on this machine, too.
        let (pid, made) = (std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
        let net = format!("10.{}.{}", 100 + pid % 100, (pid / 100 + made * 97) % 250);
        let network = Self {
            name: format!("tenure-{pid}-{made}"),
            near: format!("tn{pid}a{made}"),
            far: format!("tn{pid}b{made}"),
            address: format!("{net}.1"),
        };
        match network.set_up(&net) {
            Ok(()) => Some(network),
            Err(why) => {
                skip(&format!("{what}: no network of its own: {why}"));
                None
            }
        }
    }

    fn set_up(&self, net: &str) -> Result<(), String> {
        let Self { name, near, far, address } = self;
        ip(&["netns", "add", name])?;
        ip(&["link", "add", near, "type", "veth", "peer", far, "netns", name])?;
        ip(&["addr", "add", &format!("{address}/30"), "dev", near])?;
        ip(&["link", "set", near, "up"])?;
        ip(&["-n", name, "addr", "add", &format!("{net}.2/30"), "dev", far])?;
        ip(&["-n", name, "link", "set", far, "up"])
    }

    /// Takes its link `up` or `down`.
    pub(crate) fn set(&self, state: &str) {
        ip(&["-n", &self.name, "link", "set", &self.far, state]).expect("a network of our own");
    }

    /// The same command, run there.
    pub(crate) fn within(&self, inner: &Command) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name]).arg(inner.get_program()).args(inner.get_args());
        for (name, value) in inner.get_envs() {
            command.env(name, value.unwrap_or_default());
        }
        command
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        ip(&["link", "del", &self.near]).ok();
        ip(&["netns", "del", &self.name]).ok();
    }
}

fn ip(words: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(words).output();
    match output {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(error) => Err(error.to_string()),
    }
}
