//! Mapping of a key to its advisory lock, in the key form of the store.

use std::fmt;

use tenure_core::Key;

use super::options::KeyForm;
use super::pair::{Pair, is_digits, is_pair};
use crate::store::pg::migrate::SCHEMA_LOCK;
use crate::{Error, ErrorKind, Result};

/// An advisory lock. Locks of different forms never exclude each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum LockId {
    /// Lock of two 32-bit numbers.
    Pair(Pair),
    /// Lock of one 64-bit number.
    Bigint(i64),
}

impl KeyForm {
    /// `objsubid` of the locks of this form in `pg_locks`.
    pub(super) fn objsubid(self) -> u8 {
        match self {
            Self::Bigint => 1,
            Self::Pair => 2,
        }
    }

    /// Columns of the key in the table of terms.
    pub(super) fn key_columns(self) -> &'static str {
        match self {
            Self::Bigint => "key",
            Self::Pair => "key1, key2",
        }
    }

    pub(super) fn other(self) -> Self {
        match self {
            Self::Bigint => Self::Pair,
            Self::Pair => Self::Bigint,
        }
    }
}

impl LockId {
    /// Maps a key to its lock.
    pub(crate) fn of(form: KeyForm, key: &Key) -> Result<Self> {
        match form {
            KeyForm::Pair => Pair::of(key).map(Self::Pair),
            KeyForm::Bigint => bigint(key).map(Self::Bigint),
        }
    }

    pub(super) fn form(self) -> KeyForm {
        match self {
            Self::Pair(_) => KeyForm::Pair,
            Self::Bigint(_) => KeyForm::Bigint,
        }
    }

    /// `classid` and `objid` of the lock in `pg_locks`.
    pub(super) fn catalog(self) -> (u32, u32) {
        match self {
            Self::Pair(pair) => pair.unsigned(),
            Self::Bigint(number) => halves(number),
        }
    }

    pub(super) fn from_catalog(form: KeyForm, class: u32, object: u32) -> Self {
        match form {
            KeyForm::Pair => Self::Pair(Pair::from_unsigned(class, object)),
            KeyForm::Bigint => Self::Bigint(joined(class, object)),
        }
    }

    /// SQL arguments of the server's lock functions.
    pub(super) fn arguments(self) -> String {
        match self {
            Self::Pair(Pair { first, second }) => format!("{first}, {second}"),
            Self::Bigint(number) => literal(number),
        }
    }

    /// SQL condition that a row of `pg_locks` that is an advisory lock of this database is this lock.
    pub(super) fn is_row(self) -> String {
        let (objsubid, (class, object)) = (self.form().objsubid(), self.catalog());
        format!("objsubid = {objsubid} AND classid = {class} AND objid = {object}")
    }

    /// Key of the lock's numbers, which names the same lock as every key that is hashed to them.
    pub(super) fn key(self) -> Option<Key> {
        Key::new(&self.to_string()).ok()
    }
}

impl fmt::Display for LockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pair(pair) => pair.fmt(f),
            Self::Bigint(number) => number.fmt(f),
        }
    }
}

/// SQL of a 64-bit number. It is quoted because the digits of the smallest one do not fit before their sign is applied.
pub(super) fn literal(number: i64) -> String {
    format!("'{number}'::int8")
}

/// The number whose upper and lower halves these are.
pub(super) fn joined(upper: u32, lower: u32) -> i64 {
    (u64::from(upper) << 32 | u64::from(lower)).cast_signed()
}

fn halves(number: i64) -> (u32, u32) {
    let number = number.cast_unsigned();
    let half = |number: u64| u32::try_from(number & u64::from(u32::MAX)).unwrap_or_default();
    (half(number >> 32), half(number))
}

