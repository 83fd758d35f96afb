//! Mapping of driver errors to [`Error`], by SQLSTATE.

use std::error::Error as _;

use tokio_postgres::error::SqlState;

use crate::{Error, ErrorKind};

/// Stage of a request at the time of the failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestStage {
    /// No statement had been sent: nothing was changed.
    Connecting,
    /// A statement had been sent: it may have been executed.
    Asking,
}

/// Converts a driver error. The server's message is the source of the error; it never repeats a password.
pub(crate) fn explain(error: tokio_postgres::Error, stage: RequestStage) -> Error {
    if let Some(function) = denied_function(&error) {
        let message = format!(
            "the role may not call the function {function}: an owner must GRANT EXECUTE ON FUNCTION {function} to it"
        );
        return Error::new(ErrorKind::Denied, message).because(error);
    }
    if let Some(message) = denied_object(&error) {
        return Error::new(ErrorKind::Denied, message).because(error);
    }
    if let Some(code) = error.code() {
        let (kind, message) = refused(code, stage);
        // A server that is starting, stopping or full cannot be used either way.
        let up = stage == RequestStage::Asking
            && !["53", "57", "08"].iter().any(|class| code.code().starts_with(class));
        let refusal = Error::new(kind, message).because(error);
        return if up { refusal.into_answer() } else { refusal };
    }
    let (kind, message) = match () {
        () if is_untrusted(&error) => (
            ErrorKind::Denied,
            "the server's certificate is not trusted: check sslmode and sslrootcert",
        ),
        () if is_unencrypted(&error) => {
            (ErrorKind::Denied, "the server does not support TLS, and sslmode requires it")
        }
        () if is_passwordless(&error) => (
            ErrorKind::Denied,
            "the server requires a password: give it in $PGPASSWORD, in ~/.pgpass or in the URL",
        ),
        () if is_unbound(&error) => (
            ErrorKind::Denied,
            "the server did not use channel binding, and channel_binding requires it",
        ),
        () if is_unsupported_method(&error) => (
            ErrorKind::Denied,
            "the server requires a method of authentication that is not supported, such as GSSAPI",
        ),
        () => match stage {
            RequestStage::Connecting => {
                (ErrorKind::Unavailable, "cannot connect (is the server up?)")
            }
            RequestStage::Asking => {
                (ErrorKind::Unknown, "the connection broke before the answer came")
            }
        },
    };
    Error::new(kind, message).because(error)
}

/// Function that the role may not call, if that is the error. The server names it only in its text; in other languages
/// than English it is not found.
fn denied_function(error: &tokio_postgres::Error) -> Option<&str> {
    let refusal =
        error.as_db_error().filter(|it| *it.code() == SqlState::INSUFFICIENT_PRIVILEGE)?;
    refusal.message().strip_prefix("permission denied for function ")
}

/// True if the message of an error names a function that the role may not call.
pub(crate) fn names_function(error: &Error) -> bool {
    let source = error.source().and_then(|source| source.downcast_ref());
    source.and_then(denied_function).is_some()
}

/// Advice for an operation that needs more than the rights of a user of the table: its owner, or a right on its schema.
/// The server says so only in its text; in other languages than English the general advice is given.
fn denied_object(error: &tokio_postgres::Error) -> Option<String> {
    let refusal =
        error.as_db_error().filter(|it| *it.code() == SqlState::INSUFFICIENT_PRIVILEGE)?;
    let message = refusal.message();
    if let Some(object) = message.strip_prefix("must be owner of ") {
        return Some(format!(
            "only the owner of {object} can change its definition: connect as its owner, or let its owner run the \
             SQL that `tenure schema` prints"
        ));
    }
    let schema = message.strip_prefix("permission denied for schema ")?;
    Some(format!(
        "the role lacks rights on the schema {schema}: an owner must GRANT USAGE on it, and CREATE to create tables there"
    ))
}

/// SQLSTATE of the server's answer, if the error comes from the server.
pub(crate) fn code(error: &Error) -> Option<&str> {
    let source = error.source()?.downcast_ref::<tokio_postgres::Error>()?;
    source.code().map(SqlState::code)
}

