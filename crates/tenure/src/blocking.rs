//! The same for programs without async: every call waits on the thread that makes it.
//!
//! One thread of the process's own renews what is held, whatever the calling threads do. Calls work from anywhere, also
//! from within an async runtime, where they block the thread as any blocking call does.
//!
//! A forked copy of the process has a thread of its own from its first call on. It holds nothing of what its parent holds,
//! and needs clients of its own: connections belong to the process that opened them.
//!
//! ```
//! use std::time::Duration;
//! use tenure::blocking::Client;
//!
//! let client = Client::connect("memory:")?;
//! let guard = client.lock("reports/nightly").timeout(Duration::from_secs(10)).acquire()?;
//! println!("held as {}", guard.fencing_token());
//! guard.release()?;
//! # Ok::<(), tenure::Error>(())
//! ```

mod election;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};

pub use election::{Election, ElectionRequest, Events, Leader, Leadership};

use crate::process::PerProcess;
use crate::retry::Retry;
use crate::store::{Finding, KeyState, Store};
use crate::{Error, ErrorKind, FencingToken, Handle, Key, Lost, Result};

/// Passes builder methods on to the request inside.
macro_rules! same_as {
    ($inner:ident: $($name:ident($($argument:ident: $type:ty),*);)*) => {
        $(
            #[doc = concat!("See [`", stringify!($inner), "::", stringify!($name), "`](crate::", stringify!($inner), "::", stringify!($name), ").")]
            pub fn $name(self, $($argument: $type),*) -> Self {
                Self(self.0.$name($($argument),*))
            }
        )*
    };
}
use same_as;

/// Locks, semaphores and elections on one store; see [`crate::Client`]. Cloning is cheap.
///
/// ```
/// let client = tenure::blocking::Client::connect("memory:")?;
/// let guard = client.lock("reports").try_acquire()?;
/// assert!(client.lock("reports").try_acquire().is_err());
/// guard.release()?;
/// # Ok::<(), tenure::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Client(crate::Client);

impl Client {
    /// A client of the store that `url` names.
    ///
    /// # Errors
    ///
    /// As [`crate::Client::connect`].
    pub fn connect(url: &str) -> Result<Self> {
        wait(crate::Client::connect(url))?.map(Self)
    }

    /// A client of a store that was made by hand.
    pub fn with_store(store: Arc<dyn Store>) -> Self {
        Self(crate::Client::with_store(store))
    }

    /// A lock that one holds at a time.
    pub fn lock(&self, key: impl AsRef<str>) -> LockRequest {
        LockRequest(self.0.lock(key))
    }

    /// A semaphore with this many slots.
    pub fn semaphore(&self, key: impl AsRef<str>, slots: u32) -> LockRequest {
        LockRequest(self.0.semaphore(key, slots))
    }

    /// An election to take part in.
    pub fn election(&self, key: impl AsRef<str>) -> ElectionRequest {
        ElectionRequest(self.0.election(key))
    }

    /// Who leads an election, without taking part.
    ///
    /// # Errors
    ///
    /// `Invalid` for a bad key.
    pub fn leader(&self, key: impl AsRef<str>) -> Result<Leader> {
        self.0.leader(key).map(Leader)
    }

    /// Who holds a lock, and who waits for it.
    ///
    /// # Errors
    ///
    /// As [`crate::Client::inspect`].
    pub fn inspect(&self, key: impl AsRef<str>) -> Result<KeyState> {
        wait(self.0.inspect(key))?
    }

    /// What the store finds out about itself.
    ///
    /// # Errors
    ///
    /// Where the thread that the library works on cannot be started.
    pub fn examine(&self, limit: Duration) -> Result<Vec<Finding>> {
        wait(self.0.examine(limit))
    }
}

/// How a lock is to be acquired and kept; see [`crate::LockRequest`].
#[derive(Debug)]
#[must_use = "a request does nothing until it is acquired"]
pub struct LockRequest(crate::LockRequest);

