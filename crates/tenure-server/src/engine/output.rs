//! Output of the engine: bytes, the connections they are for, and their order.

use std::ops::Range;

use tenure_core::table::Owner;

/// Bytes for one connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputSegment {
    /// Receiving connection.
    pub to: Owner,
    /// Range of the bytes within the output.
    pub bytes: Range<usize>,
}

/// Output buffer, divided into segments per connection.
///
/// Replies are appended to `bytes`. [`seal`](Self::seal) then assigns the new bytes to a connection.
#[derive(Debug, Default)]
pub(super) struct Output {
    pub(super) bytes: Vec<u8>,
    segments: Vec<OutputSegment>,
    /// Number of bytes that belong to a segment; later bytes are not assigned yet.
    sealed: usize,
}

impl Output {
    pub(super) fn segments(&self) -> &[OutputSegment] {
        &self.segments
    }

    /// Assigns all bytes that have no segment yet to connection `to`.
    pub(super) fn seal(&mut self, to: Owner) {
        let bytes = self.sealed..self.bytes.len();
        if bytes.is_empty() {
            return;
        }
        self.sealed = bytes.end;
        match self.segments.last_mut() {
            Some(last) if last.to == to && last.bytes.end == bytes.start => {
                last.bytes.end = bytes.end;
            }
            _ => self.segments.push(OutputSegment { to, bytes }),
        }
    }

    /// Moves the reply to `from` behind the segments that its request caused for other connections.
    ///
    /// After a release, the next holder's grant is sent before the releaser's `ok`: the next holder is blocked on it,
    /// the releaser is not. `first` is the index of the first segment that the request caused.
    pub(super) fn move_own_reply_last(&mut self, from: Owner, first: usize) {
        let Some([own, others @ ..]) = self.segments.get(first..) else { return };
        // Segments of one connection must keep their order. If a later segment is for `from` too, nothing is moved.
        if own.to == from && others.iter().all(|segment| segment.to != from) {
            self.segments[first..].rotate_left(1);
        }
    }

    pub(super) fn clear(&mut self) {
        const MAX_RETAINED_BYTES: usize = 1 << 20;
        self.bytes.clear();
        self.bytes.shrink_to(MAX_RETAINED_BYTES);
        self.segments.clear();
        self.sealed = 0;
    }
}

#[cfg(test)]
mod tests {
    use tenure_core::Time;

    use super::Output;
    use crate::{Engine, Settings};

    const NOW: Time = Time::ZERO;

    /// Receivers of the output in order, and the number of lines that each receives.
    fn take_line_counts(engine: &mut Engine) -> Vec<(u64, usize)> {
        let (out, segments) = engine.output();
        let lines = |bytes: &[u8]| bytes.split_inclusive(|byte| *byte == b'\n').count();
        let counts = segments.iter().map(|s| (s.to.id(), lines(&out[s.bytes.clone()]))).collect();
        engine.clear_output();
        counts
    }

    #[test]
    fn next_holders_grant_is_sent_before_the_releasers_reply() {
        let mut engine = Engine::new(Settings::default(), None, 1, 1);
        let [holder, next, third] = [(); 3].map(|()| engine.open(None, NOW).unwrap());
        engine.receive(holder, b"l\nkey\n0\n", NOW);
        let (out, _) = engine.output();
        let token = String::from_utf8(out.to_vec()).unwrap();
        let token = token.split_whitespace().nth(1).unwrap().to_owned();
        engine.clear_output();
        engine.receive(next, b"l\nkey\n9\n", NOW);
        engine.receive(third, b"l\nother\n0\n", NOW);
        engine.receive(holder, format!("r\nkey\n{token}\n").as_bytes(), NOW);
        assert_eq!(
            take_line_counts(&mut engine),
            [(third.id(), 1), (next.id(), 1), (holder.id(), 1)]
        );
    }

    #[test]
    fn replies_to_one_connection_keep_their_order() {
        let mut engine = Engine::new(Settings::default(), None, 1, 1);
        let [from, other] = [(); 2].map(|()| engine.open(None, NOW).unwrap());
        let mut output = Output::default();
        for (to, line) in [(from, "1\n"), (other, "2\n"), (from, "3\n")] {
            output.bytes.extend_from_slice(line.as_bytes());
            output.seal(to);
        }
        let before = output.segments().to_vec();
        output.move_own_reply_last(from, 0);
        assert_eq!(output.segments(), before);
        output.move_own_reply_last(other, 1);
        assert_eq!(output.segments().iter().map(|s| s.to).collect::<Vec<_>>(), [from, from, other]);
    }
}
