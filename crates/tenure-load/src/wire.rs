//! Requests of the loads and their expected replies. Any other reply is an error that names both.

use anyhow::{Result, bail, ensure};

use crate::Target;

/// Lease in seconds that loads request: the protocol's default.
pub const LEASE_SECS: u32 = 33;

/// Seconds that a load waits for a grant before the server replies `timeout`.
pub const TIMEOUT_SECS: u32 = 10;

const TOKEN_LEN: usize = 32;
const FENCE_LEN: usize = 16;

/// Token of a grant: the first half is the fencing number, the second half a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token([u8; TOKEN_LEN]);

impl Token {
    /// Bytes of the token on the wire.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Fencing number. A later grant has a larger one.
    pub fn fence(&self) -> u64 {
        self.0[..FENCE_LEN].iter().fold(0, |fence, digit| fence << 4 | u64::from(nibble(*digit)))
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let token: [u8; TOKEN_LEN] = bytes.try_into().ok()?;
        let hex = |byte: &u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte);
        token.iter().all(hex).then_some(Self(token))
    }
}

/// Appends a request.
pub fn request(out: &mut Vec<u8>, command: &str, key: &str, argument: &str) {
    for line in [command, key, argument] {
        out.extend_from_slice(line.as_bytes());
        out.push(b'\n');
    }
}

/// Request `l`: claims `key` and waits for it.
pub fn lock(key: &str, timeout: u32, lease: u32) -> Vec<u8> {
    let mut out = Vec::new();
    request(&mut out, "l", key, &format!("{timeout} {lease}"));
    out
}

/// Request `r` with room for a token. A load that repeats it only replaces the 32 bytes of the token.
#[derive(Clone, Debug)]
pub struct Release(Vec<u8>);

impl Release {
    /// Release of `key`, without a token yet.
    pub fn of(key: &str) -> Self {
        let mut out = Vec::new();
        request(&mut out, "r", key, &"0".repeat(TOKEN_LEN));
        Self(out)
    }

    /// Request that releases the hold with this token.
    pub fn with(&mut self, token: &Token) -> &[u8] {
        let end = self.0.len() - 1;
        self.0[end - TOKEN_LEN..end].copy_from_slice(&token.0);
        &self.0
    }
}

/// Token of a grant. The reply must be exactly `word`, a token, and the requested lease.
///
/// # Errors
///
/// The reply is anything else.
pub fn granted(line: &[u8], word: &str, lease: u32) -> Result<Token> {
    let token = grant(line, word.as_bytes(), lease);
    token.ok_or_else(|| unexpected(line, &format!("{word} TOKEN {lease}")))
}

/// Checks that the reply is `wanted`.
///
/// # Errors
///
/// The reply is anything else.
pub fn expect_reply(line: &[u8], wanted: &str) -> Result<()> {
    if line == wanted.as_bytes() { Ok(()) } else { Err(unexpected(line, wanted)) }
}

/// Check that the fencing numbers of successive grants grow.
#[derive(Clone, Copy, Debug)]
pub struct FenceChecker {
    enabled: bool,
    last: Option<u64>,
}

impl FenceChecker {
    /// Checker for a server, before its first grant.
    pub fn of(target: &Target) -> Self {
        Self { enabled: target.fenced, last: None }
    }

    /// Checks the next grant.
    ///
    /// # Errors
    ///
    /// The fencing number is not larger than the last one.
    pub fn check(&mut self, token: &Token) -> Result<()> {
        if !self.enabled {
            return Ok(());
        }
        let fence = token.fence();
        if let Some(last) = self.last {
            ensure!(fence > last, "wrong reply: fence {fence} was granted after {last}");
        }
        self.last = Some(fence);
        Ok(())
    }
}

fn grant(line: &[u8], word: &[u8], lease: u32) -> Option<Token> {
    let rest = line.strip_prefix(word)?.strip_prefix(b" ")?;
    let (token, rest) = rest.split_at_checked(TOKEN_LEN)?;
    let seconds = rest.strip_prefix(b" ")?;
    if number(seconds)? != lease {
        return None;
    }
    Token::parse(token)
}

/// Parses decimal digits without a sign or leading zeros, as the server prints them.
fn number(digits: &[u8]) -> Option<u32> {
    if digits.is_empty() || (digits[0] == b'0' && digits.len() > 1) {
        return None;
    }
    digits.iter().try_fold(0_u32, |number, digit| {
        let digit = digit.is_ascii_digit().then(|| u32::from(digit - b'0'))?;
        number.checked_mul(10)?.checked_add(digit)
    })
}

#[cold]
fn unexpected(line: &[u8], wanted: &str) -> anyhow::Error {
    anyhow::anyhow!("wrong reply: {:?} instead of {wanted:?}", String::from_utf8_lossy(line))
}

fn nibble(digit: u8) -> u8 {
    if digit.is_ascii_digit() { digit - b'0' } else { digit - b'a' + 10 }
}

/// Key that no other run uses, so that holds of an earlier load do not interfere.
pub fn key(load: &str, number: usize) -> String {
    format!("{load}-{}-{number}", std::process::id())
}

/// Resolves an address given by the user.
///
/// # Errors
///
/// The address cannot be resolved.
pub fn resolve(address: &str) -> Result<std::net::SocketAddr> {
    match std::net::ToSocketAddrs::to_socket_addrs(address)?.next() {
        Some(address) => Ok(address),
        None => bail!("cannot resolve {address}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRANT: &str = "ok 00000000000000ff0123456789abcdef 33";

    #[test]
    fn a_grant_gives_its_token_and_fence() {
        let token = granted(GRANT.as_bytes(), "ok", 33).unwrap();
        assert_eq!(token.as_bytes(), &GRANT.as_bytes()[3..35]);
        assert_eq!(token.fence(), 255);
    }

    #[test]
    fn whatever_is_not_exactly_a_grant_is_refused_and_named() {
        let upper = GRANT.replace('f', "F");
        let fourth = format!("{GRANT} 1");
        let doubled = GRANT.replace(' ', "  ");
        for line in ["", "ok", "timeout", "ok 12 33", &GRANT[..37], &upper, &fourth, &doubled] {
            let error = granted(line.as_bytes(), "ok", 33).unwrap_err().to_string();
            assert!(error.contains("wrong reply") && error.contains("TOKEN 33"), "{error}");
        }
        assert!(granted(GRANT.as_bytes(), "ok", 30).is_err());
        assert!(granted(GRANT.as_bytes(), "acquired", 33).is_err());
    }

    #[test]
    fn a_fence_that_does_not_grow_is_refused() {
        let token = granted(GRANT.as_bytes(), "ok", 33).unwrap();
        let mut fences = FenceChecker { enabled: true, last: None };
        fences.check(&token).unwrap();
        assert!(fences.check(&token).is_err());
    }

    #[test]
    fn a_release_carries_the_token_it_was_last_given() {
        let token = granted(GRANT.as_bytes(), "ok", 33).unwrap();
        let mut release = Release::of("a");
        let wanted = b"r\na\n00000000000000ff0123456789abcdef\n";
        assert_eq!(release.with(&token), wanted);
    }
}
