//! Amazon S3 and compatible stores.

use async_trait::async_trait;
use reqsign_core::Signer;

use super::bucket::{
    Bucket, BucketDeadline, BucketError, EMPTY_BODY, ObjectVersion, ReadResult, Setting, SwapResult,
};
use super::etag::{EtagBucket, EtagQuirks};
use super::options::{Options, variable};
use super::web::{Signing, Web, encode};
use super::xml;
use crate::Result;

#[derive(Debug)]
pub(super) struct S3(EtagBucket);

const QUIRKS: EtagQuirks = EtagQuirks {
    common_headers: &[],
    write_headers: &[("content-type", "application/json"), ("cache-control", "no-store")],
    signs_length: false,
    error_code: |reply| xml::text(&reply.body, "Code"),
    missing_bucket_code: "NoSuchBucket",
    throttled_code: "SlowDown",
    bucket_noun: "bucket",
};

impl S3 {
    pub(super) fn open(options: &Options, mut web: Web) -> Self {
        let region = options.region.clone();
        let region = region.or_else(|| variable(&["AWS_REGION", "AWS_DEFAULT_REGION"]));
        let region = region.unwrap_or_else(|| "us-east-1".to_owned());
        if !options.anonymous {
            let provider = reqsign_aws_v4::DefaultCredentialProvider::new();
            let signer = reqsign_aws_v4::RequestSigner::new("s3", &region);
            web.signing = Signing::Amazon(Signer::new(web.context(), provider, signer));
        }
        let bucket = options.bucket.clone();
        let endpoint = options.endpoint.clone();
        let endpoint = endpoint.or_else(|| variable(&["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"]));
        let base = match endpoint {
            Some(endpoint) => format!("{}/{bucket}", endpoint.trim_end_matches('/')),
            // With dots in the bucket's name, the certificate does not match a virtual-hosted address.
            None if bucket.contains('.') => format!("https://s3.{region}.amazonaws.com/{bucket}"),
            None => format!("https://{bucket}.s3.{region}.amazonaws.com"),
        };
        Self(EtagBucket { web, base, bucket, quirks: &QUIRKS })
    }
}

#[async_trait]
impl Bucket for S3 {
    async fn read(
        &self,
        name: &str,
        unless: Option<&ObjectVersion>,
        until: BucketDeadline,
    ) -> Result<ReadResult, BucketError> {
        self.0.read(name, unless, until).await
    }

    async fn swap(
        &self,
        name: &str,
        expected: Option<&ObjectVersion>,
        body: Vec<u8>,
        until: BucketDeadline,
    ) -> Result<SwapResult, BucketError> {
        self.0.swap(name, expected, body, until).await
    }

    async fn clear(
        &self,
        name: &str,
        version: &ObjectVersion,
        until: BucketDeadline,
    ) -> Result<(), BucketError> {
        // Not every server supports conditional removal. An empty object counts as absent.
        self.swap(name, Some(version), EMPTY_BODY.to_vec(), until).await.map(drop)
    }

    async fn remove(
        &self,
        name: &str,
        version: &ObjectVersion,
        until: BucketDeadline,
    ) -> Result<bool, BucketError> {
        self.0.remove(name, Some(version), until).await
    }

    async fn erase(&self, name: &str, until: BucketDeadline) -> Result<(), BucketError> {
        self.0.remove(name, None, until).await.map(drop)
    }

    async fn list(
        &self,
        prefix: &str,
        after: Option<&str>,
        until: BucketDeadline,
    ) -> Result<Vec<String>, BucketError> {
        let mut query = format!("/?list-type=2&prefix={}", encode(prefix, &[]));
        if let Some(after) = after {
            query = format!("{query}&start-after={}", encode(after, &[]));
        }
        Ok(xml::texts(&self.0.ask_bucket(&query, until).await?.body, "Key"))
    }

    async fn settings(&self, until: BucketDeadline) -> Result<Vec<Setting>, BucketError> {
        let reply = self.0.ask_bucket("/?versioning=", until).await?;
        let on = xml::text(&reply.body, "Status").as_deref() == Some("Enabled");
        let detail = if on { "every renewal leaves a copy forever" } else { "off" };
        Ok(vec![Setting {
            what: "versioning",
            good: !on,
            detail: detail.to_owned(),
            advice: "use a bucket without it, or a lifecycle rule that expires old versions",
        }])
    }

    fn rights(&self) -> &'static str {
        "s3:GetObject, s3:PutObject and s3:ListBucket on the prefix, and gc s3:DeleteObject"
    }
}
