//! Key bytes with inline storage.

use std::fmt;
use std::ops::Deref;

/// Bytes of a key of the table. Up to 22 bytes need no allocation.
#[derive(Clone)]
pub struct KeyBytes(Repr);

#[derive(Clone)]
enum Repr {
    Inline { len: u8, bytes: [u8; INLINE_BYTES] },
    Boxed(Box<[u8]>),
}

const INLINE_BYTES: usize = 22;

impl KeyBytes {
    /// The key as bytes.
    pub fn as_bytes(&self) -> &[u8] {
        match &self.0 {
            Repr::Inline { len, bytes } => &bytes[..usize::from(*len).min(INLINE_BYTES)],
            Repr::Boxed(bytes) => bytes,
        }
    }
}

impl From<&[u8]> for KeyBytes {
    fn from(key: &[u8]) -> Self {
        match u8::try_from(key.len()) {
            Ok(len) if key.len() <= INLINE_BYTES => {
                let mut bytes = [0; INLINE_BYTES];
                bytes[..key.len()].copy_from_slice(key);
                Self(Repr::Inline { len, bytes })
            }
            _ => Self(Repr::Boxed(key.into())),
        }
    }
}

impl Deref for KeyBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.as_bytes()
    }
}

impl PartialEq for KeyBytes {
    fn eq(&self, other: &Self) -> bool {
        self.as_bytes() == other.as_bytes()
    }
}

impl Eq for KeyBytes {}

impl fmt::Debug for KeyBytes {
    /// Printable ASCII as it is, every other byte escaped.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.as_bytes().escape_ascii())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_and_long_keys_keep_their_bytes() {
        for len in [0, 1, 21, 22, 23, 255, 256, 300] {
            let bytes: Vec<u8> = (0..=255).cycle().take(len).collect();
            let key = KeyBytes::from(&*bytes);
            assert_eq!(key.as_bytes(), bytes, "{len} bytes");
            assert_eq!(matches!(key.0, Repr::Inline { .. }), len <= INLINE_BYTES, "{len} bytes");
        }
        assert_eq!(size_of::<KeyBytes>(), 24);
    }

    #[test]
    fn a_key_is_printed_without_raw_bytes() {
        assert_eq!(format!("{:?}", KeyBytes::from(&b"a\n\xff\"b"[..])), r#""a\n\xff\"b""#);
    }
}