/// Maps a key to a 64-bit number. A key written as a number is that number. Any other key is hashed: the first eight
/// bytes of its SHA-256, as a signed big-endian number.
fn bigint(key: &Key) -> Result<i64> {
    let invalid = |message| Err(Error::new(ErrorKind::Invalid, message).on(key));
    let text = key.as_str();
    if is_pair(text) {
        return invalid(
            "the key is a pair of numbers, but the store has 64-bit keys (key=bigint): give one number, or a name"
                .to_owned(),
        );
    }
    let number = if is_digits(text.strip_prefix(['-', '+']).unwrap_or(text)) {
        let Ok(number) = text.parse::<i64>() else {
            return invalid(format!(
                "the number does not fit into 64 bits: give one between {} and {}, or a name",
                i64::MIN,
                i64::MAX
            ));
        };
        // `07` would be the lock of `7` under a second name: status, history and nested holds would miss it.
        if number.to_string() != text {
            return invalid(format!("the number has a zero or a sign too many: write {number}"));
        }
        number
    } else {
        let (upper, lower) = Pair::hashed(key.as_bytes()).unsigned();
        joined(upper, lower)
    };
    if number == SCHEMA_LOCK {
        return invalid(format!("{number} is the lock of `tenure schema`: use another key"));
    }
    Ok(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(text: &str) -> Result<i64> {
        bigint(&Key::new(text).unwrap())
    }

    #[test]
    fn a_number_is_taken_as_it_is() {
        for expected in [0, 42, -42, 9_000_000_000, -9_000_000_000, i64::MIN, i64::MAX] {
            assert_eq!(number(&expected.to_string()).unwrap(), expected);
        }
        for text in ["9223372036854775808", "-9223372036854775809", "99999999999999999999999"] {
            let error = number(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{text}");
            assert!(error.to_string().contains("9223372036854775807"), "{error}");
        }
    }

    #[test]
    fn a_number_has_one_spelling_and_a_pair_is_refused() {
        for (text, spelling) in
            [("042", "42"), ("-05", "-5"), ("-0", "0"), ("+7", "7"), ("00", "0")]
        {
            let error = number(text).unwrap_err();
            assert!(error.to_string().contains(&format!("write {spelling}")), "{error}");
        }
        for text in ["1234,5678", "-1,2", "07,4294967296"] {
            let error = number(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{text}");
            assert!(error.to_string().contains("key=bigint"), "{error}");
        }
    }

    #[test]
    fn the_lock_of_the_schema_is_refused_under_its_number() {
        let error = number(&SCHEMA_LOCK.to_string()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("tenure schema"), "{error}");
        assert_eq!(number(&(SCHEMA_LOCK + 1).to_string()).unwrap(), SCHEMA_LOCK + 1);
    }

    #[test]
    fn names_are_hashed_to_64_bits_the_same_for_ever() {
        // The SQL in the docs computes the same number: the two numbers of the pair form, side by side.
        assert_eq!(number("reports/nightly").unwrap(), -7_561_344_571_775_542_094);
        assert_eq!(
            joined((-1_760_512_724_i32).cast_unsigned(), 1_996_332_210),
            -7_561_344_571_775_542_094
        );
        for name in ["4 2", "--1", "+-1", "-", "+", "0x10", "1e3", "1.5", "1,2,3", "a,b"] {
            let hashed = Pair::hashed(name.as_bytes()).unsigned();
            assert_eq!(number(name).unwrap(), joined(hashed.0, hashed.1), "{name}");
        }
    }

    #[test]
    fn locks_round_trip_through_pg_locks() {
        for (number, catalog) in [
            (42, (0, 42)),
            (-1, (u32::MAX, u32::MAX)),
            (i64::MIN, (1 << 31, 0)),
            (i64::MAX, (u32::MAX >> 1, u32::MAX)),
            (-9_000_000_000, (4_294_967_293, 3_884_901_888)),
        ] {
            let lock = LockId::Bigint(number);
            assert_eq!(lock.catalog(), catalog, "{number}");
            assert_eq!(LockId::from_catalog(KeyForm::Bigint, catalog.0, catalog.1), lock);
            assert_eq!(lock.key().unwrap().as_str(), number.to_string());
        }
        let pair = LockId::from_catalog(KeyForm::Pair, 4_294_967_291, 7);
        assert_eq!((pair.arguments(), pair.key().unwrap().as_str()), ("-5, 7".into(), "-5,7"));
        assert_ne!(LockId::from_catalog(KeyForm::Bigint, 4_294_967_291, 7), pair);
    }
}
