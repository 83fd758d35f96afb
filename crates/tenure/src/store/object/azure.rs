//! Azure Blob Storage. A version is an entity tag.

use async_trait::async_trait;
use http::Method;
use reqsign_core::Signer;

use super::dates;
use super::options::Options;
use super::s3::path;
use super::seam::{Bucket, Read, Setting, Swap, Trouble, Until, Version};
use super::web::{Reply, Signing, Web, encode, request};
use super::xml;
use crate::{Error, ErrorKind, Result};

/// The version of the protocol that is spoken.
const PROTOCOL: (&str, &str) = ("x-ms-version", "2021-12-02");

#[derive(Debug)]
pub(super) struct Azure {
    web: Web,
    /// The container's address.
    base: String,
    container: String,
}

/// What a connection string says.
#[derive(Default)]
struct Connection {
    account: Option<String>,
    key: Option<String>,
    endpoint: Option<String>,
}

impl Azure {
    pub(super) fn open(options: &Options, mut web: Web) -> Result<Self> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let connection = variable("AZURE_STORAGE_CONNECTION_STRING");
        let connection = connection.map(|text| Connection::parse(&text)).unwrap_or_default();
        let account = options.account.clone().or(connection.account);
        let account = account.or_else(|| variable("AZURE_STORAGE_ACCOUNT_NAME"));
        let account = account.or_else(|| variable("AZURE_STORAGE_ACCOUNT"));
        let key = connection.key.or_else(|| variable("AZURE_STORAGE_ACCOUNT_KEY"));
        let key = key.or_else(|| variable("AZURE_STORAGE_KEY"));
        let endpoint = options.endpoint.clone().or(connection.endpoint);
        let endpoint = match (endpoint, &account) {
            (Some(endpoint), _) => endpoint,
            (None, Some(account)) => format!("https://{account}.blob.core.windows.net"),
            (None, None) => {
                let message =
                    "no storage account is named: add ?account=NAME, or set AZURE_STORAGE_ACCOUNT";
                return Err(Error::new(ErrorKind::Invalid, message));
            }
        };
        if !options.anonymous {
            let mut provider = reqsign_azure_storage::DefaultCredentialProvider::new();
            if let (Some(account), Some(key)) = (&account, &key) {
                provider = provider.push_front(
                    reqsign_azure_storage::StaticCredentialProvider::new_shared_key(account, key),
                );
            }
            let signer = reqsign_azure_storage::RequestSigner::new();
            web.signing = Signing::Azure(Signer::new(web.context(), provider, signer));
        }
        let container = options.bucket.clone();
        let base = format!("{}/{container}", endpoint.trim_end_matches('/'));
        Ok(Self { web, base, container })
    }

    async fn send(
        &self,
        method: Method,
        url: &str,
        more: &[(&'static str, &str)],
        body: Vec<u8>,
        until: Until,
    ) -> Result<Reply, Trouble> {
        let mut headers = vec![PROTOCOL];
        headers.extend_from_slice(more);
        let length = body.len().to_string();
        if method == Method::PUT {
            // The signature covers it.
            headers.push(("content-length", &length));
        }
        self.web.send(request(method, url, &headers, body)?, until).await
    }

    fn object(&self, name: &str) -> Result<String, Trouble> {
        Ok(format!("{}/{}", self.base, path(name)?))
    }

    fn trouble(&self, reply: &Reply) -> Trouble {
        match (reply.status.as_u16(), reply.header("x-ms-error-code")) {
            (404, Some("ContainerNotFound")) => Trouble::Permanent(format!(
                "there is no container {}: make it first",
                self.container
            )),
            // It says so before it does anything.
            (503, Some("ServerBusy")) => Trouble::Throttled,
            _ => reply.trouble(),
        }
    }
}

impl Connection {
    fn parse(text: &str) -> Self {
        let mut connection = Self::default();
        for pair in text.split(';') {
            match pair.split_once('=') {
                Some(("AccountName", value)) => connection.account = Some(value.to_owned()),
                Some(("AccountKey", value)) => connection.key = Some(value.to_owned()),
                Some(("BlobEndpoint", value)) => connection.endpoint = Some(value.to_owned()),
                _ => {}
            }
        }
        connection
    }
}

#[async_trait]
impl Bucket for Azure {
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
        let url = self.object(name)?;
        let reply = self.send(Method::GET, &url, &headers, Vec::new(), until).await?;
        let now = reply.now;
        match (reply.status.as_u16(), reply.header("x-ms-error-code")) {
            (200, _) => {
                let version = reply.header("etag").map(|tag| Version(tag.to_owned()));
                let modified = reply.header("last-modified").and_then(dates::http);
                let (Some(version), Some(modified)) = (version, modified) else {
                    let what = "the store tells neither version nor time of an object";
                    return Err(Trouble::Permanent(what.to_owned()));
                };
                Ok(Read::Present { body: reply.lock()?, version, modified, now })
            }
            (304, _) => Ok(Read::Unchanged { now }),
            (404, code) if code != Some("ContainerNotFound") => Ok(Read::Absent { now }),
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
        let headers = [
            condition,
            ("x-ms-blob-type", "BlockBlob"),
            ("content-type", "application/json"),
            ("x-ms-blob-cache-control", "no-store"),
        ];
        let url = self.object(name)?;
        let reply = self.send(Method::PUT, &url, &headers, body, until).await?;
        match (reply.status.as_u16(), reply.header("x-ms-error-code")) {
            (201, _) => match reply.header("etag") {
                Some(tag) => Ok(Swap::Won(Version(tag.to_owned()))),
                None => Err(Trouble::Ambiguous("the store tells no version".to_owned())),
            },
            (409 | 412, _) => Ok(Swap::Lost),
            (404, code) if code != Some("ContainerNotFound") => Ok(Swap::Lost),
            _ => Err(self.trouble(&reply)),
        }
    }

    async fn remove(&self, name: &str, version: &Version, until: Until) -> Result<bool, Trouble> {
        let (url, headers) = (self.object(name)?, [("if-match", &*version.0)]);
        let reply = self.send(Method::DELETE, &url, &headers, Vec::new(), until).await?;
        match (reply.status.as_u16(), reply.header("x-ms-error-code")) {
            (202, _) => Ok(true),
            (409 | 412, _) => Ok(false),
            (404, code) if code != Some("ContainerNotFound") => Ok(false),
            _ => Err(self.trouble(&reply)),
        }
    }

    async fn erase(&self, name: &str, until: Until) -> Result<(), Trouble> {
        let url = self.object(name)?;
        let reply = self.send(Method::DELETE, &url, &[], Vec::new(), until).await?;
        match reply.status.as_u16() {
            202 | 404 => Ok(()),
            _ => Err(self.trouble(&reply)),
        }
    }

    fn removes(&self) -> bool {
        true
    }

    async fn list(
        &self,
        prefix: &str,
        after: Option<&str>,
        until: Until,
    ) -> Result<Vec<String>, Trouble> {
        let query = format!("restype=container&comp=list&prefix={}", encode(prefix, &[]));
        let mut marker = String::new();
        // There is no beginning in the middle: pages are gone through until one has what is asked for.
        loop {
            let mut url = format!("{}?{query}", self.base);
            if !marker.is_empty() {
                url = format!("{url}&marker={}", encode(&marker, &[]));
            }
            let reply = self.send(Method::GET, &url, &[], Vec::new(), until).await?;
            if reply.status.as_u16() != 200 {
                return Err(self.trouble(&reply));
            }
            let mut names = xml::texts(&reply.body, "Name");
            names.retain(|name| after.is_none_or(|after| &**name > after));
            marker = xml::text(&reply.body, "NextMarker").unwrap_or_default();
            if !names.is_empty() || marker.is_empty() {
                return Ok(names);
            }
        }
    }

    async fn settings(&self, until: Until) -> Result<Vec<Setting>, Trouble> {
        // What an account does with old versions is told to its administrators only: here, whether it can be reached.
        let url = format!("{}?restype=container", self.base);
        let reply = self.send(Method::GET, &url, &[], Vec::new(), until).await?;
        match reply.status.as_u16() {
            200 => Ok(Vec::new()),
            _ => Err(self.trouble(&reply)),
        }
    }

    fn rights(&self) -> &'static str {
        "to read, write, delete and list blobs of the container (Storage Blob Data Contributor)"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_string_says_account_key_and_address() {
        let text =
            "DefaultEndpointsProtocol=http;AccountName=a;AccountKey=k==;BlobEndpoint=http://h/a;";
        let Connection { account, key, endpoint } = Connection::parse(text);
        assert_eq!(account.as_deref(), Some("a"));
        assert_eq!(key.as_deref(), Some("k=="));
        assert_eq!(endpoint.as_deref(), Some("http://h/a"));
    }
}
