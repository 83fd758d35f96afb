//! The name of a hold in the table, and its handle.

use std::fmt;

use tenure_core::Key;

use crate::store::{Handle, KeySpace};

/// Identity of a hold in the table.
#[derive(Clone)]
pub(super) struct HoldName {
    pub(super) space: i16,
    pub(super) key: Key,
    /// True if the hold shares its row with other holds.
    pub(super) shared_row: bool,
    pub(super) number: i64,
    pub(super) secret: [u8; 16],
}

impl HoldName {
    /// Handle of the hold: secret text with which any process can renew and release it.
    pub(super) fn handle(&self) -> Handle {
        let kind = match (self.space, self.shared_row) {
            (_, false) => 'x',
            (0, true) => 'r',
            (_, true) => 's',
        };
        Handle::new(format!("{kind}{}-{:032x}", self.number, u128::from_be_bytes(self.secret)))
    }

    pub(super) fn parse(key: &Key, handle: &Handle) -> Option<Self> {
        let (kind, rest) = handle.expose().split_at_checked(1)?;
        let (space, shared_row) = match kind {
            "x" => (KeySpace::Lock, false),
            "r" => (KeySpace::Lock, true),
            "s" => (KeySpace::Semaphore, true),
            _ => return None,
        };
        let (number, secret) = rest.split_once('-')?;
        let secret = u128::from_str_radix(secret, 16).ok().filter(|_| secret.len() == 32)?;
        Some(Self {
            space: space_number(space),
            key: key.clone(),
            shared_row,
            number: number.parse().ok()?,
            secret: secret.to_be_bytes(),
        })
    }
}

impl fmt::Debug for HoldName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} number {}", self.key, self.number)
    }
}

/// Number of a key space in the table.
pub(super) fn space_number(space: KeySpace) -> i16 {
    match space {
        KeySpace::Lock => 0,
        KeySpace::Semaphore => 1,
    }
}
