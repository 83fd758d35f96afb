//! Everything that a request changes in the table is in the journal: a server that is killed leaves what it had.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;
use tenure_core::Time;
use tenure_core::table::Owner;
use tenure_server::journal::{Journal, JournalOptions, OpenedJournal};
use tenure_server::{Engine, Hangup, RowHolder, Settings};

const WALL: u64 = 1_700_000_000_000_000;
/// Id of a claim of the extension; the last digit distinguishes claims.
const CLAIM: &str = "0000000000000000000000000000000";

/// A server with a journal, and a second server after every request: one that reads the journal as after a kill.
struct Recorded {
    folder: TempDir,
    engine: Engine,
    now: Time,
    copies: usize,
}

impl Recorded {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let now = Time::ZERO + Duration::from_secs(1_000);
        let opened = open(&folder.path().join("data"), "boot", now);
        let engine = Engine::restore(Settings::default(), Some(b"hush"), opened, now).unwrap();
        Self { folder, engine, now, copies: 0 }
    }

    fn client(&mut self) -> Owner {
        let owner = self.engine.open(None, self.now).unwrap();
        assert_eq!(self.ask(owner, "auth\n_\nhush\n"), "ok\n");
        owner
    }

    fn greeted(&mut self) -> Owner {
        let owner = self.client();
        assert!(self.ask(owner, "hello\n_\n{}\n").starts_with("ok {"));
        owner
    }

    /// Sends a request, checks the journal, and returns the reply.
    fn ask(&mut self, from: Owner, request: &str) -> String {
        self.engine.receive(from, request.as_bytes(), self.now);
        self.check(from)
    }

    /// The token in a reply to a request for a lock.
    fn lock(&mut self, from: Owner, request: &str) -> String {
        let reply = self.ask(from, request);
        reply.split_whitespace().nth(1).unwrap_or_else(|| panic!("{reply:?}")).to_owned()
    }

    fn hang_up(&mut self, owner: Owner) {
        self.engine.hang_up(owner, Hangup::Finished, self.now);
        self.check(owner);
    }

    fn pass(&mut self, seconds: u64) {
        self.now = self.now + Duration::from_secs(seconds);
        self.engine.handle_timeout(self.now);
    }

    /// Compares this server with one that reads its journal now. Returns the output for `owner`.
    fn check(&mut self, owner: Owner) -> String {
        self.engine.commit().unwrap();
        let mut output = Vec::new();
        let (bytes, segments) = self.engine.output();
        for segment in segments.iter().filter(|segment| segment.to == owner) {
            output.extend_from_slice(&bytes[segment.bytes.clone()]);
        }
        self.engine.clear_output();
        let opened = open(&self.copy(), "boot", self.now);
        assert_eq!(opened.embargo_until, None);
        let mut restored = Engine::restore(Settings::default(), None, opened, self.now).unwrap();
        assert_eq!(holds(&mut restored, self.now), holds(&mut self.engine, self.now));
        String::from_utf8(output).unwrap()
    }

    fn copy(&mut self) -> PathBuf {
        self.copies += 1;
        let copy = self.folder.path().join(format!("copy-{}", self.copies));
        std::fs::create_dir(&copy).unwrap();
        for entry in std::fs::read_dir(self.folder.path().join("data")).unwrap() {
            let from = entry.unwrap().path();
            std::fs::copy(&from, copy.join(from.file_name().unwrap())).unwrap();
        }
        copy
    }

    fn held(&mut self) -> usize {
        holds(&mut self.engine, self.now).len()
    }
}

fn open(folder: &Path, boot: &str, now: Time) -> OpenedJournal {
    let options = JournalOptions { segment_bytes: 1 << 16, ..JournalOptions::new(folder) };
    Journal::open(&options, boot, now, WALL).unwrap()
}

/// A held key and its first holder.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct HeldKey {
    key: Box<[u8]>,
    holders: u32,
    by: String,
    number: u64,
    left: Duration,
}

fn holds(engine: &mut Engine, now: Time) -> Vec<HeldKey> {
    let (rows, _) = engine.key_rows(0, 1_000, now);
    let held = rows.into_iter().filter_map(|row| {
        let RowHolder { by, number, left, .. } = row.holder?;
        Some(HeldKey { key: row.key, holders: row.held, by, number, left })
    });
    let mut holds: Vec<_> = held.collect();
    holds.sort();
    holds
}

#[test]
fn requests_of_the_plain_protocol_are_recorded() {
    let mut server = Recorded::new();
    let (ann, bob) = (server.client(), server.client());
    let token = server.lock(ann, "l\nk\n0 30\n");
    server.pass(10);
    assert_eq!(server.ask(ann, &format!("n\nk\n{token} 60\n")), "ok 60\n");
    assert_eq!(server.ask(bob, "l\nk\n100 40\n"), "", "it waits");
    assert_eq!(server.ask(ann, &format!("r\nk\n{token}\n")), "ok\n");
    assert_eq!(server.held(), 1, "granted to the waiter");
    server.lock(ann, "sl\ns\n0 2 30\n");
    server.lock(bob, "sl\ns\n0 2 40\n");
    server.lock(ann, "l\nshort\n0 5\n");
    server.pass(5);
    server.check(ann);
    assert_eq!(server.held(), 2, "one has expired");
    server.hang_up(bob);
    server.hang_up(ann);
    assert_eq!(server.held(), 0);
}

