//! State of the HTTP interface, and its access to the engine.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tenure_core::Time;
use tokio::sync::{Semaphore, oneshot};

use super::watched::StoreMonitor;
use crate::engine::Engine;
use crate::server::Handle;

/// Time that the engine may take to respond.
const ENGINE_TIMEOUT: Duration = Duration::from_secs(5);

/// State that the requests share.
pub(super) struct Site {
    pub(super) handle: Handle,
    pub(super) auth_required: bool,
    pub(super) host: String,
    pub(super) viewers: Semaphore,
    pub(super) monitors: Vec<Arc<StoreMonitor>>,
    pub(super) since: Instant,
}

impl Site {
    /// Runs `query` on the engine's thread; `None` if the engine does not respond in time.
    pub(super) async fn query_engine<T: Send + 'static>(
        &self,
        query: impl FnOnce(&mut Engine, Time) -> T + Send + 'static,
    ) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        // The receiver is gone if the HTTP client has disconnected: the result is then dropped.
        self.handle.run_on_engine(move |engine, now| drop(reply.send(query(engine, now))));
        tokio::time::timeout(ENGINE_TIMEOUT, answer).await.ok()?.ok()
    }
}
