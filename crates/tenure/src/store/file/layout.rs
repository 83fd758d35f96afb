//! The folder of a file store: its location, the checks that it can be trusted, and the names of its files.

use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode as Permissions, OFlags, RawMode};
use rustix::io::Errno;
use tenure_core::escape::Escape;

use super::names::file_name;
use super::system::{network_name, system_error};
use crate::store::{KeySpace, url_options};
use crate::{Error, ErrorKind, Key, Result};

/// Access for its user alone.
const PRIVATE: Permissions = Permissions::RWXU;
/// Largest number of files that one listing reads.
pub(super) const MAX_FILES_READ: usize = 1_000_000;
/// Time in ns for which a check that a liveness file was not removed or the folder not moved stays valid. A holder learns
/// of its liveness file's removal at once anyhow, and of a moved folder at the next check.
pub(super) const CHECK_VALIDITY_NANOS: u64 = 50_000_000;

/// A checked folder and its options.
#[derive(Clone, Debug)]
pub(super) struct Folder {
    path: PathBuf,
    options: Options,
    /// Permissions of the files in it.
    files: Permissions,
    /// True if opening it created it.
    is_new: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Options {
    /// True if several users share it.
    pub(super) shared: bool,
    /// True if it may be on a network file system.
    pub(super) network: bool,
}

impl Folder {
    /// Folder of a plain `file:`: the same for a user's shell and for cron, and kept across logins and restarts.
    pub(super) fn by_default() -> PathBuf {
        if let Some(path) = std::env::var_os("TENURE_DIR").filter(|path| !path.is_empty()) {
            return path.into();
        }
        let user = rustix::process::geteuid();
        if user.is_root() {
            return "/var/lib/tenure".into();
        }
        format!("/var/tmp/tenure-{}", user.as_raw()).into()
    }

    /// Parses the part of a URL after `file:`: a path, with `%XX` for bytes that a URL cannot contain, and options.
    pub(super) fn parse(rest: &str) -> Result<(PathBuf, Options)> {
        let invalid = |message: String| Error::new(ErrorKind::Invalid, message);
        let (path, given) = url_options::split(rest);
        let mut options = Options::default();
        for option in given {
            match option.text {
                "shared" => options.shared = true,
                "network" => options.network = true,
                _ if ["shared", "network"].contains(&option.name) => {
                    let (name, value) = (option.name, option.value);
                    return Err(invalid(format!(
                        "the option {name} takes no value, not {value:?}"
                    )));
                }
                _ => return Err(option.unknown("a file store", &["shared", "network"])),
            }
        }
        let path = match path.strip_prefix("//") {
            None => path,
            Some(rest) if rest.starts_with('/') => rest,
            Some(_) => {
                return Err(invalid("file: names no host: write file:PATH or file:///PATH".into()));
            }
        };
        if path.is_empty() {
            return Ok((Self::by_default(), options));
        }
        let bytes = Escape::PERCENT.decode(path).ok_or_else(|| {
            invalid("the path after file: has a % without two hexadecimal digits: write %25".into())
        })?;
        if bytes.contains(&0) {
            return Err(invalid("the path after file: has a zero byte: take it out".into()));
        }
        Ok((OsString::from_vec(bytes).into(), options))
    }

    /// Creates a missing folder, and refuses one that cannot be trusted.
    pub(super) fn open(path: &Path, options: Options) -> Result<Self> {
        let path = std::path::absolute(path).map_err(|error| {
            Error::new(ErrorKind::Invalid, format!("invalid path {}", path.display()))
                .because(error)
        })?;
        let files = Permissions::from_raw_mode(0o600);
        let folder = Self { path, options, files, is_new: false };
        let is_new = folder.make()?;
        let permissions = folder.fill()?;
        let files = if options.shared { permissions & 0o666 } else { 0o600 };
        Ok(Self { files: Permissions::from_raw_mode(files), is_new, ..folder })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn is_new(&self) -> bool {
        self.is_new
    }

    pub(super) fn is_shared(&self) -> bool {
        self.options.shared
    }

    /// Name of the network file system that the folder is on; `None` for a local one.
    pub(super) fn network_file_system(&self) -> Result<Option<&'static str>> {
        let system = rustix::fs::statfs(&self.path)
            .map_err(|errno| system_error("examine the file system of", &self.path, errno))?;
        Ok(network_name(&system))
    }

    pub(super) fn files(&self) -> Permissions {
        self.files
    }

    /// Folder of the key files of a key space.
    pub(super) fn queues(&self, space: KeySpace) -> PathBuf {
        self.path.join(match space {
            KeySpace::Lock => "locks",
            KeySpace::Semaphore => "semaphores",
        })
    }

    pub(super) fn queue(&self, space: KeySpace, key: &Key) -> PathBuf {
        self.queues(space).join(file_name(key))
    }

    pub(super) fn marks(&self) -> PathBuf {
        self.path.join("marks")
    }

    pub(super) fn mark(&self, key: &Key) -> PathBuf {
        self.marks().join(file_name(key))
    }

