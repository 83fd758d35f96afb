//! A store of your own: locks in a table that has a compare-and-swap, such as a database that tenure does not know.
//!
//! The table here is a map in memory, so that the example runs anywhere. In your store, `Table::change` is one
//! transaction or one conditional write. The rest stays: claim, renew and release decide by the record alone, and by
//! the table's clock. The example runs the conformance suite on the store, and then uses it by its URL.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tenure::conformance::{self, Harness};
use tenure::store::{
    Answer, Capabilities, Claim, Contended, Grant, Hold, HolderState, Identity, KeySpace, KeyState,
    Liveness, Mode, Renewed, Store, Version, async_trait,
};
use tenure::{Client, Error, ErrorKind, FencingToken, Key, Result};

/// The table. A record stays when its lock is released: fencing tokens must grow for ever.
#[derive(Default)]
struct Table(Mutex<BTreeMap<String, Record>>);

#[derive(Clone, Default)]
struct Record {
    /// Number of grants so far. The last one is the fencing token of the holder.
    grants: u64,
    holder: Option<Holder>,
}

#[derive(Clone)]
struct Holder {
    claim: u128,
    by: Identity,
    since: Instant,
    until: Instant,
}

impl Table {
    /// Changes a record in one step. A holder whose lease has ended is gone.
    fn change<T>(&self, key: &Key, change: impl FnOnce(&mut Record) -> T) -> T {
        let mut records = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let record = records.entry(key.as_str().to_owned()).or_default();
        record.holder.take_if(|holder| holder.until <= Instant::now());
        change(record)
    }
}

impl Record {
    fn token(&self) -> FencingToken {
        FencingToken::new(0, self.grants)
    }

    /// Another version for every change of the holder.
    fn version(&self) -> Version {
        Version(u128::from(self.grants) * 2 + u128::from(self.holder.is_some()))
    }
}

/// The store: what a [`Client`] needs.
#[derive(Clone)]
struct TableStore(Arc<Table>);

/// A hold. It names its grant by the token, and never touches a later one.
struct TableHold {
    table: Arc<Table>,
    key: Key,
    token: FencingToken,
}

#[async_trait]
impl Store for TableStore {
    fn capabilities(&self) -> Capabilities {
        let mut can = Capabilities::new(Liveness::Lease);
        can.identities = true;
        can.ordered_tokens = true;
        can.min_ttl = Duration::from_millis(100);
        can
    }

    async fn claim(&self, claim: &Claim, _limit: Duration) -> Result<Answer> {
        if claim.mode != Mode::Exclusive {
            return Err(tenure::store::unsupported(self, "share a lock"));
        }
        Ok(self.0.change(&claim.key, |record| {
            // A claim that is repeated gets the grant that it already has.
            let again = record.holder.as_ref().is_some_and(|holder| holder.claim == claim.id);
            if let Some(holder) = record.holder.as_ref().filter(|_| !again) {
                return Answer::Contended(Contended::new(
                    Some(holder.by.clone()),
                    record.version(),
                ));
            }
            if !again {
                record.grants += 1;
                let (since, by) = (Instant::now(), Identity::clone(&claim.by));
                let until = since + claim.ttl;
                record.holder = Some(Holder { claim: claim.id, by, since, until });
            }
            let (table, key, token) = (Arc::clone(&self.0), claim.key.clone(), record.token());
            let mut grant = Grant::new(token, Box::new(TableHold { table, key, token }));
            grant.grants = Some(record.grants);
            Answer::Granted(grant)
        }))
    }

    async fn inspect(&self, key: &Key, space: KeySpace) -> Result<KeyState> {
        // On a server, a read: an inspection changes nothing.
        Ok(self.0.change(key, |record| {
            let mut state = KeyState::free(key.clone(), space, record.version());
            if let Some(holder) = record.holder.as_ref().filter(|_| space == KeySpace::Lock) {
                let mut shown = HolderState::new(Some(holder.by.clone()), record.token());
                shown.held_for = Some(holder.since.elapsed());
                shown.lease_left = Some(holder.until.saturating_duration_since(Instant::now()));
                state.holders.push(shown);
            }
            state
        }))
    }
}

impl TableHold {
    /// Changes the record if it still has this hold.
    fn change(&self, change: impl FnOnce(&mut Option<Holder>)) -> Result<()> {
        self.table.change(&self.key, |record| {
            if record.holder.is_none() || record.token() != self.token {
                return Err(Error::new(ErrorKind::NotHeld, "the hold has ended").on(&self.key));
            }
            change(&mut record.holder);
            Ok(())
        })
    }
}

#[async_trait]
impl Hold for TableHold {
    async fn renew(&mut self, ttl: Duration, _limit: Duration) -> Result<Renewed> {
        let until = Instant::now() + ttl;
        self.change(|holder| holder.iter_mut().for_each(|holder| holder.until = until))?;
        Ok(Renewed::default())
    }

    async fn release(&mut self, _limit: Duration) -> Result<()> {
        self.change(|holder| *holder = None)
    }
}

/// Access of the conformance suite to the store.
struct OnTable(TableStore);

#[async_trait]
impl Harness for OnTable {
    async fn open(&self) -> Arc<dyn Store> {
        Arc::new(self.0.clone())
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let store = TableStore(Arc::default());
    let report = conformance::run(OnTable(store.clone())).await;
    assert_eq!(report.failed(), 0, "{report}");
    println!("{} cases of the suite passed", report.passed());

    let client = Client::builder()
        .scheme("table", move |_url| {
            let store: Arc<dyn Store> = Arc::new(store.clone());
            async { Ok(store) }
        })
        .connect("table:locks")
        .await?;
    let guard = client.lock("deploy").acquire().await?;
    println!("held under token {}", guard.fencing_token());
    guard.release().await
}

impl fmt::Display for TableStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("table:locks")
    }
}

impl fmt::Debug for TableStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TableStore")
    }
}

impl fmt::Debug for TableHold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TableHold({}, {})", self.key, self.token)
    }
}
