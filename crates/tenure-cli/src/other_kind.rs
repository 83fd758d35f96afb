//! Check for a holder of the other kind: a lock and a semaphore of the same name do not exclude each other.

use std::time::Duration;

use tenure::store::{KeySpace, KeyState};
use tenure::{Client, Key};
use tokio::task::JoinHandle;

use crate::report::{Event, Reporter};
use crate::{humanize, keys};

/// Time limit for the store's answer.
const INSPECT_TIMEOUT: Duration = Duration::from_secs(2);

/// A check that runs beside the acquisition, which does not wait for it. Dropping it cancels the check.
pub(crate) struct OtherKindCheck(JoinHandle<Option<KeyState>>);

impl OtherKindCheck {
    /// Starts to check whether `name` is held as the kind that `space` is not. Must be called within a runtime.
    pub(crate) fn start(client: &Client, name: &Key, space: KeySpace) -> Self {
        let other = match space {
            KeySpace::Lock => KeySpace::Semaphore,
            KeySpace::Semaphore => KeySpace::Lock,
        };
        let (store, name) = (client.store().clone(), name.clone());
        Self(tokio::spawn(async move {
            if !store.capabilities().semaphore {
                return None;
            }
            // Errors are not reported here: the acquisition reports a store that does not answer.
            let state = tokio::time::timeout(INSPECT_TIMEOUT, store.inspect(&name, other)).await;
            state.ok()?.ok().filter(|state| !state.holders.is_empty())
        }))
    }

    /// Waits for the check, and warns if there is a holder of the other kind.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing: the next call continues to wait. Must not be called again after it has
    /// resolved.
    pub(crate) async fn warn(&mut self, reporter: &Reporter) {
        if let Ok(Some(state)) = (&mut self.0).await {
            let (event, message) = warning(&state);
            reporter.warn(&event, &message);
        }
    }
}

impl Drop for OtherKindCheck {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn warning(state: &KeyState) -> (Event, String) {
    let kind = keys::kind(state.space);
    let by = state.holders.first().and_then(|holder| holder.by.as_ref());
    let message = format!(
        "warning: {} is also held as a {kind}, by {}: a lock and a semaphore (--limit) of the same name do not exclude each other",
        state.key,
        humanize::identity(by)
    );
    (Event::OtherKindHeld { kind, holder: by.map(|by| by.id.clone()) }, message)
}
