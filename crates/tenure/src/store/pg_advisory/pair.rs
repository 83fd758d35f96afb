//! Mapping of a key to the two numbers of its advisory lock.

use std::fmt;

use sha2::{Digest as _, Sha256};
use tenure_core::Key;

use crate::{Error, ErrorKind, Result};

/// The two numbers of an advisory lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Pair {
    pub(crate) first: i32,
    pub(crate) second: i32,
}

impl Pair {
    /// Maps a key to its pair. A key written as `1234,5678` is that pair. Any other key is hashed: the first four bytes
    /// of its SHA-256 and the next four, each as a signed big-endian number.
    pub(super) fn of(key: &Key) -> Result<Self> {
        match numbers(key.as_str()) {
            None => Ok(Self::hashed(key.as_bytes())),
            Some((first, second)) => {
                let invalid = |message| Err(Error::new(ErrorKind::Invalid, message).on(key));
                let (Ok(first), Ok(second)) = (first.parse(), second.parse()) else {
                    return invalid(format!(
                        "a number of the pair does not fit into 32 bits: give both between {} and {}, or a name",
                        i32::MIN,
                        i32::MAX
                    ));
                };
                let pair = Self { first, second };
                // `07,5` would be the lock of `7,5` under a second name: status, history and nested holds would miss it.
                if pair.to_string() != key.as_str() {
                    return invalid(format!("the pair has a zero too many: write {pair}"));
                }
                Ok(pair)
            }
        }
    }

    /// Pair of a key that is a name.
    pub(super) fn hashed(key: &[u8]) -> Self {
        let hash = Sha256::digest(key);
        let number =
            |at: usize| i32::from_be_bytes([hash[at], hash[at + 1], hash[at + 2], hash[at + 3]]);
        Self { first: number(0), second: number(4) }
    }

    /// Pair as `pg_locks` shows it: unsigned.
    pub(super) fn unsigned(self) -> (u32, u32) {
        (self.first.cast_unsigned(), self.second.cast_unsigned())
    }

    pub(super) fn from_unsigned(first: u32, second: u32) -> Self {
        Self { first: first.cast_signed(), second: second.cast_signed() }
    }
}

impl fmt::Display for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{}", self.first, self.second)
    }
}

/// True if a text is written as a pair of numbers, of any size.
pub(super) fn is_pair(text: &str) -> bool {
    numbers(text).is_some()
}

/// True if a text consists of decimal digits.
pub(super) fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

/// Splits a text that is written as a pair of numbers.
fn numbers(text: &str) -> Option<(&str, &str)> {
    let is_number = |text: &str| is_digits(text.strip_prefix('-').unwrap_or(text));
    text.split_once(',').filter(|(first, second)| is_number(first) && is_number(second))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(text: &str) -> Result<(i32, i32)> {
        Pair::of(&Key::new(text).unwrap()).map(|pair| (pair.first, pair.second))
    }

    #[test]
    fn numbers_are_taken_as_they_are() {
        assert_eq!(pair("1234,5678").unwrap(), (1234, 5678));
        assert_eq!(pair("-5,0").unwrap(), (-5, 0));
        assert_eq!(pair("-2147483648,2147483647").unwrap(), (i32::MIN, i32::MAX));
        for text in ["2147483648,0", "0,-2147483649", "99999999999999999999,1"] {
            let error = pair(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{text}");
            assert!(error.to_string().contains("2147483647"), "{error}");
        }
    }

    #[test]
    fn a_pair_has_one_spelling() {
        for (text, spelling) in [("07,5", "7,5"), ("7,-05", "7,-5"), ("-0,1", "0,1")] {
            let error = pair(text).unwrap_err();
            assert!(error.to_string().contains(&format!("write {spelling}")), "{error}");
        }
    }

    #[test]
    fn names_are_hashed_the_same_for_ever() {
        // The SQL in the docs computes the same numbers.
        assert_eq!(pair("reports/nightly").unwrap(), (-1_760_512_724, 1_996_332_210));
        for name in ["1234", "1234,", ",1", "a,b", "1,2,3", "+1,2", "1, 2", "--1,2"] {
            let key = Key::new(name).unwrap();
            assert_eq!(Pair::of(&key).unwrap(), Pair::hashed(name.as_bytes()), "{name}");
        }
    }

    #[test]
    fn pairs_round_trip_through_pg_locks() {
        let pair = Pair { first: -5, second: 7 };
        assert_eq!(pair.unsigned(), (4_294_967_291, 7));
        assert_eq!(Pair::from_unsigned(4_294_967_291, 7), pair);
        assert_eq!(pair.to_string(), "-5,7");
    }
}
