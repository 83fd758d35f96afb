//! Name of a lock, parsed once, where it enters the program.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Name of a lock, an election or a semaphore, valid on every store.
///
/// One to [`Key::MAX_BYTES`] bytes of text. It has no control characters, no line breaks, no characters that reverse
/// the direction of text (they could forge a log line), and no white space at either end. Cloning is cheap.
///
/// ```
/// use tenure_core::Key;
///
/// let key: Key = "reports/nightly".parse()?;
/// assert_eq!(key.as_str(), "reports/nightly");
/// assert!("".parse::<Key>().is_err());
/// # Ok::<(), tenure_core::KeyError>(())
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(Arc<str>);

impl Key {
    /// Longest key, in bytes.
    pub const MAX_BYTES: usize = 200;

    /// Parses a key.
    ///
    /// # Errors
    ///
    /// Names the rule that the text breaks, and the position.
    pub fn new(text: &str) -> Result<Self, KeyError> {
        check(text).map_err(|fault| KeyError { text: excerpt(text), fault })?;
        Ok(Self(text.into()))
    }

    /// Key as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Key as bytes.
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl AsRef<str> for Key {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl FromStr for Key {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        Self::new(text)
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}

/// Reason for which a text is not a valid key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyError {
    text: String,
    fault: Fault,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Fault {
    Empty,
    TooLong(usize),
    OuterWhiteSpace,
    Forbidden(char, usize),
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = &self.text;
        match self.fault {
            Fault::Empty => write!(f, "the key is empty: give a name"),
            Fault::TooLong(bytes) => write!(
                f,
                "the key {text:?} has {bytes} bytes: shorten it to at most {}",
                Key::MAX_BYTES
            ),
            Fault::OuterWhiteSpace => {
                write!(
                    f,
                    "the key {text:?} begins or ends with white space: remove the white space"
                )
            }
            Fault::Forbidden(c, at) => write!(
                f,
                "the key {text:?} has the character U+{:04X} at byte {at}: remove control characters, line breaks and \
                 direction marks",
                u32::from(c)
            ),
        }
    }
}

impl std::error::Error for KeyError {}

fn check(text: &str) -> Result<(), Fault> {
    if text.is_empty() {
        return Err(Fault::Empty);
    }
    if text.len() > Key::MAX_BYTES {
        return Err(Fault::TooLong(text.len()));
    }
    if let Some((at, c)) = text.char_indices().find(|(_, c)| forbidden(*c)) {
        return Err(Fault::Forbidden(c, at));
    }
    if text.trim() != text {
        return Err(Fault::OuterWhiteSpace);
    }
    Ok(())
}

fn forbidden(c: char) -> bool {
    c.is_control() || matches!(c, '\u{2028}'..='\u{202E}' | '\u{2066}'..='\u{2069}' | '\u{FEFF}')
}

/// Start of an invalid key, for the message: the key may be of any length.
fn excerpt(text: &str) -> String {
    const MAX_EXCERPT_CHARS: usize = 40;
    match text.char_indices().nth(MAX_EXCERPT_CHARS) {
        Some((cut, _)) => format!("{}…", &text[..cut]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_what_users_write() {
        for text in
            ["a", "reports/nightly", "web 2", "ключ", "%20", "../etc", "🦀", &"x".repeat(200)]
        {
            assert_eq!(Key::new(text).unwrap().as_str(), text);
        }
    }

    #[test]
    fn refuses_with_the_reason_and_the_place() {
        for (text, part) in [
            ("", "empty"),
            (&*"x".repeat(201), "201 bytes"),
            ("a\nb", "U+000A at byte 1"),
            ("a\0", "U+0000"),
            ("\u{7f}", "U+007F"),
            ("a\u{202e}b", "U+202E"),
            ("a\u{2028}b", "U+2028"),
            (" a", "white space"),
            ("a\u{a0}", "white space"),
        ] {
            let message = Key::new(text).unwrap_err().to_string();
            assert!(message.contains(part), "{text:?}: {message}");
        }
    }

    #[test]
    fn the_error_shows_little_of_a_huge_key_and_no_raw_control_character() {
        let message = Key::new(&"\u{1b}é".repeat(10_000)).unwrap_err().to_string();
        assert!(message.len() < 400, "{message}");
        assert!(!message.contains('\u{1b}'));
    }
}
