//! HTTP requests to a store: signed, one attempt each, with a deadline, and every outcome distinguished.
//!
//! No storage client library is used: those retry on their own, hide the headers with the store's times, and do not
//! read a bucket's settings.

use std::error::Error as StdError;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode};
use reqsign_core::{Context, ErrorKind as SignError, HttpSend, OsEnv, Signer, SigningCredential};
use tenure_core::escape::Escape;

use super::bucket::{BucketDeadline, BucketError, MAX_LOCK_BYTES};
use super::dates;
use super::xml;
use crate::{Clock, Error, ErrorKind, Result};

/// Signature method of requests.
#[derive(Clone, Debug)]
pub(super) enum Signing {
    Anonymous,
    Google(Signer<reqsign_google::Credential>),
    Amazon(Signer<reqsign_aws_v4::Credential>),
    Azure(Signer<reqsign_azure_storage::Credential>),
}

/// HTTP client of a store.
#[derive(Clone, Debug)]
pub(super) struct Web {
    client: reqwest::Client,
    pub(super) signing: Signing,
    pub(super) clock: Clock,
}

/// Reply of a store.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: Vec<u8>,
    /// Time of the store.
    pub(super) now: Duration,
}

/// Size of the largest reply that is read: a page of a listing.
const MAX_REPLY_BYTES: usize = 4 * 1024 * 1024;

