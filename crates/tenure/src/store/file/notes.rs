//! Durable notes: one file per key, replaced atomically.

use std::fs::File;
use std::io::{ErrorKind as Io, Read as _, Write as _};
use std::path::Path;

use rustix::fs::{CWD, OFlags};
use rustix::io::Errno;

use super::layout::{Folder, MAX_FILES_READ};
use super::names::key_of_file;
use super::system::{names_in, system_error};
use crate::{Error, Key, Result};

/// Largest number of bytes read of a note.
const MAX_NOTE_BYTES: u64 = 4_096;

/// Note on a key; `None` if there is no note.
pub(super) fn read(folder: &Folder, key: &Key) -> Result<Option<String>> {
    text(&folder.mark(key))
}

/// Replaces the note on a key.
pub(super) fn write(folder: &Folder, key: &Key, text: &str) -> Result<()> {
    replace(folder, &folder.mark(key), text)
}

/// Notes on the keys with this prefix.
pub(super) fn list(folder: &Folder, prefix: &str) -> Result<Vec<String>> {
    let mut texts = Vec::new();
    for name in names_in(&folder.marks(), MAX_FILES_READ)? {
        // A name that was cut cannot be parsed back, but names of periods are never that long.
        if let Some(key) = key_of_file(&name)
            && key.as_str().starts_with(prefix)
        {
            texts.extend(text(&folder.mark(&key))?);
        }
    }
    Ok(texts)
}

fn text(path: &Path) -> Result<Option<String>> {
    let said = |error: &std::io::Error| {
        system_error("read", path, Errno::from_io_error(error).unwrap_or(Errno::IO))
    };
    let mut bytes = Vec::new();
    match File::open(path) {
        Ok(file) => {
            file.take(MAX_NOTE_BYTES).read_to_end(&mut bytes).map_err(|error| said(&error))?;
            Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
        }
        Err(error) if error.kind() == Io::NotFound => Ok(None),
        Err(error) => Err(said(&error)),
    }
}

/// Writes a new file and renames it over the old one: at any moment one of them is there, complete.
fn replace(folder: &Folder, path: &Path, text: &str) -> Result<()> {
    folder.prepare()?;
    let mut new = path.as_os_str().to_owned();
    // No key's file has this name.
    new.push("~new");
    let new = Path::new(&new);
    let wrote = || -> rustix::io::Result<()> {
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = rustix::fs::openat(CWD, new, flags, folder.files())?;
        let mut file = File::from(file);
        let io = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
        file.write_all(text.as_bytes()).map_err(io)?;
        file.sync_all().map_err(io)?;
        rustix::fs::rename(new, path)?;
        File::open(folder.marks()).and_then(|folder| folder.sync_all()).map_err(io)
    };
    wrote().map_err(|errno| -> Error { system_error("write", path, errno) })
}
