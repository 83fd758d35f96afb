//! The `traceparent` of the W3C Trace Context, which ties the work of several processes together.

use std::fmt;
use std::str::FromStr;

/// A valid `traceparent`, such as `00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01`.
///
/// Values of later versions are kept as they are.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TraceParent(String);

/// Maximum length of a `traceparent` of a later version, in bytes.
const MAX_BYTES: usize = 512;

impl TraceParent {
    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Text that is no `traceparent`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidTraceParent;

impl fmt::Display for InvalidTraceParent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "invalid traceparent: give VERSION-TRACE-PARENT-FLAGS of 2, 32, 16 and 2 lower-case hexadecimal digits, as \
             in 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        )
    }
}

impl std::error::Error for InvalidTraceParent {}

impl FromStr for TraceParent {
    type Err = InvalidTraceParent;

    fn from_str(text: &str) -> Result<Self, InvalidTraceParent> {
        let hex = |field: &str, digits: usize| {
            field.len() == digits && field.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
        };
        let is_zero = |field: &str| field.bytes().all(|b| b == b'0');
        let fields: Vec<&str> = text.splitn(5, '-').collect();
        let [version, trace, parent, flags, ref rest @ ..] = fields[..] else {
            return Err(InvalidTraceParent);
        };
        let shaped = hex(version, 2) && hex(trace, 32) && hex(parent, 16) && hex(flags, 2);
        // Only later versions may have more fields, and ff is no version.
        let known = version != "ff" && (rest.is_empty() || version != "00");
        let printable = text.len() <= MAX_BYTES && text.bytes().all(|b| b.is_ascii_graphic());
        if shaped && known && printable && !is_zero(trace) && !is_zero(parent) {
            Ok(Self(text.to_owned()))
        } else {
            Err(InvalidTraceParent)
        }
    }
}

impl fmt::Display for TraceParent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALID: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_valid_text_is_kept() {
        for text in [VALID, &VALID.replacen("00", "cc", 1), &format!("cc{}-more", &VALID[2..])] {
            assert_eq!(text.parse::<TraceParent>().unwrap().as_str(), text);
        }
    }

    #[test]
    fn an_invalid_text_is_refused() {
        for text in [
            "",
            "00",
            &VALID.to_uppercase(),
            &VALID[..54],
            &format!("{VALID}0"),
            &format!("{VALID}-more"),
            &VALID.replacen("00", "ff", 1),
            &VALID.replace("0af7651916cd43dd8448eb211c80319c", &"0".repeat(32)),
            &VALID.replace("b7ad6b7169203331", &"0".repeat(16)),
            &format!("cc{}-{}", &VALID[2..], "x".repeat(MAX_BYTES)),
            &format!("cc{}-a\nb", &VALID[2..]),
        ] {
            assert_eq!(text.parse::<TraceParent>(), Err(InvalidTraceParent), "{text:?}");
        }
    }
}
