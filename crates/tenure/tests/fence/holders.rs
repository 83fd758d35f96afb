//! Two real holders of one lock, of which the first is stale and does not know.

use std::sync::Arc;
use std::time::Duration;

use tenure::{Client, Clock, FencingToken, Guard, ManualClock, MemoryStore};
use tokio::runtime::{Builder, Runtime};

const TTL: Duration = Duration::from_secs(30);

/// A process that acquires the lock and then freezes: its clock stands still, and its tasks run no more.
pub(crate) struct Frozen {
    pub(crate) guard: Guard,
    store: MemoryStore,
    store_time: ManualClock,
    // Last, so that the guard goes before what runs its keeper.
    runtime: Runtime,
}

impl Frozen {
    pub(crate) fn holding(key: &str) -> Self {
        let (clock, store_time) = Clock::manual();
        let store = MemoryStore::with_clock(clock);
        let (stopped, _) = Clock::manual();
        let client = Client::with_store(Arc::new(store.clone())).with_clock(stopped);
        let runtime = Builder::new_current_thread().build().unwrap();
        let guard = runtime.block_on(client.lock(key).ttl(TTL).acquire()).unwrap();
        Self { guard, store, store_time, runtime }
    }

    pub(crate) fn token(&self) -> FencingToken {
        self.guard.fencing_token()
    }

    /// The token of the next holder, which gets the lock because the lease has ended at the store.
    pub(crate) fn successor(&self) -> FencingToken {
        self.store_time.advance(TTL);
        let client = Client::with_store(Arc::new(self.store.clone()));
        let next = Builder::new_current_thread().build().unwrap();
        let guard =
            next.block_on(client.lock(self.guard.key().as_str()).ttl(TTL).try_acquire()).unwrap();
        assert!(guard.is_held());
        assert!(self.guard.is_held(), "the frozen holder believes in its hold: only fencing helps");
        guard.fencing_token()
    }

    /// Lets the process go on: its tasks notice what happened meanwhile.
    pub(crate) fn thaw(&self) -> tenure::Lost {
        self.runtime.block_on(self.guard.lost())
    }
}
