//! Ports that nobody listens on.

use std::net::{Ipv4Addr, TcpListener};

use anyhow::{Context as _, Result};

/// How many ports a store may try: between the choice of a port and the store's bind, somebody else may take it.
pub(super) const TRIES: usize = 3;

/// A loopback port that was free a moment ago.
pub(super) fn free() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("binding a free port")?;
    Ok(listener.local_addr().context("asking for the port")?.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_free_port_can_be_bound_and_is_not_given_twice_while_it_is() {
        let port = free().unwrap();
        let bound = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
        assert_ne!(free().unwrap(), port);
        drop(bound);
    }
}
