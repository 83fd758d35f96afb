//! Who we are to others: host, process and a nonce, so that a restarted process is somebody else.

use std::sync::{Arc, Mutex, PoisonError};

use crate::store::Identity;
use crate::{Error, ErrorKind, Result};

/// The longest id and the longest note, in bytes: both are shown to people and kept in small fields.
pub(crate) const MAX_BYTES: usize = 200;

/// The identity of this process; a forked copy of it gets one of its own.
pub(crate) fn of_process() -> Result<Arc<Identity>> {
    static KNOWN: Mutex<Option<Arc<Identity>>> = Mutex::new(None);
    let pid = std::process::id();
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    match &*known {
        Some(identity) if identity.pid == pid => Ok(Arc::clone(identity)),
        _ => Ok(Arc::clone(known.insert(Arc::new(fresh(pid)?)))),
    }
}

fn fresh(pid: u32) -> Result<Identity> {
    let host = host();
    let nonce = random::<4>()?;
    let id = format!("{host}:{pid}:{:08x}", u32::from_be_bytes(nonce));
    Ok(Identity { id, host, pid, note: String::new() })
}

/// A text of a user's that others will read: no line breaks, nothing overlong.
pub(crate) fn checked(what: &str, text: &str) -> Result<String> {
    if text.len() > MAX_BYTES {
        let message = format!("the {what} has {} bytes: shorten it to {MAX_BYTES}", text.len());
        return Err(Error::new(ErrorKind::Invalid, message));
    }
    match text.chars().find(|c| c.is_control()) {
        None => Ok(text.to_owned()),
        Some(c) => {
            let message =
                format!("the {what} has the control character U+{:04X}: take it out", u32::from(c));
            Err(Error::new(ErrorKind::Invalid, message))
        }
    }
}

/// Bytes that nobody can guess.
pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| {
        Error::new(ErrorKind::Unavailable, "the system has no randomness to give").because(error)
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
        assert_ne!(fresh(one.pid).unwrap().id, one.id, "the same pid after a restart");
    }

    #[test]
    fn texts_for_others_are_checked() {
        assert_eq!(checked("note", "deploy 42").unwrap(), "deploy 42");
        assert!(checked("note", "a\nb").unwrap_err().to_string().contains("U+000A"));
        assert!(checked("id", &"x".repeat(201)).unwrap_err().to_string().contains("201 bytes"));
    }
}
