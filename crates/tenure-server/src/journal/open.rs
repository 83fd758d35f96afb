//! Recovery: determines how the last run ended, restores its holds, and begins the next run.
//!
//! Recovery itself may be killed after any of its steps, and the machine may crash at any time. Two rules make every
//! such end safe:
//!
//! - An embargo is stored durably before any file is written that would hide its cause.
//! - Old files are moved or removed only after the facts, stored durably, no longer refer to them.

use std::fmt;
use std::sync::Arc;

use tenure_core::table::Mode;
use tenure_core::{LockToken, Time};

use super::batch::RecordBatch;
use super::directory::DataDirectory;
use super::disk::Disk;
use super::error::JournalError;
use super::facts::{self, Facts};
use super::format::{BootId, FileKind, Record};
use super::inventory::{Inventory, remove_before};
use super::merge::{Snapshot, replay_holds};
use super::options::JournalOptions;
use super::read::{Chain, FileOwner, Reader, file_name};
use super::segment::Segment;
use super::storage::{QUARANTINE_DIR, Storage};
use super::writer::{FENCE_BLOCK_SIZE, Journal, round_up_bound};

/// Margin above the largest readable fencing number if the facts are lost: larger numbers may have been issued and be
/// unreadable.
const UNREADABLE_FENCE_MARGIN: u64 = 1 << 24;

/// Content of a directory.
#[derive(Debug)]
pub struct OpenedJournal {
    /// The journal, ready for records.
    pub journal: Journal,
    /// Restored holds, in the order of their grants. None has expired.
    pub holds: Vec<RestoredHold>,
    /// Fencing number of the next grant.
    pub next_number: u64,
    /// Nothing may be granted before this time. Restored holds may be renewed and released meanwhile.
    pub embargo_until: Option<Time>,
    /// Id of this server's data, drawn at random once.
    pub instance: u128,
    /// End of the last run.
    pub last_run: LastRun,
    /// Description of a missing or damaged copy of the facts that was written again, for the log.
    pub repaired: Option<String>,
}

/// A hold that was read from the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestoredHold {
    /// The key.
    pub key: Box<[u8]>,
    /// Mode of the hold.
    pub mode: Mode,
    /// Token of the holder.
    pub token: LockToken,
    /// End of the lease unless renewed.
    pub ends: Time,
    /// Note that was stored with the grant.
    pub note: Box<[u8]>,
}

/// End of the last run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LastRun {
    /// There was no last run: the directory was empty or missing.
    Fresh,
    /// The server stopped cleanly.
    Clean,
    /// The process was killed. All holds are restored.
    Killed,
    /// The last writes may be lost.
    Crashed(CrashCause),
    /// Files were missing or damaged, and the operator accepted the loss. The text describes the damage.
    LossAccepted(String),
}

/// Evidence that writes may be lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrashCause {
    /// The machine was rebooted, or is another machine.
    BootChanged,
    /// The clock is behind the times in the journal.
    ClockWentBack,
    /// The disk failed to store what was written.
    DiskFailed,
    /// The last write was cut short. The holds before it are restored.
    TornTail,
}

impl fmt::Display for CrashCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::BootChanged => "the machine was restarted",
            Self::ClockWentBack => "the clock is behind the journal",
            Self::DiskFailed => "the disk failed to store what was written",
            Self::TornTail => "the last write was cut short",
        })
    }
}

impl Journal {
    /// Opens the directory and restores its content. `boot` is the boot id of the machine; `now` is counted in that
    /// boot.
    ///
    /// When this returns, the ceiling, the bound and the embargo are durable.
    ///
    /// # Errors
    ///
    /// [`JournalError`] by the table of the [module](super). The directory is then unchanged, except after
    /// [`JournalError::Io`], which may be retried.
    pub fn open(
        options: &JournalOptions,
        boot: &str,
        now: Time,
        wall_micros: u64,
    ) -> Result<OpenedJournal, JournalError> {
        let directory = DataDirectory::open(&options.dir)?;
        Self::open_on(Arc::new(directory), options, boot, now, wall_micros)
    }

    /// Opens a journal on another storage than a directory of the file system, for simulators and tests.
    /// [`JournalOptions::dir`] is not used: messages name [`Storage::dir`].
    ///
    /// # Errors
    ///
    /// As for [`open`](Self::open), except [`JournalError::InUse`].
    pub fn open_on(
        storage: Arc<dyn Storage>,
        options: &JournalOptions,
        boot: &str,
        now: Time,
        wall_micros: u64,
    ) -> Result<OpenedJournal, JournalError> {
        open(Disk::new(storage), options, boot, now, wall_micros)
    }
}

