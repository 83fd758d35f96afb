//! Connects to the servers of the options.

use std::error::Error as StdError;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_nats::{ConnectErrorKind, ConnectOptions, Event, ServerError};

use super::api::Api;
use super::async_errors::AsyncErrors;
use super::options::{Credentials, Options};
use crate::{Clock, Error, ErrorKind, Result};

/// Timeout of the first connection.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that another server of the cluster has to answer.
pub(super) const INFO_TIMEOUT: Duration = Duration::from_secs(2);
/// Largest number of servers that are contacted.
pub(super) const MAX_SERVERS: usize = 16;
/// Interval of pings. After two unanswered pings the client reconnects to another server. Only pings detect a server
/// whose process is stopped (`SIGSTOP`): its connections stay open.
const PING_INTERVAL: Duration = Duration::from_secs(1);
/// Longest pause before the next server is tried.
const MAX_RECONNECT_DELAY: Duration = Duration::from_millis(500);

pub(super) async fn connect(options: &Options) -> Result<Api> {
    let (async_errors, clock) = (Arc::new(AsyncErrors::default()), Clock::system());
    let connect_options =
        connect_options(options, Arc::clone(&async_errors), clock.clone()).await?;
    let servers: Vec<_> = options.servers.iter().map(|server| format!("nats://{server}")).collect();
    let connecting = connect_options.connect(servers);
    let client = match tokio::time::timeout(CONNECT_TIMEOUT, connecting).await {
        Ok(Ok(client)) => client,
        Ok(Err(error)) => return Err(explain(error)),
        Err(_) => {
            let message = format!("no server answered within {CONNECT_TIMEOUT:?}: is it up?");
            return Err(Error::new(ErrorKind::Unavailable, message));
        }
    };
    Ok(Api { client, clock, async_errors })
}

async fn connect_options(
    options: &Options,
    async_errors: Arc<AsyncErrors>,
    clock: Clock,
) -> Result<ConnectOptions> {
    let mut connect_options = match &options.credentials {
        Credentials::None => ConnectOptions::new(),
        Credentials::Token(token) => ConnectOptions::with_token(token.clone()),
        Credentials::User(user, password) => {
            ConnectOptions::with_user_and_password(user.clone(), password.clone())
        }
        Credentials::Nkey(path) => {
            let seed = read_file(path).await?;
            ConnectOptions::with_nkey(seed.trim().to_owned())
        }
        Credentials::File(path) => {
            let text = read_file(path).await?;
            ConnectOptions::with_credentials(&text).map_err(|error| unreadable(path, error))?
        }
    };
    connect_options = connect_options
        .name("tenure")
        .connection_timeout(CONNECT_TIMEOUT)
        .ping_interval(PING_INTERVAL)
        .require_tls(options.tls)
        .reconnect_delay_callback(|attempts| {
            MAX_RECONNECT_DELAY.min(
                Duration::from_millis(20)
                    .saturating_mul(u32::try_from(attempts).unwrap_or(u32::MAX)),
            )
        })
        .event_callback(move |event| {
            if let Event::ServerError(ServerError::Other(text)) = event {
                async_errors.record(text, clock.now());
            }
            std::future::ready(())
        });
    let client_files = options.certificate.iter().flat_map(|(certificate, key)| [certificate, key]);
    for path in options.ca.iter().chain(client_files) {
        // Checked here, because the library's error names neither the file nor the reason.
        check_readable(path).await?;
    }
    if let Some(ca) = &options.ca {
        connect_options = connect_options.add_root_certificates(ca.clone());
    }
    if let Some((certificate, key)) = &options.certificate {
        connect_options = connect_options.add_client_certificate(certificate.clone(), key.clone());
    }
    Ok(connect_options)
}

async fn read_file(path: &Path) -> Result<String> {
    let file = path.to_owned();
    let read = tokio::task::spawn_blocking(move || std::fs::read_to_string(file)).await;
    read.map_err(io::Error::other).flatten().map_err(|error| unreadable(path, error))
}

async fn check_readable(path: &Path) -> Result<()> {
    let file = path.to_owned();
    let read = tokio::task::spawn_blocking(move || std::fs::File::open(file)).await;
    let read = read.map_err(io::Error::other).flatten();
    read.map(drop).map_err(|error| unreadable(path, error))
}

fn unreadable(path: &Path, error: io::Error) -> Error {
    let message = format!("cannot read {}", path.display());
    Error::new(ErrorKind::Invalid, message).because(error)
}

fn explain(error: async_nats::ConnectError) -> Error {
    let (kind, message) = match error.kind() {
        ConnectErrorKind::AuthorizationViolation => (
            ErrorKind::Denied,
            "the server refused the credentials: check user, password, token or key",
        ),
        ConnectErrorKind::Authentication => {
            (ErrorKind::Invalid, "the key cannot sign: check the nkey or the credentials file")
        }
        ConnectErrorKind::ServerParse => (ErrorKind::Invalid, "the server's address is invalid"),
        _ if is_tls(&error) => {
            (ErrorKind::Unavailable, "the TLS handshake failed: check tls, ca, cert and key")
        }
        _ => (ErrorKind::Unavailable, "cannot connect: is the server up?"),
    };
    Error::new(kind, message).because(error)
}

/// True if TLS was the cause. The library reports most TLS errors as I/O errors.
fn is_tls(error: &async_nats::ConnectError) -> bool {
    let mut cause: Option<&(dyn StdError + 'static)> = Some(error);
    while let Some(next) = cause {
        let io = next.downcast_ref::<io::Error>().map(io::Error::kind);
        if io == Some(io::ErrorKind::InvalidData) {
            return true;
        }
        cause = next.source();
    }
    error.kind() == ConnectErrorKind::Tls
}
