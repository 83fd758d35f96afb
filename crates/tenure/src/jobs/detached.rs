//! Requests that run to their end even if their caller is gone.

use crate::{Error, ErrorKind, Result};

/// Runs `work` to its end in a task of its own, even if the caller drops the future.
pub(super) async fn run_detached<T: Send + 'static>(
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    tokio::spawn(work).await.unwrap_or_else(|_| Err(runtime_ended()))
}

/// Error of a request whose task ended with its runtime.
pub(super) fn runtime_ended() -> Error {
    Error::new(ErrorKind::Shutdown, "the runtime was shut down")
}
