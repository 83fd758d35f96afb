//! The user's callbacks, and the task that calls them.

use std::fmt;
use std::future::Future;
use std::sync::Arc;

use tokio::sync::{broadcast, mpsc, oneshot};
use tokio::task::{JoinError, JoinHandle};

use super::{AcquireFailed, Event, Leadership, StateChange, StopReason};
use crate::guard::Lost;
use crate::{Error, ErrorKind};

/// What a callback may return: nothing, or a future of nothing.
///
/// So that one method takes both `|lost| eprintln!("{lost}")` and `|lost| async move { alert(lost).await }`. What
/// returns nothing is called where it may block; a future is awaited. `How` tells the two apart and is never named.
pub trait CallbackOutput<How>: sealed::RunCallback<How> {}

/// Marks a callback that returns nothing.
#[derive(Debug)]
pub enum SyncCallback {}

/// Marks a callback that returns a future.
#[derive(Debug)]
pub enum AsyncCallback {}

impl CallbackOutput<SyncCallback> for () {}
impl<F: Future<Output = ()> + Send + 'static> CallbackOutput<AsyncCallback> for F {}

mod sealed {
    use super::{AsyncCallback, Future, IN_CALLBACK, JoinHandle, SyncCallback};

    pub trait RunCallback<How>: Sized {
        fn run(call: impl FnOnce() -> Self + Send + 'static) -> JoinHandle<()>;
    }

    impl RunCallback<SyncCallback> for () {
        fn run(call: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
            tokio::task::spawn_blocking(|| IN_CALLBACK.sync_scope((), call))
        }
    }

    impl<F: Future<Output = ()> + Send + 'static> RunCallback<AsyncCallback> for F {
        fn run(call: impl FnOnce() -> F + Send + 'static) -> JoinHandle<()> {
            tokio::spawn(IN_CALLBACK.scope((), async { call().await }))
        }
    }
}

tokio::task_local! {
    /// Set while a callback runs: it must not wait for itself.
    static IN_CALLBACK: ();
}

/// Whether the caller is a callback.
pub(super) fn in_callback() -> bool {
    IN_CALLBACK.try_with(|()| ()).is_ok()
}

/// The callbacks, each list in the order of registration.
#[derive(Default)]
pub(super) struct ElectionCallbacks {
    pub(super) acquired: CallbackList<Leadership>,
    pub(super) released: CallbackList<()>,
    pub(super) lost: CallbackList<Lost>,
    pub(super) acquire_failed: CallbackList<AcquireFailed>,
    pub(super) state_change: CallbackList<StateChange>,
    pub(super) error: CallbackList<Arc<Error>>,
    pub(super) stopped: CallbackList<StopReason>,
}

/// The callbacks of one event.
pub(super) struct CallbackList<A>(Vec<Box<CallbackFn<A>>>);

type CallbackFn<A> = dyn Fn(A) -> JoinHandle<()> + Send + Sync;

impl<A> Default for CallbackList<A> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<A: Clone + Send + 'static> CallbackList<A> {
    pub(super) fn add<R: CallbackOutput<How>, How>(
        &mut self,
        callback: impl Fn(A) -> R + Send + Sync + 'static,
    ) {
        let callback = Arc::new(callback);
        self.0.push(Box::new(move |about| {
            let callback = Arc::clone(&callback);
            R::run(move || callback(about))
        }));
    }

    /// Calls them one after the other; what became of those that panicked.
    async fn call(&self, about: A) -> Vec<JoinError> {
        let mut failed = Vec::new();
        for callback in &self.0 {
            failed.extend(callback(about.clone()).await.err());
        }
        failed
    }
}

