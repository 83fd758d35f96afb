//! Names of files: a key's name, escaped so that every file system takes it, and back.

use tenure_core::Key;
use tenure_core::escape::Escape;

/// Longest escaped name that is used in full: file systems allow 255 bytes.
const LONGEST: usize = 200;

/// Name of a key's file: different for each key, even on a file system that ignores case.
///
/// A long name is cut and ends with a hash; `~` occurs in no other name. The key is also in the file, and checked
/// there.
pub(super) fn file_name(key: &Key) -> String {
    let is_plain = |byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.');
    let mut name = Escape::PERCENT_LOWER.encode(key.as_bytes(), is_plain);
    // A leading dot would hide the file, or name a folder.
    if name.starts_with('.') {
        name.replace_range(..1, "%2e");
    }
    if name.len() > LONGEST {
        return format!("{}~{:032x}", &name[..LONGEST], hash(key.as_bytes()));
    }
    name
}

/// Key of a file's name; `None` if the name was cut or is not one of ours.
pub(super) fn key_of_file(name: &[u8]) -> Option<Key> {
    let bytes = Escape::PERCENT.decode(std::str::from_utf8(name).ok()?)?;
    let key = Key::new(std::str::from_utf8(&bytes).ok()?).ok()?;
    (file_name(&key).as_bytes() == name).then_some(key)
}

/// FNV-1a with 128 bits. Two keys with the same hash are detected by the key in the file.
fn hash(bytes: &[u8]) -> u128 {
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let basis = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    bytes.iter().fold(basis, |hash, byte| (hash ^ u128::from(*byte)).wrapping_mul(PRIME))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_has_a_file_name_of_its_own_that_any_file_system_takes() {
        let (long, other) = ("🦀".repeat(50), format!("{}🐚", "🦀".repeat(49)));
        let keys = [
            "a", "A", ".", "..", "a/b", "a%2fb", "a%2Fb", "../etc", "~", "a~b", "ключ", "-n",
            "a b", "a.b", &long, &other,
        ];
        let mut names = std::collections::BTreeMap::new();
        for text in keys {
            let key = Key::new(text).unwrap();
            let name = file_name(&key);
            assert!(name.len() <= 255 && !name.starts_with('.') && !name.contains('/'), "{name}");
            assert_eq!(name, name.to_lowercase());
            if !name.contains('~') {
                assert_eq!(key_of_file(name.as_bytes()), Some(key));
            }
            assert_eq!(names.insert(name, text), None, "{text}");
        }
        assert_eq!(names.len(), keys.len());
        assert_eq!(file_name(&Key::new("reports/Nightly.1").unwrap()), "reports%2f%4eightly.1");
        for foreign in ["", "A", "%", "%2", "%2F", "a~b", ".a", "\u{7f}"] {
            assert_eq!(key_of_file(foreign.as_bytes()), None, "{foreign}");
        }
    }
}
