//! The log that all commands of a soak append to, and the turns that are read from it.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::str::FromStr;

use anyhow::{Context as _, Result, bail};
use nix::time::{ClockId, clock_gettime};

/// One of the two versions under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Version {
    Old,
    New,
}

impl Version {
    pub(super) const BOTH: [Self; 2] = [Self::Old, Self::New];

    pub(super) fn other(self) -> Self {
        match self {
            Self::Old => Self::New,
            Self::New => Self::Old,
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Old => "old",
            Self::New => "new",
        })
    }
}

impl FromStr for Version {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "old" => Ok(Self::Old),
            "new" => Ok(Self::New),
            _ => bail!("invalid version {text:?}"),
        }
    }
}

/// One run of a command under a lock or for a job.
///
/// `begin` and `last` are instants at which the command itself read the clock, so it certainly ran at both. The true end
/// is at `last` or later: two turns that overlap here did overlap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    /// Name of the lock or of the job.
    pub(super) name: String,
    /// Name of the tenure process that ran the command.
    pub(super) by: String,
    pub(super) version: Version,
    /// The fencing token; `None` if the command received none.
    pub(super) token: Option<u128>,
    /// Attempt of the job; 0 for a lock.
    pub(super) attempt: u32,
    /// Start, in nanoseconds of `CLOCK_BOOTTIME`; `last` is on the same clock.
    pub(super) begin: u64,
    pub(super) last: u64,
    /// Longest time between two log lines of the command: long if it was stopped, or if the machine was too busy.
    pub(super) pause: u64,
    /// The command ended by itself.
    pub(super) ended: bool,
    /// Process id of the command.
    pub(super) pid: i32,
}

/// Nanoseconds of `CLOCK_BOOTTIME`, which all processes of the host share and which cannot be set.
pub(super) fn now() -> Result<u64> {
    let now = clock_gettime(ClockId::CLOCK_BOOTTIME).context("reading the clock")?;
    let (seconds, nanos) = (u64::try_from(now.tv_sec())?, u64::try_from(now.tv_nsec())?);
    Ok(seconds * 1_000_000_000 + nanos)
}

/// Identifies a turn within the log.
///
/// The token is not part of it: two turns with one token are a violation that must be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TurnId {
    pub(super) begin: u64,
    pub(super) pid: i32,
}

impl fmt::Display for TurnId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.begin, self.pid)
    }
}

impl FromStr for TurnId {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (begin, pid) = text.split_once('-').context("invalid turn id")?;
        Ok(Self { begin: begin.parse()?, pid: pid.parse()? })
    }
}

/// The line that begins a turn.
pub(super) fn begin_line(turn: &Turn) -> String {
    let id = TurnId { begin: turn.begin, pid: turn.pid };
    let token = turn.token.map_or_else(|| "-".to_owned(), |token| token.to_string());
    let Turn { by, version, name, attempt, .. } = turn;
    format!("begin {id} {by} {version} {token} {attempt} {name}\n")
}

/// The line that shows that a turn still runs.
pub(super) fn beat_line(id: TurnId, at: u64) -> String {
    format!("beat {id} {at}\n")
}

/// The line of a command that ends by itself.
pub(super) fn end_line(id: TurnId, at: u64) -> String {
    format!("end {id} {at}\n")
}

/// Reads the log as it grows.
pub(super) struct Log {
    file: File,
    /// Bytes that were read and are not yet a whole line.
    rest: Vec<u8>,
    turns: BTreeMap<TurnId, Turn>,
}

impl Log {
    /// Creates the file.
    pub(super) fn create(path: &Path) -> Result<Self> {
        let file = File::options().create_new(true).append(true).read(true).open(path);
        let file = file.with_context(|| format!("creating {}", path.display()))?;
        Ok(Self { file, rest: Vec::new(), turns: BTreeMap::new() })
    }

    /// Reads the lines that were appended since the last call.
    pub(super) fn read(&mut self) -> Result<()> {
        self.file.read_to_end(&mut self.rest).context("reading the log")?;
        let Some(end) = self.rest.iter().rposition(|byte| *byte == b'\n') else { return Ok(()) };
        let whole: Vec<u8> = self.rest.drain(..=end).collect();
        let whole = String::from_utf8(whole).context("reading the log")?;
        for line in whole.lines() {
            note(&mut self.turns, line).with_context(|| format!("a line of the log: {line:?}"))?;
        }
        Ok(())
    }

