//! The object store: locks in a bucket, for processes that share nothing else.
//!
//! A lock is one JSON object. Every write names the version that it replaces: of several simultaneous attempts one
//! succeeds. A holder that stops renewing is taken over once its version was observed unchanged for its lease and
//! margin or, if the store's two clocks agree, once it is that old by the store's time. Wall clocks of clients are
//! never used.
//!
//! One client at a time waits in the only place. It writes a *bell* object beside the lock, which the owner polls, and
//! the owner's release makes the waiter the next owner in one write. Records of the plain format, which other programs
//! write, are read, waited for and taken over.
//!
//! The modules are layers. Each imports only modules of the lines below it, or further right in its own line:
//!
//! ```text
//! object                               the store
//! join, evict, examine, clean          its operations
//! place, hold, inspect                 the wait of a claim; its hold; views
//! inner                                reads of locks and bells, and conditional writes
//! observed                             since when each version was seen
//! gcs, s3, azure, etag, web, xml       the clouds
//! bucket, options, format, dates       the operations of a cloud; the URL; bytes; dates
//! ```

mod azure;
mod bucket;
mod clean;
mod dates;
mod etag;
mod evict;
mod examine;
mod format;
mod gcs;
mod hold;
mod inner;
mod inspect;
mod join;
mod observed;
mod options;
mod place;
mod s3;
mod web;
mod xml;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::{FencingToken, Key};

use self::azure::Azure;
use self::gcs::Gcs;
use self::hold::{ObjectHold, read_handle};
use self::inner::ObjectInner;
use self::observed::Observed;
use self::options::{Cloud, Options};
use self::s3::S3;
use self::web::Web;
use super::{
    Answer, Capabilities, Claim, Finding, Handle, Handoff, Hold, KeySpace, KeyState, Liveness,
    Mode, QueueKind, Store, Version, unsupported,
};
use crate::{Clock, Error, ErrorKind, Result};

/// Locks in a bucket of an object store. A clone is the same store.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// # let service = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/services/example.rs"));
/// # let Some(endpoint) = service("TENURE_TEST_S3") else { return Ok(()) };
/// # let url = format!("s3://locks/doc-{}?endpoint={endpoint}", std::process::id());
/// let store = tenure::BucketStore::open(&url)?; // gs://our-locks/batch, s3://…, az://…
/// let client = tenure::Client::with_store(std::sync::Arc::new(store));
/// let guard = client.lock("nightly").ttl(std::time::Duration::from_secs(60)).acquire().await?;
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct BucketStore {
    inner: Arc<ObjectInner>,
}

impl BucketStore {
    /// Opens the bucket of a URL: `gs://BUCKET/PREFIX?options`, `s3:` or `az:`. No request is sent yet.
    ///
    /// | option | meaning |
    /// |---|---|
    /// | `bell=500ms` | interval at which an owner polls for a hand-off request |
    /// | `poll=250ms` | interval at which a waiter polls the lock |
    /// | `look=2s` | interval at which an owner also polls the record, for waiters of the plain format; by default only renewals read it |
    /// | `endpoint=URL` | address of the store, if it is not the cloud's own |
    /// | `anonymous=true` | send requests without credentials |
    ///
    /// Credentials are found in the same places as by the cloud's own tools.
    ///
    /// # Errors
    ///
    /// `Invalid` for a bad URL.
    pub fn open(url: &str) -> Result<Self> {
        let (scheme, rest) = url.split_once(':').unwrap_or((url, ""));
        let cloud = match scheme {
            "gs" => Cloud::Google,
            "s3" => Cloud::Amazon,
            "az" => Cloud::Azure,
            _ => {
                let message = "the URL of an object store begins with gs:, s3: or az:";
                return Err(Error::new(ErrorKind::Invalid, message));
            }
        };
        let options = Options::parse(cloud, rest)?;
        let clock = Clock::system();
        let web = Web::new(clock.clone())?;
        let bucket: Box<dyn bucket::Bucket> = match cloud {
            Cloud::Google => Box::new(Gcs::open(&options, web)),
            Cloud::Amazon => Box::new(S3::open(&options, web)),
            Cloud::Azure => Box::new(Azure::open(&options, web)?),
        };
        let observed = Observed::default();
        Ok(Self { inner: Arc::new(ObjectInner { bucket, options, clock, observed }) })
    }

