//! Facts: the little that must survive a machine crash, stored in two copies. They are the server's identity, the state
//! of the directory, and the two limits that the guarantees rest on.

use std::time::Duration;

use super::disk::Disk;
use super::error::JournalError;
use super::format::{BootId, FileKind, FormatError};

/// Names of the two copies. Both are durable before anything relies on them, so either copy is enough.
pub(super) const FILE_NAMES: [&str; 2] = ["facts.a", "facts.b"];
const FACTS_LEN: usize = 156;

/// Durable facts of a data directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Facts {
    /// Random id of the server's data.
    pub(super) instance: u128,
    /// Grows with every store.
    pub(super) generation: u64,
    /// True after a clean stop: the snapshot `start` has all holds.
    pub(super) clean: bool,
    /// Sequence of the first valid snapshot; 0 with `clean` for an empty table.
    pub(super) start: u64,
    /// No larger fencing number was issued.
    pub(super) ceiling: u64,
    /// No running lease lasts longer from now.
    pub(super) bound: Duration,
    /// Nothing is granted before this time, on the clock of the boot; 0 for no embargo.
    pub(super) embargo_until: u64,
    /// Time of the store, on the clock of the boot.
    pub(super) as_of: u64,
    pub(super) boot: BootId,
}

impl Facts {
    /// Facts of a server that never ran.
    pub(super) fn fresh(boot: BootId, now: u64) -> Result<Self, JournalError> {
        let mut instance = [0; 16];
        getrandom::fill(&mut instance).map_err(|error| {
            JournalError::io("draw an instance id from", "getrandom".as_ref())(error.into())
        })?;
        Ok(Self {
            instance: u128::from_le_bytes(instance),
            generation: 0,
            clean: true,
            start: 0,
            ceiling: 0,
            bound: Duration::ZERO,
            embargo_until: 0,
            as_of: now,
            boot,
        })
    }

    /// Writes both copies, and returns when they are durable.
    ///
    /// Both new files are complete and synced before either old copy is replaced: a full disk or a crash leaves the old
    /// facts. A crash between the two renames leaves one old and one new copy; the one with the larger generation is
    /// then read. That is safe, because the caller has not yet acted on the new facts.
    pub(super) fn store(&mut self, disk: &Disk) -> Result<(), JournalError> {
        self.generation += 1;
        let bytes = self.encode();
        for name in FILE_NAMES {
            let new = format!("{name}.tmp");
            let file = disk.create(&new, 0)?;
            disk.write(&*file, &new, &bytes, 0)?;
            disk.sync(&*file, &new)?;
        }
        for name in FILE_NAMES {
            disk.rename(&format!("{name}.tmp"), name)?;
        }
        disk.sync_names()
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(FACTS_LEN);
        FileKind::Facts.begin(&mut bytes);
        bytes.extend_from_slice(&self.instance.to_le_bytes());
        let bound = u64::try_from(self.bound.as_nanos()).unwrap_or(u64::MAX);
        let rest = [
            self.generation,
            u64::from(self.clean),
            self.start,
            self.ceiling,
            bound,
            self.embargo_until,
            self.as_of,
        ];
        for value in rest {
            bytes.extend_from_slice(&value.to_le_bytes());
        }
        bytes.extend_from_slice(&self.boot.0);
        let sum = crc32fast::hash(&bytes);
        bytes.extend_from_slice(&sum.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let mut fields = FileKind::Facts.check(bytes)?;
        if bytes.len() != FACTS_LEN {
            return Err(FormatError::Damaged("is damaged: it has the wrong length"));
        }
        let mut read = || {
            Some(Self {
                instance: fields.u128()?,
                generation: fields.u64()?,
                clean: fields.u64()? != 0,
                start: fields.u64()?,
                ceiling: fields.u64()?,
                bound: Duration::from_nanos(fields.u64()?),
                embargo_until: fields.u64()?,
                as_of: fields.u64()?,
                boot: BootId(fields.take(64)?.try_into().ok()?),
            })
        };
        read().ok_or(FormatError::Damaged("is cut short"))
    }
}

/// Content of the two copies.
#[derive(Debug)]
pub(super) struct Loaded {
    /// The newer valid copy; `None` if both are missing.
    pub(super) facts: Option<Facts>,
    /// Description of a copy that is missing or damaged beside a valid one.
    pub(super) problem: Option<String>,
}

/// Copies that exist and are invalid, for the quarantine.
pub(super) fn damaged_copies(disk: &Disk) -> Vec<(&'static str, Vec<u8>)> {
    let read = |name| Some((name, disk.read(name).ok()?));
    let copies = FILE_NAMES.into_iter().filter_map(read);
    copies.filter(|(_, bytes)| Facts::decode(bytes).is_err()).collect()
}

/// Reads both copies. A missing or damaged copy is tolerated if the other is valid.
pub(super) fn load(disk: &Disk) -> Result<Loaded, JournalError> {
    let mut good: Vec<Facts> = Vec::new();
    let mut absent = None;
    let mut damaged = None;
    for name in FILE_NAMES {
        let path = disk.path(name);
        let bytes = match disk.read(name) {
            Err(error) if error.is_not_found() => {
                absent = Some((name, JournalError::Missing { path }));
                continue;
            }
            other => other?,
        };
        match Facts::decode(&bytes) {
            Ok(facts) => good.push(facts),
            Err(FormatError::Version(found)) => return Err(JournalError::Version { path, found }),
            Err(FormatError::Damaged(what)) => {
                damaged = Some((name, JournalError::Damaged { path, what }));
            }
        }
    }
    // Two servers' files are mixed. Ceiling and bound of either may be too low for the other's grants.
    if let [one, other] = good[..]
        && one.instance != other.instance
    {
        let what = "belongs to another server than facts.a";
        return Err(JournalError::Damaged { path: disk.path(FILE_NAMES[1]), what });
    }
    let facts = good.into_iter().max_by_key(|facts| facts.generation);
    match (facts, damaged) {
        (None, Some((_, error))) => Err(error),
        (None, None) => Ok(Loaded { facts: None, problem: None }),
        (facts, damaged) => {
            let describe = |(name, error): (&str, JournalError)| match error {
                JournalError::Damaged { what, .. } => format!("{name} {what}"),
                _ => format!("{name} is missing"),
            };
            Ok(Loaded { facts, problem: damaged.or(absent).map(describe) })
        }
    }
}
