//! Azure Blob Storage.

use async_trait::async_trait;
use reqsign_core::Signer;

use super::bucket::{
    Bucket, BucketDeadline, BucketError, ObjectVersion, ReadResult, Setting, SwapResult,
};
use super::etag::{EtagBucket, EtagQuirks};
use super::options::{Options, variable};
use super::web::{Signing, Web, encode};
use super::xml;
use crate::{Error, ErrorKind, Result};

#[derive(Debug)]
pub(super) struct Azure(EtagBucket);

const QUIRKS: EtagQuirks = EtagQuirks {
    // Version of the protocol.
    common_headers: &[("x-ms-version", "2021-12-02")],
    write_headers: &[
        ("x-ms-blob-type", "BlockBlob"),
        ("content-type", "application/json"),
        ("x-ms-blob-cache-control", "no-store"),
    ],
    signs_length: true,
    error_code: |reply| reply.header("x-ms-error-code").map(str::to_owned),
    missing_bucket_code: "ContainerNotFound",
    throttled_code: "ServerBusy",
    bucket_noun: "container",
};

/// Parsed connection string.
#[derive(Default)]
struct ConnectionString {
    account: Option<String>,
    key: Option<String>,
    endpoint: Option<String>,
}

impl Azure {
    pub(super) fn open(options: &Options, mut web: Web) -> Result<Self> {
        let connection = variable(&["AZURE_STORAGE_CONNECTION_STRING"]);
        let connection = connection.map(|text| ConnectionString::parse(&text)).unwrap_or_default();
        let account = options.account.clone().or(connection.account);
        let named = || variable(&["AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"]);
        let account = account.or_else(named);
        let secret = || variable(&["AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_KEY"]);
        let key = connection.key.or_else(secret);
        let endpoint = options.endpoint.clone().or(connection.endpoint);
        let endpoint = match (endpoint, &account) {
            (Some(endpoint), _) => endpoint,
            (None, Some(account)) => format!("https://{account}.blob.core.windows.net"),
            (None, None) => {
                let message = "the storage account is missing: add ?account=NAME, or set AZURE_STORAGE_ACCOUNT";
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
        let bucket = options.bucket.clone();
        let base = format!("{}/{bucket}", endpoint.trim_end_matches('/'));
        Ok(Self(EtagBucket { web, base, bucket, quirks: &QUIRKS }))
    }
}

impl ConnectionString {
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
        self.0.remove(name, Some(version), until).await.map(drop)
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
        let first = format!("?restype=container&comp=list&prefix={}", encode(prefix, &[]));
        let mut query = first.clone();
        // A listing cannot start after a name: pages are read until one has a later name.
        loop {
            let reply = self.0.ask_bucket(&query, until).await?;
            let mut names = xml::texts(&reply.body, "Name");
            names.retain(|name| after.is_none_or(|after| &**name > after));
            let marker = xml::text(&reply.body, "NextMarker").unwrap_or_default();
            if !names.is_empty() || marker.is_empty() {
                return Ok(names);
            }
            query = format!("{first}&marker={}", encode(&marker, &[]));
        }
    }

    async fn settings(&self, until: BucketDeadline) -> Result<Vec<Setting>, BucketError> {
        // Only administrators may read an account's versioning settings. This request tests that the container is
        // reachable.
        self.0.ask_bucket("?restype=container", until).await.map(|_| Vec::new())
    }

    fn rights(&self) -> &'static str {
        "to read, write, delete and list blobs of the container (Storage Blob Data Contributor)"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_string_has_account_key_and_address() {
        let text =
            "DefaultEndpointsProtocol=http;AccountName=a;AccountKey=k==;BlobEndpoint=http://h/a;";
        let ConnectionString { account, key, endpoint } = ConnectionString::parse(text);
        assert_eq!(account.as_deref(), Some("a"));
        assert_eq!(key.as_deref(), Some("k=="));
        assert_eq!(endpoint.as_deref(), Some("http://h/a"));
    }
}
