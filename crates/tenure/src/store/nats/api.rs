//! Requests to JetStream: one attempt each, with a deadline, and every outcome distinguished.
//!
//! The client library's key-value helpers are not used: they read from replicas, retry on their own, and do not
//! distinguish all errors (the codes below).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_nats::connection::State;
use async_nats::{Client, HeaderMap, Request, RequestErrorKind};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tenure_core::Time;

use super::async_errors::AsyncErrors;
use crate::{Clock, Error, ErrorKind, Result};

/// Timeout of requests whose caller gives no limit.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Header that makes a write conditional.
const EXPECTED: &str = "Nats-Expected-Last-Subject-Sequence";
/// Header of a message that deletes a key.
pub(super) const OPERATION: &str = "KV-Operation";
/// Header of a marker that the server writes in place of an expired message.
const MARKER: &str = "Nats-Marker-Reason";
/// Header with a record of tenure: in nlock's layout beside the owner id that nlock reads, and on a deleted ticket.
pub(super) const RECORD_HEADER: &str = "Tenure-Holder";

/// The condition of a write is not met: another write came first.
const WRONG_LAST_SEQUENCE: u64 = 10_071;
/// The same, while the other write is still in flight.
const WRITE_UNDER_WAY: u64 = 10_164;
/// The stream did not store the write: a limit (`maximum messages exceeded`, `maximum bytes exceeded`), or a disk
/// failure, after which the outcome is unknown.
const STORE_FAILED: u64 = 10_077;
/// The message is longer than the stream accepts.
const MESSAGE_TOO_LONG: u64 = 10_054;
const NO_MESSAGE: u64 = 10_037;
pub(super) const NO_STREAM: u64 = 10_059;
const JETSTREAM_OFF: u64 = 10_076;
const JETSTREAM_OFF_FOR_ACCOUNT: u64 = 10_039;
/// No server can take a replica of a new stream: some are offline, or no server fits.
const NO_PEERS: u64 = 10_005;
/// A limit of the account, the server or the stream is reached: storage, consumers, streams.
const LIMITS_REACHED: [u64; 6] = [10_002, 10_023, 10_026, 10_027, 10_028, 10_047];

/// A connection, on which requests are sent.
#[derive(Clone)]
pub(super) struct Api {
    pub(super) client: Client,
    pub(super) clock: Clock,
    /// Errors that the server sent outside of replies.
    pub(super) async_errors: Arc<AsyncErrors>,
}

/// Deadline of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct ApiDeadline(pub(super) Time);

/// Outcome of a conditional write.
#[derive(Debug)]
pub(super) enum WriteOutcome {
    /// The write landed, at this sequence.
    Done(u64),
    /// The write was refused: the key is at another sequence.
    Conflict,
    /// The write may or may not have landed.
    Unclear(Error),
}

/// A message of the stream.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) subject: String,
    pub(super) sequence: u64,
    /// Server timestamp, in nanoseconds.
    pub(super) timestamp: u64,
    /// Value of the `Tenure-Holder` header.
    pub(super) record_header: Option<String>,
    /// `None` for a deletion or an expiry marker.
    pub(super) value: Option<Vec<u8>>,
}

/// A write to a key.
#[derive(Debug, Default)]
pub(super) struct KeyWrite {
    /// `DEL` for a deletion; `None` for a new value.
    pub(super) operation: Option<&'static str>,
    /// Value of the `Tenure-Holder` header.
    pub(super) record_header: Option<String>,
    pub(super) value: Vec<u8>,
}

/// An error in a reply of JetStream.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct JetStreamError {
    #[serde(default)]
    pub(super) code: u64,
    #[serde(default)]
    pub(super) err_code: u64,
    #[serde(default)]
    description: String,
}

/// Failure of a request.
pub(super) enum ApiError {
    /// The server answered with an error.
    Refused(JetStreamError),
    /// There was no reply, or it could not be parsed.
    Failed(Error),
}

impl JetStreamError {
    /// True if a limit of the stream refused the write, so that certainly nothing was written.
    pub(super) fn is_limit(&self) -> bool {
        self.is_full() || self.err_code == MESSAGE_TOO_LONG
    }