impl Web {
    pub(super) fn new(clock: Clock) -> Result<Self> {
        let failed = |error: Box<dyn StdError + Send + Sync>| {
            Error::new(ErrorKind::Unavailable, "cannot create an HTTP client").because(error)
        };
        let client = reqwest::Client::builder()
            .tls_backend_preconfigured(tls().map_err(|error| failed(Box::new(error)))?)
            .redirect(reqwest::redirect::Policy::none())
            .pool_idle_timeout(Duration::from_secs(45))
            .tcp_nodelay(true)
            .user_agent(concat!("tenure/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|error| failed(Box::new(error)))?;
        Ok(Self { client, signing: Signing::Anonymous, clock })
    }

    /// Context in which signers find credentials.
    pub(super) fn context(&self) -> Context {
        Context::new()
            .with_env(OsEnv)
            .with_file_read(reqsign_file_read_tokio::TokioFileRead)
            .with_command_execute(reqsign_command_execute_tokio::TokioCommandExecute)
            .with_http_send(Fetch(self.client.clone()))
    }

    /// Builds a request and sends it.
    pub(super) async fn ask(
        &self,
        method: Method,
        url: &str,
        headers: &[(&'static str, &str)],
        body: Vec<u8>,
        until: BucketDeadline,
    ) -> Result<Reply, BucketError> {
        self.send(request(method, url, headers, body)?, until).await
    }

    /// Sends one request. A missing answer is [`BucketError::Ambiguous`]. A reply with any status is `Ok`.
    async fn send(
        &self,
        request: Request<Bytes>,
        until: BucketDeadline,
    ) -> Result<Reply, BucketError> {
        tokio::select! {
            biased;
            reply = self.exchange(request) => reply,
            () = self.clock.sleep_until(until.0) => {
                Err(BucketError::Ambiguous("no answer in time".to_owned()))
            }
        }
    }

    async fn exchange(&self, request: Request<Bytes>) -> Result<Reply, BucketError> {
        let (mut head, body) = request.into_parts();
        match &self.signing {
            Signing::Anonymous => {}
            Signing::Google(signer) => sign(signer, &mut head).await?,
            Signing::Amazon(signer) => sign(signer, &mut head).await?,
            Signing::Azure(signer) => sign(signer, &mut head).await?,
        }
        let request = reqwest::Request::try_from(Request::from_parts(head, body));
        let request = request
            .map_err(|error| BucketError::Permanent(Error::chain_of(&error.without_url())))?;
        let mut reply = self.client.execute(request).await.map_err(|error| {
            let unsent = error.is_connect() || error.is_builder();
            let words = Error::chain_of(&error.without_url());
            if unsent {
                BucketError::Unreachable(format!("cannot connect: is the store up? {words}"))
            } else {
                BucketError::Ambiguous(format!("the connection broke: {words}"))
            }
        })?;
        let date = reply.headers().get(http::header::DATE).and_then(|date| date.to_str().ok());
        let now = date.and_then(dates::http);
        let (status, headers) = (reply.status(), std::mem::take(reply.headers_mut()));
        let mut body = Vec::new();
        loop {
            let chunk = reply.chunk().await.map_err(|error| {
                let words = Error::chain_of(&error.without_url());
                BucketError::Ambiguous(format!("the connection broke during the reply: {words}"))
            })?;
            let Some(chunk) = chunk else { break };
            if body.len() + chunk.len() > MAX_REPLY_BYTES {
                return Err(BucketError::Permanent(too_large()));
            }
            body.extend_from_slice(&chunk);
        }
        // Without the store's time the age of a hold cannot be judged. The reply may be that of a proxy whose store is
        // away, so it is waited for; and a write that it answers may have taken effect.
        let now = now.ok_or_else(|| {
            let what = format!("the store answered {status} without its time: no Date header");
            BucketError::Ambiguous(what)
        })?;
        Ok(Reply { status, headers, body, now })
    }
}

/// TLS configuration with the system's root certificates, loaded once, and the crypto provider of the other stores.
fn tls() -> Result<rustls::ClientConfig, rustls::Error> {
    static READ: OnceLock<rustls::ClientConfig> = OnceLock::new();
    if let Some(read) = READ.get() {
        return Ok(read.clone());
    }
    let mut roots = rustls::RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(READ.get_or_init(|| tls).clone())
}

impl Reply {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// Content of the object, if it is not too large for a lock.
    pub(super) fn into_lock_body(self) -> Result<Vec<u8>, BucketError> {
        if self.body.len() > MAX_LOCK_BYTES {
            return Err(BucketError::Permanent(too_large()));
        }
        Ok(self.body)
    }

    /// Error for an unexpected status.
    pub(super) fn error(&self) -> BucketError {
        let status = self.status;
        let message = self.message();
        match status.as_u16() {
            429 => BucketError::Throttled,
            401 | 403 => BucketError::Denied(format!("the store refused ({status}{message})")),
            408 | 500..=599 => {
                BucketError::Ambiguous(format!("the store failed ({status}{message})"))
            }
            // Not a word of the store: a proxy or a login page answers in its place, perhaps only for a while.
            _ if message.is_empty() => BucketError::Ambiguous(format!(
                "the answer {status} has no error message of a store: is there a proxy in between?"
            )),
            _ => BucketError::Permanent(format!("the store answered {status}{message}")),
        }
    }

    /// The store's error message, shortened, and nothing else of the reply.
    fn message(&self) -> String {
        let json: Option<serde_json::Value> = serde_json::from_slice(&self.body).ok();
        let message = match json {
            Some(json) => json["error"]["message"].as_str().map(str::to_owned),
            None => xml::text(&self.body, "Message").or_else(|| xml::text(&self.body, "Code")),
        };
        let message = message.unwrap_or_default();
        let plain =
            message.split(|c: char| c.is_control() || c == ' ').filter(|word| !word.is_empty());
        let plain = plain.collect::<Vec<_>>().join(" ");
        let cut = plain.char_indices().nth(200).map_or(plain.len(), |(at, _)| at);
        if plain.is_empty() { plain } else { format!(": {}", &plain[..cut]) }
    }
}

fn too_large() -> String {
    "the object is too large for a lock and is left alone: choose another key".to_owned()
}

async fn sign<K: SigningCredential>(
    signer: &Signer<K>,
    head: &mut http::request::Parts,
) -> Result<(), BucketError> {
    signer.sign(head, None).await.map_err(|error| match error.kind() {
        SignError::RateLimited | SignError::Unexpected => {
            BucketError::Unreachable(format!("cannot obtain credentials: {error}"))
        }
        _ => BucketError::Denied(format!("no credentials: {error}")),
    })
}

/// Client of the requests that fetch credentials.
#[derive(Debug)]
struct Fetch(reqwest::Client);

impl HttpSend for Fetch {
    async fn http_send(
        &self,
        request: Request<Bytes>,
    ) -> reqsign_core::Result<http::Response<Bytes>> {
        let failed = |error: reqwest::Error| {
            reqsign_core::Error::unexpected("the request for credentials failed")
                .with_source(error.without_url())
        };
        let request = reqwest::Request::try_from(request).map_err(failed)?;
        let reply = self.0.execute(request).await.map_err(failed)?;
        let mut answer = http::Response::builder().status(reply.status());
        if let Some(headers) = answer.headers_mut() {
            *headers = reply.headers().clone();
        }
        let body = reply.bytes().await.map_err(failed)?;
        answer.body(body).map_err(|error| {
            reqsign_core::Error::unexpected("the reply to the request for credentials is invalid")
                .with_source(error)
        })
    }
}

/// Builds a request.
fn request(
    method: Method,
    url: &str,
    headers: &[(&'static str, &str)],
    body: Vec<u8>,
) -> Result<Request<Bytes>, BucketError> {
    let mut request = Request::builder().method(method).uri(url);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let failed = |error: http::Error| BucketError::Permanent(format!("invalid address: {error}"));
    request.body(Bytes::from(body)).map_err(failed)
}

/// Percent-encodes text for a URL's path or query, except the bytes in `keep`.
pub(super) fn encode(text: &str, keep: &[u8]) -> String {
    let is_plain =
        |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) || keep.contains(&byte);
    Escape::PERCENT.encode(text.as_bytes(), is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(status: u16, body: &str) -> Reply {
        let status = StatusCode::from_u16(status).unwrap();
        let (headers, body) = (HeaderMap::new(), body.as_bytes().to_vec());
        Reply { status, headers, body, now: Duration::ZERO }
    }

    #[test]
    fn replies_are_classified_by_their_possible_effect() {
        let error = |status| reply(status, "").error();
        assert!(matches!(error(429), BucketError::Throttled));
        for status in [401, 403] {
            assert!(matches!(error(status), BucketError::Denied(_)), "{status}");
        }
        for status in [408, 500, 502, 503, 504] {
            assert!(matches!(error(status), BucketError::Ambiguous(_)), "{status}");
        }
        for status in [301, 400, 405, 411] {
            let refusal = reply(status, "<Error><Message>no such method</Message></Error>");
            assert!(matches!(refusal.error(), BucketError::Permanent(_)), "{status}");
            let nonsense = reply(status, "<html>log in</html>");
            assert!(matches!(nonsense.error(), BucketError::Ambiguous(_)), "{status}");
        }
    }

    #[test]
    fn of_a_refusal_only_its_message_is_repeated() {
        let xml = "<Error><Code>No</Code><Message>not\nnow</Message><AWSAccessKeyId>AKIA7</AWSAccessKeyId></Error>";
        assert_eq!(reply(403, xml).message(), ": not now");
        let json = r#"{"error":{"code":403,"message":"not you"},"token":"hunter2"}"#;
        assert_eq!(reply(403, json).message(), ": not you");
        assert_eq!(reply(403, "<html>hunter2</html>").message(), "");
        assert_eq!(reply(403, "hunter2").message(), "");
    }

    #[test]
    fn names_are_encoded_byte_by_byte() {
        assert_eq!(encode("a/b c%é", &[]), "a%2Fb%20c%25%C3%A9");
        assert_eq!(encode("a/b~.-_", b"/"), "a/b~.-_");
    }
}
