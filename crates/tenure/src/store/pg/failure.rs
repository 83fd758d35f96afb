//! What an error of the driver means for the caller, by its SQLSTATE.

use std::error::Error as _;

use tokio_postgres::error::SqlState;

use crate::{Error, ErrorKind};

/// What was under way when it failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestStage {
    /// Nothing had been asked yet.
    Connecting,
    /// A statement had been sent.
    Asking,
}

/// The error for a caller. Messages of the server come along as the cause; none of them repeats a password.
pub(crate) fn explain(error: tokio_postgres::Error, stage: RequestStage) -> Error {
    let (kind, message) = match error.code() {
        Some(code) => refused(code, stage),
        None if is_untrusted(&error) => (
            ErrorKind::Denied,
            "the server's certificate is not to be trusted: see sslmode and sslrootcert",
        ),
        None if is_unencrypted(&error) => {
            (ErrorKind::Denied, "the server does not encrypt, and sslmode asks for it")
        }
        None if is_passwordless(&error) => (
            ErrorKind::Denied,
            "the server asks for a password: give it in $PGPASSWORD, in ~/.pgpass or in the URL",
        ),
        None => match stage {
            RequestStage::Connecting => {
                (ErrorKind::Unavailable, "cannot connect: is the server up?")
            }
            RequestStage::Asking => {
                (ErrorKind::Unknown, "the connection broke before the answer came")
            }
        },
    };
    Error::new(kind, message).because(error)
}

/// The SQLSTATE that the server answered with, where that is what went wrong.
pub(crate) fn code(error: &Error) -> Option<&str> {
    let source = error.source()?.downcast_ref::<tokio_postgres::Error>()?;
    source.code().map(SqlState::code)
}

/// What failed before the request itself was sent has changed nothing.
pub(crate) fn nothing_done(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Unknown => {
            Error::new(ErrorKind::Unavailable, "the server did not answer in time").because(error)
        }
        _ => error,
    }
}

/// The error for a server that only reads. `settled`: one that could write was there before, so this may pass.
pub(crate) fn standby(settled: bool) -> Error {
    let kind = if settled { ErrorKind::Unavailable } else { ErrorKind::Misconfigured };
    let message = "the server is a standby and only reads: name the primary, or all servers with \
                   target_session_attrs=read-write";
    Error::new(kind, message)
}

/// Whether our own verification of the server failed.
fn is_untrusted(error: &tokio_postgres::Error) -> bool {
    let io = error.source().and_then(|source| source.downcast_ref::<std::io::Error>());
    let tls = io.and_then(std::io::Error::get_ref).and_then(|inner| inner.downcast_ref());
    matches!(tls, Some(rustls::Error::InvalidCertificate(_)))
}

/// Whether the server has no TLS. The driver has no other word for it.
fn is_unencrypted(error: &tokio_postgres::Error) -> bool {
    error.source().is_some_and(|source| source.to_string() == "server does not support TLS")
}

/// Whether the server wants a password and there is none. The driver has no other word for it.
fn is_passwordless(error: &tokio_postgres::Error) -> bool {
    error.source().is_some_and(|source| source.to_string() == "password missing")
}

fn refused(code: &SqlState, stage: RequestStage) -> (ErrorKind, &'static str) {
    use ErrorKind::{Denied, Invalid, Misconfigured, Unavailable, Unknown};
    match code.code() {
        "28P01" | "28000" => (Denied, "the server refuses our user, password or address"),
        "3D000" => (Misconfigured, "there is no such database: correct the URL"),
        "42501" => (
            Denied,
            "the role lacks rights on the table: an owner must GRANT SELECT, INSERT, UPDATE on it (and USAGE on its schema)",
        ),
        "42P01" | "3F000" => (Misconfigured, "the table is missing: run `tenure schema --apply`"),
        "42703" | "42804" | "42883" | "42P10" | "42809" | "42846" | "428C9" | "23502" | "42P02" => {
            (
                Misconfigured,
                "the table has another shape than this version of tenure knows: `tenure schema` shows the right one",
            )
        }
        "22P02" | "22003" | "22P05" | "22021" | "22023" => {
            (Invalid, "a value is none that the column can hold")
        }
        "23505" => (Invalid, "there is a row of that key already"),
        "25006" => {
            (Unavailable, "the server only reads: it is a standby, or is read-only by setting")
        }
        // The server ended the session: what it was doing may have been done.
        "57P01" | "57P02" | "57P05" if stage == RequestStage::Asking => {
            (Unknown, "the server ended the connection before it answered")
        }
        other if other.starts_with("08") && stage == RequestStage::Asking => {
            (Unknown, "the connection broke before the answer came")
        }
        _ if stage == RequestStage::Connecting => {
            (Unavailable, "the server does not let us in now")
        }
        _ => (Unavailable, "the server could not do it"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permanent_failures_are_told_from_transient_ones() {
        for (code, asking, connecting) in [
            ("28P01", ErrorKind::Denied, ErrorKind::Denied),
            ("3D000", ErrorKind::Misconfigured, ErrorKind::Misconfigured),
            ("42501", ErrorKind::Denied, ErrorKind::Denied),
            ("42P01", ErrorKind::Misconfigured, ErrorKind::Misconfigured),
            ("42703", ErrorKind::Misconfigured, ErrorKind::Misconfigured),
            ("53300", ErrorKind::Unavailable, ErrorKind::Unavailable),
            ("57P03", ErrorKind::Unavailable, ErrorKind::Unavailable),
            ("40001", ErrorKind::Unavailable, ErrorKind::Unavailable),
            ("57P01", ErrorKind::Unknown, ErrorKind::Unavailable),
            ("08006", ErrorKind::Unknown, ErrorKind::Unavailable),
        ] {
            let code = SqlState::from_code(code);
            assert_eq!(refused(&code, RequestStage::Asking).0, asking, "{code:?}");
            assert_eq!(refused(&code, RequestStage::Connecting).0, connecting, "{code:?}");
        }
    }
}
