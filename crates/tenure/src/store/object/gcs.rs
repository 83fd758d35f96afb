//! Google Cloud Storage, through its JSON API. A version is a generation.

use std::time::Duration;

use async_trait::async_trait;
use http::Method;
use reqsign_core::Signer;
use serde::Deserialize;
use serde_json::json;

use super::bucket::{
    Bucket, BucketDeadline, BucketError, ObjectVersion, ReadResult, Setting, SwapResult,
    WriteReceipt,
};
use super::dates;
use super::options::{Options, variable};
use super::web::{Reply, Signing, Web, encode};
use crate::Result;

const HOST: &str = "https://storage.googleapis.com";
/// Variable with the address of an emulator, as in Google's own clients. If it is set, requests are not signed.
const EMULATOR: &str = "STORAGE_EMULATOR_HOST";

#[derive(Debug)]
pub(super) struct Gcs {
    web: Web,
    host: String,
    bucket: String,
}

/// Metadata of an object.
#[derive(Deserialize)]
struct Metadata {
    #[serde(default)]
    name: String,
    generation: String,
    #[serde(default)]
    updated: Option<String>,
}

impl Gcs {
    pub(super) fn open(options: &Options, mut web: Web) -> Self {
        let emulator = variable(&[EMULATOR]).filter(|_| options.endpoint.is_none());
        if !options.anonymous && emulator.is_none() {
            let provider = reqsign_google::DefaultCredentialProvider::new();
            let signer = reqsign_google::RequestSigner::new("storage");
            web.signing = Signing::Google(Signer::new(web.context(), provider, signer));
        }
        let emulator = emulator.map(|host| {
            let host = host.trim_end_matches('/');
            if host.contains("://") { host.to_owned() } else { format!("http://{host}") }
        });
        let host = options.endpoint.clone().or(emulator).unwrap_or_else(|| HOST.to_owned());
        Self { web, host, bucket: options.bucket.clone() }
    }

    fn object(&self, name: &str) -> String {
        let Self { host, bucket, .. } = self;
        format!("{host}/storage/v1/b/{bucket}/o/{}", encode(name, &[]))
    }

    /// Error of a 404 that is about the bucket and not the object.
    fn no_bucket(&self, reply: &Reply) -> Option<BucketError> {
        let text = String::from_utf8_lossy(&reply.body);
        let missing = text.contains("bucket does not exist") || text.contains("No such bucket");
        missing.then(|| self.bucket_is_missing())
    }

    fn bucket_is_missing(&self) -> BucketError {
        BucketError::Permanent(format!("there is no bucket {}: create it first", self.bucket))
    }

    async fn get(&self, url: &str, until: BucketDeadline) -> Result<Reply, BucketError> {
        self.web.ask(Method::GET, url, &[], Vec::new(), until).await
    }

    /// Deletes an object. True if it was there, at the version in the URL.
    async fn delete(&self, url: &str, until: BucketDeadline) -> Result<bool, BucketError> {
        let reply = self.web.ask(Method::DELETE, url, &[], Vec::new(), until).await?;
        match reply.status.as_u16() {
            200 | 204 => Ok(true),
            404 | 412 => Ok(false),
            _ => Err(reply.error()),
        }
    }

    async fn metadata(
        &self,
        name: &str,
        until: BucketDeadline,
    ) -> Result<Option<Metadata>, BucketError> {
        let reply = self.get(&self.object(name), until).await?;
        match reply.status.as_u16() {
            200 => Ok(Some(parse(&reply)?)),
            404 => Ok(None),
            _ => Err(reply.error()),
        }
    }

    /// Version and time of the content that was read, if the reply has them.
    fn version(reply: &Reply) -> Option<(ObjectVersion, Duration)> {
        let generation = reply.header("x-goog-generation")?;
        let modified = reply.header("last-modified").and_then(dates::http)?;
        Some((ObjectVersion(generation.to_owned()), modified))
    }

