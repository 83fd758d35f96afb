//! System calls of several modules: errors with advice, identities of files, names in a folder, kinds of file system.

use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, OFlags, StatFs};
#[cfg(not(target_os = "linux"))]
use rustix::fs::{Stat, fstat, statat};
#[cfg(target_os = "linux")]
use rustix::fs::{Statx, StatxFlags, makedev, statx};
use rustix::io::Errno;

use crate::{Error, ErrorKind, Result};

/// Error for a failed system call, with advice by its cause.
pub(super) fn system_error(what: &str, path: &Path, errno: Errno) -> Error {
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
        Errno::NOTDIR | Errno::NOENT | Errno::ISDIR | Errno::NAMETOOLONG => {
            (ErrorKind::Misconfigured, "the system refused")
        }
        _ => (ErrorKind::Unavailable, "the system refused"),
    };
    Error::new(kind, format!("cannot {what} {}: {advice}", path.display())).because(errno)
}

/// Names in a folder, at most `limit` of them.
pub(super) fn names_in(path: &Path, limit: usize) -> Result<Vec<Vec<u8>>> {
    let unreadable = |error: std::io::Error| {
        let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
        system_error("read", path, errno)
    };
    let mut names = Vec::new();
    for entry in std::fs::read_dir(path).map_err(unreadable)?.take(limit) {
        names.push(entry.map_err(unreadable)?.file_name().as_bytes().to_vec());
    }
    Ok(names)
}

/// Identity of a file: its device and inode number.
pub(super) type FileId = (u64, u64);

// On Linux only the needed fields are requested, with `statx`. A process that reads a file's times makes the kernel record
// an exact time at the next write, which costs more.

/// Identity of an open file.
#[cfg(target_os = "linux")]
pub(super) fn file_id(file: &OwnedFd) -> rustix::io::Result<FileId> {
    statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::INO).map(|stat| id_in(&stat))
}

/// True if a path names the file with this id.
#[cfg(target_os = "linux")]
pub(super) fn is_file_at(path: &Path, file: FileId) -> bool {
    statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::INO)
        .is_ok_and(|stat| id_in(&stat) == file)
}

/// True if an open file still has a name.
#[cfg(target_os = "linux")]
pub(super) fn is_linked(file: &OwnedFd) -> bool {
    statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::NLINK).is_ok_and(|stat| stat.stx_nlink > 0)
}

#[cfg(target_os = "linux")]
fn id_in(stat: &Statx) -> FileId {
    (makedev(stat.stx_dev_major, stat.stx_dev_minor), stat.stx_ino)
}

/// Identity of an open file.
#[cfg(not(target_os = "linux"))]
pub(super) fn file_id(file: &OwnedFd) -> rustix::io::Result<FileId> {
    fstat(file).map(|stat| id_in(&stat))
}

/// True if a path names the file with this id.
#[cfg(not(target_os = "linux"))]
pub(super) fn is_file_at(path: &Path, file: FileId) -> bool {
    statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(|stat| id_in(&stat) == file)
}

/// True if an open file still has a name.
#[cfg(not(target_os = "linux"))]
pub(super) fn is_linked(file: &OwnedFd) -> bool {
    fstat(file).is_ok_and(|stat| stat.st_nlink > 0)
}

#[cfg(not(target_os = "linux"))]
#[allow(
    clippy::cast_lossless,
    clippy::cast_sign_loss,
    clippy::unnecessary_cast,
    reason = "types differ by system"
)]
fn id_in(stat: &Stat) -> FileId {
    (stat.st_dev as u64, stat.st_ino as u64)
}

/// Flag that keeps reads from writing the file's access time.
#[cfg(target_os = "linux")]
pub(super) const NO_ACCESS_TIME: OFlags = OFlags::NOATIME;
#[cfg(not(target_os = "linux"))]
pub(super) const NO_ACCESS_TIME: OFlags = OFlags::empty();

/// Name of a network file system; `None` for a local one.
#[cfg(target_os = "linux")]
pub(super) fn network_name(system: &StatFs) -> Option<&'static str> {
    // Only the low half is the magic number; some architectures sign-extend it.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "only the low half is used"
    )]
    let magic = system.f_type as u32;
    network_name_of(magic)
}

/// Name of the network file system with this magic number.
#[cfg(target_os = "linux")]
fn network_name_of(magic: u32) -> Option<&'static str> {
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

/// Name of a network file system; `None` for a local one.
#[cfg(not(target_os = "linux"))]
pub(super) fn network_name(_: &StatFs) -> Option<&'static str> {
    None
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn network_file_systems_are_known_by_their_magic_numbers() {
        for (magic, name) in [
            (0x6969, Some("NFS")),
            (0x6573_5546, Some("FUSE")),
            (0x1983_0326, Some("BeeGFS")),
            (0x786f_4256, Some("vboxsf")),
            (0xef53, None),
            (0x0102_1994, None),
        ] {
            assert_eq!(network_name_of(magic), name, "{magic:#x}");
        }
    }
}
