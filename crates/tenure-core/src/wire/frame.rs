//! Framing: boundaries between requests.

/// Most bytes of a line before its LF, including a CR.
pub const MAX_LINE: usize = 256;
/// Most bytes of the argument of `auth`.
pub const MAX_AUTH_LINE: usize = 65_536;
/// Most bytes of the argument of our own `hello` and `x`, which carry a description of the holder.
pub const MAX_HELLO_LINE: usize = 4_096;

/// The three lines of a request, without their line ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lines<'a> {
    /// First line.
    pub command: &'a [u8],
    /// Second line.
    pub key: &'a [u8],
    /// Third line.
    pub argument: &'a [u8],
}

/// Result of framing the bytes received so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framed<'a> {
    /// Complete request, in the first `len` bytes.
    Request {
        /// Lines of the request.
        lines: Lines<'a>,
        /// Length of the request in bytes.
        len: usize,
    },
    /// Incomplete request. Call again with the same bytes and more after them.
    Partial,
    /// A line was too long and has ended: reply with an error and close the connection.
    TooLong,
    /// A line is too long and has not ended: drop these bytes, and call again with the bytes that follow.
    Discarded,
}

/// Finds requests in a stream of bytes. It stores no bytes, only its position, so each byte is scanned once, even if
/// bytes arrive singly.
#[derive(Clone, Copy, Debug)]
pub struct Framer {
    /// Most bytes of an ordinary line.
    max_line: u32,
    /// Bytes of the current request that have been scanned.
    scanned: usize,
    /// Ends of the first two lines of the request, as far as they are complete.
    ends: [u32; 2],
    lines: u8,
    discarding: bool,
}

impl Default for Framer {
    fn default() -> Self {
        Self::new(MAX_LINE)
    }
}

impl Framer {
    /// Creates a framer with another limit than [`MAX_LINE`] for ordinary lines; at most [`MAX_AUTH_LINE`].
    pub fn new(max_line: usize) -> Self {
        let max_line = u32::try_from(max_line.min(MAX_AUTH_LINE)).unwrap_or(u32::MAX);
        Self { max_line, scanned: 0, ends: [0; 2], lines: 0, discarding: false }
    }

    /// Looks for a request at the start of `bytes`: the bytes of the last call that returned
    /// [`Partial`](Framed::Partial), and those received since.
    pub fn next<'a>(&mut self, bytes: &'a [u8]) -> Framed<'a> {
        if self.discarding {
            return if find(bytes).is_some() { Framed::TooLong } else { Framed::Discarded };
        }
        loop {
            let begin = self.line_begin();
            let found = find(&bytes[self.scanned.min(bytes.len())..]).map(|at| self.scanned + at);
            let len = found.unwrap_or(bytes.len()) - begin;
            if len > self.line_limit(bytes) {
                self.discarding = true;
                return if found.is_some() { Framed::TooLong } else { Framed::Discarded };
            }
            let Some(end) = found else {
                self.scanned = bytes.len();
                return Framed::Partial;
            };
            self.scanned = end + 1;
            if self.lines == 2 {
                let lines = Lines {
                    command: line(bytes, 0, self.ends[0]),
                    key: line(bytes, self.ends[0] as usize + 1, self.ends[1]),
                    argument: strip(&bytes[begin..end]),
                };
                *self = Self::new(self.max_line as usize);
                return Framed::Request { lines, len: end + 1 };
            }
            self.ends[usize::from(self.lines)] =
                u32::try_from(end).expect("two lines are no longer than their limits");
            self.lines += 1;
        }
    }

    /// Number of complete lines of the current request.
    pub const fn lines(&self) -> u8 {
        self.lines
    }

    /// True while a line that is too long has not ended.
    pub const fn is_discarding(&self) -> bool {
        self.discarding
    }

    fn line_begin(&self) -> usize {
        match self.lines {
            0 => 0,
            n => self.ends[usize::from(n) - 1] as usize + 1,
        }
    }

    /// Most bytes of the current line.
    fn line_limit(&self, bytes: &[u8]) -> usize {
        let limit = self.max_line as usize;
        if self.lines < 2 {
            return limit;
        }
        match line(bytes, 0, self.ends[0]) {
            b"auth" => MAX_AUTH_LINE,
            b"hello" | b"x" => MAX_HELLO_LINE.max(limit),
            _ => limit,
        }
    }
}