    /// Reads metadata and content in two requests, for servers that report less with the content than Google's.
    async fn read_twice(
        &self,
        name: &str,
        now: Duration,
        until: BucketDeadline,
    ) -> Result<ReadResult, BucketError> {
        let Some(found) = self.metadata(name, until).await? else {
            return Ok(ReadResult::Absent { now });
        };
        let generation = found.generation;
        let exact = format!("{}?alt=media&ifGenerationMatch={generation}", self.object(name));
        let reply = self.get(&exact, until).await?;
        if reply.status != http::StatusCode::OK {
            let what = "the object changed between two reads: try again";
            return Err(BucketError::Unreachable(what.to_owned()));
        }
        let modified = found.updated.as_deref().and_then(dates::rfc3339).ok_or_else(|| {
            BucketError::Permanent("the store does not report when an object changed".to_owned())
        })?;
        let (version, now) = (ObjectVersion(generation), reply.now);
        Ok(ReadResult::Present { body: reply.into_lock_body()?, version, modified, now })
    }
}

#[async_trait]
impl Bucket for Gcs {
    async fn read(
        &self,
        name: &str,
        unless: Option<&ObjectVersion>,
        until: BucketDeadline,
    ) -> Result<ReadResult, BucketError> {
        let url = format!("{}?alt=media", self.object(name));
        let conditional = match unless {
            Some(ObjectVersion(generation)) => format!("{url}&ifGenerationNotMatch={generation}"),
            None => url.clone(),
        };
        let reply = self.get(&conditional, until).await?;
        let now = reply.now;
        match reply.status.as_u16() {
            304 => Ok(ReadResult::Unchanged { now }),
            404 => self.no_bucket(&reply).map_or(Ok(ReadResult::Absent { now }), Err),
            200 => match Self::version(&reply) {
                Some((version, modified)) => Ok(ReadResult::Present {
                    body: reply.into_lock_body()?,
                    version,
                    modified,
                    now,
                }),
                None => self.read_twice(name, now, until).await,
            },
            _ => Err(reply.error()),
        }
    }

    async fn swap(
        &self,
        name: &str,
        expected: Option<&ObjectVersion>,
        body: Vec<u8>,
        until: BucketDeadline,
    ) -> Result<SwapResult, BucketError> {
        let Self { host, bucket, .. } = self;
        let generation = expected.map_or("0", |version| &*version.0);
        let url = format!(
            "{host}/upload/storage/v1/b/{bucket}/o?uploadType=multipart&ifGenerationMatch={generation}"
        );
        let about = json!({
            "name": name,
            "contentType": "application/json",
            "cacheControl": "no-store",
        });
        let (boundary, kind) = boundary(&body);
        let mut parts = format!(
            "--{boundary}\r\ncontent-type: application/json; charset=UTF-8\r\n\r\n{about}\r\n\
             --{boundary}\r\ncontent-type: application/json\r\n\r\n"
        )
        .into_bytes();
        parts.extend_from_slice(&body);
        parts.extend_from_slice(format!("\r\n--{boundary}--\r\n").as_bytes());
        let headers = [("content-type", &*kind)];
        let reply = self.web.ask(Method::POST, &url, &headers, parts, until).await?;
        match reply.status.as_u16() {
            200 => {
                let about: Metadata = parse(&reply)?;
                let modified = about.updated.as_deref().and_then(dates::rfc3339);
                Ok(SwapResult::Won(WriteReceipt {
                    version: ObjectVersion(about.generation),
                    modified,
                    now: reply.now,
                }))
            }
            412 => Ok(SwapResult::Lost),
            404 => Err(self.bucket_is_missing()),
            _ => Err(reply.error()),
        }
    }

    async fn clear(
        &self,
        name: &str,
        version: &ObjectVersion,
        until: BucketDeadline,
    ) -> Result<(), BucketError> {
        self.remove(name, version, until).await.map(drop)
    }

    async fn remove(
        &self,
        name: &str,
        version: &ObjectVersion,
        until: BucketDeadline,
    ) -> Result<bool, BucketError> {
        let url = format!("{}?ifGenerationMatch={}", self.object(name), version.0);
        self.delete(&url, until).await
    }

