//! Tokens: growing fencing numbers with random secrets.

use tenure_core::LockToken;
use tenure_core::table::Mint;

/// Mint of the server's tokens.
#[derive(Debug)]
pub(crate) struct TokenMint {
    next: u64,
    secrets: Secrets,
}

impl TokenMint {
    /// Creates a mint whose first token has the number `next`.
    pub(crate) fn from(next: u64) -> Self {
        Self { next, secrets: Secrets::default() }
    }
}

impl Mint for TokenMint {
    fn mint(&mut self) -> LockToken {
        let number = self.next;
        self.next += 1;
        LockToken::new(number, self.secrets.next())
    }
}

/// Random secrets. Fetched from the system for 512 tokens at once: a system call per token would cost more than the
/// grant.
struct Secrets {
    bytes: [u8; 4096],
    used: usize,
}

impl Default for Secrets {
    fn default() -> Self {
        Self { bytes: [0; 4096], used: 4096 }
    }
}

impl std::fmt::Debug for Secrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secrets(…)")
    }
}

impl Secrets {
    fn next(&mut self) -> u64 {
        if self.used == self.bytes.len() {
            getrandom::fill(&mut self.bytes).expect("the system provides random numbers");
            self.used = 0;
        }
        let (secret, _) =
            self.bytes[self.used..].split_first_chunk().expect("eight bytes are left");
        self.used += size_of::<u64>();
        u64::from_ne_bytes(*secret)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn numbers_grow_and_secrets_differ() {
        let mut mint = TokenMint::from(7);
        let tokens: Vec<_> = (0..2000).map(|_| mint.mint()).collect();
        assert!((7..).zip(&tokens).all(|(number, token)| token.number() == number));
        let secrets: HashSet<_> = tokens.iter().map(|token| token.secret()).collect();
        assert_eq!(secrets.len(), tokens.len());
    }
}
