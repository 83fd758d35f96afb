//! Notifications of files by inotify.
//!
//! One inotify instance serves a store. In each runtime with waiters, one task reads it and wakes the watchers, whatever
//! runtime they are in.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, MutexGuard, Weak};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::{Handle, Id};
use tokio::sync::watch;

use super::wake::{FileEvents, Wake};
use crate::mutex::Mutex;

/// Size of a read, and the number of events from which there may be more to read.
const BUFFER: usize = 1024;
const FULL: usize = BUFFER / 16 - 2;

/// The inotify instance of a store, and the watchers of files.
#[derive(Debug)]
pub(super) struct Hub {
    inotify: Option<OwnedFd>,
    state: Mutex<WatchState>,
    /// Closed when the hub is dropped, which ends the tasks that read for it.
    alive: watch::Sender<()>,
    pid: u32,
}

#[derive(Debug, Default)]
struct WatchState {
    watched: HashMap<i32, Vec<Watcher>>,
    next: u64,
    /// Runtimes in which a task reads events (true), or cannot (false).
    runtimes: HashMap<Id, bool>,
}

#[derive(Debug)]
struct Watcher {
    id: u64,
    about: FileEvents,
    wake: Arc<Wake>,
}

impl Watcher {
    /// Notifies the watcher of the events that it subscribed to. The kernel has a single watch per file and
    /// process, with the events of all watchers.
    fn tell(&self, events: ReadFlags) {
        let for_others = match events {
            ReadFlags::ACCESS => self.about != FileEvents::ChangedOrRead,
            ReadFlags::MODIFY => self.about != FileEvents::ChangedOrWritten,
            _ => false,
        };
        if for_others {
            return;
        }
        let changed = events != ReadFlags::ACCESS;
        self.wake.wake_for(changed, events.contains(ReadFlags::CLOSE_WRITE));
    }
}

/// A watch of a file, which ends when it is dropped.
#[derive(Debug)]
pub(super) struct Watch {
    hub: Arc<Hub>,
    descriptor: i32,
    id: u64,
}

impl Hub {
    pub(super) fn new() -> Arc<Self> {
        let inotify = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC);
        if let Err(error) = &inotify {
            tracing::debug!(name: "tenure.watch_failed", %error, "inotify is not available: waiters poll");
        }
        let (inotify, alive) = (inotify.ok(), watch::Sender::new(()));
        Arc::new(Self { inotify, state: Mutex::default(), alive, pid: std::process::id() })
    }

    /// Watches a file; `None` if the system cannot.
    pub(super) fn watch(
        self: &Arc<Self>,
        path: &Path,
        about: FileEvents,
        wake: &Arc<Wake>,
    ) -> Option<Watch> {
        let inotify = self.inotify.as_ref()?;
        let mut flags = WatchFlags::ATTRIB
            | WatchFlags::CLOSE_WRITE
            | WatchFlags::DELETE_SELF
            | WatchFlags::MASK_ADD
            | WatchFlags::DONT_FOLLOW;
        match about {
            FileEvents::Changed => {}
            FileEvents::ChangedOrRead => flags |= WatchFlags::ACCESS,
            FileEvents::ChangedOrWritten => flags |= WatchFlags::MODIFY,
        }
        // Locked before the watch exists: its first event must find the watcher.
        let mut state = self.lock();
        let descriptor = inotify::add_watch(inotify, path, flags).ok()?;
        state.next += 1;
        let id = state.next;
        let watcher = Watcher { id, about, wake: Arc::clone(wake) };
        state.watched.entry(descriptor).or_default().push(watcher);
        Some(Watch { hub: Arc::clone(self), descriptor, id })
    }

    /// Makes sure that events are read in this runtime. False if they cannot be.
    pub(super) fn ensure_reader(self: &Arc<Self>) -> bool {
        let (Some(inotify), Ok(runtime)) = (&self.inotify, Handle::try_current()) else {
            return false;
        };
        match self.lock().runtimes.entry(runtime.id()) {
            Entry::Occupied(reads) => return *reads.get(),
            Entry::Vacant(new) => new.insert(true),
        };
        let hub = Arc::downgrade(self);
        let mut reading = EventReader { hub, runtime: runtime.id(), registered: false };
        // Runtimes cannot share a descriptor, only the open file behind it.
        let Ok(inotify) = inotify.try_clone() else { return false };
        let mut alive = self.alive.subscribe();
        runtime.spawn(async move {
            tokio::select! {
                () = reading.run(inotify) => {}
                _ = alive.changed() => {}
            }
        });
        true
    }

    fn dispatch(&self, descriptor: i32, events: ReadFlags) {
        let state = self.lock();
        if events.contains(ReadFlags::QUEUE_OVERFLOW) {
            state.watched.values().flatten().for_each(|watcher| watcher.tell(events));
        } else {
            let watchers = state.watched.get(&descriptor).into_iter().flatten();
            watchers.for_each(|watcher| watcher.tell(events));
        }
    }

    fn lock(&self) -> MutexGuard<'_, WatchState> {
        self.state.lock()
    }
}

/// Task that reads events in one runtime.
struct EventReader {
    hub: Weak<Hub>,
    runtime: Id,
    registered: bool,
}

impl EventReader {
    async fn run(&mut self, inotify: OwnedFd) {
        #[allow(
            deprecated,
            reason = "its successor is unsafe, because of types that can change their descriptor; this one cannot"
        )]
        let Ok(inotify) = AsyncFd::with_interest(inotify, Interest::READABLE) else { return };
        self.registered = true;
        let mut buffer = [MaybeUninit::uninit(); BUFFER];
        while let Ok(mut ready) = inotify.readable().await {
            let Some(hub) = self.hub.upgrade() else { return };
            let mut reader = Reader::new(&inotify, &mut buffer);
            let mut read = 0;
            while let Ok(event) = reader.next() {
                hub.dispatch(event.wd(), event.events());
                read += 1;
                // A read that does not fill the buffer has read everything.
                if reader.is_buffer_empty() && read < FULL {
                    break;
                }
            }
            ready.clear_ready();
        }
    }
}

impl Drop for EventReader {
    /// The runtime has ended, or has no I/O. Wakes the waiters, so that they arrange for another reader.
    fn drop(&mut self) {
        let Some(hub) = self.hub.upgrade() else { return };
        let mut state = hub.lock();
        if self.registered {
            state.runtimes.remove(&self.runtime);
        } else {
            state.runtimes.insert(self.runtime, false);
        }
        state.watched.values().flatten().for_each(|watcher| watcher.wake.wake());
    }
}

impl Watch {
    /// Redirects the watch to another notifier.
    pub(super) fn redirect_to(&self, wake: &Arc<Wake>) {
        let mut state = self.hub.lock();
        let watchers = state.watched.get_mut(&self.descriptor).into_iter().flatten();
        for watcher in watchers.filter(|watcher| watcher.id == self.id) {
            watcher.wake = Arc::clone(wake);
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // A forked copy shares the inotify instance with its parent, to which these watches belong.
        if self.hub.pid != std::process::id() {
            return;
        }
        let mut state = self.hub.lock();
        let Some(watchers) = state.watched.get_mut(&self.descriptor) else { return };
        watchers.retain(|watcher| watcher.id != self.id);
        if watchers.is_empty() {
            state.watched.remove(&self.descriptor);
            if let Some(inotify) = &self.hub.inotify {
                // Fails if the watch ended with its file.
                let _ = inotify::remove_watch(inotify, self.descriptor);
            }
        }
    }
}