    async fn erase(&self, name: &str, until: BucketDeadline) -> Result<(), BucketError> {
        self.delete(&self.object(name), until).await.map(drop)
    }

    async fn list(
        &self,
        prefix: &str,
        after: Option<&str>,
        until: BucketDeadline,
    ) -> Result<Vec<String>, BucketError> {
        #[derive(Deserialize)]
        struct Page {
            #[serde(default)]
            items: Vec<Metadata>,
        }
        let Self { host, bucket, .. } = self;
        let mut url = format!("{host}/storage/v1/b/{bucket}/o?prefix={}", encode(prefix, &[]));
        if let Some(after) = after {
            // The listing includes this name: it is filtered out below.
            url = format!("{url}&startOffset={}", encode(after, &[]));
        }
        let reply = self.get(&url, until).await?;
        match reply.status.as_u16() {
            200 => {
                let page: Page = parse(&reply)?;
                let names = page.items.into_iter().map(|item| item.name);
                Ok(names.filter(|name| after.is_none_or(|after| &**name > after)).collect())
            }
            404 => Err(self.bucket_is_missing()),
            _ => Err(reply.error()),
        }
    }

    async fn settings(&self, until: BucketDeadline) -> Result<Vec<Setting>, BucketError> {
        #[derive(Default, Deserialize)]
        #[serde(rename_all = "camelCase", default)]
        struct Facts {
            versioning: Versioning,
            soft_delete_policy: SoftDelete,
        }
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Versioning {
            enabled: bool,
        }
        #[derive(Default, Deserialize)]
        #[serde(rename_all = "camelCase", default)]
        struct SoftDelete {
            retention_duration_seconds: Option<String>,
        }
        let url = format!("{}/storage/v1/b/{}", self.host, self.bucket);
        let reply = self.get(&url, until).await?;
        let facts: Facts = match reply.status.as_u16() {
            200 => parse(&reply)?,
            404 => return Err(self.bucket_is_missing()),
            _ => return Err(reply.error()),
        };
        let kept = facts.soft_delete_policy.retention_duration_seconds;
        let kept =
            kept.and_then(|kept| kept.parse().ok()).map_or(Duration::ZERO, Duration::from_secs);
        Ok(vec![
            Setting {
                what: "soft delete",
                good: kept.is_zero(),
                detail: if kept.is_zero() {
                    "off".to_owned()
                } else {
                    format!("every renewal leaves a copy for {} days", kept.as_secs() / 86_400)
                },
                advice: "turn it off: gcloud storage buckets update gs://BUCKET --clear-soft-delete",
            },
            Setting {
                what: "versioning",
                good: !facts.versioning.enabled,
                detail: if facts.versioning.enabled {
                    "every renewal leaves a copy forever".to_owned()
                } else {
                    "off".to_owned()
                },
                advice: "turn it off: gcloud storage buckets update gs://BUCKET --no-versioning",
            },
        ])
    }

    fn rights(&self) -> &'static str {
        "storage.objects.get, .create and .delete on the prefix (roles/storage.objectUser)"
    }
}

/// A boundary that is not in the body, and the content type that names it.
fn boundary(body: &[u8]) -> (String, String) {
    let mut boundary = "tenure".to_owned();
    while body.windows(boundary.len()).any(|part| part == boundary.as_bytes()) {
        boundary.push('x');
    }
    let kind = format!("multipart/related; boundary={boundary}");
    (boundary, kind)
}

fn parse<'a, T: Deserialize<'a>>(reply: &'a Reply) -> Result<T, BucketError> {
    // The request succeeded, but its result is unknown.
    serde_json::from_slice(&reply.body)
        .map_err(|error| BucketError::Ambiguous(format!("cannot parse the store's reply: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boundary_is_never_in_the_body() {
        for body in ["{}", "tenure", "a tenurex b tenure"] {
            let (boundary, kind) = boundary(body.as_bytes());
            assert!(!body.contains(&boundary), "{body}");
            assert!(kind.ends_with(&boundary));
        }
    }
}
