//! Enclosing holds, as recorded in the environment: a command must not wait for a lock that a tenure command among its
//! ancestors holds while it runs.
//!
//! `TENURE_AROUND` has one word per hold, the outermost first: store, name and fencing token, separated by commas. All
//! bytes except ASCII letters, digits and `-._~/:` are written as `%xx`.

use tenure_core::escape::Escape;

pub(crate) const VARIABLE: &str = "TENURE_AROUND";

/// Maximum number of holds that are passed on; of more, only the innermost.
const MAX_ENCLOSING_HOLDS: usize = 64;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EnclosingHold {
    pub(crate) store: String,
    pub(crate) name: String,
    pub(crate) token: String,
}

impl EnclosingHold {
    /// The holds that enclose this process, or did when its environment was made.
    pub(crate) fn all() -> Vec<Self> {
        let variable = |name| std::env::var(name).ok();
        let mut all = decode(&variable(VARIABLE).unwrap_or_default());
        // The innermost hold also has variables of its own.
        if let (Some(store), Some(name), Some(token)) =
            (variable("TENURE_STORE"), variable("TENURE_NAME"), variable("TENURE_TOKEN"))
        {
            let innermost = Self { store, name, token };
            if !all.contains(&innermost) {
                all.push(innermost);
            }
        }
        all
    }

    /// Value of [`VARIABLE`] for a child that runs within these holds and the present ones.
    pub(crate) fn child_variable(holds: Vec<Self>) -> String {
        let mut all = decode(&std::env::var(VARIABLE).unwrap_or_default());
        all.extend(holds);
        encode(&all[all.len().saturating_sub(MAX_ENCLOSING_HOLDS)..])
    }
}

fn encode(all: &[EnclosingHold]) -> String {
    let mut text = String::new();
    for EnclosingHold { store, name, token } in all {
        if !text.is_empty() {
            text.push(' ');
        }
        for (field, end) in [(store, ","), (name, ","), (token, "")] {
            let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/:".contains(&byte);
            text.push_str(&Escape::PERCENT_LOWER.encode(field.as_bytes(), is_plain));
            text.push_str(end);
        }
    }
    text
}

/// Decodes the variable. Malformed words are skipped: they name no hold.
fn decode(text: &str) -> Vec<EnclosingHold> {
    let hold = |word: &str| {
        let mut fields = word.split(',').map(percent_decode);
        let (store, name, token) = (fields.next()??, fields.next()??, fields.next()??);
        fields.next().is_none().then_some(EnclosingHold { store, name, token })
    };
    text.split(' ').filter_map(hold).collect()
}

fn percent_decode(field: &str) -> Option<String> {
    String::from_utf8(Escape::PERCENT.decode(field)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enclosing(store: &str, name: &str) -> EnclosingHold {
        EnclosingHold { store: store.to_owned(), name: name.to_owned(), token: "7".to_owned() }
    }

    #[test]
    fn enclosing_holds_encode_and_decode_to_the_same_value() {
        let all = [
            enclosing("file:/a b,c", "x%y"),
            enclosing("file:/é?shared&network", "ключ"),
            enclosing("", ""),
        ];
        assert_eq!(decode(&encode(&all)), all);
        assert_eq!(encode(&all[..1]), "file:/a%20b%2cc,x%25y,7");
    }

    #[test]
    fn malformed_enclosing_holds_are_skipped() {
        for nonsense in ["", " ", "a", "a,b", "a,b,c,d", "a,b%2,7", "a,b%zz,7", "a,%ff,7"] {
            assert_eq!(decode(nonsense), [], "{nonsense}");
        }
        assert_eq!(decode("a,b file:,x,7 , "), [enclosing("file:", "x")]);
    }
}
