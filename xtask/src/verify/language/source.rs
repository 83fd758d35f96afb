//! Doc comments, string literals and type definitions of a Rust file.
//!
//! The scanner knows attributes and braces, but no grammar: enough for source that compiles, without a dependency.

use super::tokens::{Lexeme, Token, tokens};
use super::words::{Line, Passage, outside_fences};

/// Parts of a Rust file that the language check reads.
#[derive(Debug, Default)]
pub(super) struct RustFile {
    /// Doc comments without fenced code, those of tests included.
    pub(super) docs: Vec<Passage>,
    /// String literals with a space, outside tests.
    pub(super) strings: Vec<Passage>,
    /// Names of structs, enums, traits, unions and type aliases, outside tests. No associated types.
    pub(super) types: Vec<(usize, String)>,
}

impl RustFile {
    pub(super) fn scan(text: &str) -> Self {
        let tokens = tokens(text).collect::<Vec<_>>();
        let is_test = test_code(&tokens);
        let shipped = tokens.iter().zip(is_test).filter(|(_, is_test)| !is_test);
        let shipped = shipped.map(|(token, _)| *token).collect::<Vec<_>>();
        let strings = shipped.iter().filter_map(prose_of_string).collect();
        Self { docs: doc_comments(&tokens), strings, types: types(&shipped) }
    }
}

