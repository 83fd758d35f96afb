//! Identity of a holder or waiter.

use std::fmt;

/// Identity of a holder or waiter, for display. It proves nothing.
///
/// `Display` prints it as `tenure status` does: `web-2 (pid 311): build 42`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Id that is unique among all holders and waiters; `host:pid:nonce` by default.
    pub id: String,
    /// Host name.
    pub host: String,
    /// Process id; 0 if unknown.
    pub pid: u32,
    /// Free text of the user, such as a build number.
    pub note: String,
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, host, pid, note } = self;
        // A default id repeats host and pid, and its nonce means nothing to a reader.
        let name = if id.starts_with(&format!("{host}:{pid}:")) { host } else { id };
        f.write_str(&without_control_chars(name))?;
        if *pid != 0 {
            write!(f, " (pid {pid})")?;
        }
        if note.is_empty() { Ok(()) } else { write!(f, ": {}", without_control_chars(note)) }
    }
}

/// Text of another process, made safe for a terminal: control characters could move the cursor.
fn without_control_chars(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity_is_displayed_without_nonce_and_control_characters() {
        let mut by = Identity {
            id: "web-2:311:00af".into(),
            host: "web-2".into(),
            pid: 311,
            note: String::new(),
        };
        assert_eq!(by.to_string(), "web-2 (pid 311)");
        by.id = "deployer\x1b[2J".into();
        by.note = "v42".into();
        assert_eq!(by.to_string(), "deployer[2J (pid 311): v42");
    }
}
