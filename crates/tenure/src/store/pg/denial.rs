//! Servers that refuse credentials which worked before.

use std::hash::RandomState;
use std::time::Duration;

use tenure_core::Time;

use crate::mutex::Mutex;
use crate::{Error, ErrorKind, Result};

/// Pause after a denial. Each further denial of the same credentials doubles it, up to [`LONGEST_DENIAL_PAUSE`].
const FIRST_DENIAL_PAUSE: Duration = Duration::from_secs(5);
const LONGEST_DENIAL_PAUSE: Duration = Duration::from_secs(30);

/// Log of the connects of one store.
///
/// Before the first success a denial is permanent: the settings are wrong. After it a denial is transient: a password
/// is being changed, or a role may not log in for a while. The same credentials are then offered again only after a
/// pause. The pause is no timer: a connect within it fails at once, and other credentials are tried at once.
#[derive(Debug, Default)]
pub(crate) struct DenialLog {
    state: Mutex<DenialState>,
    hasher: RandomState,
}

#[derive(Debug, Default)]
struct DenialState {
    /// True once a connection was opened.
    connected: bool,
    denied: Option<Denial>,
}

#[derive(Debug)]
struct Denial {
    /// Fingerprint of the credentials that were denied.
    fingerprint: u64,
    pause: Duration,
    until: Time,
    /// Message of the denial and its causes.
    message: String,
}

impl DenialLog {
    /// Log of a store of which a connection was opened already.
    pub(crate) fn after_a_connect() -> Self {
        let state = DenialState { connected: true, denied: None };
        Self { state: Mutex::new(state), hasher: RandomState::default() }
    }

    /// Hasher for fingerprints of credentials.
    pub(crate) fn hasher(&self) -> &RandomState {
        &self.hasher
    }

    /// Error for settings that cannot be read now. It is transient if a connect succeeded before: a file that the
    /// settings need may be replaced at this moment.
    pub(crate) fn unreadable(&self, error: Error) -> Error {
        if self.state.lock().connected { error.into_transient() } else { error }
    }

    /// Fails within the pause after a denial of the credentials with this fingerprint.
    pub(crate) fn check(&self, fingerprint: u64, now: Time) -> Result<()> {
        match &self.state.lock().denied {
            Some(denied) if denied.fingerprint == fingerprint && now < denied.until => {
                let message = format!(
                    "{} (the same credentials are tried again in {:.0?})",
                    denied.message,
                    denied.until.since(now)
                );
                Err(Error::new(ErrorKind::Denied, message).into_transient())
            }
            _ => Ok(()),
        }
    }

    /// Takes the result of a connect. Makes a denial transient if a connect succeeded before.
    pub(crate) fn note<T>(&self, opened: Result<T>, fingerprint: u64, now: Time) -> Result<T> {
        let mut state = self.state.lock();
        let error = match opened {
            Ok(connection) => {
                *state = DenialState { connected: true, denied: None };
                return Ok(connection);
            }
            Err(error) if !state.connected => return Err(error),
            Err(error) => error,
        };
        match error.kind() {
            ErrorKind::Denied => {}
            // A certificate or a key that cannot be read.
            ErrorKind::Invalid => return Err(error.into_transient()),
            _ => return Err(error),
        }
        let earlier = state.denied.take().filter(|denied| denied.fingerprint == fingerprint);
        let (pause, until) = match earlier {
            // Several connects were under way: they count as one.
            Some(denied) if now < denied.until => (denied.pause, denied.until),
            Some(denied) => {
                let pause = (denied.pause * 2).min(LONGEST_DENIAL_PAUSE);
                (pause, now + pause)
            }
            None => (FIRST_DENIAL_PAUSE, now + FIRST_DENIAL_PAUSE),
        };
        state.denied = Some(Denial { fingerprint, pause, until, message: error.chain() });
        Err(error.into_transient())
    }
}

#[cfg(test)]
mod tests {
    use tenure_core::acquire::RequestFailure;

    use super::*;

    fn at(seconds: u64) -> Time {
        Time::ZERO + Duration::from_secs(seconds)
    }

    fn denied() -> Result<()> {
        Err(Error::new(ErrorKind::Denied, "wrong password"))
    }

    #[test]
    fn a_denial_is_permanent_until_a_connect_has_succeeded() {
        let log = DenialLog::default();
        let error = log.note(denied(), 1, at(0)).unwrap_err();
        assert_eq!(error.failure(), RequestFailure::Permanent);
        assert!(log.check(1, at(0)).is_ok());
        log.note(Ok(()), 1, at(0)).unwrap();
        let error = log.note(denied(), 1, at(1)).unwrap_err();
        assert_eq!((error.kind(), error.failure()), (ErrorKind::Denied, RequestFailure::Transient));
        let missing = || Error::new(ErrorKind::Misconfigured, "no such database");
        let error = log.note::<()>(Err(missing()), 1, at(1)).unwrap_err();
        assert_eq!(error.failure(), RequestFailure::Permanent);
    }

    #[test]
    fn the_same_credentials_are_offered_after_a_pause_and_others_at_once() {
        let log = DenialLog::default();
        log.note(Ok(()), 1, at(0)).unwrap();
        let mut now = 0;
        for pause in [5, 10, 20, 30, 30] {
            log.note(denied(), 1, at(now)).unwrap_err();
            // Another connect that was under way.
            log.note(denied(), 1, at(now + 1)).unwrap_err();
            let error = log.check(1, at(now + pause - 1)).unwrap_err();
            assert_eq!(error.failure(), RequestFailure::Transient);
            assert!(error.to_string().contains("wrong password"), "{error}");
            assert!(log.check(2, at(now)).is_ok(), "other credentials");
            now += pause;
            assert!(log.check(1, at(now)).is_ok());
        }
        log.note(Ok(()), 1, at(now)).unwrap();
        log.note(denied(), 1, at(now)).unwrap_err();
        assert!(log.check(1, at(now + 5)).is_ok(), "a success ends the pauses");
    }
}
