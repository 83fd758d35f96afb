//! What a server says besides answers. A missing right is told so, and the request that lacked it stays unanswered.

use std::pin::pin;
use std::sync::{Mutex, PoisonError};

use tenure_core::Time;
use tokio::sync::Notify;

/// The last words of the server that no request got.
#[derive(Debug, Default)]
pub(super) struct AsyncErrors {
    last: Mutex<Option<(String, Time)>>,
    added: Notify,
}

impl AsyncErrors {
    pub(super) fn record(&self, words: String, now: Time) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some((words, now));
        self.added.notify_waiters();
    }

    /// Resolves when the server says something of a request that was sent on this subject at `sent`.
    pub(super) async fn wait_for(&self, subject: &str, sent: Time) -> String {
        loop {
            let mut told = pin!(self.added.notified());
            told.as_mut().enable();
            if let Some(words) = self.matching(subject, sent) {
                return words;
            }
            told.await;
        }
    }

    fn matching(&self, subject: &str, sent: Time) -> Option<String> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let (words, heard) = last.as_ref()?;
        (*heard >= sent && concerns(words, subject)).then(|| words.clone())
    }
}

/// Whether words are about a subject, or about the one that all answers come on.
fn concerns(words: &str, subject: &str) -> bool {
    words.contains(&format!("\"{subject}\"")) || words.contains("Subscription to \"_INBOX.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_count_for_what_they_name_and_for_what_was_sent_before_them() {
        let (early, late) = (Time::from_nanos(1), Time::from_nanos(3));
        let words = AsyncErrors::default();
        words.record("Permissions Violation for Publish to \"a.b\"".into(), Time::from_nanos(2));
        assert!(words.matching("a.b", early).is_some());
        assert_eq!(words.matching("a.b", late), None, "said of another request");
        assert_eq!(words.matching("a", early), None);
        let inbox = "Permissions Violation for Subscription to \"_INBOX.x.*\"";
        words.record(inbox.into(), Time::from_nanos(4));
        assert_eq!(words.matching("a", late).as_deref(), Some(inbox));
    }
}