/// Doc comments: runs of doc lines with the same marker on consecutive lines.
fn doc_comments(tokens: &[Token<'_>]) -> Vec<Passage> {
    let mut docs: Vec<Passage> = vec![];
    let mut previous = None;
    for token in tokens {
        let Lexeme::Doc(comment) = token.lexeme else {
            previous = None;
            continue;
        };
        let (marker, text) = comment.split_at(3);
        let line = Line { number: token.line, text: text.to_owned() };
        match docs.last_mut() {
            Some(doc) if previous == Some((token.line - 1, marker)) => doc.push(line),
            _ => docs.push(vec![line]),
        }
        previous = Some((token.line, marker));
    }
    docs.into_iter().map(outside_fences).collect()
}

/// Lines of a string literal, if it has a space. Escapes and `{…}` become punctuation.
fn prose_of_string(token: &Token<'_>) -> Option<Passage> {
    let Lexeme::Text { body, raw } = token.lexeme else { return None };
    if !body.contains(' ') {
        return None;
    }
    let mut text = String::new();
    let mut chars = body.chars();
    while let Some(c) = chars.next() {
        if c == '\\' && !raw {
            text.push(chars.next().filter(|escaped| *escaped == '\n').unwrap_or('|'));
        } else if c == '{' {
            let end = chars.as_str().find(['}', '\n']).unwrap_or(0);
            chars = chars.as_str()[end..].chars();
            text.push('|');
        } else {
            text.push(c);
        }
    }
    let lines = text.split('\n').zip(token.line..);
    Some(lines.map(|(text, number)| Line { number, text: text.to_owned() }).collect())
}

/// For each token, true if it belongs to an item, field or statement under `#[cfg(test)]`.
fn test_code(tokens: &[Token<'_>]) -> Vec<bool> {
    let mut is_test = vec![false; tokens.len()];
    let mut at = 0;
    while at < tokens.len() {
        let end = end_of_attribute(&tokens[at..]).map_or(at + 1, |length| at + length);
        if is_cfg_test(&tokens[at..end]) {
            let end = end + end_of_item(&tokens[end..]);
            is_test[at..end].fill(true);
            at = end;
        } else {
            at = end;
        }
    }
    is_test
}

/// Length of the outer attribute that `tokens` begin with, if they begin with one.
fn end_of_attribute(tokens: &[Token<'_>]) -> Option<usize> {
    let [hash, bracket, ..] = tokens else { return None };
    let is_attribute = hash.lexeme == Lexeme::Mark('#') && bracket.lexeme == Lexeme::Mark('[');
    is_attribute.then(|| 1 + end_of_group(&tokens[1..]))
}

/// Length of the bracketed group that `tokens` begin with.
fn end_of_group(tokens: &[Token<'_>]) -> usize {
    let mut depth = 0_usize;
    for (at, token) in tokens.iter().enumerate() {
        match token.lexeme {
            Lexeme::Mark('(' | '[' | '{') => depth += 1,
            Lexeme::Mark(')' | ']' | '}') => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at + 1;
        }
    }
    tokens.len()
}

/// True for `#[cfg(test)]` and `#[cfg(all(test, …))]`.
fn is_cfg_test(attribute: &[Token<'_>]) -> bool {
    let words = attribute.iter().filter_map(|token| match token.lexeme {
        Lexeme::Word(word) => Some(word),
        _ => None,
    });
    match words.collect::<Vec<_>>()[..] {
        ["cfg", "test"] => true,
        ["cfg", "all", ref all @ ..] => {
            all.contains(&"test") && !all.contains(&"not") && !all.contains(&"any")
        }
        _ => false,
    }
}

/// Words that begin an item. A comma ends what begins with another word: a field or a match arm.
const ITEMS: &[&str] = &[
    "async",
    "const",
    "enum",
    "extern",
    "fn",
    "impl",
    "macro_rules",
    "mod",
    "static",
    "struct",
    "trait",
    "type",
    "union",
    "unsafe",
    "use",
];

/// Length of the item, field or statement that follows an attribute, with its further attributes.
fn end_of_item(tokens: &[Token<'_>]) -> usize {
    let mut at = 0;
    let mut is_item = None;
    while at < tokens.len() {
        match tokens[at].lexeme {
            Lexeme::Mark('#') => at += end_of_attribute(&tokens[at..]).unwrap_or(1),
            Lexeme::Mark('{') => return at + end_of_group(&tokens[at..]),
            Lexeme::Mark('(' | '[') => at += end_of_group(&tokens[at..]),
            Lexeme::Mark(';') => return at + 1,
            Lexeme::Mark(',') if is_item != Some(true) => return at + 1,
            Lexeme::Mark(')' | ']' | '}') => return at,
            Lexeme::Word(word) if word != "pub" && is_item.is_none() => {
                is_item = Some(ITEMS.contains(&word));
                at += 1;
            }
            _ => at += 1,
        }
    }
    at
}

/// Names of the types that `tokens` define. A `type` directly in the braces of an `impl` or `trait` is associated.
fn types(tokens: &[Token<'_>]) -> Vec<(usize, String)> {
    let mut types = Vec::new();
    // For each open brace, true if an `impl` or `trait` opened it.
    let mut braces = Vec::new();
    let mut header_of_impl = false;
    for (at, token) in tokens.iter().enumerate() {
        let next = tokens.get(at + 1).map(|token| token.lexeme);
        let before = at.checked_sub(1).map(|before| tokens[before].lexeme);
        // `impl` as a type and a variable named `union` follow other tokens.
        let begins_item = matches!(
            before,
            None | Some(
                Lexeme::Doc(_)
                    | Lexeme::Mark('{' | '}' | ';' | ']' | ')')
                    | Lexeme::Word("pub" | "unsafe")
            )
        );
        match token.lexeme {
            Lexeme::Mark('{') => braces.push(std::mem::take(&mut header_of_impl)),
            Lexeme::Mark('}') => {
                braces.pop();
            }
            Lexeme::Word("impl") if begins_item => header_of_impl = true,
            Lexeme::Word(keyword @ ("struct" | "enum" | "trait" | "type" | "union")) => {
                let Some(Lexeme::Word(name)) = next else { continue };
                let is_associated = keyword == "type" && braces.last() == Some(&true);
                if begins_item && !is_associated {
                    types.push((token.line, name.to_owned()));
                }
                header_of_impl |= keyword == "trait";
            }
            _ => {}
        }
    }
    types
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<String> {
        RustFile::scan(text).types.into_iter().map(|(_, name)| name).collect()
    }

    fn strings(text: &str) -> Vec<String> {
        let strings = RustFile::scan(text).strings.into_iter().flatten();
        strings.map(|line| format!("{}:{}", line.number, line.text)).collect()
    }

    #[test]
    fn docs_are_split_by_code_blank_lines_and_markers() {
        let text = "//! File.\n\n/// One,\n/// two.\nfn f() {} // no doc\n/// Three.\n\n/// Four.\n//// no doc\n";
        let docs = RustFile::scan(text).docs;
        let lines = docs.iter().map(|doc| (doc[0].number, doc.len())).collect::<Vec<_>>();
        assert_eq!(lines, [(1, 1), (3, 2), (6, 1), (8, 1)]);
        assert_eq!(docs[1][1].text, " two.");
    }

    #[test]
    fn fenced_code_in_docs_is_skipped() {
        let docs = RustFile::scan("/// A.\n/// ```\n/// who();\n/// ```\n/// B.\nfn f() {}\n").docs;
        assert_eq!(docs[0].iter().map(|line| line.number).collect::<Vec<_>>(), [1, 5]);
    }

    #[test]
    fn strings_are_prose_if_they_have_a_space() {
        assert_eq!(strings(r#"f("one", "a b")"#), ["1:a b"]);
    }

    #[test]
    fn escapes_and_placeholders_are_punctuation() {
        assert_eq!(strings(r#"f("a \"b\" {who} {x:?}\nc")"#), ["1:a |b| |} |}|c"]);
        assert_eq!(strings("f(\"a \\\n   b\")"), ["1:a ", "2:   b"]);
        assert_eq!(strings(r##"f(r#"a \n "b" "#)"##), [r#"1:a \n "b" "#]);
    }

    #[test]
    fn test_modules_have_neither_strings_nor_types() {
        let text = "struct A;\n#[cfg(test)]\n#[allow(x)]\nmod tests {\n struct B;\n fn f() { g(\"a b\") }\n}\nstruct C;\n";
        assert_eq!(names(text), ["A", "C"]);
        assert_eq!(strings(text), [""; 0]);
    }

    #[test]
    fn test_items_fields_and_statements_end_where_they_end() {
        let text = "#[cfg(test)] mod tests;\nstruct A { #[cfg(test)] b: fn(\"a b\"), c: f(\"c d\") }\n\
                    #[cfg(all(unix, test))] impl<A, B> X { fn f() { \"e f\" } }\n\
                    fn f() { #[cfg(test)] g(\"g h\")?; g(\"i j\") }\n";
        assert_eq!(names(text), ["A"]);
        assert_eq!(strings(text), ["2:c d", "4:i j"]);
    }

    #[test]
    fn code_without_tests_is_not_test_code() {
        for cfg in ["not(test)", "any(test, unix)", "all(unix, not(test))", "feature = \"test\""] {
            assert_eq!(names(&format!("#[cfg({cfg})]\nstruct A;\n")), ["A"], "{cfg}");
        }
    }

    #[test]
    fn types_of_every_kind_are_found() {
        let text = "pub struct A;\n#[x] enum B {}\n/// D.\npub(crate) trait C {}\ntype D = u8;\nunion E { a: u8 }\nunsafe trait F {}\n";
        assert_eq!(names(text), ["A", "B", "C", "D", "E", "F"]);
    }

    #[test]
    fn associated_types_and_other_uses_of_the_words_are_not_types() {
        let text = "impl<T> Tr for [u8; 4] { type A = u8; }\ntrait Tr { type A; fn f() -> impl Fn() { type B = u8; } }\n\
                    // struct C;\nfn f() { let union = a.union(b); r#type; \"struct D;\"; }\nmacro_rules! m { () => { struct $name; } }\n";
        assert_eq!(names(text), ["Tr", "B"]);
    }
}
