//! Opening a directory: finding out how the last run ended, and beginning the next.

use std::fmt;
use std::sync::Arc;

use tenure_core::table::Mode;
use tenure_core::{LockToken, Time};

use super::batch::RecordBatch;
use super::disk::{Disk, QUARANTINE_DIR};
use super::error::JournalError;
use super::facts::{self, Facts};
use super::format::{BootId, FileKind, Record};
use super::merge::{Snapshot, replay_holds};
use super::read::{Chain, FileOwner, Reader, file_name};
use super::segment::Segment;
use super::{FENCE_BLOCK_SIZE, Journal, JournalOptions, round_up_bound};

/// How far behind the numbers that were given out those may be which can still be read, where the facts are lost.
const UNREADABLE_FENCE_MARGIN: u64 = 1 << 24;

/// What a directory held.
#[derive(Debug)]
pub struct OpenedJournal {
    /// Ready for the next turn.
    pub journal: Journal,
    /// What is held, in the order of the grants; nothing that is over.
    pub holds: Vec<RestoredHold>,
    /// Where fencing numbers go on.
    pub next_number: u64,
    /// Nothing may be granted before this instant. Restored holds may be renewed and released meanwhile.
    pub embargo_until: Option<Time>,
    /// Names this server's data: drawn at random once, and kept.
    pub instance: u128,
    /// How the last run ended.
    pub last_run: LastRun,
    /// A copy of the facts that was missing or damaged, and was written again: for the log.
    pub repaired: Option<String>,
}

/// A hold as it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestoredHold {
    /// The key.
    pub key: Box<[u8]>,
    /// How it is held.
    pub mode: Mode,
    /// What proves it.
    pub token: LockToken,
    /// When it is over unless renewed.
    pub ends: Time,
    /// What was noted with the grant.
    pub note: Box<[u8]>,
}

/// How the last run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LastRun {
    /// There was none: the directory was empty, or was not there.
    Fresh,
    /// It stopped in order.
    Clean,
    /// It was killed. The holds are as they were.
    Killed,
    /// What was written last may be lost.
    Crashed(CrashCause),
    /// Files were missing or damaged, and the loss was accepted. The text says what was wrong.
    LossAccepted(String),
}

/// What tells that writes may be lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrashCause {
    /// The machine was restarted, or is another one.
    BootChanged,
    /// The clock is behind what the journal has seen of it.
    ClockWentBack,
    /// The disk did not take what was written.
    DiskFailed,
    /// The last write was cut short. The holds before it are restored.
    TornTail,
}

impl fmt::Display for CrashCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::BootChanged => "the machine was restarted",
            Self::ClockWentBack => "the clock is behind the journal",
            Self::DiskFailed => "the disk did not take what was written",
            Self::TornTail => "the last write was cut short",
        })
    }
}

/// What is in the directory.
#[derive(Debug, Default)]
struct Inventory {
    segments: Vec<u64>,
    snapshots: Vec<u64>,
    unfinished: Vec<String>,
    foreign: Option<String>,
}

impl Inventory {
    fn take(disk: &Disk) -> Result<Self, JournalError> {
        let mut inventory = Self::default();
        for name in disk.names()? {
            let sequence = |prefix| {
                let digits = name.strip_prefix(prefix)?;
                let sequence = u64::from_str_radix(digits, 16).ok()?;
                // Only as it is written: no other spelling, and room to count on.
                (format!("{sequence:016x}") == digits && sequence < 1 << 62).then_some(sequence)
            };
            if let Some(sequence) = sequence("journal-") {
                inventory.segments.push(sequence);
            } else if let Some(sequence) = sequence("snapshot-") {
                inventory.snapshots.push(sequence);
            } else if let Some(whole) = name.strip_suffix(".tmp") {
                let ours = ["facts.", "journal-", "snapshot-"];
                if ours.iter().any(|prefix| whole.starts_with(prefix)) {
                    inventory.unfinished.push(name);
                }
            } else if !facts::FILE_NAMES.contains(&name.as_str()) {
                inventory.foreign = Some(name);
            }
        }
        inventory.segments.sort_unstable();
        inventory.snapshots.sort_unstable();
        Ok(inventory)
    }