/// State that the last run left.
#[derive(Debug)]
struct RecoveredState {
    facts: Facts,
    holds: Vec<RestoredHold>,
    last_run: LastRun,
    /// True if the segments and snapshots are to be kept in the quarantine.
    suspect: bool,
}

/// Inputs of the recovery.
#[derive(Debug)]
struct Recovery<'a> {
    disk: Disk,
    options: &'a JournalOptions,
    boot: BootId,
    now: Time,
    wall_micros: u64,
}

pub(super) fn open(
    disk: Disk,
    options: &JournalOptions,
    boot: &str,
    now: Time,
    wall_micros: u64,
) -> Result<OpenedJournal, JournalError> {
    let boot = BootId::new(boot).ok_or(JournalError::BootId)?;
    let recovery = Recovery { disk, options, boot, now, wall_micros };
    let inventory = Inventory::take(&recovery.disk)?;
    // Read before anything is written: every branch below stores the facts, which overwrites a damaged copy.
    let damaged_facts = facts::damaged_copies(&recovery.disk);
    let mut repaired = None;
    let recovered = match facts::load(&recovery.disk) {
        Ok(loaded) => {
            repaired = loaded.problem;
            let known = loaded.facts;
            recovery.recover(&inventory, known).map_err(|error| (error, known))
        }
        Err(error) => Err((error, None)),
    };
    let state = match recovered {
        Ok(state) => state,
        Err((error, known)) if options.accept_loss && error.is_loss() => {
            recovery.discard_lost_data(&inventory, known, &error)?
        }
        Err((error, _)) => return Err(error),
    };
    recovery.begin(&inventory, state, &damaged_facts, repaired)
}

/// Moves files that are no longer trusted to the quarantine, and saves the damaged copies of the facts there.
fn quarantine(
    disk: &Disk,
    names: impl Iterator<Item = String>,
    damaged_facts: &[(&str, Vec<u8>)],
) -> Result<(), JournalError> {
    disk.empty_quarantine()?;
    for name in names {
        disk.rename(&name, &format!("{QUARANTINE_DIR}/{name}"))?;
    }
    for (name, bytes) in damaged_facts {
        let name = format!("{QUARANTINE_DIR}/{name}");
        let file = disk.create(&name, 0)?;
        disk.write(&*file, &name, bytes, 0)?;
    }
    Ok(())
}

fn restored(hold: Record<'_>) -> Option<RestoredHold> {
    let Record::Granted { key, mode, token, ends, note } = hold else { return None };
    Some(RestoredHold { key: key.into(), mode, token, ends, note: note.into() })
}

