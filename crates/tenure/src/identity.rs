//! The identity of this process: host, pid and a nonce, so that a restarted process has another identity.

use std::sync::Arc;

use crate::mutex::Mutex;
use crate::process::Process;
use crate::store::Identity;
use crate::{Error, ErrorKind, Result};

/// Maximum length of an id and of a note, in bytes: both are displayed, and kept in small fields.
pub(crate) const MAX_TEXT_BYTES: usize = 200;

impl Identity {
    /// Returns the identity of this process: the default identity of its requests.
    ///
    /// # Errors
    ///
    /// `Unavailable` if the system cannot supply the random bytes that make it unique.
    pub fn of_process() -> Result<Arc<Self>> {
        of_process()
    }
}

/// Returns the identity of this process. A forked copy of the process gets its own.
pub(crate) fn of_process() -> Result<Arc<Identity>> {
    with_process(|process| Arc::clone(process.identity()))
}

/// Returns the identity of this process and the id of its next claim. The id is unique across processes, and not a
/// secret.
pub(crate) fn of_claim() -> Result<(Arc<Identity>, u128)> {
    with_process(|process| (Arc::clone(process.identity()), process.next_claim()))
}

fn with_process<T>(f: impl FnOnce(&mut Process) -> T) -> Result<T> {
    static CURRENT: Mutex<Option<Process>> = Mutex::new(None);
    #[cfg(feature = "simulation")]
    let f = match crate::simulation::with_process(f) {
        Ok(result) => return Ok(result),
        Err(f) => f,
    };
    let pid = std::process::id();
    let mut current = CURRENT.lock();
    match &mut *current {
        Some(process) if process.identity().pid == pid => Ok(f(process)),
        // The first call, or the first after a fork. With the nonce of its parent, the copy would repeat claim ids.
        _ => Ok(f(current.insert(fresh(pid)?))),
    }
}

fn fresh(pid: u32) -> Result<Process> {
    Ok(Process::new(host(), pid, u64::from_be_bytes(random()?)))
}

/// Validates a text of the user that other participants display: no control characters, at most [`MAX_TEXT_BYTES`].
pub(crate) fn checked_text(what: &str, text: &str) -> Result<String> {
    if text.len() > MAX_TEXT_BYTES {
        let message = format!("the {what} has {} bytes: use at most {MAX_TEXT_BYTES}", text.len());
        return Err(Error::new(ErrorKind::Invalid, message));
    }
    match text.chars().find(|c| c.is_control()) {
        None => Ok(text.to_owned()),
        Some(c) => {
            let message =
                format!("the {what} has the control character U+{:04X}: remove it", u32::from(c));
            Err(Error::new(ErrorKind::Invalid, message))
        }
    }
}

/// Returns random bytes of the system, fit for secrets.
pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    #[cfg(feature = "simulation")]
    if crate::simulation::fill(&mut bytes) {
        return Ok(bytes);
    }
    getrandom::fill(&mut bytes).map_err(|error| {
        Error::new(ErrorKind::Unavailable, "cannot get random bytes of the system").because(error)
    })?;
    Ok(bytes)
}

fn host() -> String {
    let name = system_host();
    let name: String = name.chars().filter(|c| !c.is_control()).take(64).collect();
    if name.is_empty() { "localhost".to_owned() } else { name }
}

#[cfg(unix)]
fn system_host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

#[cfg(not(unix))]
fn system_host() -> String {
    std::env::var("COMPUTERNAME").unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_one_identity_and_a_restarted_one_another() {
        let one = of_process().unwrap();
        assert_eq!(one, of_process().unwrap());
        assert_eq!(one.pid, std::process::id());
        assert!(one.id.starts_with(&format!("{}:{}:", one.host, one.pid)), "{one:?}");
        let mut restarted = fresh(one.pid).unwrap();
        assert_ne!(restarted.identity().id, one.id, "the same pid after a restart");
        let (first, second) = (of_claim().unwrap(), of_claim().unwrap());
        assert_eq!(first.0, one);
        assert_ne!(first.1, second.1);
        assert_ne!(first.1 >> 64, restarted.next_claim() >> 64);
    }

    #[test]
    fn texts_for_others_are_checked() {
        assert_eq!(checked_text("note", "deploy 42").unwrap(), "deploy 42");
        assert!(checked_text("note", "a\nb").unwrap_err().to_string().contains("U+000A"));
        assert!(
            checked_text("id", &"x".repeat(201)).unwrap_err().to_string().contains("201 bytes")
        );
    }
}
