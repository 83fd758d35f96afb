//! Description of a claim that its session publishes: in `application_name`, which every role can read, and in a
//! comment at the head of its statements, which its own role and monitoring roles can read.

use std::fmt::Write as _;

use serde_json::{Value, json};
use tenure_core::FencingToken;

use crate::store::{Claim, Identity};

/// Start of the comment.
pub(super) const COMMENT_PREFIX: &str = "/*tenure:";
/// Maximum length of `application_name`.
const MAX_APPLICATION_NAME: usize = 63;
/// Separator of the holder's name and its token.
const BEFORE_TOKEN: &str = " #";

/// Published description of a claim.
#[derive(Clone, Debug)]
pub(super) struct Tag {
    /// Name of the holder, of characters that need no escaping in an SQL literal.
    pub(super) name: String,
    details: Value,
}

impl Tag {
    pub(super) fn of(claim: &Claim) -> Self {
        let Identity { id, host, pid, note } = &*claim.by;
        let ttl = u64::try_from(claim.ttl.as_millis()).unwrap_or(u64::MAX);
        let key = claim.key.as_str();
        let details =
            json!({ "key": key, "id": id, "host": host, "pid": pid, "note": note, "ttl": ttl });
        Self { name: plain(id), details }
    }

    /// Adds the time of the grant, in microseconds of the database's clock.
    pub(super) fn granted(mut self, at: i64) -> Self {
        self.details["at"] = at.into();
        self
    }

    /// Comment to put before a statement. `*` is escaped, so that no text of a user can end it.
    pub(super) fn comment(&self) -> String {
        let mut text = String::from(COMMENT_PREFIX);
        for c in self.details.to_string().chars() {
            if c.is_ascii() && c != '*' {
                text.push(c);
            } else {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    let _ = write!(text, "\\u{unit:04x}");
                }
            }
        }
        text + "*/ "
    }
}

/// Description that was read from another session.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct SessionTag {
    pub(super) key: Option<String>,
    pub(super) by: Option<Identity>,
    pub(super) ttl_ms: Option<u64>,
    pub(super) granted_at: Option<i64>,
}

impl SessionTag {
    /// Reads the comment at the head of a statement; `None` if there is no comment, or if the server truncated it.
    pub(super) fn comment(statement: &str) -> Option<Self> {
        let (json, _) = statement.strip_prefix(COMMENT_PREFIX)?.split_once("*/")?;
        let details: Value = serde_json::from_str(json).ok()?;
        let text = |name: &str| details[name].as_str().map(str::to_owned);
        let by = Identity {
            id: text("id")?,
            host: text("host").unwrap_or_default(),
            pid: details["pid"].as_u64().and_then(|pid| pid.try_into().ok()).unwrap_or_default(),
            note: text("note").unwrap_or_default(),
        };
        Some(Self {
            key: text("key"),
            by: Some(by),
            ttl_ms: details["ttl"].as_u64(),
            granted_at: details["at"].as_i64(),
        })
    }
}

/// SQL of the `application_name` of a hold, given SQL for the two halves of its token.
pub(super) fn name_sql(name: &str, epoch: &str, number: &str) -> String {
    let room = MAX_APPLICATION_NAME - BEFORE_TOKEN.len() - 1;
    format!(
        "left('{name}', {room} - length({epoch}::text || {number}::text)) || '{BEFORE_TOKEN}' || {epoch} || '.' || {number}"
    )
}

/// Splits an `application_name` into the name and the token.
pub(super) fn parse_name(application_name: &str) -> (&str, Option<FencingToken>) {
    let parsed = application_name.rsplit_once(BEFORE_TOKEN).and_then(|(name, token)| {
        let (epoch, number) = token.split_once('.')?;
        Some((name, FencingToken::new(epoch.parse().ok()?, number.parse().ok()?)))
    });
    match parsed {
        Some((name, token)) => (name, Some(token)),
        None => (application_name, None),
    }
}

/// Replaces characters that PostgreSQL does not show in `application_name`, or that need escaping in an SQL literal.
pub(super) fn plain(text: &str) -> String {
    let fits = |c: char| (c.is_ascii_graphic() || c == ' ') && c != '\'' && c != '\\';
    text.chars().map(|c| if fits(c) { c } else { '?' }).take(MAX_APPLICATION_NAME).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use tenure_core::Key;

    use super::*;
    use crate::store::Mode;

    fn claim(id: &str, note: &str) -> Claim {
        let by = Identity { id: id.into(), host: "h".into(), pid: 7, note: note.into() };
        Claim {
            id: 1,
            key: Key::new("a/*b*/").unwrap(),
            mode: Mode::Exclusive,
            ttl: Duration::from_secs(15),
            by: Arc::new(by),
            queue: true,
            fail_if_contended: false,
            fair: false,
            detached: false,
        }
    }

    #[test]
    fn nothing_ends_the_comment_early_and_all_is_read_back() {
        let claim = claim("web '1' */ DROP", "ключ 🦀 \\ /* \" */");
        let comment = Tag::of(&claim).granted(42).comment();
        assert!(comment.is_ascii(), "{comment}");
        assert_eq!(comment.matches("*/").count(), 1, "{comment}");
        assert_eq!(comment.matches("/*").count(), 1, "{comment}");
        let read = SessionTag::comment(&format!("{comment}SELECT 1")).unwrap();
        assert_eq!(read.by.as_ref(), Some(&*claim.by));
        assert_eq!(read.key.as_deref(), Some("a/*b*/"));
        assert_eq!((read.ttl_ms, read.granted_at), (Some(15_000), Some(42)));
        assert_eq!(SessionTag::comment(&comment[..40]), None, "truncated by the server");
        assert_eq!(SessionTag::comment("SELECT 1"), None);
    }

    #[test]
    fn names_need_no_quotes_and_tokens_are_found_behind_them() {
        assert_eq!(Tag::of(&claim("o'b\\ключ", "")).name, "o?b?????");
        assert_eq!(parse_name("web-1 #2.77"), ("web-1", Some(FencingToken::new(2, 77))));
        assert_eq!(parse_name("issue #9"), ("issue #9", None));
        assert_eq!(parse_name("psql"), ("psql", None));
    }
}
