//! Every file missing, truncated at every byte, with every bit flipped, from another server, of another version.

use super::super::format::{FORMAT_VERSION, FRAME_END_MARK, FRAME_HEAD_LEN, HEADER_LEN};
use super::super::{CrashCause, LastRun};
use super::*;

/// Directory of a killed server with a snapshot and several segments, with its holds and the time of the kill.
fn killed(options: &JournalOptions) -> (Image, Holds, Time) {
    let opened = open_with(options, None, BOOT, START).unwrap();
    let mut server = ModelServer::new(&opened, START, 5);
    let mut journal = opened.journal;
    for turn in 0..20 {
        // No merge in the later turns, so that some segments are sealed and not merged.
        journal.base.1 = if turn > 10 { u64::MAX } else { 0 };
        server.turn(&mut journal);
        journal.commit().unwrap();
        journal.wait_for_snapshot();
    }
    drop(journal);
    let image = Image::of(&options.dir);
    assert!(image.only("journal-").len() >= 3, "{image:?}");
    assert!(image.0.values().map(Vec::len).sum::<usize>() < 5000, "small enough to try every bit");
    (image, server.holds, server.now)
}

/// Checks that a damaged directory either restores the same holds (true) or is refused without a change (false).
fn judge(
    options: &JournalOptions,
    damaged: &Image,
    holds: &Holds,
    now: Time,
    context: &str,
) -> bool {
    match open_with(options, None, BOOT, now) {
        Ok(opened) => {
            assert_eq!(by_number(&opened.holds), *holds, "{context}");
            let repaired = opened.repaired.is_some();
            let torn = opened.last_run == LastRun::Crashed(CrashCause::TornTail);
            assert!(repaired != torn, "{context}: the damage was not reported");
            assert_eq!(torn, opened.embargo_until.is_some(), "{context}");
            true
        }
        Err(error) => {
            assert!(error.is_loss() || matches!(error, JournalError::Version { .. }), "{error}");
            let text = error.to_string();
            assert!(context.split(' ').any(|name| text.contains(name)), "{context}: {text}");
            assert_eq!(Image::of(&options.dir), *damaged, "{context}: a refusal changed something");
            false
        }
    }
}

#[test]
fn no_flipped_bit_and_no_cut_goes_unnoticed() {
    let folder = temporary();
    let options = small(&folder.path().join("data"));
    let (image, holds, now) = killed(&options);
    let mut torn = 0;
    for (name, bytes) in &image.0 {
        let mut try_with = |changed: Option<Vec<u8>>, context: &str| {
            let mut damaged = image.clone();
            match changed {
                Some(changed) => damaged.0.insert(name.clone(), changed),
                None => damaged.0.remove(name),
            };
            let path = options.dir.join(name);
            match damaged.0.get(name) {
                Some(bytes) => std::fs::write(path, bytes).unwrap(),
                None => std::fs::remove_file(path).unwrap(),
            }
            let opened = judge(&options, &damaged, &holds, now, context);
            if opened {
                torn += usize::from(!name.starts_with("facts"));
                image.put(&options.dir);
            } else {
                assert!(!name.starts_with("facts"), "{context}: the other copy is good");
            }
        };
        image.put(&options.dir);
        try_with(None, &format!("missing {name}"));
        for length in 0..bytes.len() {
            try_with(Some(bytes[..length].to_vec()), &format!("{name} cut to {length}"));
        }
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            try_with(Some(flipped), &format!("{name} with bit {bit} flipped"));
        }
        try_with(Some([bytes.as_slice(), b"more"].concat()), &format!("{name} with more"));
    }
    // A flipped bit behind the last frame looks like a torn frame head: at most as many as a head has bits.
    assert!(torn <= 20 * 8, "{torn} damages passed for a torn end");
}