fn line(bytes: &[u8], begin: usize, end: u32) -> &[u8] {
    strip(&bytes[begin..end as usize])
}

fn strip(mut line: &[u8]) -> &[u8] {
    while let [rest @ .., b'\r'] = line {
        line = rest;
    }
    line
}

fn find(bytes: &[u8]) -> Option<usize> {
    // Lines are short: a plain loop beats a call.
    bytes.iter().position(|byte| *byte == b'\n')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines<'a>(command: &'a [u8], key: &'a [u8], argument: &'a [u8]) -> Lines<'a> {
        Lines { command, key, argument }
    }

    #[test]
    fn requests_are_found_however_the_bytes_come() {
        let bytes = b"l\r\nkey\r\r\n10 33\nping\n\n\n";
        for cut in 1..bytes.len() {
            let mut framer = Framer::default();
            let mut found = Vec::new();
            let mut begin = 0;
            for end in [cut, bytes.len()] {
                while let Framed::Request { lines, len } = framer.next(&bytes[begin..end]) {
                    found.push(lines);
                    begin += len;
                }
            }
            let whole = [lines(b"l", b"key", b"10 33"), lines(b"ping", b"", b"")];
            assert_eq!(found, whole, "cut at {cut}");
        }
    }

    #[test]
    fn a_line_may_have_256_bytes_and_no_more() {
        for (extra, fits) in [(0, true), (1, false)] {
            let key = "k".repeat(MAX_LINE - 1 + extra) + "\r";
            let bytes = format!("r\n{key}\nt\n");
            let framed = Framer::default().next(bytes.as_bytes());
            assert_eq!(matches!(framed, Framed::Request { .. }), fits, "{extra}");
            assert_eq!(framed == Framed::TooLong, !fits, "{extra}");
        }
    }

    #[test]
    fn another_limit_stays_from_request_to_request() {
        let mut framer = Framer::new(3);
        let bytes = b"r\nkey\nt\nr\nkeys\nt\n";
        assert!(matches!(framer.next(bytes), Framed::Request { len: 8, .. }));
        assert_eq!(framer.next(&bytes[8..]), Framed::TooLong);
    }

    #[test]
    fn the_rest_of_a_line_that_is_too_long_is_swallowed() {
        let mut framer = Framer::default();
        assert_eq!(framer.next(&[b'x'; MAX_LINE]), Framed::Partial);
        assert_eq!(framer.next(&[b'x'; MAX_LINE + 1]), Framed::Discarded);
        assert_eq!(framer.next(&[b'x'; 5000]), Framed::Discarded);
        assert_eq!(framer.next(b"x\nping\n"), Framed::TooLong);
    }

    #[test]
    fn only_the_argument_of_auth_may_be_long() {
        let secret = "s".repeat(MAX_AUTH_LINE);
        let bytes = format!("auth\n_\n{secret}\n");
        let framed = Framer::default().next(bytes.as_bytes());
        assert!(
            matches!(framed, Framed::Request { lines, .. } if lines.argument.len() == MAX_AUTH_LINE)
        );
        let bytes = format!("auth\n_\n{secret}s\n");
        assert_eq!(Framer::default().next(bytes.as_bytes()), Framed::TooLong);
        let bytes = format!("auth\n{secret}\ns\n");
        assert_eq!(Framer::default().next(bytes.as_bytes()), Framed::TooLong);
        let bytes = format!("r\nk\n{secret}\n");
        assert_eq!(Framer::default().next(bytes.as_bytes()), Framed::TooLong);
    }
}
