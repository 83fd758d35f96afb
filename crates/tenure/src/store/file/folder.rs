//! The folder of a file store: its location, the checks that it can be trusted, and the names of its files.

use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode as Permissions, OFlags, StatFs};
use rustix::io::Errno;

use super::super::KeySpace;
use crate::{Error, ErrorKind, Key, Result};

/// Access for its user alone.
const PRIVATE: Permissions = Permissions::RWXU;

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
        let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
        let mut options = Options::default();
        for option in query.split('&').filter(|option| !option.is_empty()) {
            match option {
                "shared" => options.shared = true,
                "network" => options.network = true,
                _ => {
                    return Err(invalid(format!(
                        "unknown option {option:?} in the URL of a file store: use shared or network"
                    )));
                }
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
        let bytes = unescape(path).ok_or_else(|| {
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
            .map_err(|errno| failed("examine the file system of", &self.path, errno))?;
        Ok(network(&system))
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

    pub(super) fn seats(&self) -> PathBuf {
        self.path.join("seats")
    }

    pub(super) fn seat(&self, seat: u64) -> PathBuf {
        self.path.join(format!("seats/{seat:016x}"))
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
            Err(errno) => Err(failed("make the store's folder", &self.path, errno)),
        }
    }

    /// Creates missing subfolders, and returns the folder's permissions.
    fn fill(&self) -> Result<u32> {
        let permissions = self.check()?;
        let folders = if self.options.shared {
            Permissions::from_raw_mode(permissions & 0o1777)
        } else {
            PRIVATE
        };
        let queues = [self.queues(KeySpace::Lock), self.queues(KeySpace::Semaphore)];
        for part in queues.into_iter().chain([self.seats(), self.marks()]) {
            match rustix::fs::mkdir(&part, folders) {
                // A shared folder gets the permissions that the umask removed.
                Ok(()) if self.options.shared => rustix::fs::chmod(&part, folders)
                    .map_err(|errno| failed("set the permissions of", &part, errno))?,
                Ok(()) | Err(Errno::EXIST) => {}
                Err(errno) => return Err(failed("make", &part, errno)),
            }
        }
        Ok(permissions)
    }

    /// Refuses a folder that another user can replace or tamper with. Returns its permissions.
    fn check(&self) -> Result<u32> {
        let path = &self.path;
        let link = rustix::fs::statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|errno| failed("examine the store's folder", path, errno))?;
        match FileType::from_raw_mode(link.st_mode) {
            FileType::Directory => {}
            FileType::Symlink => {
                return Err(self.refuse("it is a symbolic link: name the folder that it points to"));
            }
            _ => return Err(self.refuse("it is no folder: name another path")),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = rustix::fs::open(path, flags, Permissions::empty())
            .map_err(|errno| failed("open the store's folder", path, errno))?;
        let stat = rustix::fs::fstat(&folder)
            .map_err(|errno| failed("examine the store's folder", path, errno))?;
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
                .map_err(|errno| failed("examine the file system of", path, errno))?;
            if let Some(name) = network(&system) {
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

/// Error for a failed system call, with advice by its cause.
pub(super) fn failed(what: &str, path: &Path, errno: Errno) -> Error {
    let (kind, advice) = match errno {
        Errno::ACCESS | Errno::PERM => (
            ErrorKind::Denied,
            "it is not permitted: check its owner and permissions, or name another folder",
        ),
        Errno::ROFS => (ErrorKind::Denied, "the file system is read-only: name a folder elsewhere"),
        Errno::NOSPC | Errno::DQUOT => (ErrorKind::Denied, "the disk is full: free some space"),
        Errno::LOOP => (ErrorKind::Denied, "it is a symbolic link: remove it"),
        Errno::MFILE | Errno::NFILE => {
            (ErrorKind::Unavailable, "too many files are open: raise the limit (ulimit -n)")
        }
        _ => (ErrorKind::Unavailable, "the system refused"),
    };
    Error::new(kind, format!("cannot {what} {}: {advice}", path.display())).because(errno)
}

#[cfg(target_os = "linux")]
fn network(system: &StatFs) -> Option<&'static str> {
    // Only the low half is the magic number; some architectures sign-extend it.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "only the low half is used"
    )]
    let magic = system.f_type as u32;
    network_of(magic)
}

/// Name of the network file system with this magic number.
#[cfg(target_os = "linux")]
fn network_of(magic: u32) -> Option<&'static str> {
    Some(match magic {
        0x6969 => "NFS",
        0x517b | 0xff53_4d42 | 0xfe53_4d42 => "CIFS",
        0x6573_5546 => "FUSE",
        0x0102_1997 => "9P",
        0x00c3_6400 => "Ceph",
        0x5346_414f => "AFS",
        0x0bd0_0bd0 => "Lustre",
        0x1983_0326 => "BeeGFS",
        0x786f_4256 => "vboxsf",
        _ => return None,
    })
}

#[cfg(not(target_os = "linux"))]
fn network(_: &StatFs) -> Option<&'static str> {
    None
}

/// Longest escaped name that is used in full: file systems allow 255 bytes.
const LONGEST: usize = 200;

