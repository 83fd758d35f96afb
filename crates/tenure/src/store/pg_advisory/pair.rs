//! Mapping of a key to the two numbers of its advisory lock.

use std::fmt;

use sha2::{Digest as _, Sha256};
use tenure_core::Key;

use crate::{Error, ErrorKind, Result};

/// The two numbers of an advisory lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Pair {
    pub(super) first: i32,
    pub(super) second: i32,
}

impl Pair {
    /// Maps a key to its pair. A key written as `1234,5678` is that pair. Any other key is hashed: the first four bytes
    /// of its SHA-256 and the next four, each as a signed big-endian number.
    pub(super) fn of(key: &Key) -> Result<Self> {
        match numbers(key.as_str()) {
            None => Ok(Self::hashed(key.as_bytes())),
            Some((first, second)) => {
                let (first, second) = (first.parse().ok(), second.parse().ok());
                let pair = first.zip(second).map(|(first, second)| Self { first, second });
                pair.ok_or_else(|| {
                    let message = format!(
                        "a number of the pair does not fit into 32 bits: give both between {} and {}, or a name",
                        i32::MIN,
                        i32::MAX
                    );
                    Error::new(ErrorKind::Invalid, message).on(key)
                })
            }
        }
    }

    fn hashed(key: &[u8]) -> Self {
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

    /// Key of this pair, which names the same lock as every key that is hashed to the pair.
    pub(super) fn key(self) -> Option<Key> {
        Key::new(&self.to_string()).ok()
    }
}

impl fmt::Display for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{}", self.first, self.second)
    }
}

/// Splits a text that is written as a pair of numbers.
fn numbers(text: &str) -> Option<(&str, &str)> {
    let number = |text: &str| {
        let digits = text.strip_prefix('-').unwrap_or(text);
        !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit())
    };
    text.split_once(',').filter(|(first, second)| number(first) && number(second))
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
        assert_eq!(pair.key().unwrap().as_str(), "-5,7");
    }
}
