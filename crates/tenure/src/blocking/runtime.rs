//! The thread behind the blocking API, and calls that wait for it.

use std::future::Future;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};

use crate::process::PerProcess;
use crate::race::before;
use crate::{Error, ErrorKind, Result};

/// Forwards builder methods to the inner request.
macro_rules! same_as {
    ($inner:literal: $($name:ident($($argument:ident: $type:ty),*);)*) => {
        $(
            #[doc = concat!("See [`", stringify!($name), "`](crate::", $inner, "::", stringify!($name), ").")]
            pub fn $name(self, $($argument: $type),*) -> Self {
                Self(self.0.$name($($argument),*))
            }
        )*
    };
}
pub(super) use same_as;

/// Forwards methods that add a callback: to a builder, or to a value that is borrowed (`&`).
macro_rules! same_callbacks_as {
    ($inner:literal: $($name:ident($($argument:ty)?);)*) => {
        $(
            #[doc = concat!("See [`", stringify!($name), "`](crate::", $inner, "::", stringify!($name), ").")]
            pub fn $name<R: CallbackOutput<How>, How>(
                self,
                f: impl Fn($($argument)?) -> R + Send + Sync + 'static,
            ) -> Self {
                Self(self.0.$name(f))
            }
        )*
    };
    (&$inner:literal: $($name:ident($($argument:ty)?);)*) => {
        $(
            #[doc = concat!("See [`", stringify!($name), "`](crate::", $inner, "::", stringify!($name), ").")]
            pub fn $name<R: CallbackOutput<How>, How>(
                &self,
                f: impl Fn($($argument)?) -> R + Send + Sync + 'static,
            ) {
                self.0.$name(f);
            }
        )*
    };
}
pub(super) use same_callbacks_as;

/// Blocks this thread until `future` is ready. Its timers and tasks run on the background thread.
pub(super) fn wait<F: Future>(future: F) -> Result<F::Output> {
    let _within = runtime()?.enter();
    Ok(pollster::block_on(future))
}

/// Blocks this thread for at most `timeout`; for futures that need no runtime.
pub(super) fn within<F: Future>(timeout: Duration, future: F) -> Option<F::Output> {
    let clock = crate::Clock::system();
    pollster::block_on(before(&clock, clock.now() + timeout, future))
}

/// The runtime whose single thread renews the holds. It lives as long as the process.
///
/// A forked child must never drop its parent's runtime: joining its threads would block for ever, because fork does not
/// copy them, and dropping its sockets would deregister them from the epoll instance that it shares with the parent.
fn runtime() -> Result<&'static Runtime> {
    static RUNTIME: PerProcess<std::io::Result<Runtime>> = PerProcess::new();
    let made = RUNTIME.get_or_init(|| {
        Builder::new_multi_thread().worker_threads(1).thread_name("tenure").enable_all().build()
    });
    made.as_ref().map_err(|error| {
        let message = format!("cannot start the background thread that renews holds: {error}");
        Error::new(ErrorKind::Unavailable, message)
    })
}
