//! Hexadecimal digits.

/// The digits in lower case.
pub const DIGITS: &[u8; 16] = b"0123456789abcdef";

/// The bytes as lower-case digits, two per byte.
pub fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        text.extend(pair(*byte).map(char::from));
    }
    text
}

/// The bytes that pairs of digits of either case stand for; `None` for any other text.
pub fn decode(text: &str) -> Option<Vec<u8>> {
    let pairs = text.as_bytes().chunks(2);
    pairs.map(|pair| byte(*pair.first()?, *pair.get(1)?)).collect()
}

/// The number that at most 32 lower-case digits stand for; `None` for any other text.
pub fn number(text: &[u8]) -> Option<u128> {
    if text.len() > 32 {
        return None;
    }
    text.iter().try_fold(0, |number, digit| {
        let digit = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some(number << 4 | u128::from(digit))
    })
}

/// The two lower-case digits of a byte.
pub fn pair(byte: u8) -> [u8; 2] {
    [DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]
}

/// The byte of two digits of either case.
pub fn byte(high: u8, low: u8) -> Option<u8> {
    let value =
        |digit: u8| char::from(digit).to_digit(16).and_then(|value| u8::try_from(value).ok());
    Some(value(high)? << 4 | value(low)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_survives_both_ways() {
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(decode(&encode(&all)), Some(all));
        assert_eq!(encode(b"\x00\xffa"), "00ff61");
        assert_eq!(decode("aF0B"), Some(vec![0xaf, 0x0b]));
        for bad in ["0", "0g", "+1", "000", "é"] {
            assert_eq!(decode(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_number_has_at_most_32_lower_case_digits() {
        assert_eq!(number(b""), Some(0));
        assert_eq!(number(b"00af"), Some(0xaf));
        assert_eq!(number(&[b'f'; 32]), Some(u128::MAX));
        for bad in [&[b'0'; 33][..], b"A", b"g", b"+1", b" 1"] {
            assert_eq!(number(bad), None, "{bad:?}");
        }
    }
}
