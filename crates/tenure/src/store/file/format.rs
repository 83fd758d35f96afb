//! Format of a queue's file: its title, its head, and a line per holder and waiter.

use tenure_core::{Key, hex};

use crate::store::{KeySpace, Mode};

/// Size of the title, in bytes.
pub(super) const TITLE_BYTES: usize = 256;
/// Size of the head, and of a line, in bytes.
pub(super) const LINE_BYTES: usize = 128;
/// Size of the owner's part of a line, in bytes.
pub(super) const OWNER_BYTES: usize = 112;
/// Offset of the head in the file.
pub(super) const HEAD_AT: usize = TITLE_BYTES;
/// Offset of the first line in the file.
pub(super) const LINES_AT: usize = HEAD_AT + LINE_BYTES;
/// Largest number of holders and waiters of one key.
pub(super) const MAX_LINES: usize = 10_000;
/// Bound of fencing numbers, which no clock reaches: µs of 290,000 years.
pub(super) const MAX_FENCE: u64 = 1 << 63;

/// A holder or waiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct QueueLine {
    pub(super) index: usize,
    /// Order of arrival.
    pub(super) seq: u64,
    /// Name of its liveness file.
    pub(super) owner: u64,
    pub(super) mode: Mode,
    /// Zero while it waits.
    pub(super) token: u64,
    /// Token that it has as soon as no claim is before it; zero if it must be granted one then.
    pub(super) promised: u64,
    /// Start of the hold or wait, on the machine's own clock.
    pub(super) since: u64,
    pub(super) mark: Mark,
}

/// Mark that an operator's eviction leaves on a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    None,
    /// The owner must release.
    Evicted,
    /// The owner did not release in time, and no longer counts. The line stays its own until it blanks the line or
    /// dies.
    CutOff,
}

/// Head of a queue's file.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Head {
    /// Last fencing number issued.
    pub(super) fence: u64,
    pub(super) seq: u64,
    /// Number of lines, used or not.
    pub(super) lines: usize,
}

impl Head {
    pub(super) fn text(self) -> [u8; LINE_BYTES] {
        let mut text = padded("fence                      seq                  lines         ");
        decimal(&mut text[6..26], self.fence);
        hexadecimal(&mut text[31..47], self.seq);
        hexadecimal(&mut text[54..62], self.lines as u64);
        text
    }

    pub(super) fn parse(text: &[u8]) -> Option<Self> {
        let fence = from_decimal(text.strip_prefix(b"fence ")?.get(..20)?)?;
        let seq = from_hexadecimal(text.get(26..)?.strip_prefix(b" seq ")?.get(..16)?)?;
        let lines = from_hexadecimal(text.get(47..)?.strip_prefix(b" lines ")?.get(..8)?)?;
        Some(Self { fence, seq, lines: usize::try_from(lines).ok()? })
    }
}

/// Title of a key's file.
pub(super) fn title(key: &Key, space: KeySpace) -> [u8; TITLE_BYTES] {
    let space = match space {
        KeySpace::Lock => "lock",
        KeySpace::Semaphore => "semaphore",
    };
    padded(&format!("tenure queue 1 {space} {key}"))
}

/// Key in the title of a file of this key space; `None` if the title is invalid.
pub(super) fn key_in_title(begin: &[u8; TITLE_BYTES], space: KeySpace) -> Option<Key> {
    let text = std::str::from_utf8(begin).ok()?.trim_end();
    let key = text.strip_prefix("tenure queue 1 ")?.split_once(' ')?.1;
    let key = Key::new(key).ok()?;
    (title(&key, space) == *begin).then_some(key)
}

/// Offset of a line in the file.
pub(super) fn line_at(index: usize) -> usize {
    LINES_AT + index * LINE_BYTES
}

/// Parses the lines in use; `None` if one is invalid.
pub(super) fn parse_lines(text: &[u8], head: Head) -> Option<Vec<QueueLine>> {
    let mut lines = Vec::new();
    for (index, text) in text.chunks(LINE_BYTES).take(head.lines).enumerate() {
        if !is_blank(text) {
            lines.push(QueueLine::parse(index, text)?);
        }
    }
    lines.sort_unstable_by_key(|line| line.seq);
    if let Some(first) = lines.iter_mut().find(|line| line.mark != Mark::CutOff)
        && first.token == 0
    {
        first.token = first.promised;
    }
    Some(lines)
}

/// True if a blank line is marked. The mark of a line in use may belong to a later owner.
pub(super) fn was_marked(text: &[u8]) -> bool {
    let mark = text.get(OWNER_BYTES).copied().filter(|_| is_blank(text));
    mark.is_some_and(|mark| Mark::parse(mark) != Some(Mark::None))
}

/// True if a line is unused.
pub(super) fn is_blank(text: &[u8]) -> bool {
    text[..text.len().min(OWNER_BYTES)].iter().all(|byte| matches!(byte, b' ' | 0))
}

