//! What S3 and Azure have in common: versions are entity tags, conditions are headers. They differ in names and numbers.

use http::Method;

use super::dates;
use super::seam::{Read, Swap, Trouble, Until, Version, Written};
use super::web::{Reply, Web, encode};
use crate::Result;

/// The objects of a bucket whose versions are entity tags.
#[derive(Debug)]
pub(super) struct Tags {
    pub(super) web: Web,
    /// What comes before a slash and an object's name.
    pub(super) base: String,
    pub(super) bucket: String,
    pub(super) dialect: &'static Dialect,
}

/// How a cloud calls it.
#[derive(Debug)]
pub(super) struct Dialect {
    /// The headers of every request.
    pub(super) always: &'static [(&'static str, &'static str)],
    /// The headers of a write.
    pub(super) write: &'static [(&'static str, &'static str)],
    /// The signature of a write covers its length.
    pub(super) signs_length: bool,
    /// The cloud's own word for what is wrong.
    pub(super) word: fn(&Reply) -> Option<String>,
    pub(super) no_bucket: &'static str,
    /// Said with 503 before anything is done.
    pub(super) too_much: &'static str,
    /// What a bucket is called.
    pub(super) bucket: &'static str,
}

impl Tags {
    /// Sends one request.
    pub(super) async fn ask(
        &self,
        method: Method,
        url: &str,
        more: &[(&'static str, &str)],
        body: Vec<u8>,
        until: Until,
    ) -> Result<Reply, Trouble> {
        let length = body.len().to_string();
        let mut headers = [self.dialect.always, more].concat();
        if self.dialect.signs_length && method == Method::PUT {
            headers.push(("content-length", &length));
        }
        self.web.ask(method, url, &headers, body, until).await
    }

    /// The same without headers and content, of the bucket itself: `query` follows its address. A refusal is trouble.
    pub(super) async fn ask_bucket(&self, query: &str, until: Until) -> Result<Reply, Trouble> {
        let url = format!("{}{query}", self.base);
        let reply = self.ask(Method::GET, &url, &[], Vec::new(), until).await?;
        if reply.status.as_u16() == 200 { Ok(reply) } else { Err(self.trouble(&reply)) }
    }

    pub(super) async fn read(
        &self,
        name: &str,
        unless: Option<&Version>,
        until: Until,
    ) -> Result<Read, Trouble> {
        let condition = unless.map(|Version(tag)| ("if-none-match", &**tag));
        let url = self.object(name)?;
        let reply = self.ask(Method::GET, &url, condition.as_slice(), Vec::new(), until).await?;
        let now = reply.now;
        match reply.status.as_u16() {
            200 => {
                let modified = reply.header("last-modified").and_then(dates::http);
                let (Some(version), Some(modified)) = (version(&reply), modified) else {
                    let what = "the store tells neither version nor time of an object";
                    return Err(Trouble::Permanent(what.to_owned()));
                };
                Ok(Read::Present { body: reply.lock()?, version, modified, now })
            }
            304 => Ok(Read::Unchanged { now }),
            404 if !self.lacks_bucket(&reply) => Ok(Read::Absent { now }),
            _ => Err(self.trouble(&reply)),
        }
    }

    pub(super) async fn swap(
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
        let headers = [&[condition][..], self.dialect.write].concat();
        let reply = self.ask(Method::PUT, &self.object(name)?, &headers, body, until).await?;
        match reply.status.as_u16() {
            200 | 201 => match version(&reply) {
                Some(version) => {
                    // Azure says it with a write, S3 only with a read.
                    let modified = reply.header("last-modified").and_then(dates::http);
                    Ok(Swap::Won(Written { version, modified, now: reply.now }))
                }
                None => Err(Trouble::Ambiguous("the store tells no version".to_owned())),
            },
            // 409: another write of the same object was under way.
            409 | 412 => Ok(Swap::Lost),
            404 if !self.lacks_bucket(&reply) => Ok(Swap::Lost),
            _ => Err(self.trouble(&reply)),
        }
    }

    /// Removes an object, at this version if one is named; whether it did.
    pub(super) async fn remove(
        &self,
        name: &str,
        version: Option<&Version>,
        until: Until,
    ) -> Result<bool, Trouble> {
        let condition = version.map(|Version(tag)| ("if-match", &**tag));
        let url = self.object(name)?;
        let reply = self.ask(Method::DELETE, &url, condition.as_slice(), Vec::new(), until).await?;
        match reply.status.as_u16() {
            200 | 202 | 204 => Ok(true),
            409 | 412 if condition.is_some() => Ok(false),
            404 if !self.lacks_bucket(&reply) => Ok(false),
            _ => Err(self.trouble(&reply)),
        }
    }

    /// The address of an object. Steps to the folder above would be resolved on the way.
    fn object(&self, name: &str) -> Result<String, Trouble> {
        if name.split('/').any(|part| matches!(part, "." | "..")) {
            let what =
                "a key with the steps . or .. cannot be the name of an object here: choose another";
            return Err(Trouble::Unnameable(what.to_owned()));
        }
        Ok(format!("{}/{}", self.base, encode(name, b"/")))
    }

    /// A 404 that is of the bucket rather than of the object.
    fn lacks_bucket(&self, reply: &Reply) -> bool {
        (self.dialect.word)(reply).as_deref() == Some(self.dialect.no_bucket)
    }

    fn trouble(&self, reply: &Reply) -> Trouble {
        let word = (self.dialect.word)(reply);
        match (reply.status.as_u16(), word.as_deref()) {
            (404, Some(word)) if word == self.dialect.no_bucket => {
                let Dialect { bucket, .. } = self.dialect;
                Trouble::Permanent(format!("there is no {bucket} {}: make it first", self.bucket))
            }
            (503, Some(word)) if word == self.dialect.too_much => Trouble::Throttled,
            (501, _) | (400, Some("NotImplemented")) => Trouble::Permanent(
                "the store knows no conditions on writes: no lock can be kept on it".to_owned(),
            ),
            _ => reply.trouble(),
        }
    }
}

fn version(reply: &Reply) -> Option<Version> {
    reply.header("etag").map(|tag| Version(tag.to_owned()))
}
