//! Tokens of a Rust file, as far as comments, strings and braces are concerned.

/// Token of a Rust file, with the line it begins on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Token<'a> {
    pub(super) line: usize,
    pub(super) lexeme: Lexeme<'a>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lexeme<'a> {
    /// Line of a doc comment, with its marker: `///` or `//!`.
    Doc(&'a str),
    /// Body of a string literal as written.
    Text { body: &'a str, raw: bool },
    /// Identifier, keyword or number. A raw identifier keeps its `r#`.
    Word(&'a str),
    /// Lifetime or character literal.
    Quote,
    /// Punctuation.
    Mark(char),
}

/// Tokens of a Rust file. Ordinary comments yield nothing.
pub(super) fn tokens(text: &str) -> impl Iterator<Item = Token<'_>> {
    Tokens { rest: text, line: 1 }
}

struct Tokens<'a> {
    rest: &'a str,
    line: usize,
}

impl<'a> Iterator for Tokens<'a> {
    type Item = Token<'a>;

    fn next(&mut self) -> Option<Token<'a>> {
        loop {
            let blank = self.rest.len() - self.rest.trim_start().len();
            self.take(blank);
            let line = self.line;
            if self.rest.is_empty() {
                return None;
            }
            if let Some(lexeme) = self.token() {
                return Some(Token { line, lexeme });
            }
        }
    }
}

impl<'a> Tokens<'a> {
    /// Takes a token or a comment off the front. `None` for a comment that documents nothing.
    fn token(&mut self) -> Option<Lexeme<'a>> {
        let rest = self.rest;
        if rest.starts_with("//") {
            let comment = self.take(rest.find('\n').unwrap_or(rest.len()));
            let is_doc = comment.starts_with("//!") || comment.starts_with("///");
            return (is_doc && !comment.starts_with("////")).then_some(Lexeme::Doc(comment));
        }
        if rest.starts_with("/*") {
            self.take(block_comment(rest));
            return None;
        }
        if let Some((lexeme, length)) = string_literal(rest) {
            self.take(length);
            return Some(lexeme);
        }
        if rest.starts_with('\'') {
            self.take(quote(rest));
            return Some(Lexeme::Quote);
        }
        let raw = if rest.starts_with("r#") { 2 } else { 0 };
        let word = rest[raw..].find(|c| !is_word(c)).map_or(rest.len(), |length| raw + length);
        if word > raw {
            return Some(Lexeme::Word(self.take(word)));
        }
        let mark = rest.chars().next()?;
        self.take(mark.len_utf8());
        Some(Lexeme::Mark(mark))
    }

    fn take(&mut self, length: usize) -> &'a str {
        let (taken, rest) = self.rest.split_at(length);
        self.line += taken.matches('\n').count();
        self.rest = rest;
        taken
    }
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Length of the block comment that `text` begins with. Block comments nest.
fn block_comment(text: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < text.len() {
        if text[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if text[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
        } else {
            at += text[at..].chars().next().map_or(1, char::len_utf8);
        }
        if depth == 0 {
            return at;
        }
    }
    at
}

/// The string literal that `text` begins with and its length, if it begins with one.
fn string_literal(text: &str) -> Option<(Lexeme<'_>, usize)> {
    let prefix = text.find(|c| !"bcr".contains(c)).filter(|length| *length <= 2)?;
    let raw = text[..prefix].ends_with('r');
    let hashes =
        if raw { text[prefix..].len() - text[prefix..].trim_start_matches('#').len() } else { 0 };
    let start = prefix + hashes + 1;
    text[prefix + hashes..].strip_prefix('"')?;
    let length = if raw {
        text[start..].find(&format!("\"{}", "#".repeat(hashes)))?
    } else {
        end_of_escaped(&text[start..], '"')?
    };
    let body = &text[start..start + length];
    Some((Lexeme::Text { body, raw }, start + length + 1 + hashes))
}

/// Position of the first `end` that no backslash escapes.
fn end_of_escaped(text: &str, end: char) -> Option<usize> {
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        if c == end {
            return Some(at);
        }
        if c == '\\' {
            chars.next();
        }
    }
    None
}

/// Length of the lifetime or character literal that `text` begins with.
fn quote(text: &str) -> usize {
    let body = &text[1..];
    let mut chars = body.chars();
    let (first, second) = (chars.next(), chars.next());
    if first == Some('\\') || second == Some('\'') {
        return end_of_escaped(body, '\'').map_or(text.len(), |end| end + 2);
    }
    1 + body.find(|c| !is_word(c)).unwrap_or(body.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lexemes(text: &str) -> Vec<Lexeme<'_>> {
        tokens(text).map(|token| token.lexeme).collect()
    }

    fn plain(body: &str) -> Lexeme<'_> {
        Lexeme::Text { body, raw: false }
    }

    fn raw(body: &str) -> Lexeme<'_> {
        Lexeme::Text { body, raw: true }
    }

    #[test]
    fn strings_end_at_a_quote_that_is_not_escaped() {
        assert_eq!(
            lexemes(r#""a \" b" "\\" b"c" c"d""#),
            [r#"a \" b"#, r"\\", "c", "d"].map(plain)
        );
    }

    #[test]
    fn raw_strings_end_at_as_many_hashes() {
        assert_eq!(lexemes(r##"r"a\" r#"b "c" "#"##), ["a\\", "b \"c\" "].map(raw));
        assert_eq!(lexemes("br##\"d\"#\"##"), [raw("d\"#")]);
    }

    #[test]
    fn comments_in_strings_are_text_and_strings_in_comments_are_not() {
        assert_eq!(
            lexemes("\"// a\" // \"b\n/* \"c /* d */ \" */ \"/* e\""),
            ["// a", "/* e"].map(plain)
        );
    }

    #[test]
    fn characters_and_lifetimes_open_no_string() {
        let text = r#"'"' '\'' '\u{22}' b'"' 'a' &'a str "b""#;
        let found = lexemes(text);
        assert_eq!(found.iter().filter(|lexeme| **lexeme == Lexeme::Quote).count(), 6, "{found:?}");
        assert_eq!(found.last(), Some(&plain("b")));
    }

    #[test]
    fn raw_identifiers_are_no_keywords() {
        assert_eq!(lexemes("r#type b c2"), ["r#type", "b", "c2"].map(Lexeme::Word));
    }

    #[test]
    fn lines_are_counted_in_strings_and_comments() {
        let lines = tokens("a\n\"b\nc\" /*\n*/ d // e\n\n/// f\n").map(|token| token.line);
        assert_eq!(lines.collect::<Vec<_>>(), [1, 2, 4, 6]);
    }

    #[test]
    fn text_that_breaks_off_ends_the_tokens() {
        for text in ["\"a", "r#\"a\"", "/* a", "'", "'\\", "r#", "é \"é", "b"] {
            assert!(tokens(text).count() < 10, "{text}");
        }
    }
}
