//! Blocking API for programs without async: every call blocks the thread that makes it.
//!
//! One background thread per process renews the holds, whatever the calling threads do. Calls work on any thread, also
//! within an async runtime, where they block the thread as any blocking call does.
//!
//! It has locks, semaphores, elections, `once` and the operations of a client. A call cannot interrupt the caller's work
//! when a hold is lost, as `run` of the async API does: the work checks `is_held`, or another thread waits for `ending`.
//! Jobs (`tenure::jobs`) have the async API only.
//!
//! A forked child process starts a background thread of its own with its first call. It has none of its parent's holds
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
mod keys;
mod lock;
mod once;
mod runtime;

pub use election::{Election, ElectionRequest, Events, Leader, Leadership};
pub use keys::{KeyWatch, LockAllRequest, LockGuards};
pub use lock::{Client, ClientBuilder, Guard, LockRequest, Pending};
pub use once::{Once, OnceRequest, OnceRun};