/// The server's message, without its details: those quote rows.
#[cfg(feature = "jobs")]
pub(crate) fn server_message(error: &Error) -> Option<String> {
    let source = error.source()?.downcast_ref::<tokio_postgres::Error>()?;
    let refusal = source.as_db_error()?;
    Some(format!("{} (SQLSTATE {})", refusal.message(), refusal.code().code()))
}

/// Converts `Unknown` to `Unavailable`, for failures before the request itself was sent: nothing was changed.
pub(crate) fn nothing_done(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Unknown => {
            Error::new(ErrorKind::Unavailable, "the server did not answer in time").because(error)
        }
        _ => error,
    }
}

/// Error for a read-only server. `settled`: a writable server answered before, so the failure may be transient.
pub(crate) fn standby(settled: bool) -> Error {
    let kind = if settled { ErrorKind::Unavailable } else { ErrorKind::Misconfigured };
    let message = "the server is a read-only standby: name the primary, or all servers with \
                   target_session_attrs=read-write";
    Error::new(kind, message)
}

/// True if our verification of the server's certificate failed.
fn is_untrusted(error: &tokio_postgres::Error) -> bool {
    let io = error.source().and_then(|source| source.downcast_ref::<std::io::Error>());
    let tls = io.and_then(std::io::Error::get_ref).and_then(|inner| inner.downcast_ref());
    matches!(tls, Some(rustls::Error::InvalidCertificate(_)))
}

/// True if the server has no TLS. The driver reports it only as this text.
fn is_unencrypted(error: &tokio_postgres::Error) -> bool {
    error.source().is_some_and(|source| source.to_string() == "server does not support TLS")
}

/// True if the server requires a password and none was given. The driver reports it only as this text.
fn is_passwordless(error: &tokio_postgres::Error) -> bool {
    error.source().is_some_and(|source| source.to_string() == "password missing")
}

/// True if channel binding is required and the server did not offer it. The driver reports it only as this text.
fn is_unbound(error: &tokio_postgres::Error) -> bool {
    error.source().is_some_and(|source| source.to_string() == "server did not use channel binding")
}

/// True if the driver cannot authenticate as the server requires. The driver reports it only as these texts.
fn is_unsupported_method(error: &tokio_postgres::Error) -> bool {
    let texts = ["unsupported authentication method", "unsupported SASL mechanism"];
    error.source().is_some_and(|source| texts.contains(&&*source.to_string()))
}

fn refused(code: &SqlState, stage: RequestStage) -> (ErrorKind, &'static str) {
    use ErrorKind::{Denied, Invalid, Misconfigured, Unavailable, Unknown};
    match code.code() {
        "28P01" | "28000" => {
            (Denied, "the server rejected the user, the password or the client's address")
        }
        "3D000" => (Misconfigured, "there is no such database: correct the URL"),
        "42501" => (
            Denied,
            "the role lacks rights on the table: an owner must GRANT SELECT, INSERT, UPDATE on it (and USAGE on its schema)",
        ),
        "42P01" | "3F000" => (Misconfigured, "the table is missing: run `tenure schema --apply`"),
        "42703" | "42804" | "42883" | "42P10" | "42809" | "42846" | "428C9" | "23502" | "42P02" => {
            (
                Misconfigured,
                "the table does not fit this version of tenure: `tenure schema` prints the right definition",
            )
        }
        "22001" | "22P02" | "22003" | "22P05" | "22021" | "22023" => {
            (Invalid, "invalid value for the type of the column")
        }
        "23505" => (Invalid, "a row of that key exists already"),
        "25006" => {
            (Unavailable, "the server is read-only: a standby, or read-only by its settings")
        }
        // The server ended the session: the statement may have been executed before.
        "57P01" | "57P02" | "57P05" if stage == RequestStage::Asking => {
            (Unknown, "the server ended the connection before it answered")
        }
        other if other.starts_with("08") && stage == RequestStage::Asking => {
            (Unknown, "the connection broke before the answer came")
        }
        _ if stage == RequestStage::Connecting => {
            (Unavailable, "the server refused the connection")
        }
        _ => (Unavailable, "the server could not execute the request"),
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
