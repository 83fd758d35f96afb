//! Common protocol of S3 and Azure: versions are entity tags, and conditions are headers. [`EtagQuirks`] holds the
//! differences.

use http::Method;

use super::bucket::{
    BucketDeadline, BucketError, ObjectVersion, ReadResult, SwapResult, WriteReceipt,
};
use super::dates;
use super::web::{Reply, Web, encode};
use crate::Result;

/// A bucket whose object versions are entity tags.
#[derive(Debug)]
pub(super) struct EtagBucket {
    pub(super) web: Web,
    /// Address of the bucket, to which a slash and the object's name are added.
    pub(super) base: String,
    pub(super) bucket: String,
    pub(super) quirks: &'static EtagQuirks,
}

/// Names and codes in which the clouds differ.
#[derive(Debug)]
pub(super) struct EtagQuirks {
    /// Headers of every request.
    pub(super) common_headers: &'static [(&'static str, &'static str)],
    /// Headers of a write.
    pub(super) write_headers: &'static [(&'static str, &'static str)],
    /// True if the signature of a write covers its length.
    pub(super) signs_length: bool,
    /// Reads the cloud's error code from a reply.
    pub(super) error_code: fn(&Reply) -> Option<String>,
    /// Error code of a missing bucket.
    pub(super) missing_bucket_code: &'static str,
    /// Error code of a 503 that certainly had no effect.
    pub(super) throttled_code: &'static str,
    /// The cloud's term for a bucket.
    pub(super) bucket_noun: &'static str,
}

impl EtagBucket {
    /// Sends one request.
    pub(super) async fn ask(
        &self,
        method: Method,
        url: &str,
        more: &[(&'static str, &str)],
        body: Vec<u8>,
        until: BucketDeadline,
    ) -> Result<Reply, BucketError> {
        let length = body.len().to_string();
        let mut headers = [self.quirks.common_headers, more].concat();
        if self.quirks.signs_length && method == Method::PUT {
            headers.push(("content-length", &length));
        }
        self.web.ask(method, url, &headers, body, until).await
    }

    /// Sends a GET request about the bucket itself, with `query` appended to its address. Any status but 200 is an
    /// error.
    pub(super) async fn ask_bucket(
        &self,
        query: &str,
        until: BucketDeadline,
    ) -> Result<Reply, BucketError> {
        let url = format!("{}{query}", self.base);
        let reply = self.ask(Method::GET, &url, &[], Vec::new(), until).await?;
        if reply.status.as_u16() == 200 { Ok(reply) } else { Err(self.error(&reply)) }
    }

    pub(super) async fn read(
        &self,
        name: &str,
        unless: Option<&ObjectVersion>,
        until: BucketDeadline,
    ) -> Result<ReadResult, BucketError> {
        let condition = unless.map(|ObjectVersion(tag)| ("if-none-match", &**tag));
        let url = self.object(name)?;
        let reply = self.ask(Method::GET, &url, condition.as_slice(), Vec::new(), until).await?;
        let now = reply.now;
        match reply.status.as_u16() {
            200 => {
                let modified = reply.header("last-modified").and_then(dates::http);
                let (Some(version), Some(modified)) = (version(&reply), modified) else {
                    // Perhaps a page of a proxy: waited for, as any answer that is not the store's.
                    let what = "the store does not report the version and time of an object";
                    return Err(BucketError::Ambiguous(what.to_owned()));
                };
                Ok(ReadResult::Present { body: reply.into_lock_body()?, version, modified, now })
            }
            304 => Ok(ReadResult::Unchanged { now }),
            404 if !self.lacks_bucket(&reply) => Ok(ReadResult::Absent { now }),
            _ => Err(self.error(&reply)),
        }
    }

    pub(super) async fn swap(
        &self,
        name: &str,
        expected: Option<&ObjectVersion>,
        body: Vec<u8>,
        until: BucketDeadline,
    ) -> Result<SwapResult, BucketError> {
        let condition = match expected {
            Some(ObjectVersion(tag)) => ("if-match", &**tag),
            None => ("if-none-match", "*"),
        };
        let headers = [&[condition][..], self.quirks.write_headers].concat();
        let reply = self.ask(Method::PUT, &self.object(name)?, &headers, body, until).await?;
        match reply.status.as_u16() {
            200 | 201 => match version(&reply) {
                Some(version) => {
                    // Azure reports the time in the reply to a write, S3 only in the reply to a read.
                    let modified = reply.header("last-modified").and_then(dates::http);
                    Ok(SwapResult::Won(WriteReceipt { version, modified, now: reply.now }))
                }
                None => {
                    Err(BucketError::Ambiguous("the store does not report the version".to_owned()))
                }
            },
            // 409: another write of the same object was in flight.
            409 | 412 => Ok(SwapResult::Lost),
            404 if !self.lacks_bucket(&reply) => Ok(SwapResult::Lost),
            _ => Err(self.error(&reply)),
        }
    }

    /// Removes an object, on condition of a version if one is given. True if it was removed.
    pub(super) async fn remove(
        &self,
        name: &str,
        version: Option<&ObjectVersion>,
        until: BucketDeadline,
    ) -> Result<bool, BucketError> {
        let condition = version.map(|ObjectVersion(tag)| ("if-match", &**tag));
        let url = self.object(name)?;
        let reply = self.ask(Method::DELETE, &url, condition.as_slice(), Vec::new(), until).await?;
        match reply.status.as_u16() {
            200 | 202 | 204 => Ok(true),
            409 | 412 if condition.is_some() => Ok(false),
            404 if !self.lacks_bucket(&reply) => Ok(false),
            _ => Err(self.error(&reply)),
        }
    }

    /// Address of an object. Names with `.` or `..` as a part are refused: proxies and clients would resolve them.
    fn object(&self, name: &str) -> Result<String, BucketError> {
        if name.split('/').any(|part| matches!(part, "." | "..")) {
            let what = "a key with the parts . or .. cannot be the name of an object here: use another key";
            return Err(BucketError::Unnameable(what.to_owned()));
        }
        Ok(format!("{}/{}", self.base, encode(name, b"/")))
    }

    /// True if a 404 is about the bucket and not the object.
    fn lacks_bucket(&self, reply: &Reply) -> bool {
        (self.quirks.error_code)(reply).as_deref() == Some(self.quirks.missing_bucket_code)
    }

    fn error(&self, reply: &Reply) -> BucketError {
        let code = (self.quirks.error_code)(reply);
        match (reply.status.as_u16(), code.as_deref()) {
            (404, Some(code)) if code == self.quirks.missing_bucket_code => {
                let EtagQuirks { bucket_noun: bucket, .. } = self.quirks;
                BucketError::Permanent(format!(
                    "there is no {bucket} {}: create it first",
                    self.bucket
                ))
            }
            (503, Some(code)) if code == self.quirks.throttled_code => BucketError::Throttled,
            (501, _) | (400, Some("NotImplemented")) => BucketError::Permanent(
                "the store does not support conditional writes: it cannot keep locks".to_owned(),
            ),
            _ => reply.error(),
        }
    }
}

fn version(reply: &Reply) -> Option<ObjectVersion> {
    reply.header("etag").map(|tag| ObjectVersion(tag.to_owned()))
}
