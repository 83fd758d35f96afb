//! Fencing token in a request header, and status codes for refused requests.
//!
//! The holder sends its token in the header [`HEADER`] of every request that writes. The service reads it with
//! [`token`] and writes through a [`Gate`]. Nothing here needs a particular framework: header values are bytes, and a
//! refusal is a status code.
//!
//! ```
//! use std::sync::Mutex;
//! use tenure::FencingToken;
//! use tenure::fence::{Gate, http};
//!
//! struct Report {
//!     gate: Gate,
//!     text: Mutex<String>,
//! }
//!
//! /// `PUT /report`, with the values of all headers of that name.
//! fn put(report: &Report, fencing: &[&str], body: &str) -> Result<(), http::Refusal> {
//!     let token = http::token(fencing)?;
//!     report.gate.write(token, || *report.text.lock().unwrap() = body.to_owned())?;
//!     Ok(())
//! }
//!
//! let report = Report { gate: Gate::new(), text: Mutex::default() };
//! let old = http::value(FencingToken::new(0, 6))?; // of guard.fencing_token()
//! let new = http::value(FencingToken::new(0, 7))?;
//! put(&report, &[&old], "draft")?;
//! put(&report, &[&new], "final")?;
//!
//! let refusal = put(&report, &[&old], "late").unwrap_err();
//! assert_eq!(refusal.status(), 412);
//! assert_eq!(put(&report, &[], "unfenced").unwrap_err().status(), 428);
//! assert_eq!(*report.text.lock().unwrap(), "final");
//! # Ok::<(), http::Refusal>(())
//! ```
//!
//! # Status codes
//!
//! - **412 Precondition Failed** if the token is stale. The header states the condition "there was no newer holder",
//!   which is false; nothing was written. 409 Conflict would invite the sender to resolve the conflict and send the
//!   request again, and some clients do so automatically. A stale holder has to stop.
//! - **428 Precondition Required** if there is no token, or only 0, which stands for none. The service requires a
//!   condition so that no write is lost under another one, which is the purpose of this status.
//! - **400 Bad Request** if the value is not a token, or there are several. The sender must be corrected; the same
//!   request will always fail.
//!
//! The service must still authenticate its callers: a token is public, and any client could invent a high one.

use std::fmt;

use super::{Gate, NoToken, Stale};
use crate::FencingToken;

/// Name of the header that carries a fencing token.
///
/// HTTP/1.1 ignores case; HTTP/2 and some libraries require names in lower case.
pub const HEADER: &str = "tenure-fencing-token";

/// Number of digits of the greatest token.
const MAX_DIGITS: usize = 39;

/// Value of [`HEADER`] for this token: the decimal number, without sign, blanks or leading zeros.
///
/// # Errors
///
/// [`NoToken`] for [`FencingToken::NONE`]: a service that began with 0 as its newest token would accept it.
pub fn value(token: FencingToken) -> Result<String, NoToken> {
    super::encoded_token(token)
}

/// Token of a request, from the values of all its headers named [`HEADER`].
///
/// Parsing is strict: one header with one value, exactly as [`value`] writes it. Blanks around the value are ignored,
/// as HTTP requires.
///
/// # Errors
///
/// [`Refusal::Missing`], [`Refusal::Repeated`], [`Refusal::Malformed`] or [`Refusal::NoToken`].
///
/// ```
/// use tenure::fence::http::{Refusal, token};
///
/// assert_eq!(token(["42"])?.to_string(), "42");
/// assert_eq!(token(["42", "42"]), Err(Refusal::Repeated));
/// assert_eq!(token(["+42"]), Err(Refusal::Malformed));
/// # Ok::<(), Refusal>(())
/// ```
pub fn token<V: AsRef<[u8]>>(values: impl IntoIterator<Item = V>) -> Result<FencingToken, Refusal> {
    let mut values = values.into_iter();
    let only = values.next().ok_or(Refusal::Missing)?;
    if values.next().is_some() {
        return Err(Refusal::Repeated);
    }
    match parse(only.as_ref()) {
        Some(FencingToken::NONE) => Err(Refusal::NoToken),
        token => token.ok_or(Refusal::Malformed),
    }
}

/// Token of a request, if `gate` admits it.
///
/// For a request that only installs the token, and for a handler that keeps the resource locked until its write is
/// done. Otherwise a newer holder can write in between: see [`Gate::admit`].
///
/// # Errors
///
/// Those of [`token`], and [`Refusal::Stale`].
///
/// ```
/// use tenure::FencingToken;
/// use tenure::fence::{Gate, http};
///
/// let gate = Gate::starting_at(FencingToken::new(0, 7));
/// assert_eq!(http::admit(["8"], &gate), Ok(FencingToken::new(0, 8)));
/// assert_eq!(http::admit(["7"], &gate).unwrap_err().status(), 412);
/// ```
pub fn admit<V: AsRef<[u8]>>(
    values: impl IntoIterator<Item = V>,
    gate: &Gate,
) -> Result<FencingToken, Refusal> {
    let token = token(values)?;
    gate.admit(token)?;
    Ok(token)
}