#[test]
fn two_turns_that_changed_places_are_noticed() {
    let folder = temporary();
    let options = small(&folder.path().join("data"));
    let opened = open_with(&options, None, BOOT, START).unwrap();
    let mut server = ModelServer::new(&opened, START, 5);
    let mut journal = opened.journal;
    server.grant(&mut journal);
    journal.commit().unwrap();
    let name = Image::of(&options.dir).only("journal-").remove(0);
    let number = opened.next_number;
    let lease = Duration::from_secs(3);
    let mut ends = Vec::new();
    for number in [number, number + 1] {
        ends.push(std::fs::read(options.dir.join(&name)).unwrap());
        journal.renewed(number, lease, server.now + lease);
        journal.commit().unwrap();
    }
    drop(journal);
    let mut image = Image::of(&options.dir);
    let used = |bytes: &[u8]| bytes.iter().rposition(|byte| *byte != 0).unwrap() + 1;
    let (first, second) = (used(&ends[0]), used(&ends[1]));
    let bytes = image.0.get_mut(&name).unwrap();
    let last = used(bytes);
    assert_eq!(second - first, last - second, "of the same length");
    bytes[first..last].rotate_left(second - first);
    image.put(&options.dir);
    assert!(!judge(&options, &image, &server.holds, server.now, &name));
}

/// Offsets of the marks of all frames of a file.
fn marks(bytes: &[u8]) -> Vec<usize> {
    let mut marks = Vec::new();
    let mut at = HEADER_LEN;
    while let Some((length, _)) = bytes.get(at..).and_then(<[u8]>::split_first_chunk)
        && *length != [0; 4]
    {
        at += FRAME_HEAD_LEN + usize::try_from(u32::from_le_bytes(*length)).unwrap();
        marks.push(at);
        at += 1;
    }
    marks
}

#[test]
fn an_erased_mark_passes_for_a_torn_end_only_at_the_end_of_the_journal() {
    let folder = temporary();
    // Two runs with one segment each: the second begins with the holds of the first in its snapshot.
    let options = JournalOptions { segment_bytes: 1 << 14, ..small(&folder.path().join("data")) };
    let (mut now, mut holds) = (START, Holds::new());
    for seed in [1, 2] {
        let opened = open_with(&options, None, BOOT, now).unwrap();
        let mut server = ModelServer::new(&opened, now, seed);
        let mut journal = opened.journal;
        for _ in 0..10 {
            server.turn(&mut journal);
            journal.commit().unwrap();
        }
        (now, holds) = (server.now, server.holds);
    }
    let image = Image::of(&options.dir);
    let all = [image.only("snapshot-"), image.only("journal-")].concat();
    let marks =
        all.iter().flat_map(|name| marks(&image.0[name]).into_iter().map(move |at| (name, at)));
    let mut marks: Vec<_> = marks.collect();
    assert_eq!((all.len(), marks.len()), (2, 11), "one of the snapshot, one per turn");
    let (last, end) = marks.pop().unwrap();
    let erase = |name: &String, at: usize| {
        let mut damaged = image.clone();
        let byte = &mut damaged.0.get_mut(name).unwrap()[at];
        assert_eq!(std::mem::take(byte), FRAME_END_MARK, "{name}: byte {at}");
        damaged.put(&options.dir);
        damaged
    };
    for (name, at) in marks {
        let damaged = erase(name, at);
        assert!(!judge(&options, &damaged, &holds, now, name), "{name}: byte {at}");
    }
    erase(last, end);
    let opened = open_with(&options, None, BOOT, now).unwrap();
    assert_eq!(opened.last_run, LastRun::Crashed(CrashCause::TornTail));
}

#[test]
fn both_copies_of_the_facts_are_needed_to_lose_them() {
    let folder = temporary();
    let options = small(&folder.path().join("data"));
    let (image, holds, now) = killed(&options);
    let mut damaged = image.clone();
    damaged.0.get_mut("facts.a").unwrap()[40] ^= 1;
    damaged.put(&options.dir);
    let opened = open_with(&options, None, BOOT, now).unwrap();
    assert!(opened.repaired.unwrap().starts_with("facts.a is damaged"));
    assert_eq!(by_number(&opened.holds), holds);
    drop(opened.journal);
    let kept = std::fs::read(options.dir.join("quarantine/facts.a")).unwrap();
    assert_eq!(kept, damaged.0["facts.a"]);
    assert_eq!(open_with(&options, None, BOOT, now).unwrap().repaired, None);

    for name in ["facts.a", "facts.b"] {
        damaged.0.get_mut(name).unwrap().truncate(50);
    }
    damaged.put(&options.dir);
    let error = open_with(&options, None, BOOT, now).unwrap_err();
    assert!(matches!(error, JournalError::Damaged { .. }), "{error}");
    for name in ["facts.a", "facts.b"] {
        damaged.0.remove(name);
    }
    damaged.put(&options.dir);
    let error = open_with(&options, None, BOOT, now).unwrap_err();
    assert!(matches!(error, JournalError::Missing { .. }), "{error}");
}

