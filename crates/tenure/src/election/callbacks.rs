//! The user's callbacks, and the task that calls them.

use std::fmt;
use std::future::Future;
use std::sync::{Arc, MutexGuard};

use tokio::sync::{broadcast, mpsc, oneshot};
use tokio::task::{JoinError, JoinHandle};

use super::{AcquireFailed, Event, Leadership, StateChange, StopReason};
use crate::guard::Lost;
use crate::mutex::Mutex;
use crate::{Error, ErrorKind};

/// Return value of a callback: nothing, a `Result<(), E>`, or a future of either.
///
/// With this trait one method takes both `|lost| eprintln!("{lost}")` and `|lost| async move { alert(lost).await }`. A
/// callback that returns a value runs on a thread that may block; a future is awaited. An error is reported to
/// `on_error`. `How` distinguishes the two and is never named by users.
pub trait CallbackOutput<How>: sealed::RunCallback<How> {}

/// Marker of callbacks that return a value.
#[derive(Debug)]
pub enum SyncCallback {}

/// Marker of callbacks that return a future.
#[derive(Debug)]
pub enum AsyncCallback {}

impl<R: sealed::CallbackValue> CallbackOutput<SyncCallback> for R {}
impl<F> CallbackOutput<AsyncCallback> for F where
    F: Future<Output: sealed::CallbackValue> + Send + 'static
{
}

/// Error that a callback returned.
type CallbackError = Box<dyn std::error::Error + Send + Sync>;

mod sealed {
    use super::{AsyncCallback, CallbackError, Future, IN_CALLBACK, JoinHandle, SyncCallback};

    pub trait CallbackValue: Send + 'static {
        fn into_result(self) -> Result<(), CallbackError>;
    }

    impl CallbackValue for () {
        fn into_result(self) -> Result<(), CallbackError> {
            Ok(())
        }
    }

    impl<E: Into<CallbackError> + Send + 'static> CallbackValue for Result<(), E> {
        fn into_result(self) -> Result<(), CallbackError> {
            self.map_err(Into::into)
        }
    }

    pub trait RunCallback<How>: Sized {
        fn run(
            call: impl FnOnce() -> Self + Send + 'static,
        ) -> JoinHandle<Result<(), CallbackError>>;
    }

    impl<R: CallbackValue> RunCallback<SyncCallback> for R {
        fn run(call: impl FnOnce() -> R + Send + 'static) -> JoinHandle<Result<(), CallbackError>> {
            tokio::task::spawn_blocking(|| IN_CALLBACK.sync_scope((), call).into_result())
        }
    }

    impl<F: Future<Output: CallbackValue> + Send + 'static> RunCallback<AsyncCallback> for F {
        fn run(call: impl FnOnce() -> F + Send + 'static) -> JoinHandle<Result<(), CallbackError>> {
            tokio::spawn(IN_CALLBACK.scope((), async { call().await.into_result() }))
        }
    }
}

tokio::task_local! {
    /// Set while a callback runs: a callback must not wait for itself.
    static IN_CALLBACK: ();
}

/// True if the caller runs within a callback.
pub(super) fn in_callback() -> bool {
    IN_CALLBACK.try_with(|()| ()).is_ok()
}

/// Registered callbacks; each list is in the order of registration.
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

/// Callbacks of one kind of event. Callbacks can be added while others run.
pub(super) struct CallbackList<A>(Mutex<Vec<Arc<CallbackFn<A>>>>);

type CallbackFn<A> = dyn Fn(A) -> JoinHandle<Result<(), CallbackError>> + Send + Sync;

impl<A> Default for CallbackList<A> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<A: Clone + Send + 'static> CallbackList<A> {
    pub(super) fn add<R: CallbackOutput<How>, How>(
        &self,
        callback: impl Fn(A) -> R + Send + Sync + 'static,
    ) {
        let callback = Arc::new(callback);
        self.lock().push(Arc::new(move |about| {
            let callback = Arc::clone(&callback);
            R::run(move || callback(about))
        }));
    }

    /// Calls the callbacks one after the other. Returns the errors of those that panicked or returned an error.
    async fn call(&self, name: &str, about: A) -> Vec<Error> {
        let mut failed = Vec::new();
        let callbacks = self.lock().clone();
        for callback in callbacks {
            match callback(about.clone()).await {
                Ok(Err(error)) => {
                    let message = format!("{name} returned an error");
                    failed.push(Error::new(ErrorKind::CallbackFailed, message).because(error));
                }
                Err(error) if error.is_panic() => {
                    let message = format!("{name} panicked: {}", panic_message(error));
                    failed.push(Error::new(ErrorKind::Panicked, message));
                }
                // Without an error, or ended by the shutdown of the runtime.
                Ok(Ok(())) | Err(_) => {}
            }
        }
        failed
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<CallbackFn<A>>>> {
        self.0.lock()
    }
}

