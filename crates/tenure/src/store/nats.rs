//! The NATS store: locks in a key-value bucket, which JetStream replicates.
//!
//! One record per key lists its holders and their leases. Every write names the sequence that it replaces, and the
//! server refuses it if the record has changed since: of several simultaneous attempts one succeeds.
//!
//! A holder that stops renewing is taken over by a client that has seen no renewal for the lease and a margin. The
//! client measures that time on its own clock: clocks of clients are never compared. Several holders (shared locks,
//! semaphores) share one record, and the renewals of each holder are observed separately.
//!
//! The modules are layers. Each imports only modules of the lines below it, or further right in its own line:
//!
//! ```text
//! nats                              the store
//! join, examine, monitor, evict     its operations
//! place, grant                      the wait of a claim in order of arrival; the write that grants a claim
//! hold                              renewal and release
//! inspect, queue, watch             views; the tickets at the server; notifications of changes
//! inner                             conditional writes and reads of records
//! keys, tickets, watches            the records, tickets and watches that this process knows
//! lineage                           epochs of fencing tokens; detection of a stream that lost writes
//! bucket, settings, stream          which buckets are created, adopted and refused
//! layout, nlock, format             the bytes: tenure's own layout and nlock's
//! consumer, connect                 consumers of JetStream; the connection
//! api, async_errors, options        requests; errors that the server reports outside replies; the URL
//! ```
//!
//! Buckets in nlock's layout are supported too: see [`NatsStore::is_best_effort`].

mod api;
mod async_errors;
mod bucket;
mod connect;
mod consumer;
mod evict;
mod examine;
mod format;
mod grant;
mod hold;
mod inner;
mod inspect;
mod join;
mod keys;
mod layout;
mod lineage;
mod monitor;
mod nlock;
mod options;
mod place;
mod queue;
mod settings;
mod stream;
mod tickets;
mod watch;
mod watches;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::{FencingToken, Key};

use self::hold::{NatsHold, read_handle};
use self::inner::NatsInner;
use self::layout::BucketLayout;
use self::options::Options;
use self::settings::SettingsCheck;
use super::{
    Answer, Capabilities, Claim, Finding, Handle, Handoff, Hold, KeySpace, KeyState, Liveness,
    QueueKind, Store, Version,
};
use crate::{Error, ErrorKind, Result};

/// Locks in a key-value bucket of NATS JetStream. A clone is the same store, on the same connection.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// # let service = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/services/example.rs"));
/// # let Some(url) = service("TENURE_TEST_NATS") else { return Ok(()) };
/// # let url = format!("{url}/doc_{}", std::process::id());
/// let store = tenure::NatsStore::connect(&url).await?; // nats://nats-1,nats-2,nats-3/locks
/// let client = tenure::Client::with_store(std::sync::Arc::new(store));
/// let guard = client.lock("reports/nightly").fair().acquire().await?; // in order of arrival
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct NatsStore {
    inner: Arc<NatsInner>,
    /// True if the bucket was absent, and was created when this store connected.
    created: bool,
}

/// Smallest ttl: a round trip and its variance must be small compared with it.
const MIN_TTL: Duration = Duration::from_millis(200);

impl NatsStore {
    /// Connects to the bucket of a URL: `nats://[user:password@|token@]host[:port],…/bucket?options`.
    ///
    /// A URL without a server means `$NATS_URL`, and if that is unset, this host. The default bucket is `tenure`. An
    /// absent bucket is created, with file storage and, on a cluster, three replicas. An existing bucket is used
    /// unchanged, or refused.
    ///
    /// | option | meaning |
    /// |---|---|
    /// | `replicas=N` | replicas of a new bucket; an existing bucket with another number is refused |
    /// | `fair=true` | every claim waits in order of arrival, as with [`fair`](crate::LockRequest::fair) |
    /// | `form=nlock`, `ttl=30s` | nlock's layout, and the ttl of the bucket |
    /// | `creds=FILE`, `nkey=FILE` | credentials: a `.creds` file, an nkey seed |
    /// | `monitor=HOST:PORT,…` | monitoring ports, which tell [`examine`](Store::examine) how often the servers sync to disk |
    /// | `tls=true`, `ca=FILE`, `cert=FILE&key=FILE` | TLS, root certificates, client certificate and key |
    ///
    /// # Errors
    ///
    /// `Invalid` for a bad URL, `Misconfigured` for a server without JetStream or an unsuitable bucket, `Denied` for
    /// wrong credentials or missing permissions, `Unavailable` if no server answers.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves at most a newly created bucket behind.
    pub async fn connect(url: &str) -> Result<Self> {
        let rest = url.strip_prefix("nats:").ok_or_else(|| {
            Error::new(ErrorKind::Invalid, "the URL of a NATS store begins with nats:")
        })?;
        let environment = std::env::var("NATS_URL").ok();
        let options = Options::parse(rest, environment.as_deref())?;
        Self::open(options.clone()).await.map_err(|error| error.at(&options))
    }