#[test]
fn accept_loss_begins_an_embargo_and_keeps_fencing_numbers_growing() {
    let folder = temporary();
    let options = small(&folder.path().join("data"));
    // Fencing numbers far above a block: to exceed them, recovery must have read them.
    let (image, holds, now) = killed(&JournalOptions { fence_floor: 1 << 30, ..options.clone() });
    let highest = *holds.keys().max().unwrap();
    let accepting = JournalOptions { accept_loss: true, ..options.clone() };
    let bound = Duration::from_secs(128);
    for name in [image.only("snapshot-").remove(0), image.only("journal-").remove(0)] {
        let mut damaged = image.clone();
        damaged.0.get_mut(&name).unwrap()[130] ^= 4;
        damaged.put(&options.dir);
        let error = open_with(&options, None, BOOT, now).unwrap_err();
        let opened = open_with(&accepting, None, BOOT, now).unwrap();
        assert_eq!(opened.last_run, LastRun::LossAccepted(error.to_string()));
        assert_eq!((opened.holds.len(), opened.embargo_until), (0, Some(now + bound)));
        assert!(opened.next_number > highest);
        let kept = std::fs::read(options.dir.join("quarantine").join(&name)).unwrap();
        assert_eq!(kept, damaged.0[&name]);
        drop(opened.journal);
        // The loss is accepted once: the next start is an ordinary one, and keeps the embargo.
        let opened = open_with(&options, None, BOOT, now).unwrap();
        assert_eq!((opened.last_run, opened.embargo_until), (LastRun::Killed, Some(now + bound)));
    }
    let mut damaged = image.clone();
    for name in ["facts.a", "facts.b"] {
        damaged.0.get_mut(name).unwrap()[99] ^= 1;
    }
    damaged.put(&options.dir);
    let opened = open_with(&accepting, None, BOOT, now).unwrap();
    assert_eq!(opened.embargo_until, Some(now + options.max_lease));
    assert!(opened.next_number > highest, "numbers that can still be read are exceeded");
    drop(opened.journal);
    damaged.put(&options.dir);
    let floor = JournalOptions { fence_floor: 1 << 40, ..accepting.clone() };
    assert!(open_with(&floor, None, BOOT, now).unwrap().next_number > 1 << 40);
    // Without damage nothing is discarded, and the floor applies as well.
    image.put(&options.dir);
    assert!(open_with(&floor, None, BOOT, now).unwrap().next_number > 1 << 40);
    image.put(&options.dir);
    let opened = open_with(&accepting, None, BOOT, now).unwrap();
    assert_eq!((opened.last_run, by_number(&opened.holds)), (LastRun::Killed, holds));
}

#[test]
fn files_of_another_server_are_refused() {
    let folder = temporary();
    let options = small(&folder.path().join("data"));
    let (image, holds, now) = killed(&options);
    let elsewhere = small(&folder.path().join("elsewhere"));
    let (other, ..) = killed(&elsewhere);
    for name in image.0.keys() {
        let mut mixed = image.clone();
        mixed.0.insert(name.clone(), other.0.get(name).expect("the same files").clone());
        mixed.put(&options.dir);
        assert!(!judge(&options, &mixed, &holds, now, &format!("{name} facts.b")), "{name}");
    }
    for name in image.0.keys().filter(|name| !name.starts_with("facts")) {
        let mut mixed = image.clone();
        mixed.0.insert(name.clone(), b"Dear diary, this is quite another file. ".repeat(20));
        mixed.put(&options.dir);
        assert!(!judge(&options, &mixed, &holds, now, name), "{name}");
    }
    // A file of the same server under the name of another file.
    let [first, second] = &image.only("journal-")[..2] else { panic!() };
    let mut mixed = image.clone();
    mixed.0.insert(first.clone(), image.0[second].clone());
    mixed.put(&options.dir);
    assert!(!judge(&options, &mixed, &holds, now, first));
    // The same with files that have no records.
    let empty = small(&folder.path().join("empty"));
    let mut images = Vec::new();
    for _ in 0..2 {
        drop(open_with(&empty, None, BOOT, START).unwrap());
        images.push(Image::of(&empty.dir));
    }
    for prefix in ["journal-", "snapshot-"] {
        let [old, new] = [&images[0], &images[1]].map(|image| image.only(prefix).remove(0));
        let mut mixed = images[1].clone();
        mixed.0.insert(new.clone(), images[0].0[&old].clone());
        mixed.put(&empty.dir);
        assert!(!judge(&empty, &mixed, &Holds::new(), START, &new), "{new}");
    }
}

