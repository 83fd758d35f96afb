//! Fields of an argument line, and integers.

/// Iterator over the fields of a line. It splits at Unicode white space, in bytes that need not be UTF-8.
#[derive(Clone, Debug)]
pub(super) struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    pub(super) fn of(line: &'a [u8]) -> Self {
        Self(line)
    }

    /// Remaining bytes, trimmed.
    pub(super) fn rest(self) -> &'a [u8] {
        trim(self.0)
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let line = trim_start(self.0);
        if line.is_empty() {
            self.0 = line;
            return None;
        }
        let mut end = line.iter().take_while(|byte| byte.is_ascii_graphic()).count();
        while end < line.len() && whitespace_len(&line[end..]) == 0 {
            end += 1;
        }
        self.0 = &line[end..];
        Some(&line[..end])
    }
}

/// Line without white space at either end.
pub(super) fn trim(line: &[u8]) -> &[u8] {
    let line = trim_start(line);
    if line.last().is_some_and(u8::is_ascii_graphic) {
        return line;
    }
    let mut end = 0;
    let mut at = 0;
    while at < line.len() {
        let width = whitespace_len(&line[at..]);
        at += width.max(1);
        if width == 0 {
            end = at;
        }
    }
    &line[..end]
}

fn trim_start(mut line: &[u8]) -> &[u8] {
    loop {
        match whitespace_len(line) {
            0 => return line,
            width => line = &line[width..],
        }
    }
}

/// Number of bytes of the white space character at the start of the line, or 0.
#[inline]
fn whitespace_len(line: &[u8]) -> usize {
    match line.first() {
        None => 0,
        Some(byte) if byte.is_ascii() => usize::from(matches!(byte, b'\t'..=b'\r' | b' ')),
        Some(_) => {
            let character = line[..line.len().min(4)].utf8_chunks().next();
            let first = character.and_then(|chunk| chunk.valid().chars().next());
            first.filter(|c| c.is_whitespace()).map_or(0, char::len_utf8)
        }
    }
}

/// Parses a decimal number of 64 bits with an optional sign.
pub(super) fn integer(field: &[u8]) -> Option<i64> {
    let (negative, digits) = match field {
        [b'-', digits @ ..] => (true, digits),
        [b'+', digits @ ..] | digits => (false, digits),
    };
    if digits.is_empty() {
        return None;
    }
    let mut value = 0_i64;
    for digit in digits {
        let digit = i64::from(digit.wrapping_sub(b'0'));
        if digit > 9 {
            return None;
        }
        value = value.checked_mul(10)?;
        value = if negative { value.checked_sub(digit) } else { value.checked_add(digit) }?;
    }
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_split_at_unicode_white_space() {
        let split = |line: &'static [u8]| Fields::of(line).collect::<Vec<_>>();
        assert_eq!(split(b"10 33"), [b"10", b"33"]);
        assert_eq!(split(b" \t10\x0b\x0c 33 "), [b"10", b"33"]);
        assert_eq!(split("10\u{a0}33\u{3000}\u{85}7".as_bytes()), [&b"10"[..], b"33", b"7"]);
        assert_eq!(split(b"1\xff2 \xc2"), [&b"1\xff2"[..], b"\xc2"]);
        assert!(split("\u{2003} ".as_bytes()).is_empty());
        assert_eq!(trim("\u{a0} a b \u{2009}".as_bytes()), b"a b");
        assert_eq!(trim(b" \xa0 "), b"\xa0");
    }

    #[test]
    fn integers_are_decimal_with_a_sign_at_most() {
        for (text, value) in
            [("+3", 3), ("-0", 0), ("007", 7), ("-12", -12), ("9223372036854775807", i64::MAX)]
        {
            assert_eq!(integer(text.as_bytes()), Some(value), "{text}");
        }
        assert_eq!(integer(b"-9223372036854775808"), Some(i64::MIN));
        for text in ["", "+", "-", "1_0", "0x10", "1.5", "1e3", "9223372036854775808", "--1", "٣"]
        {
            assert_eq!(integer(text.as_bytes()), None, "{text}");
        }
    }
}
