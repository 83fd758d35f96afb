//! A store of your own with a queue, shared by several processes: a table in a file.
//!
//! `Table::change` is one transaction, made by a driver that blocks. The rest shows what `custom_store` leaves out: a
//! queue with places, a clock that processes share, time limits, and a conformance suite that starts other processes.

use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, fs, io, thread};

use serde::{Deserialize, Serialize};
use tenure::conformance::{self, Harness};
use tenure::store::LeaseStart::{FromConfirm, FromRequest};
use tenure::store::{
    Answer, Capabilities, Claim, Contended, Grant, Hold, HolderState, KeySpace, KeyState,
    LeaseStart, Liveness, Mode, Place, QueueKind, Renewed, Store, Version, Waited, WaiterState,
    async_trait,
};
use tenure::{Clock, Error, ErrorKind, FencingToken, Key, Result, Time};

/// Pause between two looks at the table.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Limit of a request that has none of its own.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// Record of a key.
#[derive(Default, Deserialize, Serialize)]
struct Record {
    grants: u64,
    /// Claims in order of arrival. The first one has the lock.
    claims: Vec<Entry>,
}

#[derive(Deserialize, Serialize)]
struct Entry {
    id: u128,
    /// End of the lease of a holder, or of the place of a silent waiter, in nanoseconds. All processes of a host have
    /// the same [`Clock::system`] until the host restarts: keep this file in a directory that a restart empties.
    until: u64,
    /// Fencing token; 0 while the claim waits.
    token: u64,
}

impl Record {
    /// Removes the claims of dead processes, and grants the lock to the first claim.
    fn advance(&mut self, now: Time) {
        self.claims.retain(|entry| entry.until > now.as_nanos());
        if let Some(first) = self.claims.first_mut().filter(|first| first.token == 0) {
            self.grants += 1;
            first.token = self.grants;
        }
    }

    fn find(&mut self, id: u128) -> Option<&mut Entry> {
        self.claims.iter_mut().find(|entry| entry.id == id)
    }

    /// Another value for every change of holder or waiters, the same after a renewal.
    fn version(&self) -> Version {
        let mix = |version: u128, entry: &Entry| version.rotate_left(7) ^ entry.id;
        Version(self.claims.iter().fold(self.grants.into(), mix))
    }
}

#[derive(Clone, Debug)]
struct Table(PathBuf);

impl Table {
    /// Changes a record in one step. The driver blocks, so it runs on a thread of its own: on a thread of the runtime,
    /// it would delay the renewals of all other holds.
    async fn change<T: Send + 'static>(
        &self,
        key: &Key,
        limit: Duration,
        change: impl FnOnce(&mut Record, Time) -> T + Send + 'static,
    ) -> Result<T> {
        let (path, key, clock) = (self.0.clone(), key.to_string(), Clock::system());
        let by = clock.now() + limit;
        let transaction = move || -> io::Result<T> {
            // The table is replaced, so another file is locked: one that is never replaced.
            let lock = File::create(path.with_extension("lock"))?;
            while let Err(busy) = lock.try_lock() {
                match busy {
                    TryLockError::WouldBlock if clock.now() < by => thread::sleep(POLL_INTERVAL),
                    busy => return Err(busy.into()),
                }
            }
            let mut records: BTreeMap<String, Record> =
                serde_json::from_str(&fs::read_to_string(&path)?)?;
            let (record, now) = (records.entry(key).or_default(), clock.now());
            record.advance(now);
            let result = change(record, now);
            record.advance(now); // the next waiter holds the lock before a release returns
            let new = path.with_extension("new");
            fs::write(&new, serde_json::to_string(&records)?)?;
            fs::rename(new, path)?;
            Ok(result)
        };
        let changed = tokio::task::spawn_blocking(transaction).await;
        // The last step makes the change, so none is in effect after an error: the kind is `Unavailable`. A driver
        // that sends requests to a server fails with `Unknown` once a request may have reached the server.
        changed.map_err(io::Error::other).and_then(|changed| changed).map_err(|error| {
            Error::new(ErrorKind::Unavailable, format!("cannot change the table: {error}"))
        })
    }
}

/// A claim in the table: a [`Place`] while it waits, and then a [`Hold`] under its token.
#[derive(Clone, Debug)]
struct QueuedClaim {
    table: Table,
    key: Key,
    id: u128,
    ttl: Duration,
    /// 0 while the claim waits.
    token: u64,
}

impl QueuedClaim {
    fn granted(&self, token: u64, lease_start: LeaseStart) -> Grant {
        let hold = Self { token, ..self.clone() };
        let mut grant = Grant::new(FencingToken::new(0, token), Box::new(hold));
        (grant.grants, grant.lease_start) = (Some(token), lease_start);
        grant
    }

