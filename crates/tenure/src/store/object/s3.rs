//! Amazon S3 and what speaks its protocol. A version is an entity tag.

use async_trait::async_trait;
use http::Method;
use reqsign_core::Signer;

use super::dates;
use super::options::Options;
use super::seam::{Bucket, Read, Setting, Swap, Trouble, Until, Version};
use super::web::{Reply, Signing, Web, encode, request};
use super::xml;
use crate::Result;

#[derive(Debug)]
pub(super) struct S3 {
    web: Web,
    /// What comes before an object's name.
    base: String,
    bucket: String,
}

impl S3 {
    pub(super) fn open(options: &Options, mut web: Web) -> Self {
        let variable = |names: [&str; 2]| {
            names.iter().find_map(|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
        };
        let region =
            options.region.clone().or_else(|| variable(["AWS_REGION", "AWS_DEFAULT_REGION"]));
        let region = region.unwrap_or_else(|| "us-east-1".to_owned());
        if !options.anonymous {
            let provider = reqsign_aws_v4::DefaultCredentialProvider::new();
            let signer = reqsign_aws_v4::RequestSigner::new("s3", &region);
            web.signing = Signing::Amazon(Signer::new(web.context(), provider, signer));
        }
        let bucket = options.bucket.clone();
        let endpoint = options.endpoint.clone();
        let endpoint = endpoint.or_else(|| variable(["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"]));
        let base = match endpoint {
            Some(endpoint) => format!("{}/{bucket}", endpoint.trim_end_matches('/')),
            // The certificate of the other form does not cover dots.
            None if bucket.contains('.') => format!("https://s3.{region}.amazonaws.com/{bucket}"),
            None => format!("https://{bucket}.s3.{region}.amazonaws.com"),
        };
        Self { web, base, bucket }
    }

    fn object(&self, name: &str) -> Result<String, Trouble> {
        Ok(format!("{}/{}", self.base, path(name)?))
    }

    fn trouble(&self, reply: &Reply) -> Trouble {
        let code = xml::text(&reply.body, "Code").unwrap_or_default();
        match (reply.status.as_u16(), &*code) {
            (404, "NoSuchBucket") => {
                Trouble::Permanent(format!("there is no bucket {}: make it first", self.bucket))
            }
            // It says so before it does anything.
            (503, "SlowDown") => Trouble::Throttled,
            (501, _) | (400, "NotImplemented") => Trouble::Permanent(
                "the store knows no conditional writes: no lock can be kept on it".to_owned(),
            ),
            _ => reply.trouble(),
        }
    }
}

/// An object's name as the path of a URL. Steps to the folder above would be resolved on the way.
pub(super) fn path(name: &str) -> Result<String, Trouble> {
    if name.split('/').any(|part| matches!(part, "." | "..")) {
        let what =
            "a key with the steps . or .. cannot be the name of an object here: choose another";
        return Err(Trouble::Permanent(what.to_owned()));
    }
    Ok(encode(name, b"/"))
}

#[async_trait]
impl Bucket for S3 {
    async fn read(
        &self,
        name: &str,
        unless: Option<&Version>,
        until: Until,
    ) -> Result<Read, Trouble> {
        let mut headers = Vec::new();
        if let Some(Version(tag)) = unless {
            headers.push(("if-none-match", &**tag));
        }
        let asked = request(Method::GET, &self.object(name)?, &headers, Vec::new())?;
        let reply = self.web.send(asked, until).await?;
        let now = reply.now;
        match reply.status.as_u16() {
            200 => {
                let version = reply.header("etag").map(|tag| Version(tag.to_owned()));
                let modified = reply.header("last-modified").and_then(dates::http);
                let (Some(version), Some(modified)) = (version, modified) else {
                    let what = "the store tells neither version nor time of an object";
                    return Err(Trouble::Permanent(what.to_owned()));
                };
                Ok(Read::Present { body: reply.lock()?, version, modified, now })
            }
            304 => Ok(Read::Unchanged { now }),
            404 if xml::text(&reply.body, "Code").as_deref() != Some("NoSuchBucket") => {
                Ok(Read::Absent { now })
            }
            _ => Err(self.trouble(&reply)),
        }
    }

    async fn swap(
        &self,
        name: &str,
        expected: Option<&Version>,
        body: Vec<u8>,
        until: Until,
    ) -> Result<Swap, Trouble> {
        let condition = match expected {
            Some(Version(tag)) => ("if-match", &**tag),
            None => ("if-none-match", "*"),
        };
        let headers =
            [condition, ("content-type", "application/json"), ("cache-control", "no-store")];
        let asked = request(Method::PUT, &self.object(name)?, &headers, body)?;
        let reply = self.web.send(asked, until).await?;
        match reply.status.as_u16() {
            200 => match reply.header("etag") {
                Some(tag) => Ok(Swap::Won(Version(tag.to_owned()))),
                None => Err(Trouble::Ambiguous("the store tells no version".to_owned())),
            },
            // 409: another write of the same object was under way.
            409 | 412 => Ok(Swap::Lost),
            404 if xml::text(&reply.body, "Code").as_deref() != Some("NoSuchBucket") => {
                Ok(Swap::Lost)
            }
            _ => Err(self.trouble(&reply)),
        }
    }

    async fn remove(&self, name: &str, version: &Version, until: Until) -> Result<bool, Trouble> {
        // A removal cannot name its version everywhere: what is empty is as good as gone.
        let swapped = self.swap(name, Some(version), b"{}".to_vec(), until).await?;
        Ok(swapped != Swap::Lost)
    }

    async fn erase(&self, name: &str, until: Until) -> Result<(), Trouble> {
        let asked = request(Method::DELETE, &self.object(name)?, &[], Vec::new())?;
        let reply = self.web.send(asked, until).await?;
        match reply.status.as_u16() {
            200 | 204 | 404 => Ok(()),
            _ => Err(self.trouble(&reply)),
        }
    }

    fn removes(&self) -> bool {
        false
    }

    async fn list(
        &self,
        prefix: &str,
        after: Option<&str>,
        until: Until,
    ) -> Result<Vec<String>, Trouble> {
        let mut query = format!("list-type=2&prefix={}", encode(prefix, &[]));
        if let Some(after) = after {
            query = format!("{query}&start-after={}", encode(after, &[]));
        }
        let url = format!("{}/?{query}", self.base);
        let reply = self.web.send(request(Method::GET, &url, &[], Vec::new())?, until).await?;
        match reply.status.as_u16() {
            200 => Ok(xml::texts(&reply.body, "Key")),
            _ => Err(self.trouble(&reply)),
        }
    }

    async fn settings(&self, until: Until) -> Result<Vec<Setting>, Trouble> {
        let url = format!("{}/?versioning=", self.base);
        let reply = self.web.send(request(Method::GET, &url, &[], Vec::new())?, until).await?;
        if reply.status.as_u16() != 200 {
            return Err(self.trouble(&reply));
        }
        let on = xml::text(&reply.body, "Status").as_deref() == Some("Enabled");
        let detail = if on { "every renewal leaves a copy for ever" } else { "off" };
        Ok(vec![Setting {
            what: "versioning",
            good: !on,
            detail: detail.to_owned(),
            advice: "use a bucket without it, or a lifecycle rule that ends old versions",
        }])
    }

    fn rights(&self) -> &'static str {
        "s3:GetObject, s3:PutObject and s3:ListBucket on the prefix"
    }
}
