//! Progress of a claimed job until a heartbeat has stored it.

use crate::mutex::Mutex;

/// The last progress of a job, and whether the row has it.
#[derive(Debug, Default)]
pub(super) struct PendingProgress(Mutex<ProgressState>);

#[derive(Debug, Default)]
struct ProgressState {
    text: String,
    /// The row does not have the text.
    changed: bool,
    /// A heartbeat without an answer yet has a text.
    sent: bool,
}

impl PendingProgress {
    pub(super) fn set(&self, text: String) {
        let mut state = self.0.lock();
        state.changed |= state.text != text;
        state.text = text;
    }

    /// Takes the text for a heartbeat; `None` if the row has it.
    pub(super) fn take(&self) -> Option<String> {
        let mut state = self.0.lock();
        if !std::mem::take(&mut state.changed) {
            return None;
        }
        state.sent = true;
        Some(state.text.clone())
    }

    /// Notes the end of a heartbeat. If it was not applied for certain, the next one has the last text again.
    pub(super) fn answered(&self, applied: bool) {
        let mut state = self.0.lock();
        let sent = std::mem::take(&mut state.sent);
        state.changed |= sent && !applied;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_sent_until_a_heartbeat_was_applied() {
        let progress = PendingProgress::default();
        assert_eq!(progress.take(), None);
        progress.answered(false);
        assert_eq!(progress.take(), None, "nothing was sent");
        progress.set("1".to_owned());
        assert_eq!(progress.take().as_deref(), Some("1"));
        progress.answered(false);
        assert_eq!(progress.take().as_deref(), Some("1"));
        progress.set("2".to_owned());
        progress.answered(true);
        assert_eq!(progress.take().as_deref(), Some("2"), "newer than what was sent");
        progress.answered(true);
        progress.set("2".to_owned());
        assert_eq!(progress.take(), None, "the row has it");
    }
}