    /// Keeps the claim for `ttl` from now, or ends it if that is zero. Returns its token.
    async fn keep(&self, ttl: Duration, limit: Duration) -> Result<u64> {
        let (id, token) = (self.id, self.token);
        let change = move |record: &mut Record, now: Time| {
            // A hold names its token too: an earlier or later hold of the same claim has another token.
            let entry = record.find(id).filter(|entry| token == 0 || entry.token == token)?;
            entry.until = (now + ttl).as_nanos();
            Some(entry.token)
        };
        let ended = || Error::new(ErrorKind::NotHeld, "the claim has ended").on(&self.key);
        self.table.change(&self.key, limit, change).await?.ok_or_else(ended)
    }
}

#[async_trait]
impl Place for QueuedClaim {
    async fn wait(&mut self, limit: Duration) -> Result<Waited> {
        let clock = Clock::system();
        let by = clock.now() + limit;
        loop {
            // Each look keeps the place for another ttl. A waiter that died stops looking.
            match self.keep(self.ttl, REQUEST_TIMEOUT).await {
                Ok(0) if clock.now() >= by => return Ok(Waited::StillQueued { ahead: None }),
                Ok(0) => tokio::time::sleep(POLL_INTERVAL.min(by.since(clock.now()))).await,
                // Granted at an unknown instant before this look: the lease counts from the first renewal.
                Ok(token) => return Ok(Waited::Granted(self.granted(token, FromConfirm))),
                Err(error) if error.kind() == ErrorKind::NotHeld => return Ok(Waited::Gone),
                Err(error) => return Err(error),
            }
        }
    }

    async fn abandon(&mut self, limit: Duration) -> Result<()> {
        self.keep(Duration::ZERO, limit).await.map(drop)
    }
}

#[async_trait]
impl Hold for QueuedClaim {
    async fn renew(&mut self, ttl: Duration, limit: Duration) -> Result<Renewed> {
        self.keep(ttl, limit).await.map(|_| Renewed::default())
    }

    async fn release(&mut self, limit: Duration) -> Result<()> {
        self.keep(Duration::ZERO, limit).await.map(drop)
    }
}

#[async_trait]
impl Store for Table {
    fn capabilities(&self) -> Capabilities {
        let mut can = Capabilities::new(Liveness::Lease);
        can.queue = QueueKind::Fifo;
        can.ordered_tokens = true;
        can.min_ttl = Duration::from_secs(1);
        can
    }

    async fn claim(&self, claim: &Claim, limit: Duration) -> Result<Answer> {
        if claim.mode != Mode::Exclusive {
            return Err(tenure::store::unsupported(self, "share a lock"));
        }
        let (id, ttl, queue) = (claim.id, claim.ttl, claim.queue);
        let change = move |record: &mut Record, now: Time| {
            // Without `queue`, the claim is granted only if no other is there before it.
            if record.find(id).is_none() && (queue || record.claims.is_empty()) {
                record.claims.push(Entry { id, until: (now + ttl).as_nanos(), token: 0 });
                record.advance(now);
            }
            (record.find(id).map(|entry| entry.token), record.version())
        };
        let (token, version) = self.change(&claim.key, limit, change).await?;
        let (table, key) = (self.clone(), claim.key.clone());
        let queued = QueuedClaim { table, key, id, ttl, token: 0 };
        Ok(match token {
            None => Answer::Contended(Contended::new(None, version)),
            Some(0) => Answer::Queued(Box::new(queued)),
            Some(token) => Answer::Granted(queued.granted(token, FromRequest)),
        })
    }

    async fn inspect(&self, key: &Key, space: KeySpace) -> Result<KeyState> {
        let look = |record: &mut Record, _| (record.claims.len(), record.version());
        let (claims, version) = self.change(key, REQUEST_TIMEOUT, look).await?;
        let mut state = KeyState::free(key.clone(), space, version);
        if space == KeySpace::Lock && claims > 0 {
            state.holders.push(HolderState::new(None, FencingToken::NONE));
            state.waiters.resize(claims - 1, WaiterState::new(None));
        }
        Ok(state)
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "table:{}", self.0.display())
    }
}

#[async_trait]
impl Harness for Table {
    async fn open(&self) -> Arc<dyn Store> {
        Arc::new(self.clone())
    }

    /// Nothing is kept in memory: another value of the store reads the file as a restarted process does.
    async fn restart(&self) -> Option<Arc<dyn Store>> {
        Some(self.open().await)
    }

    /// This program again, with the table as its argument: `main` then calls [`conformance::work`].
    fn worker(&self) -> Option<Command> {
        let mut command = Command::new(std::env::current_exe().ok()?);
        command.arg(&self.0);
        Some(command)
    }
}

#[tokio::main]
async fn main() -> io::Result<()> {
    if let Some(table) = std::env::args_os().nth(1) {
        conformance::work(Arc::new(Table(table.into()))).await;
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let table = Table(folder.path().join("table"));
    fs::write(&table.0, "{}")?;
    let report = conformance::run(table).await;
    assert_eq!(report.failed(), 0, "{report}");
    println!("{} cases of the suite passed, {} skipped", report.passed(), report.skipped());
    Ok(())
}