    /// All turns, by their begin.
    pub(super) fn turns(&self) -> impl Iterator<Item = &Turn> {
        self.turns.values()
    }

    /// The turns of a process that have begun and not ended by themselves.
    pub(super) fn open_turns<'a>(&'a self, by: &'a str) -> impl Iterator<Item = &'a Turn> {
        // The turns of a running process are among the latest, so a bounded scan finds them.
        self.turns.values().rev().take(256).filter(move |turn| turn.by == by && !turn.ended)
    }
}

fn note(turns: &mut BTreeMap<TurnId, Turn>, line: &str) -> Result<()> {
    let mut words = line.split(' ');
    let mut word = || words.next().context("a word is missing");
    let (what, id) = (word()?, word()?.parse::<TurnId>()?);
    if what == "begin" {
        let (by, version) = (word()?.to_owned(), word()?.parse()?);
        let token = match word()? {
            "-" => None,
            token => Some(token.parse()?),
        };
        let (attempt, name) = (word()?.parse()?, word()?.to_owned());
        let TurnId { begin, pid } = id;
        let (last, pause, ended) = (begin, 0, false);
        let turn = Turn { name, by, version, token, attempt, begin, last, pause, ended, pid };
        if turns.insert(id, turn).is_some() {
            bail!("the turn began before");
        }
        return Ok(());
    }
    let turn = turns.get_mut(&id).context("the turn has not begun")?;
    let at: u64 = word()?.parse()?;
    turn.pause = turn.pause.max(at.saturating_sub(turn.last));
    turn.last = turn.last.max(at);
    match what {
        "beat" => {}
        "end" => turn.ended = true,
        _ => bail!("unknown event {what:?}"),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stores::Folder;
    use std::io::Write as _;

    #[test]
    fn turns_are_read_as_the_log_grows() {
        let folder = Folder::create("upgrade-log").unwrap();
        let path = folder.path().join("log");
        let mut log = Log::create(&path).unwrap();
        let mut file = File::options().append(true).open(&path).unwrap();
        let turn = Turn {
            name: "a".to_owned(),
            by: "3.1".to_owned(),
            version: Version::New,
            token: Some(u128::from(u64::MAX) + 7),
            attempt: 2,
            begin: 100,
            last: 100,
            pause: 0,
            ended: false,
            pid: 41,
        };
        let id = TurnId { begin: 100, pid: 41 };
        file.write_all(begin_line(&turn).as_bytes()).unwrap();
        log.read().unwrap();
        assert_eq!(log.turns().collect::<Vec<_>>(), [&turn]);

        // An incomplete line is kept until the rest of it is read.
        let lines = beat_line(id, 150) + &end_line(id, 170);
        let (first, second) = lines.split_at(lines.len() - 4);
        file.write_all(first.as_bytes()).unwrap();
        log.read().unwrap();
        assert_eq!(log.open_turns("3.1").next().map(|turn| turn.last), Some(150));
        file.write_all(second.as_bytes()).unwrap();
        log.read().unwrap();
        assert_eq!(
            log.turns().next(),
            Some(&Turn { last: 170, pause: 50, ended: true, ..turn.clone() })
        );
        assert_eq!(log.open_turns("3.1").count(), 0);

        let without_token = Turn { token: None, begin: 180, last: 180, ..turn };
        file.write_all(begin_line(&without_token).as_bytes()).unwrap();
        log.read().unwrap();
        assert_eq!(log.turns().last(), Some(&without_token));
    }

    #[test]
    fn a_line_that_is_not_understood_is_an_error() {
        let mut turns = BTreeMap::new();
        for line in ["beat 1-1 5", "begin 1-1 0.0 newer 7 0 a", "end 1-1", "shrug 1-1 5", ""] {
            assert!(note(&mut turns, line).is_err(), "{line}");
        }
        note(&mut turns, "begin 1-1 0.0 old 7 0 a").unwrap();
        assert!(note(&mut turns, "begin 1-1 0.0 old 7 0 a").is_err());
    }
}
