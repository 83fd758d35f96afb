//! TLS and authentication of the lock server: its certificate, its token, and the addresses that need them.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::net::{IpAddr, TcpListener};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use tenure_server::{TlsFiles, TlsSetup};

use crate::report;

/// TLS and authentication of clients.
#[derive(Args, Clone)]
pub(super) struct AuthArgs {
    /// Certificate of the server, as PEM; the server then accepts TLS only
    #[arg(long, value_name = "FILE", env = "DFLOCKD_TLS_CERT", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Private key of the certificate, as PEM
    #[arg(long, value_name = "FILE", env = "DFLOCKD_TLS_KEY", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Accept only clients with a certificate of these authorities
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_client_ca: Option<PathBuf>,
    /// Auth token that clients must send; safer in a file or in the environment, where other users cannot see it
    #[arg(long, value_name = "TOKEN", env = "DFLOCKD_AUTH_TOKEN", hide_env_values = true)]
    auth_token: Option<String>,
    /// File with the auth token that clients must send
    #[arg(long, value_name = "FILE", env = "DFLOCKD_AUTH_TOKEN_FILE")]
    auth_token_file: Option<PathBuf>,
    /// Accept other hosts without TLS or without an auth token
    #[arg(long)]
    insecure: bool,
}

impl AuthArgs {
    pub(super) fn tls(&self) -> Result<Option<TlsSetup>, String> {
        const EXPIRY_WARNING: Duration = Duration::from_secs(14 * 24 * 60 * 60);
        let (Some(cert), Some(key)) = (&self.tls_cert, &self.tls_key) else { return Ok(None) };
        let files = TlsFiles {
            cert: cert.clone(),
            key: key.clone(),
            client_ca: self.tls_client_ca.clone(),
        };
        let setup = files.load().map_err(|error| tenure::Error::chain_of(&error))?;
        if setup.valid_for < EXPIRY_WARNING {
            let days = setup.valid_for.as_secs() / (24 * 60 * 60);
            report::print_line(&format!(
                "{}: the certificate expires in {days} days",
                cert.display()
            ));
        }
        if setup.is_authority {
            report::print_line(&format!(
                "{}: the certificate is that of an authority, which many clients do not accept from a server: create it with \
                 basicConstraints CA:FALSE",
                cert.display()
            ));
        }
        Ok(Some(setup))
    }

    pub(super) fn secret(&self) -> Result<Option<Vec<u8>>, String> {
        let token = self.auth_token.as_ref();
        let file = self.auth_token_file.as_ref();
        // The command line takes precedence over the environment: if one of the two settings comes from the
        // environment, the other one was typed, and counts.
        let is_from = |name, value: &OsStr| std::env::var_os(name).is_some_and(|set| set == value);
        let secret = match (token, file) {
            (None, None) => return Ok(None),
            (Some(token), None) => token.clone().into_bytes(),
            (None, Some(file)) => read_secret(file)?,
            (Some(token), Some(file)) => match (
                is_from("DFLOCKD_AUTH_TOKEN", token.as_ref()),
                is_from("DFLOCKD_AUTH_TOKEN_FILE", file.as_ref()),
            ) {
                (true, false) => read_secret(file)?,
                (false, true) => token.clone().into_bytes(),
                _ => {
                    return Err(
                        "--auth-token and --auth-token-file are both set: give only one".to_owned()
                    );
                }
            },
        };
        let secret = secret.trim_ascii();
        if secret.is_empty() {
            return Err("the auth token is empty: set it, or omit the option".to_owned());
        }
        Ok(Some(secret.to_vec()))
    }

    /// Refuses an address that other hosts can reach without TLS and authentication, unless `--insecure` is given.
    pub(super) fn check_exposure(&self, listener: &TcpListener) -> Result<(), String> {
        let address = listener.local_addr().map_err(|error| format!("cannot serve: {error}"))?;
        let protected = self.tls_cert.is_some()
            && (self.auth_token.is_some()
                || self.auth_token_file.is_some()
                || self.tls_client_ca.is_some());
        if is_loopback(address.ip()) || protected || self.insecure {
            return Ok(());
        }
        Err(format!(
            "{address} can be reached from other hosts: give --tls-cert, --tls-key and --auth-token-file, or --insecure"
        ))
    }
}

/// True if only processes of this host reach the address.
pub(super) fn is_loopback(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_loopback(),
        IpAddr::V6(address) => {
            address.is_loopback() || address.to_ipv4_mapped().is_some_and(|v4| v4.is_loopback())
        }
    }
}

fn read_secret(path: &Path) -> Result<Vec<u8>, String> {
    let failed = |error: io::Error| {
        format!(
            "cannot read the auth token in {}: {}",
            path.display(),
            report::os_error_text(&error)
        )
    };
    let secret = fs::read(path).map_err(failed)?;
    let mode = fs::metadata(path).map_err(failed)?.permissions().mode();
    if mode & 0o007 != 0 {
        report::print_line(&format!(
            "{}: every user of this host can read the token: run chmod 600 on it",
            path.display()
        ));
    }
    Ok(secret)
}
