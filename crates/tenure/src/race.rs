//! Waits for the first of two futures, or for a future until a deadline.

use std::future::Future;

use tenure_core::Time;

use crate::Clock;

/// Output of the future that was ready first.
pub(crate) enum Either<A, B> {
    First(A),
    Second(B),
}

/// Waits for the first of two futures. If both are ready, `first` wins. The other one is dropped.
pub(crate) async fn race<A, B>(
    first: impl Future<Output = A>,
    second: impl Future<Output = B>,
) -> Either<A, B> {
    tokio::select! {
        biased;
        output = first => Either::First(output),
        output = second => Either::Second(output),
    }
}

/// Waits for a future until `end`; `None` if it is not ready then. A future that is ready wins, however late it is.
pub(crate) async fn before<T>(
    clock: &Clock,
    end: Time,
    future: impl Future<Output = T>,
) -> Option<T> {
    match race(future, clock.sleep_until(end)).await {
        Either::First(output) => Some(output),
        Either::Second(()) => None,
    }
}