/// Name of a key's file: different for each key, even on a file system that ignores case.
///
/// A long name is cut and ends with a hash; `~` occurs in no other name. The key is also in the file, and checked
/// there.
pub(super) fn file_name(key: &Key) -> String {
    let mut name = String::with_capacity(key.as_bytes().len() + 8);
    for (at, byte) in key.as_bytes().iter().enumerate() {
        let plain =
            matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_') || (*byte == b'.' && at > 0);
        if plain {
            name.push(char::from(*byte));
        } else {
            name.push('%');
            name.push(char::from(HEX[usize::from(byte >> 4)]));
            name.push(char::from(HEX[usize::from(byte & 15)]));
        }
    }
    if name.len() > LONGEST {
        return format!("{}~{:032x}", &name[..LONGEST], hash(key.as_bytes()));
    }
    name
}

/// Key of a file's name; `None` if the name was cut or is not one of ours.
pub(super) fn key_of(name: &[u8]) -> Option<Key> {
    let bytes = unescape(std::str::from_utf8(name).ok()?)?;
    let key = Key::new(std::str::from_utf8(&bytes).ok()?).ok()?;
    (file_name(&key).as_bytes() == name).then_some(key)
}

const HEX: &[u8; 16] = b"0123456789abcdef";

fn unescape(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        rest = after;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let digits = std::str::from_utf8(rest.get(..2)?).ok()?;
        if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        rest = &rest[2..];
    }
    Some(bytes)
}

/// FNV-1a with 128 bits. Two keys with the same hash are detected by the key in the file.
fn hash(bytes: &[u8]) -> u128 {
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let basis = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    bytes.iter().fold(basis, |hash, byte| (hash ^ u128::from(*byte)).wrapping_mul(PRIME))
}

/// Identity of a file: its device and inode number.
pub(super) type FileId = (u64, u64);

pub(super) use identity::{is_linked, names, of as file_id};

/// Requests only the needed fields with `statx`. A process that reads a file's times makes the kernel record an exact
/// time at the next write, which costs more.
#[cfg(target_os = "linux")]
mod identity {
    use std::os::fd::OwnedFd;
    use std::path::Path;

    use rustix::fs::{AtFlags, CWD, Statx, StatxFlags, makedev, statx};
    use rustix::io::Errno;

    use super::FileId;

    fn id(stat: &Statx) -> FileId {
        (makedev(stat.stx_dev_major, stat.stx_dev_minor), stat.stx_ino)
    }

    pub(in super::super) fn of(file: &OwnedFd) -> Result<FileId, Errno> {
        statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::INO).map(|stat| id(&stat))
    }

    /// True if a path names the file with this id.
    pub(in super::super) fn names(path: &Path, file: FileId) -> bool {
        statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::INO)
            .is_ok_and(|stat| id(&stat) == file)
    }

    /// True if an open file still has a name.
    pub(in super::super) fn is_linked(file: &OwnedFd) -> bool {
        statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::NLINK)
            .is_ok_and(|stat| stat.stx_nlink > 0)
    }
}

#[cfg(not(target_os = "linux"))]
mod identity {
    use std::os::fd::OwnedFd;
    use std::path::Path;

    use rustix::fs::{AtFlags, CWD, Stat, fstat, statat};
    use rustix::io::Errno;

    use super::FileId;

    #[allow(clippy::cast_sign_loss, clippy::cast_lossless, reason = "types differ by system")]
    fn id(stat: &Stat) -> FileId {
        (stat.st_dev as u64, stat.st_ino as u64)
    }

    pub(in super::super) fn of(file: &OwnedFd) -> Result<FileId, Errno> {
        fstat(file).map(|stat| id(&stat))
    }

    /// True if a path names the file with this id.
    pub(in super::super) fn names(path: &Path, file: FileId) -> bool {
        statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(|stat| id(&stat) == file)
    }

    /// True if an open file still has a name.
    pub(in super::super) fn is_linked(file: &OwnedFd) -> bool {
        fstat(file).is_ok_and(|stat| stat.st_nlink > 0)
    }
}

/// Names in a folder, at most `most` of them.
pub(super) fn entries(path: &Path, most: usize) -> Result<Vec<Vec<u8>>> {
    let unreadable = |error: std::io::Error| {
        let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
        failed("read", path, errno)
    };
    let mut names = Vec::new();
    for entry in std::fs::read_dir(path).map_err(unreadable)?.take(most) {
        names.push(entry.map_err(unreadable)?.file_name().as_bytes().to_vec());
    }
    Ok(names)
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
                assert_eq!(key_of(name.as_bytes()), Some(key));
            }
            assert_eq!(names.insert(name, text), None, "{text}");
        }
        assert_eq!(names.len(), keys.len());
        assert_eq!(file_name(&Key::new("reports/Nightly.1").unwrap()), "reports%2f%4eightly.1");
        for foreign in ["", "A", "%", "%2", "%2F", "a~b", ".a", "\u{7f}"] {
            assert_eq!(key_of(foreign.as_bytes()), None, "{foreign}");
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn network_file_systems_are_known_by_their_magic_numbers() {
        for (magic, name) in [
            (0x6969, Some("NFS")),
            (0x6573_5546, Some("FUSE")),
            (0x1983_0326, Some("BeeGFS")),
            (0x786f_4256, Some("vboxsf")),
            (0xef53, None),
            (0x0102_1994, None),
        ] {
            assert_eq!(network_of(magic), name, "{magic:#x}");
        }
    }

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