impl QueueLine {
    pub(super) fn text(self) -> [u8; LINE_BYTES] {
        let Self { seq, owner, mode, token, promised, since, mark, .. } = self;
        let (letter, limit) = match mode {
            Mode::Exclusive => (b'x', 1),
            Mode::Shared => (b's', 0),
            Mode::Slot { limit } => (b'n', limit),
        };
        let mut text = padded("");
        hexadecimal(&mut text[..16], seq);
        hexadecimal(&mut text[17..33], owner);
        text[34] = letter;
        hexadecimal(&mut text[36..44], limit.into());
        decimal(&mut text[45..65], token);
        hexadecimal(&mut text[66..82], since);
        decimal(&mut text[83..103], promised);
        text[OWNER_BYTES] = mark.letter();
        text
    }

    /// Parses a line. Every digit must be present: a half-blanked line is invalid.
    pub(super) fn parse(index: usize, text: &[u8]) -> Option<Self> {
        let field = |at: usize, length: usize| text.get(at..at + length);
        let limit = u32::try_from(from_hexadecimal(field(36, 8)?)?).ok()?;
        Some(Self {
            index,
            seq: from_hexadecimal(field(0, 16)?)?,
            owner: from_hexadecimal(field(17, 16)?)?,
            mode: match text.get(34)? {
                b'x' => Mode::Exclusive,
                b's' => Mode::Shared,
                b'n' => Mode::Slot { limit },
                _ => return None,
            },
            token: from_decimal(field(45, 20)?)?,
            since: from_hexadecimal(field(66, 16)?)?,
            promised: from_decimal(field(83, 20)?)?,
            mark: Mark::parse(*text.get(OWNER_BYTES)?)?,
        })
    }
}

impl Mark {
    fn letter(self) -> u8 {
        match self {
            Self::None => b' ',
            Self::Evicted => b'e',
            Self::CutOff => b'c',
        }
    }

    pub(super) fn parse(letter: u8) -> Option<Self> {
        [Self::None, Self::Evicted, Self::CutOff].into_iter().find(|mark| mark.letter() == letter)
    }
}

fn hexadecimal(text: &mut [u8], mut number: u64) {
    for digit in text.iter_mut().rev() {
        *digit = hex::DIGITS[(number & 15) as usize];
        number >>= 4;
    }
}

fn decimal(text: &mut [u8], mut number: u64) {
    for digit in text.iter_mut().rev() {
        *digit = b'0' + (number % 10) as u8;
        number /= 10;
    }
}

fn from_hexadecimal(text: &[u8]) -> Option<u64> {
    u64::try_from(hex::number(text)?).ok()
}

fn from_decimal(text: &[u8]) -> Option<u64> {
    text.iter().try_fold(0_u64, |number, digit| {
        let digit = digit.is_ascii_digit().then(|| digit - b'0')?;
        number.checked_mul(10)?.checked_add(digit.into())
    })
}

/// Pads text to a line of the file.
pub(super) fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [b' '; N];
    bytes[N - 1] = b'\n';
    let length = text.len().min(N - 1);
    bytes[..length].copy_from_slice(&text.as_bytes()[..length]);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_head_and_lines_read_back_as_written() {
        let head = Head { fence: 1_747_000_000_000_000, seq: 0xfeed, lines: 10_000 };
        let text = head.text();
        let expected = "fence 00001747000000000000 seq 000000000000feed lines 00002710 ";
        assert!(text.starts_with(expected.as_bytes()), "{}", String::from_utf8_lossy(&text));
        let read = Head::parse(&text).unwrap();
        assert_eq!((read.fence, read.seq, read.lines), (head.fence, head.seq, head.lines));
        for mode in [Mode::Exclusive, Mode::Shared, Mode::Slot { limit: u32::MAX }] {
            for mark in [Mark::None, Mark::Evicted, Mark::CutOff] {
                let line = QueueLine {
                    index: 7,
                    seq: 1,
                    owner: u64::MAX,
                    mode,
                    token: 9,
                    promised: 8,
                    since: 3,
                    mark,
                };
                let text = line.text();
                assert_eq!(text[LINE_BYTES - 1], b'\n');
                assert_eq!(QueueLine::parse(7, &text), Some(line));
            }
        }
    }

    #[test]
    fn of_a_line_that_is_half_blank_none_is_read() {
        let (mode, mark) = (Mode::Exclusive, Mark::None);
        let (token, promised) = (3, 5);
        let line =
            QueueLine { index: 0, seq: 1, owner: 2, mode, token, promised, since: 4, mark }.text();
        let used = 103;
        for cut in 1..used {
            let (mut begun, mut ended) = (line, line);
            begun[..cut].fill(b' ');
            ended[cut..OWNER_BYTES].fill(b' ');
            assert_eq!(QueueLine::parse(0, &begun), None, "blank up to {cut}");
            assert_eq!(QueueLine::parse(0, &ended), None, "blank from {cut}");
        }
    }
}
