//! The data directory: restores all holds after a killed process, and prevents double grants after a machine crash.
//!
//! The journal is synchronous and knows no sockets. In each turn, an iteration of its event loop, the server reports
//! the changes of its table to the [`Journal`], then calls [`commit`](Journal::commit), and only then sends replies:
//!
//! ```
//! use std::time::Duration;
//! use tenure_core::table::Mode;
//! use tenure_core::{LockToken, Time};
//! use tenure_server::journal::{Journal, JournalOptions, LastRun};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let temporary = tempfile::tempdir()?;
//! let mut options = JournalOptions::new(temporary.path().join("data"));
//! # options.segment_bytes = 1 << 16;
//! let boot = "7ecacd41-249d-4cc1-bbe7-8c7b6ce1fd74"; // in production: /proc/sys/kernel/random/boot_id
//! let (now, lease) = (Time::from_nanos(5_000_000_000), Duration::from_secs(30));
//!
//! let opened = Journal::open(&options, boot, now, 1_700_000_000_000_000)?;
//! assert_eq!(opened.last_run, LastRun::Fresh);
//! let mut journal = opened.journal;
//! let token = LockToken::new(opened.next_number, 0xfeed);
//! journal.granted(b"printer", Mode::Exclusive, token, lease, now + lease, b"");
//! journal.commit()?; // now the reply may be sent
//! drop(journal); // the process is killed
//!
//! let opened = Journal::open(&options, boot, now, 1_700_000_000_000_000)?;
//! assert_eq!(opened.last_run, LastRun::Killed);
//! assert_eq!((opened.holds[0].token, opened.holds[0].ends), (token, now + lease));
//! assert!(opened.next_number > token.number());
//! # Ok(())
//! # }
//! ```
//!
//! # Guarantees
//!
//! - **Killed process** (same boot): the restored holds are exactly those of the last commit that returned, or of a
//!   commit in progress, whose replies were never sent. Written data is in the kernel's page cache, which survives the
//!   process, so a commit does not sync.
//! - **Crashed machine** (another boot; or a clock behind the journal; or a disk that failed to store the page cache,
//!   which a sync at the start detects): no hold is restored, and nothing is granted for as long as the longest lease
//!   could still run. The end of the journal may be lost with the page cache. A hold that the journal does show may
//!   have been released or broken and granted to another client just before the crash, and that grant may be lost. If
//!   the older token could still renew, there would be two holders. So every token becomes invalid, and the server
//!   waits until no client can believe in its lease. This wait is the *embargo*.
//! - **Torn end** (same boot): a write was cut short by the kill. Its replies were never sent, so the holds before it
//!   are exact and are restored. The embargo applies nevertheless, as after a machine crash.
//! - **Clean stop**: the holds are restored, even after a reboot. Their remaining time then starts with the server,
//!   because the time that the machine was off is unknown.
//! - **Fencing numbers grow** in all of these cases, and an embargo survives further kills and crashes.
//!
//! Two limits are made durable before anything relies on them; both change seldom. The *ceiling*: no larger fencing
//! number was issued. It is raised in blocks of 2²¹. The *bound*: no running lease lasts longer. It is rounded up to a
//! power of two seconds, so a client that requests ever longer leases causes about seventeen syncs at most.
//!
//! Not guaranteed: a directory restored from a backup, or a virtual machine reset to an earlier state, is not detected.
//! Only the wall clock then keeps fencing numbers growing: they start at the wall clock if it is ahead. Every start
//! after a kill or a crash skips the rest of a block, which is 2.1 s of the wall clock at most, and gets ahead of the
//! wall clock by that much. A directory that is restored before the wall clock has caught up repeats numbers.
//!
//! # The files
//!
//! | file | content | missing | cut short, changed, foreign |
//! |---|---|---|---|
//! | `facts.a`, `facts.b` | two copies: version, instance, boot, clean or not, ceiling, bound, embargo | one: the other copy is used, and the missing one is written again; both, beside other files of a server: refused | one: as missing, and kept in `quarantine`; both, or of two servers: refused; of another version: refused |
//! | `snapshot-N` | every hold at the start of `journal-N` | refused; after a machine crash it is not needed | refused; after a machine crash not read, kept in `quarantine` |
//! | `journal-N` | the changes since, turn by turn | refused; after a machine crash or a clean stop it is not needed | refused, except for a torn end of the last one; after a machine crash not read, kept in `quarantine` |
//! | `*.tmp` | an unfinished file | - | removed |
//! | `pid` | process that uses the directory, for operators | - | read for an error message only |
//! | `quarantine/` | files that the last crash made untrustworthy | - | never read |
//!
//! The journal reads and writes them through a [`Storage`](storage::Storage), which a simulator can replace: [`Journal::open_on`].
//!
//! An empty or missing directory is a fresh start: [`LastRun::Fresh`]. A directory with files of other programs only is
//! refused. So is a directory that another process has open: the lock is on the directory itself, because a lock file
//! could be deleted.
//!
//! [`JournalOptions::accept_loss`] gets past a refusal: it treats the directory as after a machine crash. If both
//! copies of the facts are lost, the embargo lasts [`JournalOptions::max_lease`], and fencing numbers continue 2²⁴
//! above the largest of the wall clock, [`JournalOptions::fence_floor`] and the numbers that can still be read.
//!
//! ## Format
//!
//! Little-endian. Every file begins with eight bytes of magic, its version, and the version inverted. Segments and
//! snapshots have a header of 128 bytes:
//! `magic:8 version:4 !version:4 instance:16 sequence:8 size:8 boot:64 zero:12 crc32:4`. The size is that of the whole
//! file: a segment is allocated in full and filled with zeros, so that a full disk is noticed early, and a truncation
//! is detected wherever it is. Frames follow, one per turn (or more, if a turn exceeds 1 MiB):
//!
//! ```text
//! length:4 as-of:8 crc32-of-records:4 crc32-of-sequence-offset-and-the-preceding:4 records:length mark:1 (0xa5)
//!
//! granted  kind:1 (1 exclusive, 2 shared, 3 slot) key-length:4 note-length:4 limit:4 number:8 secret:8 ends:8 key note
//! renewed  kind:1 (4) number:8 ends:8
//! ended    kind:1 (5) number:8
//! sealed   kind:1 (6) next-sequence:8
//! ```
//!
//! A frame is *torn* if it has no mark and only zeros follow. A frame with a mark and a wrong checksum, or without a
//! mark and with data after it, is *damaged*: no single flipped bit makes a frame look torn.
//!
//! ## Rotation
//!
//! A full segment is sealed with the sequence of the next segment, which was created when the first was half full. A
//! thread merges the old snapshot and the sealed segments into a new snapshot. It reads files only: the table is never
//! walked, and the server does not wait. The new snapshot gets its final name when it is complete, and only then are
//! the files that it replaces removed.

mod batch;
mod directory;
mod disk;
mod error;
mod facts;
mod format;
mod inventory;
mod merge;
mod open;
mod options;
mod read;
mod segment;
pub mod storage;
#[cfg(test)]
mod tests;
mod writer;

pub use self::error::JournalError;
pub use self::open::{CrashCause, LastRun, OpenedJournal, RestoredHold};
pub use self::options::JournalOptions;
pub use self::writer::Journal;
