//! News of files, from the kernel: who closed one, touched one or took one away.
//!
//! One inotify instance serves a store. In each runtime that waits, one task reads it and wakes those concerned, whatever
//! runtime they are in. Where there is no inotify, or none left for this user, waiters look by themselves from time to
//! time ([`POLL`]).

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

/// How often a waiter looks that nobody can wake.
pub(super) const POLL: Duration = Duration::from_millis(25);

/// Whom to wake.
#[derive(Debug, Default)]
pub(super) struct Wake {
    news: Notify,
    closed: AtomicBool,
    stirred: AtomicBool,
}

impl Wake {
    /// Resolves when there was news since the last time.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses no news.
    pub(super) async fn news(&self) {
        self.news.notified().await;
    }

    pub(super) fn wake(&self) {
        self.news.notify_one();
    }

    /// Whether somebody closed a watched file since this was asked last. The kernel says so some microseconds before it
    /// takes the lock off the file.
    pub(super) fn was_closed(&self) -> bool {
        self.closed.swap(false, Ordering::AcqRel)
    }

    /// Whether there was other news since this was asked last than that somebody left: a file may have been removed.
    pub(super) fn was_stirred(&self) -> bool {
        self.stirred.swap(false, Ordering::AcqRel)
    }
}

/// What to be told about a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum About {
    /// It was touched, closed by one who could write to it, or taken away.
    Seat,
    /// The same, or it was read: its owner does that when it leaves, because no other news is as cheap to send.
    Turn,
    /// The same as of a seat, or it was written to.
    Content,
}

pub(super) use system::{Hub, Watch};

impl Hub {
    /// News of this file from now on; `None` where nobody can tell.
    pub(super) fn watch(
        self: &Arc<Self>,
        path: &Path,
        about: About,
        wake: &Arc<Wake>,
    ) -> Option<Watch> {
        self.add(path, about, wake)
    }
}

#[cfg(target_os = "linux")]
mod system {
    use std::collections::HashMap;
    use std::collections::hash_map::Entry;
    use std::mem::MaybeUninit;
    use std::os::fd::OwnedFd;
    use std::path::Path;
    use std::sync::atomic::Ordering;
    use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

    use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
    use tokio::io::Interest;
    use tokio::io::unix::AsyncFd;
    use tokio::runtime::{Handle, Id};
    use tokio::sync::watch;

    use super::{About, Wake};

    /// What is read at once, and the number of events from which on there may be more.
    const BUFFER: usize = 1024;
    const FULL: usize = BUFFER / 16 - 2;

    #[derive(Debug)]
    pub(in super::super) struct Hub {
        inotify: Option<OwnedFd>,
        state: Mutex<WatchState>,
        /// Closed when the hub goes, which ends the tasks that read for it.
        alive: watch::Sender<()>,
        pid: u32,
    }

    #[derive(Debug, Default)]
    struct WatchState {
        watched: HashMap<i32, Vec<Watcher>>,
        next: u64,
        /// Where somebody reads the news, and where nobody can.
        runtimes: HashMap<Id, bool>,
    }

    #[derive(Debug)]
    struct Watcher {
        id: u64,
        about: About,
        wake: Arc<Wake>,
    }

    impl Watcher {
        /// The kernel has one watch for all of a process who want news of a file: each is told of what it asked for.
        fn tell(&self, events: ReadFlags) {
            let for_others = match events {
                ReadFlags::ACCESS => self.about != About::Turn,
                ReadFlags::MODIFY => self.about != About::Content,
                _ => false,
            };
            if for_others {
                return;
            }
            if events != ReadFlags::ACCESS {
                self.wake.stirred.store(true, Ordering::Release);
            }
            if events.contains(ReadFlags::CLOSE_WRITE) {
                self.wake.closed.store(true, Ordering::Release);
            }
            self.wake.wake();
        }
    }

    /// Ends with its drop.
    #[derive(Debug)]
    pub(in super::super) struct Watch {
        hub: Arc<Hub>,
        descriptor: i32,
        id: u64,
    }

    impl Hub {
        pub(in super::super) fn new() -> Arc<Self> {
            let inotify = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC);
            if let Err(error) = &inotify {
                tracing::debug!(name: "tenure.watch_failed", %error, "waiters look from time to time");
            }
            let (inotify, alive) = (inotify.ok(), watch::Sender::new(()));
            Arc::new(Self { inotify, state: Mutex::default(), alive, pid: std::process::id() })
        }

