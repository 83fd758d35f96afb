//! The NATS store: locks in a bucket of JetStream's, replicated by it.
//!
//! One record a key says who holds it and for how long. It is written only at the sequence that the writer names, so
//! that of all who try one succeeds. A holder that falls silent is taken over by whoever has seen its record unchanged for
//! its lease and a short grace, on its own clock; no clock is compared with another's. Several holders (shared locks,
//! semaphores) are in one record, each watched by itself.
//!
//! A bucket of nlock's form is served as well: see [`NatsStore::is_best_effort`].

mod api;
mod async_errors;
mod bucket;
mod connect;
mod examine;
mod format;
mod hold;
mod inner;
mod keys;
mod layout;
mod lineage;
mod monitor;
mod nlock;
mod options;
mod queue;
mod settings;
mod watch;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::{FencingToken, Key, Time};

use self::api::WriteOutcome;
use self::hold::{NatsHold, read_handle};
use self::inner::NatsInner;
use self::keys::KnownKey;
use self::layout::BucketLayout;
use self::lineage::Lineage;
use self::options::Options;
use self::settings::SettingsCheck;
use super::{
    Answer, Capabilities, Claim, Finding, Handle, Handoff, Hold, KeySpace, KeyState, Liveness,
    QueueKind, Store, Version,
};
use crate::{Error, ErrorKind, Result};

/// Locks in a bucket of NATS JetStream. A clone is the same store, on the same connection.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// # let Ok(url) = std::env::var("TENURE_TEST_NATS") else { return Ok(()) };
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
    /// Whether the bucket was made by this store.
    made: bool,
}

/// How long a request may take that has no limit of its own.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// The most keys that one call lists.
const MAX_LISTED_KEYS: usize = 1_000;
/// The smallest ttl: a round trip and its variance must be small beside it.
const MIN_TTL: Duration = Duration::from_millis(200);