    fn at(&self, error: Error, key: &Key) -> Error {
        error.on(key).at(self)
    }
}

impl fmt::Display for BucketStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.inner, f)
    }
}

impl fmt::Debug for BucketStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.inner)
    }
}

#[async_trait]
impl Store for BucketStore {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            queue: QueueKind::Single,
            liveness: Liveness::Lease,
            push: false,
            handoff: Handoff::Polled { every: self.inner.options.bell },
            shared: false,
            semaphore: false,
            detached: true,
            list: true,
            identities: true,
            evict: true,
            ordered_tokens: true,
            min_ttl: self.inner.options.grain.min_ttl(),
        }
    }

    async fn claim(&self, claim: &Claim, limit: Duration) -> Result<Answer> {
        if claim.mode != Mode::Exclusive {
            return Err(unsupported(self, "share a lock or keep semaphores").on(&claim.key));
        }
        join::claim(&self.inner, claim, limit).await.map_err(|error| self.at(error, &claim.key))
    }

    async fn resume(&self, key: &Key, handle: &Handle) -> Result<Box<dyn Hold>> {
        let Some((claim, fence)) = read_handle(handle) else {
            let message = "the handle is not one of an object store";
            return Err(self.at(Error::new(ErrorKind::Invalid, message), key));
        };
        let known = inspect::read_lock(&self.inner, key).await;
        let known = known.map_err(|error| self.at(error, key))?;
        let record = known.sight.record.as_ref();
        let ours = record.filter(|record| {
            !record.expires.is_zero()
                && format::claim_of(&record.owner) == Some(claim)
                && record.fence.is_none_or(|known| known == fence)
        });
        let Some(id) = ours.map(|record| record.owner.clone()) else {
            return Err(self.at(Error::new(ErrorKind::NotHeld, "the hold has ended"), key));
        };
        let name = self.inner.name(key).map_err(|error| self.at(error, key))?;
        let (inner, key) = (Arc::clone(&self.inner), key.clone());
        let (last_read, last_write) = (inner.clock.now(), inner.clock.now());
        Ok(Box::new(ObjectHold { inner, key, name, id, fence, known, last_read, last_write }))
    }

    async fn changed(&self, _key: &Key, _space: KeySpace, _since: Version) -> Result<()> {
        // An object store sends no notifications: callers poll.
        std::future::pending().await
    }

    async fn inspect(&self, key: &Key, space: KeySpace) -> Result<KeyState> {
        if space != KeySpace::Lock {
            let (holders, waiters, version) = (Vec::new(), Vec::new(), Version::default());
            return Ok(KeyState { key: key.clone(), space, holders, waiters, version });
        }
        inspect::state(&self.inner, key).await.map_err(|error| self.at(error, key))
    }

    async fn list(
        &self,
        space: KeySpace,
        prefix: &str,
        after: Option<&str>,
    ) -> Result<Vec<KeyState>> {
        if space != KeySpace::Lock {
            return Ok(Vec::new());
        }
        inspect::list(&self.inner, prefix, after).await.map_err(|error| error.at(self))
    }

    async fn evict(&self, key: &Key, token: FencingToken, reason: &str) -> Result<()> {
        if evict::evict(&self.inner, key, token).await.map_err(|error| self.at(error, key))? {
            tracing::info!(name: "tenure.evicted", %key, store = %self, %token, reason);
            return Ok(());
        }
        let message =
            format!("no hold has the token {token}: see `tenure status` for the present holder");
        Err(self.at(Error::new(ErrorKind::NotHeld, message), key))
    }

    async fn examine(&self, limit: Duration) -> Vec<Finding> {
        examine::findings(&self.inner, self.inner.until(limit)).await
    }

    async fn clean(&self, older_than: Duration) -> Result<u64> {
        clean::clean(&self.inner, older_than).await.map_err(|error| error.at(self))
    }

    async fn close(&self) {}
}