impl Recovery<'_> {
    /// Determines how the last run ended. The order of the checks matters: each later check is only valid if the
    /// earlier ones have passed.
    fn recover(
        &self,
        found: &Inventory,
        known: Option<Facts>,
    ) -> Result<RecoveredState, JournalError> {
        let Some(mut facts) = known else { return self.first_start(found) };
        let owner = FileOwner { instance: facts.instance, boot: facts.boot };
        let went_back = facts.boot == self.boot && self.now.as_nanos() < facts.as_of;
        // First, because a clean stop has synced everything: then neither another boot nor another clock means loss.
        if facts.clean {
            return self.after_clean_stop(facts, owner);
        }
        // Segments are never synced while the server runs. After a reboot any of their last frames may be missing, even
        // if the files read well: a release, or a grant to another client. So the files are not even read.
        if facts.boot != self.boot {
            return self.after_crash(facts, CrashCause::BootChanged);
        }
        // Within one boot the clock only grows. If it is behind, this is not the boot of the last run, although it has
        // the same id: the page cache may be lost, and the leases end on another clock.
        if went_back {
            return self.after_crash(facts, CrashCause::ClockWentBack);
        }
        // The facts name the first snapshot of the run; a merge may since have replaced it by a later one. The latest
        // is complete, because a snapshot gets its name only then. One before `start` is a leftover of an earlier run.
        let base = found.snapshots.last().copied().filter(|base| *base >= facts.start);
        let Some(base) = base else {
            let path = self.disk.path(&file_name(FileKind::Snapshot, facts.start));
            return Err(JournalError::Missing { path });
        };
        let segments = found.segments.iter().copied().filter(|at| *at >= base).collect();
        let chain = Chain { owner, base, segments };
        // Before the files are read. If the kernel failed to write a page back, it may have dropped the page, and the
        // file then reads as zeros, like a journal that ended earlier: holds would be restored that were released and
        // granted again since. The sync reports that failure.
        if !chain.is_on_disk(&self.disk)? {
            return self.after_crash(facts, CrashCause::DiskFailed);
        }
        let mut holds = Vec::new();
        let end = replay_holds(&self.disk, &chain, false, |hold| {
            holds.extend(restored(hold));
            Ok(())
        })?;
        // The same check as above with the times of the frames, which are later than that of the facts.
        if end.as_of > self.now.as_nanos() {
            return self.after_crash(facts, CrashCause::ClockWentBack);
        }
        let last_run = if end.torn {
            // Stored before `begin` writes a new snapshot, which hides the torn end. If this process were killed in
            // between, the next start would find an intact snapshot and would grant at once.
            self.extend_embargo(&mut facts)?;
            LastRun::Crashed(CrashCause::TornTail)
        } else {
            LastRun::Killed
        };
        Ok(RecoveredState { facts, holds, last_run, suspect: end.torn })
    }

    /// Starts without facts. That is a fresh start only if the directory has neither data of a server nor other files.
    fn first_start(&self, found: &Inventory) -> Result<RecoveredState, JournalError> {
        // Facts are the first files of a run and are never removed. If other files of a server are here, the facts were
        // lost: a fresh start would forget the holds and repeat fencing numbers.
        if !found.is_empty() || found.quarantine {
            return Err(JournalError::Missing { path: self.disk.path(facts::FILE_NAMES[0]) });
        }
        if let Some(name) = &found.foreign {
            return Err(JournalError::NotOurs { path: self.disk.path(name) });
        }
        let mut facts = Facts::fresh(self.boot, self.now.as_nanos())?;
        // Before any other file: if this process were killed between a first segment and the facts, the next start
        // would take the directory for one whose facts were lost.
        facts.store(&self.disk)?;
        Ok(RecoveredState { facts, holds: Vec::new(), last_run: LastRun::Fresh, suspect: false })
    }

    /// Restores the holds of the last snapshot, which was synced. Segments are not read: the stop may have been killed
    /// before it removed them.
    fn after_clean_stop(
        &self,
        mut facts: Facts,
        owner: FileOwner,
    ) -> Result<RecoveredState, JournalError> {
        let mut holds = Vec::new();
        if facts.start > 0 {
            let chain = Chain { owner, base: facts.start, segments: Vec::new() };
            chain.read_snapshot(&self.disk, &mut |hold| {
                holds.extend(restored(hold));
                Ok(())
            })?;
        }
        // Start and ceiling are 0 if a first start was killed before its first run began.
        let last_run =
            if facts.start == 0 && facts.ceiling == 0 { LastRun::Fresh } else { LastRun::Clean };
        if facts.boot != self.boot || self.now.as_nanos() < facts.as_of {
            // Times of another boot mean nothing on this clock, and the time that the machine was off is unknown. Each
            // lease gets the time that it had left at the stop: maybe too long, never shorter than its holder counts.
            let stopped = Time::from_nanos(facts.as_of);
            let moved = |ends: Time| {
                if ends == Time::MAX { ends } else { self.now + ends.since(stopped) }
            };
            for hold in &mut holds {
                hold.ends = moved(hold.ends);
            }
            if facts.embargo_until > 0 {
                facts.embargo_until = moved(Time::from_nanos(facts.embargo_until)).as_nanos();
            }
        }
        Ok(RecoveredState { facts, holds, last_run, suspect: false })
    }

    /// Discards all holds and begins an embargo, by which every client's lease has ended. The [module](super) explains
    /// why no hold can be kept.
    fn after_crash(
        &self,
        mut facts: Facts,
        why: CrashCause,
    ) -> Result<RecoveredState, JournalError> {
        self.discard_holds(&mut facts)?;
        Ok(RecoveredState {
            facts,
            holds: Vec::new(),
            last_run: LastRun::Crashed(why),
            suspect: true,
        })
    }

    /// Goes on without the lost data, as after a crash. If the facts themselves are lost, ceiling and bound are
    /// estimated on the safe side.
    fn discard_lost_data(
        &self,
        found: &Inventory,
        known: Option<Facts>,
        error: &JournalError,
    ) -> Result<RecoveredState, JournalError> {
        let last_run = LastRun::LossAccepted(error.to_string());
        let mut facts = match known {
            Some(facts) => facts,
            None => Facts {
                ceiling: self.highest_readable(found).saturating_add(UNREADABLE_FENCE_MARGIN),
                bound: self.options.max_lease,
                ..Facts::fresh(self.boot, self.now.as_nanos())?
            },
        };
        self.discard_holds(&mut facts)?;
        Ok(RecoveredState { facts, holds: Vec::new(), last_run, suspect: true })
    }

    /// Durably replaces the state by an empty table with an embargo.
    ///
    /// One write does both. If this process is killed after it, the next start finds a clean stop with an empty table
    /// and keeps the embargo. If it is killed before it, the next start finds the crash again. In no case does a start
    /// see the present boot id together with the old files, which would look like a killed process.
    fn discard_holds(&self, facts: &mut Facts) -> Result<(), JournalError> {
        facts.clean = true;
        facts.start = 0;
        facts.boot = self.boot;
        facts.as_of = self.now.as_nanos();
        // An old embargo may be on the clock of another boot. Nothing is lost: the bound covers what was left of it.
        facts.embargo_until = 0;
        self.extend_embargo(facts)
    }

    /// Durably extends the embargo: `bound` from now, no lease of the last run can still be valid.
    fn extend_embargo(&self, facts: &mut Facts) -> Result<(), JournalError> {
        let until = self.now + facts.bound;
        facts.embargo_until = facts.embargo_until.max(until.as_nanos());
        facts.store(&self.disk)
    }

    /// Begins the next run: writes its first segment and snapshot, stores the facts, removes the files of the last run.
    ///
    /// The process may be killed after each step:
    ///
    /// - After the segment: it is empty and stands after the end of the old chain, which [`Chain::walk`] allows.
    /// - After the snapshot: after a kill it holds the same as the old chain, and the next start uses it; after a clean
    ///   stop or a crash the facts still say `clean`, and the next start ignores it.
    /// - After the facts: they name the new sequence, so the old files no longer count.
    ///
    /// The facts are stored before this returns, so no grant can have a fencing number above the durable ceiling.
    fn begin(
        self,
        found: &Inventory,
        state: RecoveredState,
        damaged_facts: &[(&str, Vec<u8>)],
        repaired: Option<String>,
    ) -> Result<OpenedJournal, JournalError> {
        let RecoveredState { mut facts, mut holds, last_run, suspect } = state;
        let Self { disk, options, boot, now, wall_micros } = self;
        holds.retain(|hold| hold.ends > now);
        let embargo_until = Time::from_nanos(facts.embargo_until);
        let embargo_until = (embargo_until > now).then_some(embargo_until);
        let last_end = holds.iter().map(|hold| hold.ends).chain(embargo_until).max().unwrap_or(now);
        let next_number = facts
            .ceiling
            .saturating_add(1)
            .max(wall_micros)
            .max(options.fence_floor.saturating_add(1));

        let owner = FileOwner { instance: facts.instance, boot };
        // Above every sequence in use: the new files must not replace old ones before the facts are stored.
        let sequence = found.names().map(|(at, _)| at).max().unwrap_or(0).max(facts.start) + 1;
        let segment = Segment::create(&disk, owner, sequence, options.segment_bytes)?;
        let mut snapshot = Snapshot::begin(&disk, owner, sequence)?;
        for RestoredHold { key, mode, token, ends, note } in &holds {
            let (mode, token, ends) = (*mode, *token, *ends);
            snapshot.add(&Record::Granted { key, mode, token, ends, note })?;
        }
        // Not synced: after a machine crash no hold is restored, whether the snapshot survives or not.
        let length = snapshot.finish(false)?;
        facts.clean = false;
        facts.start = sequence;
        facts.boot = boot;
        facts.ceiling = next_number.saturating_add(FENCE_BLOCK_SIZE - 1);
        facts.bound = round_up_bound(last_end.since(now), options.max_lease);
        facts.embargo_until = embargo_until.map_or(0, Time::as_nanos);
        facts.as_of = now.as_nanos();
        facts.store(&disk)?;
        // Only now may the old files go, see above.
        if suspect || !damaged_facts.is_empty() {
            let names = found.names().map(|(_, name)| name).filter(|_| suspect);
            quarantine(&disk, names, damaged_facts)?;
        }
        remove_before(&disk, sequence)?;
        let journal = Journal {
            disk,
            max_lease: options.max_lease,
            segment_bytes: options.segment_bytes,
            facts,
            highest: next_number - 1,
            batch: RecordBatch::default(),
            segment,
            next: None,
            base: (sequence, length),
            sealed: Vec::new(),
            merging: None,
            background_error: None,
            stopped: false,
        };
        let instance = facts.instance;
        Ok(OpenedJournal {
            journal,
            holds,
            next_number,
            embargo_until,
            instance,
            last_run,
            repaired,
        })
    }

    /// Largest of the wall clock, the fence floor and the fencing numbers that can still be read.
    fn highest_readable(&self, found: &Inventory) -> u64 {
        let mut highest = self.wall_micros.max(self.options.fence_floor);
        let kinds = [(FileKind::Segment, &found.segments), (FileKind::Snapshot, &found.snapshots)];
        for (kind, sequences) in kinds {
            for &sequence in sequences {
                let Ok(mut reader) = Reader::salvage(&self.disk, kind, sequence) else { continue };
                while let Ok(Some(mut records)) = reader.frame() {
                    while let Some(record) = records.record() {
                        if let Record::Granted { token, .. } = record {
                            highest = highest.max(token.number());
                        }
                    }
                }
            }
        }
        highest
    }
}