impl NatsStore {
    /// Connects to what a URL names: `nats://[user:password@|token@]host[:port],…/bucket?options`.
    ///
    /// Without a server `$NATS_URL` is asked, and then this host. The bucket is `tenure` by default; where it is absent
    /// it is made, with file storage and, on a cluster, three replicas; one that is there is used as it is, or refused.
    ///
    /// | option | meaning |
    /// |---|---|
    /// | `replicas=N` | copies of a new bucket; an existing one with another number is refused |
    /// | `fair=true` | who waits is served in order of arrival, as with [`fair`](crate::LockRequest::fair) |
    /// | `form=nlock`, `ttl=30s` | nlock's form of bucket, and its ttl |
    /// | `creds=FILE`, `nkey=FILE` | credentials: a `.creds` file, a seed |
    /// | `monitor=HOST:PORT,…` | monitoring ports, for [`examine`](Store::examine) to ask how often servers write to disk |
    /// | `tls=true`, `ca=FILE`, `cert=FILE&key=FILE` | TLS, whose certificates to trust, our own |
    ///
    /// # Errors
    ///
    /// `Invalid` for a bad URL, `Misconfigured` for a server without JetStream and a bucket of a foreign shape, `Denied`
    /// for credentials and rights, `Unavailable` where no server answers.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves at most a bucket that was made.
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
        let until = api.until(connect::CONNECT_TIMEOUT);
        if api.client.try_server_info().is_some_and(|info| !info.jetstream) {
            let message = "JetStream is off on this server: start it with --jetstream";
            return Err(Error::new(ErrorKind::Misconfigured, message));
        }
        // Before the bucket is looked at: a connection that is made meanwhile is one to look again after.
        let connections = api.connections();
        let (info, form, made) = bucket::open(&api, &options, until).await?;
        let lineage = Lineage::new(&info, api.clock.now())?;
        let adopted = SettingsCheck::new(&info, connections, api.clock.now());
        let inner = Arc::new(NatsInner::new(api, options, form, lineage, adopted));
        if let BucketLayout::Nlock { ttl } = form {
            tracing::warn!(
                name: "tenure.best_effort",
                store = %inner,
                ?ttl,
                "the bucket has nlock's form: memory and one replica; a restart of the server forgets who holds"
            );
        }
        Ok(Self { inner, made })
    }

    /// Whether the bucket has nlock's form: in memory, with one replica, where a restart of the server forgets who holds
    /// and a ttl that another participant changes ends holds early. Then exclusion is best effort.
    pub fn is_best_effort(&self) -> bool {
        self.inner.layout != BucketLayout::Native
    }

    fn at(&self, error: Error, key: &Key) -> Error {
        error.on(key).at(self)
    }

    async fn read(&self, key: &Key, space: KeySpace) -> Result<KnownKey> {
        let subject = self.inner.subject(key, space);
        let read = self.inner.read(&subject, self.inner.api.until(REQUEST_TIMEOUT)).await;
        read.map_err(|error| self.at(error, key))
    }

    /// Whether the form of the bucket has keys of this space at all.
    fn has_space(&self, space: KeySpace) -> bool {
        self.inner.layout == BucketLayout::Native || space == KeySpace::Lock
    }

    /// Breaks the hold of that token in one space; whether there was one.
    async fn evict_in(&self, key: &Key, space: KeySpace, token: FencingToken) -> Result<bool> {
        let subject = self.inner.subject(key, space);
        let until = self.inner.api.until(REQUEST_TIMEOUT);
        // A renewal of its holder may come between the look and the write.
        for _ in 0..5 {
            let known = self.inner.read(&subject, until).await?;
            let epoch = self.inner.lineage().epoch;
            let named =
                known.record.holders.iter().find(|holder| {
                    FencingToken::new(epoch, holder.number(known.sequence)) == token
                });
            let Some(claim) = named.map(|holder| holder.claim) else { return Ok(false) };
            let next = known.record.release(claim, known.sequence);
            let next = next.expect("the holder was found in it");
            match self.inner.put(&subject, known.sequence, next, until).await? {
                (WriteOutcome::Done(_), _) => return Ok(true),
                (WriteOutcome::Conflict, _) => {}
                (WriteOutcome::Unclear(error), _) => return Err(error),
            }
        }
        let message = "the record was written to each time: try again";
        Err(Error::new(ErrorKind::Contention, message))
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
        let ours = self.inner.layout == BucketLayout::Native;
        Capabilities {
            queue: if ours && self.inner.options.fair { QueueKind::Fifo } else { QueueKind::None },
            liveness: Liveness::Lease,
            push: true,
            handoff: Handoff::None,
            shared: ours,
            semaphore: ours,
            // The bucket's ttl is the same for all: nobody could renew a hold for longer.
            detached: ours,
            list: true,
            names: true,
            evict: true,
            ordered_tokens: true,
            min_ttl: MIN_TTL,
        }
    }

    fn first_use(&self) -> Option<String> {
        self.made.then(|| format!("made the bucket {} for its locks", self.inner.options.bucket))
    }

    async fn claim(&self, claim: &Claim, limit: Duration) -> Result<Answer> {
        self.inner.claim(claim, limit).await.map_err(|error| self.at(error, &claim.key))
    }

    async fn resume(&self, key: &Key, handle: &Handle) -> Result<Box<dyn Hold>> {
        let Some((space, claim, token)) = read_handle(handle) else {
            let message = "this is no handle of a NATS store";
            return Err(self.at(Error::new(ErrorKind::Invalid, message), key));
        };
        let known = self.read(key, space).await?;
        let ours = known.record.holder(claim);
        let ours = ours.filter(|holder| holder.number(known.sequence) == token.number());
        let Some(held) = ours.map(|holder| holder.held) else {
            return Err(self.at(Error::new(ErrorKind::NotHeld, "the hold has ended"), key));
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
            since: self.inner.now() - held,
            place: None,
        }))
    }

    async fn changed(&self, key: &Key, space: KeySpace, since: Version) -> Result<()> {
        let subject = self.inner.subject(key, space);
        let news = self.inner.watches.of(&self.inner, &subject).await;
        let mut news = news.map_err(|error| self.at(error, key))?;
        loop {
            news.borrow_and_update();
            let now = self.inner.now();
            let (seen, due) = match self.inner.keys.known(&subject) {
                Some(known) => (known.version(now), known.watched.next_takeover(now)),
                None => (Version::default(), Time::MAX),
            };
            if seen != since {
                return Ok(());
            }
            tokio::select! {
                news = news.changed() => news.map_err(|error| {
                    let message = "the watch has ended";
                    self.at(Error::new(ErrorKind::Unavailable, message).because(error), key)
                })?,
                () = self.inner.api.clock.sleep_until(due) => {}
            }
        }
    }

    async fn inspect(&self, key: &Key, space: KeySpace) -> Result<KeyState> {
        let known =
            if self.has_space(space) { self.read(key, space).await? } else { KnownKey::default() };
        let mut state = self.inner.key_state(key.clone(), space, &known);
        if self.inner.layout == BucketLayout::Native {
            let waiters = self.inner.waiters(key, space, &known).await;
            state.waiters = waiters.map_err(|error| self.at(error, key))?;
        }
        Ok(state)
    }

    async fn list(
        &self,
        space: KeySpace,
        prefix: &str,
        after: Option<&str>,
    ) -> Result<Vec<KeyState>> {
        if !self.has_space(space) {
            return Ok(Vec::new());
        }
        let root = self.inner.root();
        let filter = match self.inner.layout {
            BucketLayout::Native => format!("{root}{}.>", format::prefix(space)),
            BucketLayout::Nlock { .. } => format!("{root}>"),
        };
        let messages =
            watch::snapshot(&self.inner, &filter).await.map_err(|error| error.at(self))?;
        let mut states: Vec<_> = messages
            .iter()
            .filter_map(|message| {
                let key = self.inner.layout.key(message.subject.strip_prefix(&root)?, space)?;
                let wanted = key.as_str().starts_with(prefix)
                    && after.is_none_or(|after| key.as_str() > after);
                wanted.then_some((key, message))
            })
            .filter_map(|(key, message)| {
                self.inner.note_message(message);
                let known = self.inner.keys.known(&message.subject)?;
                Some(self.inner.key_state(key, space, &known))
            })
            .filter(|state| !state.holders.is_empty())
            .collect();
        states.sort_by(|a, b| a.key.cmp(&b.key));
        states.truncate(MAX_LISTED_KEYS);
        Ok(states)
    }

    async fn evict(&self, key: &Key, token: FencingToken, reason: &str) -> Result<()> {
        for space in
            [KeySpace::Lock, KeySpace::Semaphore].into_iter().filter(|space| self.has_space(*space))
        {
            let evicted = self.evict_in(key, space, token).await;
            if evicted.map_err(|error| self.at(error, key))? {
                tracing::info!(name: "tenure.evicted", %key, store = %self, %token, reason);
                return Ok(());
            }
        }
        let message = format!("no hold has the token {token}: look at who holds it now");
        Err(self.at(Error::new(ErrorKind::NotHeld, message), key))
    }

    async fn examine(&self, limit: Duration) -> Vec<Finding> {
        let until = self.inner.api.until(limit);
        let mut findings = super::examine::basics(self, limit / 2).await;
        if !findings.iter().any(Finding::is_unreachable) {
            findings.extend(examine::findings(self, until).await);
        }
        findings
    }

    async fn close(&self) {
        // What was sent is on its way before the connection goes.
        let _ = self.inner.api.client.flush().await;
    }
}