impl ElectionCallbacks {
    async fn dispatch(&self, event: Event, events: &broadcast::Sender<Event>) {
        let is_error = matches!(event, Event::Error(_));
        let failed = match event {
            Event::Acquired(leadership) => self.acquired.call("on_acquired", leadership).await,
            Event::Released => self.released.call("on_released", ()).await,
            Event::Lost(lost) => self.lost.call("on_lost", lost).await,
            Event::AcquireFailed(how) => self.acquire_failed.call("on_acquire_failed", how).await,
            Event::StateChange(how) => self.state_change.call("on_state_change", how).await,
            Event::Error(error) => self.error.call("on_error", error).await,
            Event::Stopped(why) => self.stopped.call("on_stopped", why).await,
            Event::Missed(_) => return,
        };
        for error in failed {
            log_failure(&error);
            // A failure of `on_error` is not reported to `on_error` again: that could go on without an end.
            if !is_error {
                let error = Arc::new(error);
                // Fails if there is no subscriber, which is no error.
                let _ = events.send(Event::Error(Arc::clone(&error)));
                self.error.call("on_error", error).await.iter().for_each(log_failure);
            }
        }
    }
}

impl fmt::Debug for ElectionCallbacks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Callbacks")
    }
}

fn log_failure(error: &Error) {
    tracing::error!(name: "tenure.election.callback_failed", error = error.chain());
}

fn panic_message(failed: JoinError) -> String {
    let Ok(panic) = failed.try_into_panic() else { return "it was cancelled".to_owned() };
    match (panic.downcast_ref::<String>(), panic.downcast_ref::<&str>()) {
        (Some(message), _) => message.clone(),
        (None, Some(message)) => (*message).to_owned(),
        (None, None) => "without a message".to_owned(),
    }
}

/// Number of events that are queued for slow callbacks.
const CALLBACK_QUEUE_CAPACITY: usize = 1_024;
/// Part of the queue that is reserved for the beginning and the end of terms, because these come in pairs.
const RESERVED_FOR_TERMS: usize = 64;

/// Sends events to the task that runs the callbacks, and to all subscribers. Never blocks.
#[derive(Debug)]
pub(super) struct EventDispatcher {
    calls: mpsc::Sender<DispatchItem>,
    events: broadcast::Sender<Event>,
    /// True if the callbacks did not receive the beginning of the current term: they do not receive its end either.
    skipping: bool,
}

enum DispatchItem {
    Event(Event),
    /// Request for a reply once all callbacks of earlier events have run.
    Flushed(oneshot::Sender<()>),
}

impl EventDispatcher {
    /// Spawns the task that runs the callbacks; must be called within a runtime.
    pub(super) fn start(
        callbacks: Arc<ElectionCallbacks>,
        events: broadcast::Sender<Event>,
    ) -> Self {
        let (calls, mut queued) = mpsc::channel(CALLBACK_QUEUE_CAPACITY);
        let listeners = events.clone();
        tokio::spawn(async move {
            while let Some(next) = queued.recv().await {
                match next {
                    DispatchItem::Event(event) => callbacks.dispatch(event, &listeners).await,
                    // Fails if the caller no longer waits.
                    DispatchItem::Flushed(reply) => drop(reply.send(())),
                }
            }
        });
        Self { calls, events, skipping: false }
    }

    pub(super) fn dispatch(&mut self, event: Event) {
        // Fails if there is no subscriber, which is no error.
        let _ = self.events.send(event.clone());
        let room = self.calls.capacity();
        // `Lost` and `Released` are queued exactly if their `Acquired` was. Half of the reserved places are free when a
        // term is queued, and only ends of terms and `Stopped` may use that half. So the end finds a place.
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
            tracing::warn!(name: "tenure.election.callbacks_behind", "callbacks are too slow: event dropped");
        }
    }

    /// Replies once the callbacks of all earlier events have run.
    pub(super) fn flush(&self, reply: oneshot::Sender<()>) {
        // If the queue is full the reply is dropped, which ends the caller's wait.
        let _ = self.calls.try_send(DispatchItem::Flushed(reply));
    }
}