#[test]
fn two_phase_claims_are_recorded() {
    let mut server = Recorded::new();
    let (ann, bob, cid) = (server.client(), server.client(), server.client());
    server.lock(ann, "e\nk\n30\n");
    server.pass(10);
    // The lease begins again when the grant is redeemed.
    let token = server.lock(ann, "w\nk\n0\n");
    assert_eq!(server.ask(bob, "e\nk\n30\n"), "queued\n");
    assert_eq!(server.ask(cid, "e\nk\n30\n"), "queued\n");
    assert_eq!(server.ask(bob, "w\nk\n100\n"), "", "it waits");
    server.pass(10);
    assert_eq!(server.ask(ann, &format!("r\nk\n{token}\n")), "ok\n");
    server.hang_up(bob);
    assert_eq!(server.held(), 1, "granted to the last, which has not asked for it yet");
    server.hang_up(cid);
    assert_eq!(server.held(), 0);
}

#[test]
fn requests_of_the_extension_are_recorded() {
    let mut server = Recorded::new();
    let (ann, bob) = (server.greeted(), server.greeted());
    let token = server.lock(ann, &format!("x\nk\n{CLAIM}1 x 30000 queue bound ann\n"));
    assert!(holds(&mut server.engine, server.now).iter().any(|held| held.by == "ann"));
    server.pass(10);
    assert_eq!(server.ask(ann, &format!("xn\nk\n{token} 60000\n")), "ok 60000 0\n");
    let queued = server.ask(bob, &format!("x\nk\n{CLAIM}2 x 40000 queue bound bob\n"));
    assert_eq!(queued, "queued\n");
    assert!(server.ask(ann, &format!("xa\n_\n{CLAIM}1\n")).ends_with("ok\n"));
    assert_eq!(server.held(), 1, "granted to the waiter");
    server.ask(bob, &format!("xa\n_\n{CLAIM}2\n"));
    assert_eq!(server.held(), 0);
    server.lock(ann, &format!("x\nk\n{CLAIM}3 s 30000 try detached ann\n"));
    server.hang_up(ann);
    assert_eq!(server.held(), 1, "detached");
    let number = holds(&mut server.engine, server.now)[0].number;
    assert_eq!(server.ask(bob, &format!("brk\nk\n{number} stuck\n")), "ok\n");
    assert_eq!(server.held(), 0);
}

#[test]
fn after_a_crash_of_the_machine_nothing_is_granted_while_a_lease_may_run() {
    let mut server = Recorded::new();
    let ann = server.client();
    server.lock(ann, "l\nk\n0 60\n");
    let copy = server.copy();
    let now = Time::ZERO + Duration::from_secs(5);
    let opened = open(&copy, "another boot", now);
    let mut engine = Engine::restore(Settings::default(), None, opened, now).unwrap();
    let bob = engine.open(None, now).unwrap();
    engine.receive(bob, b"l\nk\n100\n", now);
    engine.handle_timeout(now + Duration::from_secs(59));
    assert!(engine.output().0.is_empty(), "granted while the lease of the last run may be valid");
    let over = engine.poll_timeout().unwrap();
    assert!(over >= now + Duration::from_secs(60));
    engine.handle_timeout(over);
    assert!(engine.output().0.starts_with(b"ok "));
}

#[test]
fn after_ten_minutes_the_embargo_of_a_crash_still_covers_the_longest_lease() {
    let mut server = Recorded::new();
    let ann = server.client();
    server.lock(ann, "l\nlong\n0 3600\n");
    server.lock(ann, "l\nshort\n0 700\n");
    // By now the bound is lowered, if the leases that run allow it.
    server.pass(650);
    let left = Duration::from_secs(3600 - 650);
    let opened = open(&server.copy(), "another boot", server.now);
    assert!(opened.embargo_until.unwrap() >= server.now + left, "{:?}", opened.embargo_until);
}

#[test]
fn an_embargo_outlasts_a_clean_stop_whose_snapshot_is_lost() {
    let mut server = Recorded::new();
    let ann = server.client();
    server.lock(ann, "l\nk\n0 60\n");
    let (folder, now) = (server.copy(), server.now);
    let crashed = open(&folder, "another boot", now);
    let until = crashed.embargo_until.unwrap();
    crashed.journal.close(now).unwrap();
    for entry in std::fs::read_dir(&folder).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name().to_str().unwrap().starts_with("snapshot-") {
            std::fs::remove_file(entry.path()).unwrap();
        }
    }
    let options = JournalOptions { accept_loss: true, ..JournalOptions::new(&folder) };
    let opened = Journal::open(&options, "another boot", now, WALL).unwrap();
    assert!(opened.embargo_until.unwrap() >= until, "{:?}", opened.embargo_until);
}