impl LockRequest {
    same_as! { LockRequest:
        ttl(ttl: Duration);
        timeout(timeout: Duration);
        shared();
        keep_alive(on: bool);
        keep_alive_factor(factor: u32);
        max_hold(max: Duration);
        stop_grace(time: Duration);
        retry(retry: impl Retry + 'static);
        id(id: impl Into<String>);
        note(note: impl Into<String>);
        fair();
        fail_if_contended();
        detached();
        on_handoff_requested(f: impl Fn() + Send + Sync + 'static);
        on_renewal_error(f: impl Fn(&Error) + Send + Sync + 'static);
    }

    /// Acquires the lock, waiting for it as long as the timeout allows.
    ///
    /// # Errors
    ///
    /// As [`crate::LockRequest::acquire`].
    pub fn acquire(self) -> Result<Guard> {
        wait(self.0.acquire())?.map(Guard)
    }

    /// Acquires the lock if it is free.
    ///
    /// # Errors
    ///
    /// As [`crate::LockRequest::try_acquire`].
    pub fn try_acquire(self) -> Result<Guard> {
        wait(self.0.try_acquire())?.map(Guard)
    }

    /// Joins the queue: the first of two phases.
    ///
    /// # Errors
    ///
    /// As [`crate::LockRequest::enqueue`].
    pub fn enqueue(self) -> Result<Pending> {
        wait(self.0.enqueue())?.map(Pending)
    }
}

/// A place in the queue; see [`crate::Pending`].
#[derive(Debug)]
pub struct Pending(crate::Pending);

impl Pending {
    /// Waits for the lock: the second of two phases.
    ///
    /// # Errors
    ///
    /// As [`crate::Pending::wait`].
    pub fn wait(self) -> Result<Guard> {
        wait(self.0.wait())?.map(Guard)
    }
}

/// A held lock; see [`crate::Guard`]. Dropping it releases the lock, in the background.
#[derive(Debug)]
#[must_use = "dropping a guard releases the lock"]
pub struct Guard(crate::Guard);

impl Guard {
    /// The key that is held.
    pub fn key(&self) -> &Key {
        self.0.key()
    }

    /// The number that grows with every grant of this key.
    pub fn fencing_token(&self) -> FencingToken {
        self.0.fencing_token()
    }

    /// The revision of the record in a bucket of NATS, which renewals raise; `None` on other stores. See
    /// [`crate::Guard::revision`].
    pub fn revision(&self) -> Option<u64> {
        self.0.revision()
    }

    /// The secret that renews and releases the hold from elsewhere.
    pub fn handle(&self) -> Option<&Handle> {
        self.0.handle()
    }

    /// Whether the lock is held at this moment.
    pub fn is_held(&self) -> bool {
        self.0.is_held()
    }

    /// How long the lock is held for certain.
    pub fn remaining(&self) -> Duration {
        self.0.remaining()
    }

    /// Waits for the loss of the hold, for `timeout` at most; `None` where it is still held then.
    pub fn lost(&self, timeout: Duration) -> Option<Lost> {
        within(timeout, self.0.lost())
    }

    /// Waits until somebody waits for this lock, for `timeout` at most; whether somebody does.
    pub fn handoff_requested(&self, timeout: Duration) -> bool {
        within(timeout, self.0.handoff_requested()).is_some()
    }

    /// Waits until it is time to stop the protected work, for `timeout` at most; whether it is.
    pub fn ending(&self, timeout: Duration) -> bool {
        within(timeout, self.0.ending()).is_some()
    }

    /// Releases the lock and says how that went.
    ///
    /// # Errors
    ///
    /// As [`crate::Guard::release`].
    pub fn release(self) -> Result<()> {
        wait(self.0.release())?
    }

    /// Stops renewing and leaves the hold to its ttl.
    ///
    /// # Errors
    ///
    /// As [`crate::Guard::forget`].
    pub fn detach(self) -> Result<Handle> {
        wait(self.0.detach())?
    }
}

/// Waits for a future on this thread, with the thread of the process behind it.
fn wait<F: Future>(future: F) -> Result<F::Output> {
    let _within = runtime()?.enter();
    Ok(pollster::block_on(future))
}

/// The same for as long as `timeout`; of futures that need no runtime.
fn within<F: Future>(timeout: Duration, future: F) -> Option<F::Output> {
    let clock = crate::Clock::system();
    pollster::block_on(async {
        tokio::select! {
            biased;
            output = future => Some(output),
            () = clock.sleep_until(clock.now() + timeout) => None,
        }
    })
}

/// The runtime on whose one thread holds are kept. It lives as long as the process. That of a parent is never dropped in a
/// forked copy: to join its threads would wait for ever, and to close its sockets would cut the parent's watch over them.
fn runtime() -> Result<&'static Runtime> {
    static RUNTIME: PerProcess<std::io::Result<Runtime>> = PerProcess::new();
    let made = RUNTIME.get_or_init(|| {
        Builder::new_multi_thread().worker_threads(1).thread_name("tenure").enable_all().build()
    });
    made.as_ref().map_err(|error| {
        let message = format!("the thread that keeps holds cannot be started: {error}");
        Error::new(ErrorKind::Unavailable, message)
    })
}
