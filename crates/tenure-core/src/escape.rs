//! Text in which some bytes are written as a sign and two hexadecimal digits, such as `%2F`.

use crate::hex;

/// A way to escape bytes.
#[derive(Clone, Copy, Debug)]
pub struct Escape {
    sign: u8,
    upper_case: bool,
}

impl Escape {
    /// `%2F`, as in URLs.
    pub const PERCENT: Self = Self { sign: b'%', upper_case: true };
    /// `%2f`, for text that must not have upper-case letters.
    pub const PERCENT_LOWER: Self = Self { sign: b'%', upper_case: false };
    /// `=2F`, for text in which `%` has another meaning or is not allowed.
    pub const EQUALS: Self = Self { sign: b'=', upper_case: true };

    /// Escapes every byte that is not ASCII or for which `is_plain` is false. It must be false for the sign.
    pub fn encode(self, bytes: &[u8], is_plain: impl Fn(u8) -> bool) -> String {
        let mut text = String::with_capacity(bytes.len() + 8);
        for byte in bytes.iter().copied() {
            if byte.is_ascii() && is_plain(byte) {
                text.push(char::from(byte));
            } else {
                text.push(char::from(self.sign));
                let digits = hex::pair(byte)
                    .map(|digit| if self.upper_case { digit.to_ascii_uppercase() } else { digit });
                text.extend(digits.map(char::from));
            }
        }
        text
    }

    /// Reverses [`encode`](Self::encode), with digits of either case. `None` if two digits do not follow a sign.
    pub fn decode(self, text: &str) -> Option<Vec<u8>> {
        let mut bytes = Vec::with_capacity(text.len());
        let mut rest = text.bytes();
        while let Some(byte) = rest.next() {
            let is_escape = byte == self.sign;
            bytes.push(if is_escape { hex::byte(rest.next()?, rest.next()?)? } else { byte });
        }
        Some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escaped_text_decodes_to_the_same_bytes() {
        let all: Vec<u8> = (0..=255).collect();
        for escape in [Escape::PERCENT, Escape::PERCENT_LOWER, Escape::EQUALS] {
            for is_plain in [|_| false, |byte: u8| byte.is_ascii_alphanumeric()] {
                assert_eq!(escape.decode(&escape.encode(&all, is_plain)).as_ref(), Some(&all));
            }
        }
    }

    #[test]
    fn each_form_has_its_sign_and_its_case() {
        let plain = |byte: u8| byte.is_ascii_alphanumeric();
        assert_eq!(Escape::PERCENT.encode("a/é".as_bytes(), plain), "a%2F%C3%A9");
        assert_eq!(Escape::PERCENT_LOWER.encode(b"a/", plain), "a%2f");
        assert_eq!(Escape::EQUALS.encode(b"a/%", plain), "a=2F=25");
        assert_eq!(Escape::EQUALS.decode("%=2f"), Some(b"%/".to_vec()));
    }

    #[test]
    fn a_sign_without_two_digits_is_refused() {
        for bad in ["%", "%2", "a%2g", "%+1", "%%41", "%é"] {
            assert_eq!(Escape::PERCENT.decode(bad), None, "{bad}");
        }
    }
}
