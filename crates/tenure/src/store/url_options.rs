//! Options in the URL of a store: `?name=value&name=value`.

#[cfg(any(feature = "nats", feature = "server"))]
use tenure_core::escape::Escape;

#[cfg(any(
    all(unix, feature = "file"),
    feature = "nats",
    feature = "object",
    feature = "server"
))]
use crate::{Error, ErrorKind};

/// Longest name of an option that an error repeats.
const MAX_SHOWN_NAME: usize = 32;

/// One option of a URL.
#[cfg(any(all(unix, feature = "file"), feature = "nats", feature = "object", feature = "server"))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct UrlOption<'a> {
    pub(crate) name: &'a str,
    /// Value as the URL has it, with its escapes; empty if there is no `=`.
    pub(crate) value: &'a str,
    /// The whole option.
    #[cfg(all(unix, feature = "file"))]
    pub(crate) text: &'a str,
}

/// Splits a URL into the part before its `?`, and its options.
#[cfg(any(all(unix, feature = "file"), feature = "nats", feature = "object", feature = "server"))]
pub(crate) fn split(url: &str) -> (&str, impl Iterator<Item = UrlOption<'_>>) {
    let (location, query) = url.split_once('?').unwrap_or((url, ""));
    let options = query.split('&').filter(|text| !text.is_empty()).map(|text| {
        let (name, value) = text.split_once('=').unwrap_or((text, ""));
        UrlOption {
            name,
            value,
            #[cfg(all(unix, feature = "file"))]
            text,
        }
    });
    (location, options)
}

#[cfg(any(all(unix, feature = "file"), feature = "nats", feature = "object", feature = "server"))]
impl UrlOption<'_> {
    /// Value without its escapes. An error shows only the name: the value may be a secret.
    #[cfg(any(feature = "nats", feature = "server"))]
    pub(crate) fn decoded(&self) -> crate::Result<String> {
        let bytes = Escape::PERCENT.decode(self.value);
        let text = bytes.and_then(|bytes| String::from_utf8(bytes).ok());
        text.ok_or_else(|| {
            // A name that is not one of ours may be part of a password that was not escaped.
            let name = if is_shown(self.name) { self.name } else { "in the URL" };
            let message =
                format!("invalid value of the option {name}: write special characters as %XX");
            Error::new(ErrorKind::Invalid, message)
        })
    }

    /// Value of an option that is true or false. Without a value it is true.
    #[cfg(any(feature = "nats", feature = "object"))]
    pub(crate) fn flag(&self) -> crate::Result<bool> {
        match self.value {
            "" | "true" => Ok(true),
            "false" => Ok(false),
            _ => {
                let message = format!("the option {} is true or false", self.name);
                Err(Error::new(ErrorKind::Invalid, message))
            }
        }
    }

    /// Error for an option that the store does not have. `store` is its name with an article.
    pub(crate) fn unknown(&self, store: &str, supported: &[&str]) -> Error {
        let name = if is_shown(self.name) { format!(" {:?}", self.name) } else { String::new() };
        let message = format!(
            "unknown option{name} in the URL of {store}; supported options: {}",
            supported.join(", ")
        );
        Error::new(ErrorKind::Invalid, message)
    }
}

/// True if an error may repeat this name of an option. Any other text may be part of a password that was not escaped.
pub(crate) fn is_shown(name: &str) -> bool {
    name.len() <= MAX_SHOWN_NAME && name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_')
}

#[cfg(all(
    test,
    any(all(unix, feature = "file"), feature = "nats", feature = "object", feature = "server")
))]
mod tests {
    use super::*;

    #[test]
    fn options_are_split_at_their_separators() {
        let (location, options) = split("h/b?a=1&&flag&c=x=y?z&=v");
        assert_eq!(location, "h/b");
        let options: Vec<_> = options.map(|option| (option.name, option.value)).collect();
        assert_eq!(options, [("a", "1"), ("flag", ""), ("c", "x=y?z"), ("", "v")]);
        assert_eq!(split("h").1.count() + split("h?").1.count(), 0);
    }

    #[test]
    fn unknown_option_is_named_unless_it_may_be_a_secret() {
        let error = |url: &str| {
            let option = split(url).1.next().unwrap();
            option.unknown("a store", &["ca", "key"]).to_string()
        };
        let message = error("?colour=hunter2");
        assert!(
            message.ends_with(
                "unknown option \"colour\" in the URL of a store; supported options: ca, key"
            ),
            "{message}"
        );
        for secret in ["?hunter2", "?hunter2@h=1", "?Secret=1", &format!("?{}", "x".repeat(33))] {
            let message = error(secret);
            assert!(message.contains("unknown option in the URL"), "{message}");
        }
    }

    #[cfg(any(feature = "nats", feature = "server"))]
    #[test]
    fn values_are_decoded_and_errors_do_not_show_them() {
        let decoded = |url: &str| split(url).1.next().unwrap().decoded();
        assert_eq!(decoded("?a=x%20%C3%A9").unwrap(), "x é");
        for bad in ["?a=hunter2%", "?a=hunter2%zz", "?a=hunter2%ff"] {
            let error = decoded(bad).unwrap_err().to_string();
            assert!(error.contains("option a") && !error.contains("hunter2"), "{error}");
        }
    }
}