    async fn open(options: Options) -> Result<Self> {
        let api = connect::connect(&options).await?;
        let until = api.deadline_after(connect::CONNECT_TIMEOUT);
        if api.client.try_server_info().is_some_and(|info| !info.jetstream) {
            let message = "JetStream is off on this server: start it with --jetstream";
            return Err(Error::new(ErrorKind::Misconfigured, message));
        }
        // The connections are counted before the settings are read. If they were counted afterwards, a reconnect in
        // between would look as if the settings had been read over the new connection, and an edit of the bucket during
        // the outage would go unnoticed.
        let connections = api.connections();
        let (info, layout, created) = bucket::open(&api, &options, until).await?;
        let lineage = lineage::new(&info, api.clock.now())?;
        let settings_check = SettingsCheck::new(&info, connections, api.clock.now());
        let inner = Arc::new(NatsInner::new(api, options, layout, lineage, settings_check));
        if let BucketLayout::Nlock { ttl } = layout {
            tracing::warn!(
                name: "tenure.best_effort",
                store = %inner,
                ?ttl,
                "the bucket has nlock's form: memory and one replica; a restart of the server forgets all holds"
            );
        }
        Ok(Self { inner, created })
    }

    /// True if the bucket has nlock's layout: in memory, with one replica.
    ///
    /// Exclusion is then best effort. A restart of the server forgets all holds, and another participant that changes
    /// the bucket's ttl ends holds early.
    pub fn is_best_effort(&self) -> bool {
        self.inner.layout != BucketLayout::Native
    }

    fn explain(&self, error: Error, key: &Key) -> Error {
        error.on(key).at(self)
    }
}

impl fmt::Display for NatsStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.inner, f)
    }
}

impl fmt::Debug for NatsStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:?})", self.inner, self.inner.layout)
    }
}

#[async_trait]
impl Store for NatsStore {
    fn capabilities(&self) -> Capabilities {
        let native = self.inner.layout == BucketLayout::Native;
        Capabilities {
            queue: if native && self.inner.options.fair {
                QueueKind::Fifo
            } else {
                QueueKind::None
            },
            liveness: Liveness::Lease,
            push: true,
            handoff: Handoff::None,
            shared: native,
            semaphore: native,
            // In nlock's layout the bucket's ttl ends every hold: a detached hold could not have a longer lease.
            detached: native,
            list: true,
            identities: true,
            evict: true,
            ordered_tokens: true,
            min_ttl: MIN_TTL,
        }
    }

    fn creation_notice(&self) -> Option<String> {
        self.created.then(|| format!("created the bucket {} for locks", self.inner.options.bucket))
    }

    async fn claim(&self, claim: &Claim, limit: Duration) -> Result<Answer> {
        join::claim(&self.inner, claim, limit)
            .await
            .map_err(|error| self.explain(error, &claim.key))
    }

    async fn resume(&self, key: &Key, handle: &Handle) -> Result<Box<dyn Hold>> {
        let Some((space, claim, token)) = read_handle(handle) else {
            let message = "the handle is not one of a NATS store";
            return Err(self.explain(Error::new(ErrorKind::Invalid, message), key));
        };
        let known = inspect::read(&self.inner, key, space).await;
        let known = known.map_err(|error| self.explain(error, key))?;
        let ours = known.record.holder(claim);
        let ours = ours.filter(|holder| holder.number(known.sequence) == token.number());
        let Some(held) = ours.map(|holder| holder.held_for) else {
            return Err(self.explain(Error::new(ErrorKind::NotHeld, "the hold has ended"), key));
        };
        Ok(Box::new(NatsHold {
            inner: Arc::clone(&self.inner),
            key: key.clone(),
            space,
            subject: self.inner.subject(key, space),
            claim,
            token,
            sequence: known.sequence,
            record: known.record,
            connection: known.connection,
            held_since: self.inner.now() - held,
            place: None,
        }))
    }

    async fn changed(&self, key: &Key, space: KeySpace, since: Version) -> Result<()> {
        let changed = watch::changed(&self.inner, key, space, since).await;
        changed.map_err(|error| self.explain(error, key))
    }

    async fn inspect(&self, key: &Key, space: KeySpace) -> Result<KeyState> {
        let state = inspect::inspect(&self.inner, key, space).await;
        state.map_err(|error| self.explain(error, key))
    }

    async fn list(
        &self,
        space: KeySpace,
        prefix: &str,
        after: Option<&str>,
    ) -> Result<Vec<KeyState>> {
        let listed = inspect::list(&self.inner, space, prefix, after).await;
        listed.map_err(|error| error.at(self))
    }

    async fn evict(&self, key: &Key, token: FencingToken, reason: &str) -> Result<()> {
        let spaces = [KeySpace::Lock, KeySpace::Semaphore];
        for space in spaces.into_iter().filter(|space| self.inner.has_space(*space)) {
            let evicted = evict::evict(&self.inner, key, space, token).await;
            if evicted.map_err(|error| self.explain(error, key))? {
                tracing::info!(name: "tenure.evicted", %key, store = %self, %token, reason);
                return Ok(());
            }
        }
        let message =
            format!("no hold has the token {token}: see `tenure status` for the present holder");
        Err(self.explain(Error::new(ErrorKind::NotHeld, message), key))
    }

    async fn examine(&self, limit: Duration) -> Vec<Finding> {
        examine::findings(&self.inner, self.created, self.inner.api.deadline_after(limit)).await
    }

    async fn close(&self) {
        // Releases may still be in the client's buffer: they must leave before the connection closes.
        let _ = self.inner.api.client.flush().await;
    }
}