impl ElectionCallbacks {
    async fn dispatch(&self, event: Event, events: &broadcast::Sender<Event>) {
        let is_error = matches!(event, Event::Error(_));
        let (name, failed) = match event {
            Event::Acquired(leadership) => ("on_acquired", self.acquired.call(leadership).await),
            Event::Released => ("on_released", self.released.call(()).await),
            Event::Lost(lost) => ("on_lost", self.lost.call(lost).await),
            Event::AcquireFailed(how) => ("on_acquire_failed", self.acquire_failed.call(how).await),
            Event::StateChange(how) => ("on_state_change", self.state_change.call(how).await),
            Event::Error(error) => ("on_error", self.error.call(error).await),
            Event::Stopped(why) => ("on_stopped", self.stopped.call(why).await),
            Event::Missed(_) => return,
        };
        for failed in failed.into_iter().filter(JoinError::is_panic) {
            let message = format!("{name} panicked: {}", panic_message(failed));
            tracing::error!(name: "tenure.election.callback_panicked", callback = name, message);
            // Who panics over an error is not told of another.
            if !is_error {
                let error = Arc::new(Error::new(ErrorKind::Panicked, message));
                // Nobody has to listen.
                let _ = events.send(Event::Error(Arc::clone(&error)));
                for failed in self.error.call(error).await {
                    tracing::error!(name: "tenure.election.callback_panicked", callback = "on_error", %failed);
                }
            }
        }
    }
}

impl fmt::Debug for ElectionCallbacks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Callbacks")
    }
}

fn panic_message(failed: JoinError) -> String {
    let Ok(panic) = failed.try_into_panic() else { return "it was cancelled".to_owned() };
    match (panic.downcast_ref::<String>(), panic.downcast_ref::<&str>()) {
        (Some(message), _) => message.clone(),
        (None, Some(message)) => (*message).to_owned(),
        (None, None) => "without a message".to_owned(),
    }
}

/// How many events wait for slow callbacks.
const CALLBACK_QUEUE_CAPACITY: usize = 1_024;
/// How many of these places only the beginning and the end of a term may take: they come in pairs.
const RESERVED_FOR_TERMS: usize = 64;

/// Passes events on, to the task that calls callbacks and to whoever reads them. Never waits.
#[derive(Debug)]
pub(super) struct EventDispatcher {
    calls: mpsc::Sender<DispatchItem>,
    events: broadcast::Sender<Event>,
    /// The term that runs was not told to the callbacks, so its end is not either.
    skipping: bool,
}

enum DispatchItem {
    Event(Event),
    /// Everything before this has been told.
    Flushed(oneshot::Sender<()>),
}

impl EventDispatcher {
    /// Starts the task that calls callbacks, within a runtime.
    pub(super) fn start(callbacks: ElectionCallbacks, events: broadcast::Sender<Event>) -> Self {
        let (calls, mut queued) = mpsc::channel(CALLBACK_QUEUE_CAPACITY);
        let listeners = events.clone();
        tokio::spawn(async move {
            while let Some(next) = queued.recv().await {
                match next {
                    DispatchItem::Event(event) => callbacks.dispatch(event, &listeners).await,
                    // Nobody waits any more.
                    DispatchItem::Flushed(reply) => drop(reply.send(())),
                }
            }
        });
        Self { calls, events, skipping: false }
    }

    pub(super) fn dispatch(&mut self, event: Event) {
        // Nobody has to listen.
        let _ = self.events.send(event.clone());
        let room = self.calls.capacity();
        let wanted = match &event {
            Event::Acquired(_) => {
                self.skipping = room <= RESERVED_FOR_TERMS / 2;
                !self.skipping
            }
            Event::Lost(_) | Event::Released => !std::mem::take(&mut self.skipping),
            Event::Stopped(_) => true,
            _ => room > RESERVED_FOR_TERMS,
        };
        if !wanted || self.calls.try_send(DispatchItem::Event(event)).is_err() {
            tracing::warn!(name: "tenure.election.callbacks_behind", "callbacks are too slow: an event is not told to them");
        }
    }

    /// Answers once every event before has been told to the callbacks.
    pub(super) fn flush(&self, reply: oneshot::Sender<()>) {
        // Where there is no room the reply is dropped, which ends the wait for it.
        let _ = self.calls.try_send(DispatchItem::Flushed(reply));
    }
}