/// Reason for refusing a request. The text is suitable for the response body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// The request carries no token.
    Missing,
    /// The request carries the header more than once.
    Repeated,
    /// The header's value is not a token.
    Malformed,
    /// The header's value is 0: the sender's hold has no token.
    NoToken,
    /// A newer token was seen.
    Stale(Stale),
}

impl Refusal {
    /// Status code of the response.
    pub const fn status(self) -> u16 {
        match self {
            Self::Missing | Self::NoToken => 428,
            Self::Repeated | Self::Malformed => 400,
            Self::Stale(_) => 412,
        }
    }
}

impl From<Stale> for Refusal {
    fn from(stale: Stale) -> Self {
        if stale.offered.is_none() { Self::NoToken } else { Self::Stale(stale) }
    }
}

impl From<NoToken> for Refusal {
    fn from(NoToken: NoToken) -> Self {
        Self::NoToken
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => {
                write!(f, "no fencing token: send the token of your guard in the header {HEADER}")
            }
            Self::Repeated => write!(f, "several fencing tokens: send the header {HEADER} once"),
            Self::Malformed => {
                write!(f, "not a fencing token: send one decimal number in the header {HEADER}")
            }
            Self::NoToken => write!(f, "{HEADER} is 0: {NoToken}"),
            Self::Stale(stale) => stale.fmt(f),
        }
    }
}

impl std::error::Error for Refusal {}

fn parse(value: &[u8]) -> Option<FencingToken> {
    let digits = str::from_utf8(value).ok()?.trim_matches([' ', '\t']);
    // The sender chooses the length of the value: leading zeros would allow any length.
    let canonical = digits.len() <= MAX_DIGITS && (digits == "0" || !digits.starts_with('0'));
    if canonical { digits.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_survives_its_header() {
        for number in [1, 42, u128::from(u64::MAX) + 1, u128::MAX] {
            let token = FencingToken::from_u128(number);
            assert_eq!(super::token([value(token).unwrap()]), Ok(token));
            assert_eq!(super::token([format!(" \t{token} ")]), Ok(token));
        }
        assert_eq!(value(FencingToken::from_u128(u128::MAX)).unwrap().len(), MAX_DIGITS);
    }

    #[test]
    fn anything_else_is_refused() {
        let long = "1".repeat(100_000);
        for text in [
            "",
            " ",
            "+1",
            "-1",
            "1 2",
            "1,2",
            "1, 1",
            "1;2",
            "1.0",
            "1e3",
            "0x1",
            "\"1\"",
            "01",
            "00",
            "one",
            "١",
            "1\0",
            "1\n2",
            "1\r",
            "340282366920938463463374607431768211456",
            &long,
        ] {
            assert_eq!(token([text]), Err(Refusal::Malformed), "{text:?}");
        }
        assert_eq!(token([b"\xff"]), Err(Refusal::Malformed));
        assert_eq!(token([""; 0]), Err(Refusal::Missing));
        assert_eq!(token(["1", "1"]), Err(Refusal::Repeated));
    }

    #[test]
    fn no_token_is_neither_sent_nor_accepted() {
        assert_eq!(value(FencingToken::NONE), Err(NoToken));
        assert_eq!(token(["0"]), Err(Refusal::NoToken));
        let refusal = Refusal::from(Gate::new().admit(FencingToken::NONE).unwrap_err());
        assert_eq!((refusal, refusal.status()), (Refusal::NoToken, 428));
        assert!(refusal.to_string().contains("?fencing=ordered"), "{refusal}");
    }

    #[test]
    fn a_request_with_a_token_is_for_the_gate_to_decide() {
        let [old, newest] = [7, 8].map(|number| FencingToken::new(0, number));
        let gate = Gate::new();
        assert_eq!(admit(["7"], &gate), Ok(old));
        assert_eq!(admit(["8"], &gate), Ok(newest));
        assert_eq!(admit(["7"], &gate), Err(Refusal::Stale(Stale { offered: old, newest })));
        assert_eq!(admit(["8"], &gate), Ok(newest));
    }

    #[test]
    fn a_request_that_carries_no_token_does_not_reach_the_gate() {
        let gate = Gate::starting_at(FencingToken::new(0, 7));
        for values in [&[][..], &["9", "9"], &["nine"]] {
            assert!(admit(values, &gate).is_err());
        }
        assert_eq!(gate.newest(), FencingToken::new(0, 7));
    }
}
