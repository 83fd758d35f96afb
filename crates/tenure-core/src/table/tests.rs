//! One test for each property of the table. Time is counted in seconds.
#![expect(clippy::disallowed_types, reason = "any hasher with a fixed seed will do for a test")]

mod claims;
mod embargo;
mod limits;
mod locks;
mod owners;
mod prefetch;

use std::hash::{BuildHasherDefault, DefaultHasher};
use std::time::Duration;

use super::*;

type Table = LockTable<BuildHasherDefault<DefaultHasher>, Counter>;

/// Tokens 1, 2, 3…
#[derive(Debug, Default)]
struct Counter(u64);

impl Mint for Counter {
    fn mint(&mut self) -> LockToken {
        self.0 += 1;
        LockToken::new(self.0, 1000 + self.0)
    }
}

const KEY: &[u8] = b"reports/nightly";
const LEASE: Duration = Duration::from_secs(10);

fn table() -> Table {
    with(TableConfig::default())
}

fn with(config: TableConfig) -> Table {
    LockTable::new(config, BuildHasherDefault::default(), Counter::default())
}

/// Instant `seconds` after the origin.
const fn at(seconds: u64) -> Time {
    Time::from_nanos(seconds * 1_000_000_000)
}

fn exclusive(owner: Owner) -> TableClaim {
    TableClaim { owner, mode: Mode::Exclusive, lease: LEASE, queue: true }
}

fn shared(owner: Owner) -> TableClaim {
    TableClaim { mode: Mode::Shared, ..exclusive(owner) }
}

fn slot(owner: Owner, limit: u32) -> TableClaim {
    TableClaim { mode: Mode::Slot { limit }, ..exclusive(owner) }
}

/// Access to the answer that a test expects; panics on any other.
trait Expect {
    fn grant(self) -> Grant;
    fn place(self) -> PlaceId;
}

macro_rules! expect {
    ($answer:ident, $granted:ident, $waiting:ident) => {
        impl Expect for $answer {
            fn grant(self) -> Grant {
                let Self::$granted(grant) = self else { panic!("not granted: {self:?}") };
                grant
            }

            fn place(self) -> PlaceId {
                let Self::$waiting(place) = self else { panic!("not waiting: {self:?}") };
                place
            }
        }
    };
}

expect!(ClaimAnswer, Granted, Queued);
expect!(Enqueued, Granted, Queued);
expect!(Redeemed, Granted, Waiting);

impl Table {
    fn release_key(&mut self, grant: Grant, now: Time) {
        self.check();
        self.release(KeySpace::Lock, KEY, grant.token, now).expect("held");
        self.check();
    }

    /// Grants to waiters since the last call; panics on any other event.
    fn turns(&mut self) -> Vec<(PlaceId, Grant)> {
        self.check();
        let turn = |event| match event {
            TableEvent::Granted { place: Some(place), grant, .. } => (place, grant),
            other => panic!("{other:?}"),
        };
        self.events().into_iter().map(turn).collect()
    }

    /// Events since the last call that the caller of an operation does not learn from its answer.
    fn events(&mut self) -> Vec<TableEvent> {
        self.check();
        let mut events: Vec<_> = std::iter::from_fn(|| self.poll_event()).collect();
        events.retain(|event| {
            matches!(
                event,
                TableEvent::Granted { place: Some(_), .. }
                    | TableEvent::Ended {
                        how: Ending::Expired
                            | Ending::Evicted
                            | Ending::Disconnected
                            | Ending::Abandoned,
                        ..
                    }
                    | TableEvent::HandoffRequested { .. }
            )
        });
        events
    }
}

fn ended(how: Ending, owner: impl Into<Option<Owner>>, grant: Grant) -> TableEvent {
    let owner = owner.into();
    TableEvent::Ended { how, owner, space: KeySpace::Lock, key: KEY.into(), token: grant.token }
}
