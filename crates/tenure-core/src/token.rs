//! Tokens: the public fencing token, and the lock token with the secret that proves ownership.

use std::fmt;
use std::str::FromStr;

use crate::hex;

/// Number that grows with every grant of a key. A protected resource rejects a token smaller than one it has seen.
///
/// It has 128 bits, an epoch and a number, and is compared, printed and parsed as one decimal number. It is public:
/// knowing it gives no control over the hold.
///
/// ```
/// use tenure_core::FencingToken;
///
/// let first = FencingToken::new(0, 41);
/// let later = FencingToken::new(1, 0);
/// assert!(first < later);
/// assert_eq!(first.to_string(), "41");
/// assert_eq!("18446744073709551616".parse(), Ok(later));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct FencingToken {
    epoch: u64,
    number: u64,
}

impl FencingToken {
    /// No token: the value for a hold on a store whose grants have no known order. No grant is numbered 0, and every
    /// helper that checks tokens rejects this value.
    pub const NONE: Self = Self::new(0, 0);

    /// Creates the token `number` of `epoch`.
    pub const fn new(epoch: u64, number: u64) -> Self {
        Self { epoch, number }
    }

    /// True for [`NONE`](Self::NONE).
    pub const fn is_none(self) -> bool {
        self.as_u128() == 0
    }

    /// Epoch: it rises when the store may have lost grants and their numbers. Such events are a fail-over of PostgreSQL
    /// and the creation of a NATS stream.
    pub const fn epoch(self) -> u64 {
        self.epoch
    }

    /// Number: it rises with each grant within an epoch.
    pub const fn number(self) -> u64 {
        self.number
    }

    /// Token as the single number that is compared and printed.
    pub const fn as_u128(self) -> u128 {
        ((self.epoch as u128) << 64) | self.number as u128
    }

    /// Token from the number that [`as_u128`](Self::as_u128) returned.
    #[expect(clippy::cast_possible_truncation, reason = "the two halves")]
    pub const fn from_u128(value: u128) -> Self {
        Self { epoch: (value >> 64) as u64, number: value as u64 }
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_u128().fmt(f)
    }
}

impl fmt::Debug for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.epoch, self.number)
    }
}

impl FromStr for FencingToken {
    type Err = TokenError;

    fn from_str(text: &str) -> Result<Self, TokenError> {
        let only_digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        match text.parse() {
            Ok(value) if only_digits => Ok(Self::from_u128(value)),
            _ => Err(TokenError::Fencing),
        }
    }
}

/// Token of a grant of the lock table: the fencing number, and a secret that proves ownership.
///
/// Printed and parsed as 32 lower-case hexadecimal digits, the first 16 of which are the number. `Debug` hides the
/// secret.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct LockToken {
    number: u64,
    secret: u64,
}

impl LockToken {
    /// Creates the token of grant `number` with `secret`.
    pub const fn new(number: u64, secret: u64) -> Self {
        Self { number, secret }
    }

    /// Fencing number.
    pub const fn number(self) -> u64 {
        self.number
    }

    /// Secret half, for the persistence of a hold. Store it only where the server alone can read it.
    pub const fn secret(self) -> u64 {
        self.secret
    }

    /// Public half, as the fencing token of the grant.
    pub const fn fencing(self) -> FencingToken {
        FencingToken::new(0, self.number)
    }

    /// Digits that [`Display`](fmt::Display) prints.
    pub fn to_hex(self) -> [u8; 32] {
        let mut text = [0; 32];
        let bytes = self.number.to_be_bytes().into_iter().chain(self.secret.to_be_bytes());
        for (digits, byte) in text.chunks_exact_mut(2).zip(bytes) {
            digits.copy_from_slice(&hex::pair(byte));
        }
        text
    }

    /// Parses 32 lower-case hexadecimal digits; `None` for anything else.
    pub fn from_hex(text: &[u8]) -> Option<Self> {
        let text: &[u8; 32] = text.try_into().ok()?;
        let value = hex::number(text)?;
        // A fencing token divides 128 bits into the same two halves, under other names.
        let FencingToken { epoch: number, number: secret } = FencingToken::from_u128(value);
        Some(Self { number, secret })
    }
}

impl fmt::Display for LockToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}{:016x}", self.number, self.secret)
    }
}

impl fmt::Debug for LockToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LockToken({}:…)", self.number)
    }
}

impl FromStr for LockToken {
    type Err = TokenError;

    fn from_str(text: &str) -> Result<Self, TokenError> {
        Self::from_hex(text.as_bytes()).ok_or(TokenError::Lock)
    }
}

/// Reason for which a text is not a token. The text itself is not repeated: it may contain a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenError {
    /// Not a decimal number of at most 128 bits.
    Fencing,
    /// Not 32 lower-case hexadecimal digits.
    Lock,
}

impl fmt::Display for TokenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fencing => "not a fencing token: give a decimal number of at most 128 bits",
            Self::Lock => "not a lock token: give 32 lower-case hexadecimal digits",
        })
    }
}

impl std::error::Error for TokenError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_epoch_outweighs_the_number() {
        assert!(FencingToken::new(1, 0) > FencingToken::new(0, u64::MAX));
        assert!(FencingToken::new(1, 2) > FencingToken::new(1, 1));
    }

    #[test]
    fn a_fencing_token_survives_its_text() {
        for value in [0, 7, u128::from(u64::MAX), u128::from(u64::MAX) + 1, u128::MAX] {
            let token = FencingToken::from_u128(value);
            assert_eq!(token.to_string(), value.to_string());
            assert_eq!(token.to_string().parse(), Ok(token));
        }
        for text in ["", "-1", "+1", "0x10", "1.5", " 1", "340282366920938463463374607431768211456"]
        {
            assert_eq!(text.parse::<FencingToken>(), Err(TokenError::Fencing), "{text:?}");
        }
    }

    #[test]
    fn a_lock_token_survives_its_text_and_hides_its_secret() {
        let token = LockToken::new(0x2a, 0xdead_beef_0000_0001);
        assert_eq!(token.to_string(), "000000000000002adeadbeef00000001");
        assert_eq!(token.to_hex(), *b"000000000000002adeadbeef00000001");
        assert_eq!(token.to_string().parse(), Ok(token));
        assert_eq!(format!("{token:?}"), "LockToken(42:…)");
        for text in ["", "000000000000002ADEADBEEF00000001", &"0".repeat(31), &"é".repeat(16)] {
            assert_eq!(text.parse::<LockToken>(), Err(TokenError::Lock), "{text:?}");
        }
    }
}