    fn names(&self) -> impl Iterator<Item = (u64, String)> {
        let segments = self.segments.iter().map(|at| (*at, file_name(FileKind::Segment, *at)));
        segments.chain(self.snapshots.iter().map(|at| (*at, file_name(FileKind::Snapshot, *at))))
    }

    fn is_empty(&self) -> bool {
        self.segments.is_empty() && self.snapshots.is_empty()
    }
}

/// What the last run left.
#[derive(Debug)]
struct RecoveredState {
    facts: Facts,
    holds: Vec<RestoredHold>,
    last_run: LastRun,
    /// The segments and snapshots go to the quarantine.
    suspect: bool,
}

/// What the caller knows.
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
    // Now, because the next writing of the facts replaces it.
    let spoiled = facts::damaged_copies(&recovery.disk);
    let mut repaired = None;
    let recovered = match facts::load(&recovery.disk) {
        Ok(loaded) => {
            repaired = loaded.problem;
            let known = loaded.facts;
            recovery.recover(&inventory, known).map_err(|error| (error, known))
        }
        Err(error) => Err((error, None)),
    };
    let past = match recovered {
        Ok(past) => past,
        Err((error, known)) if options.accept_loss && error.is_loss() => {
            recovery.discard_lost_data(&inventory, known, &error)?
        }
        Err((error, _)) => return Err(error),
    };
    recovery.begin(&inventory, past, &spoiled, repaired)
}

/// Removes what a snapshot stands for, and what was never finished.
pub(super) fn remove_before(disk: &Disk, start: u64) -> Result<(), JournalError> {
    let inventory = Inventory::take(disk)?;
    for (_, name) in inventory.names().filter(|(sequence, _)| *sequence < start) {
        disk.remove(&name)?;
    }
    inventory.unfinished.iter().try_for_each(|name| disk.remove(name))
}

/// Moves what is not trusted any more out of the way.
fn quarantine(
    disk: &Disk,
    names: impl Iterator<Item = String>,
    spoiled: &[(&str, Vec<u8>)],
) -> Result<(), JournalError> {
    disk.empty_quarantine()?;
    for name in names {
        disk.rename(&name, &format!("{QUARANTINE_DIR}/{name}"))?;
    }
    for (name, bytes) in spoiled {
        let name = format!("{QUARANTINE_DIR}/{name}");
        let file = disk.create(&name, 0)?;
        disk.write(&file, &name, bytes, 0)?;
    }
    Ok(())
}

fn restored(hold: Record<'_>) -> Option<RestoredHold> {
    let Record::Granted { key, mode, token, ends, note } = hold else { return None };
    Some(RestoredHold { key: key.into(), mode, token, ends, note: note.into() })
}

