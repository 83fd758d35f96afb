//! Banned words, and the passages of prose in which they are counted.

/// Line of a file, numbered from 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Line {
    pub(super) number: usize,
    pub(super) text: String,
}

/// Lines that are read together: a doc comment, a string literal, or a paragraph.
pub(super) type Passage = Vec<Line>;

/// Word or phrase that the project bans.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Rule {
    pub(super) phrase: &'static str,
    /// True for a word that stands for a person.
    pub(super) person: bool,
    /// Advice that is printed with each occurrence.
    pub(super) instead: &'static str,
}

const NAME_THE_NOUN: &str = "name the noun: holder, waiter, client, caller, operator, process";

const RELEASE: &str = "release a hold, leave a queue, close a connection";

/// Every banned word and phrase, in lower case.
pub(super) const RULES: &[Rule] = &[
    Rule { phrase: "who", person: true, instead: NAME_THE_NOUN },
    Rule { phrase: "whoever", person: true, instead: NAME_THE_NOUN },
    Rule { phrase: "whom", person: true, instead: NAME_THE_NOUN },
    Rule { phrase: "nobody", person: true, instead: NAME_THE_NOUN },
    Rule { phrase: "somebody", person: true, instead: NAME_THE_NOUN },
    Rule { phrase: "everybody", person: true, instead: NAME_THE_NOUN },
    Rule { phrase: "anybody", person: true, instead: NAME_THE_NOUN },
    Rule { phrase: "someone else", person: false, instead: "write \"another process\"" },
    Rule { phrase: "let go", person: false, instead: RELEASE },
    Rule { phrase: "lets go", person: false, instead: RELEASE },
    Rule { phrase: "give back", person: false, instead: RELEASE },
    Rule { phrase: "gives back", person: false, instead: RELEASE },
    Rule { phrase: "given back", person: false, instead: RELEASE },
    Rule { phrase: "the one that", person: false, instead: "repeat the noun" },
    Rule { phrase: "any more", person: false, instead: "write \"no longer\"" },
    Rule {
        phrase: "is none", person: false, instead: "write \"is invalid\" or \"there is no …\""
    },
];

/// Words that must not open a doc comment.
const QUESTIONS: &[&str] = &["what", "how", "whether", "where", "who", "why"];

/// Occurrence of a banned word.
pub(super) struct Hit {
    pub(super) line: usize,
    pub(super) rule: &'static Rule,
}

/// Every occurrence of a banned word in `passage`. Code spans are skipped; a phrase may cross a line break.
pub(super) fn hits(passage: &[Line]) -> Vec<Hit> {
    let words = passage.iter().flat_map(words_of).collect::<Vec<_>>();
    let mut hits = Vec::new();
    for start in 0..words.len() {
        for rule in RULES {
            if rule.opens(&words[start..]) {
                hits.push(Hit { line: words[start].0, rule });
            }
        }
    }
    hits
}

impl Rule {
    fn opens(&self, words: &[(usize, String)]) -> bool {
        let mut found = words.iter().map(|(_, word)| word.as_str());
        self.phrase.split(' ').all(|wanted| found.next() == Some(wanted))
    }
}

/// True if a doc comment opens with a question word instead of a noun phrase or a verb.
pub(super) fn is_question(doc: &[Line]) -> bool {
    let words = doc.first().map(words_of).unwrap_or_default();
    words.first().is_some_and(|(_, word)| QUESTIONS.contains(&word.as_str()))
}

/// Words of a line in lower case. Punctuation and code yield an empty word, so that no phrase matches across them.
fn words_of(line: &Line) -> Vec<(usize, String)> {
    let mut words = Vec::new();
    let mut word = String::new();
    for c in without_code(&line.text).chars().chain([' ']) {
        if c.is_alphanumeric() {
            word.extend(c.to_lowercase());
            continue;
        }
        if !word.is_empty() {
            words.push((line.number, std::mem::take(&mut word)));
        }
        // An apostrophe ends a word; marks of emphasis may stand within a phrase.
        if !c.is_whitespace() && !"'’*_".contains(c) {
            words.push((line.number, String::new()));
        }
    }
    words
}

/// The line with each code span replaced by a backtick. The last backtick of an odd number is text.
fn without_code(text: &str) -> String {
    let last = text.matches('`').count();
    let parts = text.split('`').enumerate();
    let kept = parts.map(|(index, part)| {
        let is_code = index % 2 == 1 && index < last;
        if is_code { "`" } else { part }
    });
    kept.collect()
}

/// Lines outside fenced code, without the fences.
pub(super) fn outside_fences(lines: impl IntoIterator<Item = Line>) -> Passage {
    let mut fenced = false;
    let outside = lines.into_iter().filter(|line| {
        let text = line.text.trim_start();
        let is_fence = text.starts_with("```") || text.starts_with("~~~");
        fenced ^= is_fence;
        !fenced && !is_fence
    });
    outside.collect()
}

/// Paragraphs of a Markdown file, without its fenced code.
pub(super) fn paragraphs(text: &str) -> Vec<Passage> {
    let lines = text.lines().zip(1..);
    let lines = lines.map(|(text, number)| Line { number, text: text.to_owned() });
    let lines = outside_fences(lines);
    let paragraphs = lines.split(|line| line.text.trim().is_empty());
    paragraphs.filter(|lines| !lines.is_empty()).map(<[Line]>::to_vec).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passage(lines: &[&str]) -> Passage {
        let lines = lines.iter().zip(1..);
        lines.map(|(text, number)| Line { number, text: (*text).to_owned() }).collect()
    }

    fn found(lines: &[&str]) -> Vec<(usize, &'static str)> {
        hits(&passage(lines)).iter().map(|hit| (hit.line, hit.rule.phrase)).collect()
    }

    #[test]
    fn banned_words_are_found_in_any_case_and_as_whole_words() {
        assert_eq!(
            found(&["Who knows: nobody's whole (WHOM)."]),
            [(1, "who"), (1, "nobody"), (1, "whom")]
        );
    }

    #[test]
    fn phrases_cross_lines_but_not_punctuation() {
        assert_eq!(
            found(&["It is the", "one that **is** none."]),
            [(1, "the one that"), (2, "is none")]
        );
        assert_eq!(found(&["the one, that", "is `x` none; is.", "None"]), []);
    }

    #[test]
    fn code_spans_are_skipped() {
        assert_eq!(found(&["`who` and `a` who", "a lone ` who"]), [(1, "who"), (2, "who")]);
    }

    #[test]
    fn questions_are_the_first_word_of_the_first_line() {
        assert!(is_question(&passage(&[" Whether it holds.", "More."])));
        assert!(!is_question(&passage(&[" Lease.", "How long it lasts."])));
        assert!(!is_question(&passage(&["`what` it is called."])));
        assert!(!is_question(&[]));
    }

    #[test]
    fn paragraphs_skip_fenced_code() {
        let paragraphs = paragraphs("# A\n\nb\nc\n```sh\nwho\n\n```\nd\n\n\n- e\n");
        let lines = paragraphs.iter().map(|lines| lines.iter().map(|line| line.number).collect());
        assert_eq!(lines.collect::<Vec<Vec<_>>>(), [vec![1], vec![3, 4, 9], vec![12]]);
    }
}