        pub(super) fn add(
            self: &Arc<Self>,
            path: &Path,
            about: About,
            wake: &Arc<Wake>,
        ) -> Option<Watch> {
            let inotify = self.inotify.as_ref()?;
            let mut flags = WatchFlags::ATTRIB
                | WatchFlags::CLOSE_WRITE
                | WatchFlags::DELETE_SELF
                | WatchFlags::MASK_ADD
                | WatchFlags::DONT_FOLLOW;
            match about {
                About::Seat => {}
                About::Turn => flags |= WatchFlags::ACCESS,
                About::Content => flags |= WatchFlags::MODIFY,
            }
            // Locked before the watch is there: its first event finds whom to wake.
            let mut state = self.lock();
            let descriptor = inotify::add_watch(inotify, path, flags).ok()?;
            state.next += 1;
            let id = state.next;
            let watcher = Watcher { id, about, wake: Arc::clone(wake) };
            state.watched.entry(descriptor).or_default().push(watcher);
            Some(Watch { hub: Arc::clone(self), descriptor, id })
        }

        /// Sees to it that the news is read in this runtime; whether it is.
        pub(in super::super) fn read(self: &Arc<Self>) -> bool {
            let (Some(inotify), Ok(runtime)) = (&self.inotify, Handle::try_current()) else {
                return false;
            };
            match self.lock().runtimes.entry(runtime.id()) {
                Entry::Occupied(reads) => return *reads.get(),
                Entry::Vacant(new) => new.insert(true),
            };
            let hub = Arc::downgrade(self);
            let mut reading = EventReader { hub, runtime: runtime.id(), registered: false };
            // Runtimes cannot share one descriptor, only what it stands for.
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
            self.state.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }

    /// The part of a task that reads the news in one runtime.
    struct EventReader {
        hub: Weak<Hub>,
        runtime: Id,
        registered: bool,
    }

    impl EventReader {
        async fn run(&mut self, inotify: OwnedFd) {
            #[allow(
                deprecated,
                reason = "its successor is unsafe for the sake of types that can change their descriptor; this one cannot"
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
                    // One call that does not fill the buffer has read everything.
                    if reader.is_buffer_empty() && read < FULL {
                        break;
                    }
                }
                ready.clear_ready();
            }
        }
    }

    impl Drop for EventReader {
        /// The runtime has ended, or has no I/O. Those who wait see to their news themselves.
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
        /// Wakes another from now on.
        pub(in super::super) fn turn_to(&self, wake: &Arc<Wake>) {
            let mut state = self.hub.lock();
            let watchers = state.watched.get_mut(&self.descriptor).into_iter().flatten();
            for watcher in watchers.filter(|watcher| watcher.id == self.id) {
                watcher.wake = Arc::clone(wake);
            }
        }
    }

    impl Drop for Watch {
        fn drop(&mut self) {
            // A forked copy shares the instance with its parent, whose watches these are.
            if self.hub.pid != std::process::id() {
                return;
            }
            let mut state = self.hub.lock();
            let Some(watchers) = state.watched.get_mut(&self.descriptor) else { return };
            watchers.retain(|watcher| watcher.id != self.id);
            if watchers.is_empty() {
                state.watched.remove(&self.descriptor);
                if let Some(inotify) = &self.hub.inotify {
                    // It went with its file where this fails.
                    let _ = inotify::remove_watch(inotify, self.descriptor);
                }
            }
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use std::path::Path;
    use std::sync::Arc;

    use super::{About, Wake};

    #[derive(Debug)]
    pub(in super::super) struct Hub;

    #[derive(Debug)]
    pub(in super::super) struct Watch;

    impl Watch {
        pub(in super::super) fn turn_to(&self, _: &Arc<Wake>) {}
    }

    impl Hub {
        pub(in super::super) fn new() -> Arc<Self> {
            Arc::new(Self)
        }

        pub(super) fn add(self: &Arc<Self>, _: &Path, _: About, _: &Arc<Wake>) -> Option<Watch> {
            None
        }

        pub(in super::super) fn read(self: &Arc<Self>) -> bool {
            false
        }
    }
}