    /// True if the stream had no room for the write.
    fn is_full(&self) -> bool {
        self.err_code == STORE_FAILED && self.description.starts_with("maximum ")
    }

    /// Kind of the error. A refusal that can end without an operator is `Unavailable`: the claim waits, and reports it.
    pub(super) fn kind(&self) -> ErrorKind {
        match (self.code, self.err_code) {
            (_, JETSTREAM_OFF | JETSTREAM_OFF_FOR_ACCOUNT) => ErrorKind::Misconfigured,
            // Records are removed, and consumers of waiters end.
            _ if self.is_full() || LIMITS_REACHED.contains(&self.err_code) => {
                ErrorKind::Unavailable
            }
            (_, NO_PEERS) if self.description.contains("offline") => ErrorKind::Unavailable,
            (401 | 403, _) => ErrorKind::Denied,
            // A record that is too long, a stream that was deleted, a request that this server does not know: no fault
            // of the caller's request, and no wait cures it.
            (400 | 404, _) => ErrorKind::Misconfigured,
            _ => ErrorKind::Unavailable,
        }
    }
}

impl From<ApiError> for Error {
    fn from(error: ApiError) -> Self {
        match error {
            ApiError::Failed(error) => error,
            ApiError::Refused(refusal) => refusal.into(),
        }
    }
}

impl From<JetStreamError> for Error {
    fn from(refusal: JetStreamError) -> Self {
        let JetStreamError { err_code, description, .. } = &refusal;
        let mut text = format!("the server says: {description} ({err_code})");
        if matches!(*err_code, JETSTREAM_OFF | JETSTREAM_OFF_FOR_ACCOUNT) {
            text += ": turn JetStream on, for the server and the account";
        }
        Self::new(refusal.kind(), text)
    }
}

impl Api {
    /// Number of connections made so far, including the first.
    pub(super) fn connections(&self) -> u64 {
        self.client.statistics().connects.load(Ordering::Acquire)
    }

    pub(super) fn deadline_after(&self, limit: Duration) -> ApiDeadline {
        ApiDeadline(self.clock.now() + limit)
    }

    /// Writes a value on condition that the subject's last sequence is `expected`; 0 means that it has no message.
    ///
    /// # Errors
    ///
    /// Only if certainly nothing was written; otherwise the outcome is [`WriteOutcome::Unclear`]. `Unavailable` while
    /// the connection is down.
    pub(super) async fn write(
        &self,
        subject: &str,
        expected: u64,
        write: KeyWrite,
        until: ApiDeadline,
    ) -> Result<WriteOutcome, ApiError> {
        #[derive(Deserialize)]
        struct Acknowledged {
            error: Option<JetStreamError>,
            #[serde(default)]
            seq: u64,
        }
        // The client library keeps requests that are made while the connection is down, and sends them over the next
        // one, even if their callers have given up. A server that crashed may by then have given the expected sequence
        // to the record of another holder, which the write would replace.
        if self.client.connection_state() != State::Connected {
            let message = "the connection to the server is down";
            return Err(ApiError::Failed(Error::new(ErrorKind::Unavailable, message)));
        }
        let mut headers = HeaderMap::new();
        headers.insert(EXPECTED, expected.to_string());
        if let Some(operation) = write.operation {
            headers.insert(OPERATION, operation);
        }
        if let Some(record_header) = write.record_header {
            headers.insert(RECORD_HEADER, record_header);
        }
        let request = Request::new().headers(headers).payload(write.value.into());
        let reply = match self.send(subject, request, until).await {
            Ok(reply) => reply,
            // A publish without permission is dropped by the server: certainly not written.
            Err(error) if error.kind() == ErrorKind::Denied => {
                return Err(ApiError::Failed(error));
            }
            Err(error) => return Ok(WriteOutcome::Unclear(error)),
        };
        let parsed = serde_json::from_slice::<Acknowledged>(&reply);
        let Acknowledged { error, seq } = match parsed {
            Ok(acknowledged) => acknowledged,
            Err(error) => return Ok(WriteOutcome::Unclear(unreadable(&error))),
        };
        match error {
            None if seq > 0 => Ok(WriteOutcome::Done(seq)),
            None => Ok(WriteOutcome::Unclear(unknown_outcome(
                "the server's acknowledgement has no sequence",
            ))),
            Some(JetStreamError { err_code: WRONG_LAST_SEQUENCE | WRITE_UNDER_WAY, .. }) => {
                Ok(WriteOutcome::Conflict)
            }
            // A server error may come after the write was proposed to the cluster.
            Some(refusal) if refusal.code >= 500 && !refusal.is_limit() => {
                Ok(WriteOutcome::Unclear(refusal.into()))
            }
            Some(refusal) => Err(ApiError::Refused(refusal)),
        }
    }

