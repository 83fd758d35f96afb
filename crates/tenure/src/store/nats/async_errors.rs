//! Errors that a server sends on the connection, outside of replies.
//!
//! A request without permission gets no reply. The server reports the violation on the connection instead; matching the
//! two lets the request fail at once with the reason, and not by a timeout.

use std::pin::pin;

use tenure_core::Time;
use tokio::sync::Notify;

use crate::mutex::Mutex;

/// Last error that the server sent outside of a reply.
#[derive(Debug, Default)]
pub(super) struct AsyncErrors {
    /// Text and time of arrival.
    last: Mutex<Option<(String, Time)>>,
    arrived: Notify,
}

impl AsyncErrors {
    pub(super) fn record(&self, text: String, now: Time) {
        *self.last.lock() = Some((text, now));
        self.arrived.notify_waiters();
    }

    /// Resolves with the error about a request that was sent on this subject at `sent`.
    pub(super) async fn wait_for(&self, subject: &str, sent: Time) -> String {
        loop {
            // Enabled before the check. Otherwise an error that arrives between the check and the await would be
            // missed.
            let mut arrived = pin!(self.arrived.notified());
            arrived.as_mut().enable();
            if let Some(text) = self.matching(subject, sent) {
                return text;
            }
            arrived.await;
        }
    }

    fn matching(&self, subject: &str, sent: Time) -> Option<String> {
        let last = self.last.lock();
        let (text, received) = last.as_ref()?;
        (*received >= sent && concerns(text, subject)).then(|| text.clone())
    }
}

/// True if an error is about a subject, or about the inbox on which all replies arrive.
fn concerns(text: &str, subject: &str) -> bool {
    text.contains(&format!("\"{subject}\"")) || text.contains("Subscription to \"_INBOX.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_match_requests_on_their_subject_sent_before_them() {
        let (early, late) = (Time::from_nanos(1), Time::from_nanos(3));
        let errors = AsyncErrors::default();
        errors.record("Permissions Violation for Publish to \"a.b\"".into(), Time::from_nanos(2));
        assert!(errors.matching("a.b", early).is_some());
        assert_eq!(errors.matching("a.b", late), None, "about an earlier request");
        assert_eq!(errors.matching("a", early), None);
        let inbox = "Permissions Violation for Subscription to \"_INBOX.x.*\"";
        errors.record(inbox.into(), Time::from_nanos(4));
        assert_eq!(errors.matching("a", late).as_deref(), Some(inbox));
    }
}
