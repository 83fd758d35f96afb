//! A look at the other kind of a name: a lock and a semaphore of one name are two things.

use std::time::Duration;

use tenure::store::{KeySpace, KeyState};
use tenure::{Client, Key};
use tokio::task::JoinHandle;

use crate::report::{Event, Reporter};
use crate::{humanize, keys};

/// How long the store may take to answer.
const INSPECT_TIMEOUT: Duration = Duration::from_secs(2);

/// One look beside the acquisition, which does not wait for it. Dropping it ends the look.
pub(crate) struct OtherKindCheck(JoinHandle<Option<KeyState>>);

impl OtherKindCheck {
    /// Asks whether `name` is held as the kind that `space` is not. To be called from within a runtime.
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
            // A store that does not answer fails the acquisition in its own way; here it says nothing.
            let looked = tokio::time::timeout(INSPECT_TIMEOUT, store.inspect(&name, other)).await;
            looked.ok()?.ok().filter(|state| !state.holders.is_empty())
        }))
    }

    /// Resolves when the look is over, and has warned of what it found.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing: the next call goes on. After it has resolved it must not be called again.
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
        "warning: {} is also held as a {kind}, by {}: a lock and a semaphore (--limit) of one name do not exclude each other",
        state.key,
        humanize::identity(by)
    );
    (Event::OtherKindHeld { kind, holder: by.map(|by| by.id.clone()) }, message)
}
