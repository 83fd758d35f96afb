//! Progress that the work of a job reports as lines of text.

/// Maximum length of a progress text in bytes.
pub const MAX_PROGRESS_BYTES: usize = 1 << 10;

/// A progress text as it is stored: UTF-8 without control characters, cut to [`MAX_PROGRESS_BYTES`].
///
/// ```
/// use tenure_core::jobs::progress_text;
///
/// assert_eq!(progress_text(b" 7 of 9\t(\xff)\r\n"), "7 of 9 (\u{fffd})");
/// ```
pub fn progress_text(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let text = text.replace(|c: char| c.is_control(), " ");
    let text = text.trim();
    let end = (0..=text.len().min(MAX_PROGRESS_BYTES)).rev().find(|at| text.is_char_boundary(*at));
    text[..end.unwrap_or_default()].to_owned()
}

/// Collects the bytes that the work writes, and finds the last line.
#[derive(Debug, Default)]
pub struct ProgressLines {
    /// Beginning of a line that is not complete.
    begun: Vec<u8>,
}

impl ProgressLines {
    /// Adds bytes; returns the last line that is complete with them and is not empty.
    pub fn push(&mut self, bytes: &[u8]) -> Option<String> {
        let mut last = None;
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            let room = MAX_PROGRESS_BYTES.saturating_sub(self.begun.len());
            self.begun.extend_from_slice(&part[..part.len().min(room)]);
            if part.ends_with(b"\n") {
                let line = progress_text(&std::mem::take(&mut self.begun));
                last = Some(line).filter(|line| !line.is_empty()).or(last);
            }
        }
        last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_complete_line_counts() {
        let mut lines = ProgressLines::default();
        assert_eq!(lines.push(b"1 of"), None);
        assert_eq!(lines.push(b" 9\n2 of 9\n3 o").as_deref(), Some("2 of 9"));
        assert_eq!(lines.push(b"f 9\n\n  \n").as_deref(), Some("3 of 9"));
        assert_eq!(lines.push(b"\n"), None);
    }

    #[test]
    fn a_long_line_is_cut_between_characters() {
        let mut lines = ProgressLines::default();
        for _ in 0..1_000 {
            assert_eq!(lines.push("ä".repeat(100).as_bytes()), None);
        }
        assert!(lines.begun.len() <= MAX_PROGRESS_BYTES);
        let line = lines.push(b"\n").unwrap();
        assert_eq!(line, "ä".repeat(512));
        assert_eq!(progress_text(format!("a{}", "ä".repeat(600)).as_bytes()).len(), 1_023);
    }
}