#[test]
fn another_format_version_is_refused_even_with_accept_loss() {
    let folder = temporary();
    let options = small(&folder.path().join("data"));
    let accepting = JournalOptions { accept_loss: true, ..options.clone() };
    let (image, _, now) = killed(&options);
    for name in image.0.keys() {
        let mut newer = image.clone();
        let bytes = newer.0.get_mut(name).unwrap();
        bytes[8..12].copy_from_slice(&(FORMAT_VERSION + 1).to_le_bytes());
        bytes[12..16].copy_from_slice(&(!(FORMAT_VERSION + 1)).to_le_bytes());
        newer.put(&options.dir);
        for options in [&options, &accepting] {
            let error = open_with(options, None, BOOT, now).unwrap_err();
            assert!(matches!(error, JournalError::Version { found: 2, .. }), "{error}");
            assert!(error.to_string().contains("version 2, this server reads version 1"));
        }
    }
}

#[test]
fn a_snapshot_of_a_clean_stop_is_refused_like_any_other() {
    let folder = temporary();
    let options = small(&folder.path().join("data"));
    let (image, holds, now) = killed(&options);
    image.put(&options.dir);
    open_with(&options, None, BOOT, now).unwrap().journal.close(now).unwrap();
    let clean = Image::of(&options.dir);
    assert_eq!(clean.0.len(), 3, "two copies of the facts, and a snapshot");
    let name = clean.only("snapshot-").remove(0);
    for boot in [BOOT, OTHER_BOOT] {
        for bit in 0..clean.0[&name].len() * 8 {
            let mut damaged = clean.clone();
            damaged.0.get_mut(&name).unwrap()[bit / 8] ^= 1 << (bit % 8);
            std::fs::write(options.dir.join(&name), &damaged.0[&name]).unwrap();
            let error = open_with(&options, None, boot, now).unwrap_err();
            assert!(error.to_string().contains(&name), "{error}");
            assert_eq!(Image::of(&options.dir), damaged);
        }
        std::fs::remove_file(options.dir.join(&name)).unwrap();
        let error = open_with(&options, None, boot, now).unwrap_err();
        assert!(matches!(error, JournalError::Missing { .. }), "{error}");
        // If the loss is accepted, the embargo lasts until the last lease ends.
        let accepting = JournalOptions { accept_loss: true, ..options.clone() };
        let opened = open_with(&accepting, None, boot, now).unwrap();
        assert_eq!(opened.last_run, LastRun::LossAccepted(error.to_string()));
        assert_eq!(opened.embargo_until, holds.values().map(|hold| hold.ends).max());
        drop(opened.journal);
        clean.put(&options.dir);
    }
    let opened = open_with(&options, None, BOOT, now).unwrap();
    assert_eq!((opened.last_run, by_number(&opened.holds)), (LastRun::Clean, holds));
}

#[test]
fn after_a_machine_crash_the_state_of_segments_and_snapshots_does_not_matter() {
    let folder = temporary();
    let options = small(&folder.path().join("data"));
    let (image, _, now) = killed(&options);
    let damages: [fn(&mut Vec<u8>); 4] = [
        |_| {},
        Vec::clear,
        |bytes| bytes.truncate(200),
        |bytes| bytes.iter_mut().for_each(|byte| *byte = 0),
    ];
    for damage in damages {
        let mut crashed = image.clone();
        let files = crashed.0.iter_mut().filter(|(name, _)| !name.starts_with("facts"));
        files.for_each(|(_, bytes)| damage(bytes));
        crashed.put(&options.dir);
        let opened = open_with(&options, None, OTHER_BOOT, now).unwrap();
        assert_eq!(opened.last_run, LastRun::Crashed(CrashCause::BootChanged));
        assert_eq!((opened.holds.len(), opened.repaired.is_none()), (0, true));
        assert_eq!(opened.embargo_until, Some(now + Duration::from_secs(128)));
        drop(opened.journal);
        for name in image.0.keys().filter(|name| !name.starts_with("facts")) {
            let kept = std::fs::read(options.dir.join("quarantine").join(name)).unwrap();
            assert_eq!(kept, crashed.0[name], "{name}");
        }
    }
}