impl Recovery<'_> {
    fn recover(
        &self,
        found: &Inventory,
        known: Option<Facts>,
    ) -> Result<RecoveredState, JournalError> {
        let Some(mut facts) = known else { return self.first_start(found) };
        let owner = FileOwner { instance: facts.instance, boot: facts.boot };
        let went_back = facts.boot == self.boot && self.now.as_nanos() < facts.as_of;
        if facts.clean {
            return self.after_clean_stop(facts, owner);
        }
        if facts.boot != self.boot {
            return self.after_crash(facts, CrashCause::BootChanged);
        }
        if went_back {
            return self.after_crash(facts, CrashCause::ClockWentBack);
        }
        let base = found.snapshots.last().copied().filter(|base| *base >= facts.start);
        let Some(base) = base else {
            let path = self.disk.path(&file_name(FileKind::Snapshot, facts.start));
            return Err(JournalError::Missing { path });
        };
        let segments = found.segments.iter().copied().filter(|at| *at >= base).collect();
        let chain = Chain { owner, base, segments };
        if !chain.is_on_disk(&self.disk)? {
            return self.after_crash(facts, CrashCause::DiskFailed);
        }
        let mut holds = Vec::new();
        let end = replay_holds(&self.disk, &chain, false, |hold| {
            holds.extend(restored(hold));
            Ok(())
        })?;
        if end.as_of > self.now.as_nanos() {
            return self.after_crash(facts, CrashCause::ClockWentBack);
        }
        let last_run = if end.torn {
            // Before anything else: once a new snapshot is there, nobody sees that the end was torn.
            self.extend_embargo(&mut facts)?;
            LastRun::Crashed(CrashCause::TornTail)
        } else {
            LastRun::Killed
        };
        Ok(RecoveredState { facts, holds, last_run, suspect: end.torn })
    }

    /// No facts: a fresh start only where there is nothing of ours, and nothing of anybody else's.
    fn first_start(&self, found: &Inventory) -> Result<RecoveredState, JournalError> {
        if !found.is_empty() || self.disk.path(QUARANTINE_DIR).exists() {
            return Err(JournalError::Missing { path: self.disk.path(facts::FILE_NAMES[0]) });
        }
        if let Some(name) = &found.foreign {
            return Err(JournalError::NotOurs { path: self.disk.path(name) });
        }
        let mut facts = Facts::fresh(self.boot, self.now.as_nanos())?;
        facts.store(&self.disk)?;
        Ok(RecoveredState { facts, holds: Vec::new(), last_run: LastRun::Fresh, suspect: false })
    }

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
        let last_run =
            if facts.start == 0 && facts.ceiling == 0 { LastRun::Fresh } else { LastRun::Clean };
        if facts.boot != self.boot || self.now.as_nanos() < facts.as_of {
            // Another clock: what was left of each lease at the stop is left of it now.
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

    /// No hold is kept, see the [module](super); everybody who may believe in one is waited out.
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

    /// Durably turns to an empty table and a quiet time, after which the other files mean nothing.
    fn discard_holds(&self, facts: &mut Facts) -> Result<(), JournalError> {
        facts.clean = true;
        facts.start = 0;
        facts.boot = self.boot;
        facts.as_of = self.now.as_nanos();
        // It was on a clock that may be another's, and the bound covers what was left of it.
        facts.embargo_until = 0;
        self.extend_embargo(facts)
    }

    fn extend_embargo(&self, facts: &mut Facts) -> Result<(), JournalError> {
        let until = self.now + facts.bound;
        facts.embargo_until = facts.embargo_until.max(until.as_nanos());
        facts.store(&self.disk)
    }

    /// The next run, from the files it begins with to the removal of those of the last.
    ///
    /// The order is what makes every step safe to be killed after: the old files count until the new snapshot is there,
    /// and after a clean stop until the facts say that the server runs again.
    fn begin(
        self,
        found: &Inventory,
        past: RecoveredState,
        spoiled: &[(&str, Vec<u8>)],
        repaired: Option<String>,
    ) -> Result<OpenedJournal, JournalError> {
        let RecoveredState { mut facts, mut holds, last_run, suspect } = past;
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
        let sequence = found.names().map(|(at, _)| at).max().unwrap_or(0).max(facts.start) + 1;
        let segment = Segment::create(&disk, owner, sequence, options.segment_bytes)?;
        let mut snapshot = Snapshot::begin(&disk, owner, sequence)?;
        for RestoredHold { key, mode, token, ends, note } in &holds {
            let (mode, token, ends) = (*mode, *token, *ends);
            snapshot.add(&Record::Granted { key, mode, token, ends, note })?;
        }
        let length = snapshot.finish(false)?;
        facts.clean = false;
        facts.start = sequence;
        facts.boot = boot;
        facts.ceiling = next_number.saturating_add(FENCE_BLOCK_SIZE - 1);
        facts.bound = round_up_bound(last_end.since(now), options.max_lease);
        facts.embargo_until = embargo_until.map_or(0, Time::as_nanos);
        facts.as_of = now.as_nanos();
        facts.store(&disk)?;
        if suspect || !spoiled.is_empty() {
            let names = found.names().map(|(_, name)| name).filter(|_| suspect);
            quarantine(&disk, names, spoiled)?;
        }
        remove_before(&disk, sequence)?;
        let journal = Journal {
            disk: Arc::new(disk),
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

    /// The largest fencing number in what can still be read.
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
