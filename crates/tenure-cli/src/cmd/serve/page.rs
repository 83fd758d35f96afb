//! The status page of the lock server: its listener, and the stores that it shows.

use std::io;
use std::net::TcpListener;

use clap::Args;
use tenure_server::{Handle, http};

use super::auth::is_loopback;
use super::watched;
use crate::{health, report};

/// The HTTP page.
#[derive(Args)]
pub(super) struct PageArgs {
    /// Serve a status page, /metrics, /livez and /readyz on this address, such as 127.0.0.1:8388
    #[arg(long, value_name = "ADDR")]
    http: Option<String>,
    /// Also show the holders of this store on the status page. May be given several times. With `?queue=TABLE` in a postgres:
    /// URL, show the jobs of that queue. The store is read only while the page is open in a browser
    #[arg(long, value_name = "URL", requires = "http")]
    watch: Vec<String>,
    /// Number of events remembered per name; 64 with --http, else 0
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=1000))]
    history: Option<u16>,
}

impl PageArgs {
    pub(super) fn history(&self) -> usize {
        self.history.map_or(if self.http.is_some() { 64 } else { 0 }, usize::from)
    }

    /// Opens the listener of the page, with true if requests need the token. Other hosts may reach it only if there is
    /// a token to check.
    pub(super) fn listen(
        &self,
        secret: Option<&[u8]>,
    ) -> Result<Option<(TcpListener, bool)>, String> {
        let Some(http) = &self.http else { return Ok(None) };
        let listener = health::listen(http, "--http")?;
        let address = listener.local_addr().map_err(|error| format!("--http: {error}"))?;
        let exposed = !is_loopback(address.ip());
        if exposed && secret.is_none() {
            return Err(format!(
                "--http: {address} can be reached from other hosts: give --auth-token-file, or a loopback address"
            ));
        }
        if exposed {
            report::print_line(
                "the status page is served without TLS: put a TLS proxy in front of it",
            );
        }
        Ok(Some((listener, exposed)))
    }

    /// The stores that the page shows beside the server's own keys.
    pub(super) fn watched(&self) -> Result<Vec<Box<dyn http::WatchedStore>>, String> {
        self.watch.iter().map(|url| watched::parse_watch_url(url)).collect()
    }

    pub(super) fn start(
        &self,
        (listener, auth_required): (TcpListener, bool),
        watched: Vec<Box<dyn http::WatchedStore>>,
        handle: Handle,
    ) -> Result<(), String> {
        let failed = |error: io::Error| format!("--http: {}", report::os_error_text(&error));
        let address = listener.local_addr().map_err(failed)?;
        let host = self.http.as_deref().and_then(|http| http.rsplit_once(':'));
        let host = host.map(|(host, _)| host.to_owned()).unwrap_or_default();
        let options = http::HttpOptions { listener, handle, auth_required, host, watched };
        http::start(options).map_err(failed)?;
        report::print_line(&format!("status page: http://{address}/"));
        Ok(())
    }
}
