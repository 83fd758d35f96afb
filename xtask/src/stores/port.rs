//! Free loopback ports.

use std::net::{Ipv4Addr, TcpListener};

use anyhow::{Context as _, Result};

/// Maximum number of ports that a store tries.
const MAX_ATTEMPTS: usize = 4;

/// Starts something on a free loopback port.
///
/// Another process may take the port between its choice and the store's bind. So another port is tried if the error,
/// which should contain the store's log, says that the address is in use.
pub(crate) fn with_free_port<T>(start: impl FnMut(u16) -> Result<T>) -> Result<T> {
    with_port_from(free, start)
}

/// As [`with_free_port`], with ports from `find`.
pub(crate) fn with_port_from<T>(
    find: impl Fn() -> Result<u16>,
    mut start: impl FnMut(u16) -> Result<T>,
) -> Result<T> {
    let mut tries = 1;
    loop {
        match start(find()?) {
            Err(error) if tries < MAX_ATTEMPTS && says_in_use(&error) => tries += 1,
            outcome => return outcome,
        }
    }
}

/// A port without a listener at this moment.
pub(crate) fn free() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("binding a free port")?;
    Ok(listener.local_addr().context("reading the bound port")?.port())
}

/// A free port that also stays free while its server is down, for servers that are restarted.
///
/// The kernel assigns ephemeral ports to clients. A client that connects to a port of that range while the server is
/// down may even be assigned that port and connect to itself. So this port is below Linux's default ephemeral range.
pub(crate) fn below_ephemeral_range() -> Result<u16> {
    const FIRST: u16 = 20_000;
    const COUNT: u16 = 12_000;
    let start = std::process::id() % u32::from(COUNT);
    let start = u16::try_from(start).context("a process id modulo a count")?;
    let ports = (0..COUNT).map(|step| FIRST + (start + step) % COUNT);
    let mut free = ports.filter(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok());
    free.next().with_context(|| format!("no port from {FIRST} on is free"))
}

fn says_in_use(error: &anyhow::Error) -> bool {
    format!("{error:#}").to_lowercase().contains("address already in use")
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;

    #[test]
    fn a_free_port_can_be_bound_and_is_not_given_twice_while_it_is() {
        let port = free().unwrap();
        let bound = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
        assert_ne!(free().unwrap(), port);
        drop(bound);
    }

    #[test]
    fn a_lasting_port_can_be_bound_and_is_not_given_twice_while_it_is() {
        let port = below_ephemeral_range().unwrap();
        assert!(port < 32_768, "{port}");
        let bound = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
        assert_ne!(below_ephemeral_range().unwrap(), port);
        drop(bound);
    }

    #[test]
    fn a_port_that_was_taken_meanwhile_is_given_up_for_another() {
        let mut tried = Vec::new();
        let port = with_free_port(|port| {
            tried.push(port);
            if tried.len() < 3 {
                bail!("its log: Address already in use")
            }
            Ok(port)
        });
        assert_eq!(tried.len(), 3);
        assert_eq!(port.ok(), tried.last().copied());
    }

    #[test]
    fn other_errors_and_endless_bad_luck_are_returned() {
        for (why, tries) in [("no memory", 1), ("address already in use", MAX_ATTEMPTS)] {
            let mut tried = 0;
            let outcome: Result<()> = with_free_port(|_| {
                tried += 1;
                bail!(why)
            });
            assert_eq!(outcome.unwrap_err().to_string(), why);
            assert_eq!(tried, tries);
        }
    }
}
