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

mod azure;
mod bucket;
mod clean;
mod dates;
mod etag;
mod examine;
mod format;
mod gcs;
mod hold;
mod inner;
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
use self::inner::{BELL, KnownLock, ObjectInner, PutResult, holder_identity, version_of};
use self::observed::Observed;
use self::options::{Cloud, Options};
use self::s3::S3;
use self::web::Web;
use super::{
    Answer, Capabilities, Claim, Finding, Handle, Handoff, Hold, HolderState, Identity, KeySpace,
    KeyState, Liveness, Mode, QueueKind, Store, Version, WaiterState, unsupported,
};
use crate::{Clock, Error, ErrorKind, Result};

/// Locks in a bucket of an object store. A clone is the same store.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// # let Ok(endpoint) = std::env::var("TENURE_TEST_S3") else { return Ok(()) };
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

/// Timeout of requests whose caller gives no limit.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Largest number of keys that one call lists.
const MAX_LISTED_KEYS: usize = 100;

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

    async fn read_lock(&self, key: &Key) -> Result<KnownLock> {
        let name = self.inner.name(key)?;
        self.inner.read_lock(&name, None, self.inner.until(REQUEST_TIMEOUT)).await
    }

    /// State of a key as `inspect` and `list` report it. `bell` is the waiter at the bell.
    fn key_state(&self, key: Key, known: &KnownLock, bell: Option<(&str, &Identity)>) -> KeyState {
        let sight = &known.sight;
        let held = sight.is_held(&known.watch(true), self.inner.options.grain);
        let holder = sight.record.as_ref().filter(|_| held);
        let holders = holder.map(|record| HolderState {
            by: Some(holder_identity(record)),
            token: FencingToken::new(0, record.fence.unwrap_or_default()),
            held_for: None,
            lease_left: Some(match record.lease {
                Some(lease) => (sight.modified + lease).saturating_sub(sight.date).min(lease),
                None => record.expires.saturating_sub(sight.date),
            }),
            revision: None,
        });
        let named = sight.waiter().map(|waiter| {
            let id = format::owner_name(&waiter.id).to_owned();
            WaiterState { by: Some(Identity { id, ..Identity::default() }), waited_for: None }
        });
        let rings = bell.map(|(_, by)| WaiterState { by: Some(by.clone()), waited_for: None });
        let seen = match holders {
            None if named.is_none() && bell.is_none() => Version::default(),
            _ => version_of(sight, bell.map(|(id, _)| id)),
        };
        let waiters = named.into_iter().chain(rings).collect();
        KeyState {
            key,
            space: KeySpace::Lock,
            holders: holders.into_iter().collect(),
            waiters,
            version: seen,
        }
    }

    async fn state(&self, key: &Key) -> Result<KeyState> {
        let known = self.read_lock(key).await?;
        let name = self.inner.name(key)?;
        let rung = self.inner.read_bell(&name, self.inner.until(REQUEST_TIMEOUT)).await?;
        let record = known.sight.record.as_ref();
        // A bell of the present owner is left over from its own wait.
        let bell = rung.bell.filter(|bell| {
            rung.alive && record.is_none_or(|record| !record.is_owned_by(&bell.next_holder.id))
        });
        let bell = bell.as_ref().map(|bell| (&*bell.next_holder.id, &bell.by));
        Ok(self.key_state(key.clone(), &known, bell))
    }

    async fn break_hold(&self, key: &Key, token: FencingToken) -> Result<bool> {
        let name = self.inner.name(key)?;
        let until = self.inner.until(REQUEST_TIMEOUT);
        // A renewal may come between the read and the write, and the write is then refused: read again.
        for _ in 0..5 {
            let known = self.inner.read_lock(&name, None, until).await?;
            let held = known.sight.is_held(&known.watch(true), self.inner.options.grain);
            let Some(record) = known.sight.record.as_ref().filter(|_| held) else {
                return Ok(false);
            };
            let fence = record.fence.unwrap_or_default();
            if token != FencingToken::new(0, fence) {
                return Ok(false);
            }
            let now = known.now(self.inner.clock.now());
            let Some(next) = record.release(&record.owner, fence, None, now) else {
                return Ok(false);
            };
            match self.inner.put(&name, &known, next, until).await? {
                PutResult::Won(_) => return Ok(true),
                PutResult::Lost => {}
                PutResult::Throttled => {
                    self.inner.wait_write_interval(until).await;
                }
                PutResult::Unclear(error, _) => return Err(error),
            }
        }
        let message = "the record was changed by a concurrent write each time: try again";
        Err(Error::new(ErrorKind::Contention, message))
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
        self.inner.claim(claim, limit).await.map_err(|error| self.at(error, &claim.key))
    }

    async fn resume(&self, key: &Key, handle: &Handle) -> Result<Box<dyn Hold>> {
        let Some((claim, fence)) = read_handle(handle) else {
            let message = "the handle is not one of an object store";
            return Err(self.at(Error::new(ErrorKind::Invalid, message), key));
        };
        let known = self.read_lock(key).await.map_err(|error| self.at(error, key))?;
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
        self.state(key).await.map_err(|error| self.at(error, key))
    }

    async fn list(
        &self,
        space: KeySpace,
        prefix: &str,
        after: Option<&str>,
    ) -> Result<Vec<KeyState>> {
        let mut states = Vec::new();
        if space != KeySpace::Lock {
            return Ok(states);
        }
        let root = &self.inner.options.prefix;
        let full = format!("{root}{prefix}");
        let mut after = after.map(|after| format!("{root}{after}"));
        loop {
            let until = self.inner.until(REQUEST_TIMEOUT);
            let page = self.inner.bucket.list(&full, after.as_deref(), until).await;
            let page = page.map_err(|error| error.explain_read(&*self.inner.bucket).at(self))?;
            let Some(last) = page.last() else { return Ok(states) };
            after = Some(last.clone());
            for name in page.iter().filter(|name| !name.ends_with(BELL)) {
                let Some(key) = name.strip_prefix(root).and_then(|key| Key::new(key).ok()) else {
                    continue;
                };
                match self.read_lock(&key).await {
                    Ok(known) => {
                        let state = self.key_state(key, &known, None);
                        states.extend((!state.holders.is_empty()).then_some(state));
                    }
                    // Objects that are not locks may be in the bucket.
                    Err(error) if error.kind() == ErrorKind::Misconfigured => {}
                    Err(error) => return Err(error.at(self)),
                }
                if states.len() >= MAX_LISTED_KEYS {
                    return Ok(states);
                }
            }
            if !states.is_empty() {
                return Ok(states);
            }
        }
    }

    async fn evict(&self, key: &Key, token: FencingToken, reason: &str) -> Result<()> {
        if self.break_hold(key, token).await.map_err(|error| self.at(error, key))? {
            tracing::info!(name: "tenure.evicted", %key, store = %self, %token, reason);
            return Ok(());
        }
        let message =
            format!("no hold has the token {token}: see `tenure status` for the present holder");
        Err(self.at(Error::new(ErrorKind::NotHeld, message), key))
    }

    async fn examine(&self, limit: Duration) -> Vec<Finding> {
        examine::findings(&self.inner, limit).await
    }

    async fn clean(&self, older_than: Duration) -> Result<u64> {
        clean::clean(self, &self.inner, older_than).await
    }

    async fn close(&self) {}
}
