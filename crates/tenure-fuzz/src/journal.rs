//! The data directory of the lock server: a start after a kill, with a file that was changed meanwhile.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use tenure_core::table::Mode;
use tenure_core::{LockToken, Time};
use tenure_server::journal::{Journal, JournalOptions};
use tenure_server::{Engine, Settings};

use crate::Samples;

#[path = "../../tenure-server/src/journal/format.rs"]
#[allow(dead_code, reason = "the journal uses the rest")]
mod format;

use format::{FRAME_END_MARK, FRAME_HEAD_LEN, HEADER_LEN, Record};

const BOOT: &str = "7ecacd41-249d-4cc1-bbe7-8c7b6ce1fd74";
const NOW: Time = Time::from_nanos(5_000_000_000);
const WALL_MICROS: u64 = 1_700_000_000_000_000;
const LEASE: Duration = Duration::from_secs(30);
/// Size of the segment, as small as the journal accepts.
const SEGMENT_BYTES: u64 = 1 << 16;
/// Largest number of records' bytes, so that the frame fits into the segment.
const MAX_RECORD_BYTES: usize = 32 << 10;

/// Opens a data directory that the input has changed.
///
/// If the first byte is zero, a file is overwritten: the second byte selects the file, the next two the offset, and the
/// rest is its new content there. Otherwise the input after the first byte is the records of one more frame, whose
/// checksums are valid: random bytes would never get past a checksum.
pub fn journal(bytes: &[u8]) {
    restored_holds(bytes);
}

/// Number of holds that the changed directory restores; `None` if it is refused.
fn restored_holds(bytes: &[u8]) -> Option<usize> {
    let (mode, rest) = bytes.split_first()?;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let data = folder.path().join("data");
    copy_template(&data);
    if *mode == 0 {
        overwrite(&data, rest);
    } else {
        append_frame(&data, rest);
    }
    let mut restored = None;
    for accept_loss in [false, true] {
        let options = JournalOptions { accept_loss, ..options(&data) };
        let Ok(opened) = Journal::open(&options, BOOT, NOW, WALL_MICROS) else { continue };
        if !accept_loss {
            restored = Some(opened.holds.len());
        }
        if let Ok(mut engine) = Engine::restore(Settings::default(), None, opened, NOW) {
            engine.handle_timeout(NOW + LEASE);
            let _ = engine.commit();
        }
    }
    restored
}

/// Valid frames, and changes of files.
pub fn journal_samples() -> Samples {
    let token = LockToken::new(WALL_MICROS + 5, 7);
    let ends = NOW + LEASE;
    let granted = |mode, number| Record::Granted {
        key: b"k",
        mode,
        token: LockToken::new(number, 1),
        ends,
        note: b"n",
    };
    let records = [
        vec![granted(Mode::Exclusive, token.number())],
        vec![granted(Mode::Slot { limit: 2 }, 9), Record::Renewed { number: 9, ends }],
        vec![granted(Mode::Shared, u64::MAX), Record::Ended { number: u64::MAX }],
        vec![Record::Sealed { next: 2 }],
    ];
    let mut samples =
        vec![vec![0, 0, 16, 0, 1, 2, 3], vec![0, 2, 0, 0, 0xff], vec![0, 3, 150, 0, 0]];
    for frame in records {
        let mut bytes = vec![1];
        for record in frame {
            record.encode(&mut bytes);
        }
        samples.push(bytes);
    }
    samples
}

fn options(data: &Path) -> JournalOptions {
    JournalOptions { segment_bytes: SEGMENT_BYTES, ..JournalOptions::new(data) }
}

/// Files of a server that was killed with two holds: names and content.
fn template() -> &'static [(PathBuf, Vec<u8>)] {
    static FILES: OnceLock<Vec<(PathBuf, Vec<u8>)>> = OnceLock::new();
    FILES.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let data = folder.path().join("data");
        let opened = Journal::open(&options(&data), BOOT, NOW, WALL_MICROS).expect("a fresh start");
        let mut journal = opened.journal;
        for (key, number) in [(&b"a"[..], opened.next_number), (b"b", opened.next_number + 1)] {
            let token = LockToken::new(number, 3);
            journal.granted(key, Mode::Exclusive, token, LEASE, NOW + LEASE, b"note");
            journal.commit().expect("committed");
        }
        drop(journal);
        let entries = fs::read_dir(&data).expect("the data directory");
        let mut files = Vec::new();
        for path in
            entries.map(|entry| entry.expect("an entry").path()).filter(|path| path.is_file())
        {
            let content = fs::read(&path).expect("a file");
            files.push((path.file_name().expect("a name").into(), content));
        }
        files.sort();
        files
    })
}

fn copy_template(data: &Path) {
    fs::create_dir(data).expect("created");
    for (name, content) in template() {
        fs::write(data.join(name), content).expect("written");
    }
}

fn overwrite(data: &Path, input: &[u8]) {
    let [file, low, high, patch @ ..] = input else { return };
    let files = template();
    let (name, content) = &files[usize::from(*file) % files.len()];
    let mut content = content.clone();
    let offset = usize::from(u16::from_le_bytes([*low, *high])).min(content.len());
    content.truncate(content.len().max(offset + patch.len()));
    content.resize(content.len().max(offset + patch.len()), 0);
    content[offset..offset + patch.len()].copy_from_slice(patch);
    fs::write(data.join(name), content).expect("written");
}

fn is_segment(name: &Path) -> bool {
    name.to_string_lossy().starts_with("journal-")
}

/// Appends a frame with these records to the segment.
fn append_frame(data: &Path, records: &[u8]) {
    let records = &records[..records.len().min(MAX_RECORD_BYTES)];
    let (name, content) =
        template().iter().rfind(|(name, _)| is_segment(name)).expect("there is a segment");
    let mut content = content.clone();
    let number = |at: usize| content[at..].first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
    let sequence = number(32).expect("a whole header");
    let mut offset = HEADER_LEN;
    loop {
        let length = content[offset..].first_chunk().map(|bytes| u32::from_le_bytes(*bytes));
        match usize::try_from(length.expect("the segment is not full")) {
            Ok(0) | Err(_) => break,
            Ok(length) => offset += FRAME_HEAD_LEN + length + 1,
        }
    }
    let mut frame = vec![0; FRAME_HEAD_LEN];
    frame.extend_from_slice(records);
    frame.push(FRAME_END_MARK);
    format::seal(&mut frame, NOW.as_nanos(), sequence, offset as u64);
    content[offset..offset + frame.len()].copy_from_slice(&frame);
    fs::write(data.join(name), content).expect("written");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_the_input_reach_the_table_and_a_changed_file_is_refused() {
        let mut grant = vec![1];
        let token = LockToken::new(WALL_MICROS + 1_000_000, 7);
        let (mode, ends) = (Mode::Exclusive, NOW + LEASE);
        Record::Granted { key: b"c", mode, token, ends, note: b"" }.encode(&mut grant);
        assert_eq!(restored_holds(&grant), Some(3));
        let unchanged = [0, 0];
        assert_eq!(restored_holds(&unchanged), Some(2));
        let segment = template().iter().position(|(name, _)| is_segment(name));
        let segment = u8::try_from(segment.expect("a segment")).expect("a small number");
        assert_eq!(restored_holds(&[0, segment, 150, 0, 0xff, 0xff]), None);
    }
}