    /// Folder of the liveness files.
    pub(super) fn liveness_files(&self) -> PathBuf {
        self.path.join("seats")
    }

    pub(super) fn liveness_file(&self, owner: u64) -> PathBuf {
        self.path.join(format!("seats/{owner:016x}"))
    }

    /// Creates what is missing, after the folder was wiped.
    pub(super) fn prepare(&self) -> Result<()> {
        self.make()?;
        self.fill().map(drop)
    }

    /// Creates the folder; false if it exists.
    fn make(&self) -> Result<bool> {
        match rustix::fs::mkdir(&self.path, PRIVATE) {
            Ok(()) => Ok(true),
            Err(Errno::EXIST) => Ok(false),
            Err(Errno::NOENT) => Err(self.refuse("its parent does not exist: create that first")),
            Err(errno) => Err(system_error("make the store's folder", &self.path, errno)),
        }
    }

    /// Creates missing subfolders, and returns the folder's permissions.
    fn fill(&self) -> Result<RawMode> {
        let permissions = self.check()?;
        let folders = if self.options.shared {
            Permissions::from_raw_mode(permissions & 0o1777)
        } else {
            PRIVATE
        };
        let queues = [self.queues(KeySpace::Lock), self.queues(KeySpace::Semaphore)];
        for part in queues.into_iter().chain([self.liveness_files(), self.marks()]) {
            match rustix::fs::mkdir(&part, folders) {
                // A shared folder gets the permissions that the umask removed.
                Ok(()) if self.options.shared => rustix::fs::chmod(&part, folders)
                    .map_err(|errno| system_error("set the permissions of", &part, errno))?,
                Ok(()) | Err(Errno::EXIST) => {}
                Err(errno) => return Err(system_error("make", &part, errno)),
            }
        }
        Ok(permissions)
    }

    /// Refuses a folder that another user can replace or tamper with. Returns its permissions.
    fn check(&self) -> Result<RawMode> {
        let path = &self.path;
        let link = rustix::fs::statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|errno| system_error("examine the store's folder", path, errno))?;
        match FileType::from_raw_mode(link.st_mode) {
            FileType::Directory => {}
            FileType::Symlink => {
                return Err(self.refuse("it is a symbolic link: name the folder that it points to"));
            }
            _ => return Err(self.refuse("it is no folder: name another path")),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = rustix::fs::open(path, flags, Permissions::empty())
            .map_err(|errno| system_error("open the store's folder", path, errno))?;
        let stat = rustix::fs::fstat(&folder)
            .map_err(|errno| system_error("examine the store's folder", path, errno))?;
        if !self.options.shared {
            let user = rustix::process::geteuid().as_raw();
            if stat.st_uid != user {
                let message = format!(
                    "it belongs to user {}, not to us (user {user}): name a folder of your own, or share it \
                     with file:PATH?shared",
                    stat.st_uid
                );
                return Err(self.refuse(&message));
            }
            if stat.st_mode & 0o022 != 0 {
                return Err(self.refuse(
                    "other users can write to it: prevent that with chmod go-w, or share it with \
                     file:PATH?shared",
                ));
            }
        }
        if !self.options.network {
            let system = rustix::fs::fstatfs(&folder)
                .map_err(|errno| system_error("examine the file system of", path, errno))?;
            if let Some(name) = network_name(&system) {
                let message = format!(
                    "it is on {name}, where file locks may not exclude other hosts: name a folder on a local disk, or \
                     use it anyway with file:PATH?network"
                );
                return Err(self.refuse(&message));
            }
        }
        Ok(stat.st_mode & 0o7777)
    }

    fn refuse(&self, why: &str) -> Error {
        let message = format!("cannot keep locks in {}: {why}", self.path.display());
        Error::new(ErrorKind::Denied, message)
    }
}

impl fmt::Display for Folder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "file:{}", self.path.display())?;
        match (self.options.shared, self.options.network) {
            (false, false) => Ok(()),
            (true, false) => f.write_str("?shared"),
            (false, true) => f.write_str("?network"),
            (true, true) => f.write_str("?shared&network"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_name_a_path_and_options() {
        let shared = Options { shared: true, ..Options::default() };
        let network = Options { network: true, ..Options::default() };
        for (rest, path, options) in [
            ("/a/b", "/a/b", Options::default()),
            ("///a", "/a", Options::default()),
            ("a%20b%3f", "a b?", Options::default()),
            ("/a?shared", "/a", shared),
            ("/a?network&", "/a", network),
            ("/a?shared&network", "/a", Options { shared: true, network: true }),
        ] {
            assert_eq!(Folder::parse(rest).unwrap(), (PathBuf::from(path), options), "{rest}");
        }
        for (rest, part) in [
            ("//host/a", "file:///PATH"),
            ("/a?readonly", "readonly"),
            ("/a%2", "%25"),
            ("/a%+1", "%25"),
            ("/a%00", "zero byte"),
        ] {
            let error = Folder::parse(rest).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(error.to_string().contains(part), "{rest}: {error}");
        }
    }
}