    /// Reads the last message of a subject from the leader of the stream, never from a replica that may lag.
    pub(super) async fn last_message(
        &self,
        stream: &str,
        subject: &str,
        until: ApiDeadline,
    ) -> Result<Option<Message>> {
        #[derive(Deserialize)]
        struct FoundMessage {
            message: Stored,
        }
        #[derive(Deserialize)]
        struct Stored {
            subject: String,
            seq: u64,
            #[serde(default)]
            hdrs: String,
            #[serde(default)]
            data: String,
            time: String,
        }
        let body = json!({ "last_by_subj": subject });
        match self.request::<FoundMessage>(&format!("STREAM.MSG.GET.{stream}"), &body, until).await
        {
            Ok(FoundMessage { message: Stored { subject, seq, hdrs, data, time } }) => {
                let decode = |text: &str| STANDARD.decode(text).map_err(|error| unreadable(&error));
                let headers = String::from_utf8_lossy(&decode(&hdrs)?).into_owned();
                let deleted = headers.lines().any(is_end_marker);
                let value = if deleted { None } else { Some(decode(&data)?) };
                let record_header = headers
                    .lines()
                    .find_map(|line| line.strip_prefix(RECORD_HEADER)?.strip_prefix(':'));
                Ok(Some(Message {
                    subject,
                    sequence: seq,
                    timestamp: parse_timestamp(&time)?,
                    record_header: record_header.map(|text| text.trim().to_owned()),
                    value,
                }))
            }
            Err(ApiError::Refused(JetStreamError { err_code: NO_MESSAGE, .. })) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Sends a request to the JetStream API and parses the reply.
    pub(super) async fn request<T: DeserializeOwned>(
        &self,
        subject: &str,
        body: &Value,
        until: ApiDeadline,
    ) -> Result<T, ApiError> {
        let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        let request = Request::new().payload(body.into());
        let reply = self.send(&format!("$JS.API.{subject}"), request, until).await;
        let reply = reply.map_err(|error| {
            // These requests only read, or may be repeated. So a missing reply is `Unavailable`, and does not make the
            // outcome of a claim `Unknown`.
            ApiError::Failed(if error.kind() == ErrorKind::Unknown {
                Error::new(ErrorKind::Unavailable, error.to_string()).because(error)
            } else {
                error
            })
        })?;
        let value: Value =
            serde_json::from_slice(&reply).map_err(|error| ApiError::Failed(unreadable(&error)))?;
        if let Some(error) = value.get("error") {
            let refusal = serde_json::from_value(error.clone());
            return Err(refusal
                .map_or_else(|error| ApiError::Failed(unreadable(&error)), ApiError::Refused));
        }
        serde_json::from_value(value).map_err(|error| ApiError::Failed(unreadable(&error)))
    }

    /// Sends one request and waits for its reply until the deadline.
    async fn send(&self, subject: &str, request: Request, until: ApiDeadline) -> Result<Vec<u8>> {
        // The library's own timeout is not used: its clock stops while the machine is suspended.
        let sent = self.clock.now();
        let reply = self.client.send_request(subject.to_owned(), request.timeout(None));
        tokio::select! {
            biased;
            reply = reply => match reply {
                Ok(message) => Ok(message.payload.to_vec()),
                Err(error) if error.kind() == RequestErrorKind::NoResponders => {
                    Err(unknown_outcome("no server answers for the stream: is JetStream on, and does the stream have a leader?").because(error))
                }
                Err(error) => Err(unknown_outcome("the request failed in transit").because(error)),
            },
            // A request without permission gets no reply, only an error on the connection.
            text = self.async_errors.wait_for(subject, sent) => {
                let message = format!("the server refused: {text}; grant the account the permission");
                Err(Error::new(ErrorKind::Denied, message))
            }
            () = self.clock.sleep_until(until.0) => Err(unknown_outcome("no answer in time")),
        }
    }
}

/// True if a header line marks the message as a deletion or expiry.
fn is_end_marker(line: &str) -> bool {
    let Some((name, value)) = line.split_once(':') else { return false };
    name.eq_ignore_ascii_case(MARKER)
        || name.eq_ignore_ascii_case(OPERATION) && matches!(value.trim(), "DEL" | "PURGE")
}

/// True if the headers of a delivered message mark it as a deletion or expiry.
pub(super) fn has_end_marker(headers: &HeaderMap) -> bool {
    headers.get(MARKER).is_some()
        || headers.get(OPERATION).is_some_and(|what| matches!(what.as_str(), "DEL" | "PURGE"))
}

/// Parses a timestamp of the server, into nanoseconds since 1970.
pub(super) fn parse_timestamp(text: &str) -> Result<u64> {
    let time = humantime::parse_rfc3339(text).map_err(|error| unreadable(&error))?;
    let since = time.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    Ok(u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}

fn unknown_outcome(message: &str) -> Error {
    Error::new(ErrorKind::Unknown, message)
}

fn unreadable(error: &(impl std::error::Error + ?Sized)) -> Error {
    Error::new(ErrorKind::Unavailable, format!("cannot parse the server's reply: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn end_markers_are_distinguished_from_values() {
        for line in ["KV-Operation: DEL", "kv-operation:PURGE", "Nats-Marker-Reason: MaxAge"] {
            assert!(is_end_marker(line), "{line}");
        }
        for line in ["NATS/1.0", "KV-Operation: PUT", "Nats-Expected-Last-Subject-Sequence: 3"] {
            assert!(!is_end_marker(line), "{line}");
        }
    }

    #[test]
    fn timestamps_of_the_server_are_read_to_the_nanosecond() {
        assert_eq!(parse_timestamp("1970-01-01T00:00:01.000000002Z").unwrap(), 1_000_000_002);
        assert_eq!(parse_timestamp("1970-01-01T00:00:00Z").unwrap(), 0);
        assert!(parse_timestamp("yesterday").is_err());
    }

    #[test]
    fn refusals_keep_their_error_code() {
        let refusal = |code, err_code| {
            Error::from(JetStreamError { code, err_code, description: "so it is".to_owned() })
        };
        let off = refusal(503, JETSTREAM_OFF);
        assert_eq!(off.kind(), ErrorKind::Misconfigured);
        assert!(off.to_string().contains("10076") && off.to_string().contains("turn JetStream on"));
        assert_eq!(refusal(503, 10_008).kind(), ErrorKind::Unavailable);
        assert_eq!(refusal(403, 10_100).kind(), ErrorKind::Denied);
        for (code, err_code) in [(400, 10_058), (404, NO_STREAM), (400, MESSAGE_TOO_LONG)] {
            assert_eq!(refusal(code, err_code).kind(), ErrorKind::Misconfigured, "{err_code}");
        }
        // Only an error that names a limit proves that nothing was written.
        let failed = |description: &str| JetStreamError {
            code: 503,
            err_code: STORE_FAILED,
            description: description.to_owned(),
        };
        assert!(failed("maximum bytes exceeded").is_limit());
        assert!(!failed("no space left on device").is_limit());
    }

    #[test]
    fn limits_that_can_end_by_themselves_are_waited_for() {
        let kind = |code, err_code, description: &str| {
            JetStreamError { code, err_code, description: description.to_owned() }.kind()
        };
        for err_code in LIMITS_REACHED {
            assert_eq!(kind(400, err_code, "a limit"), ErrorKind::Unavailable, "{err_code}");
        }
        let full = "maximum messages exceeded";
        assert_eq!(kind(400, STORE_FAILED, full), ErrorKind::Unavailable);
        let no_peers = "no suitable peers for placement";
        let offline = format!("{no_peers}, peer offline");
        assert_eq!(kind(400, NO_PEERS, &offline), ErrorKind::Unavailable);
        assert_eq!(kind(400, NO_PEERS, no_peers), ErrorKind::Misconfigured);
    }
}
