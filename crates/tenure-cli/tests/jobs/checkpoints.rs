//! `tenure job checkpoint`: chunks that scripts claim, save and complete.

use serde_json::Value;

use crate::queue::Queue;
use crate::support::eventually;

/// A table of checkpoints, and the command on it.
struct Chunks {
    queue: Queue,
    table: String,
}

impl Chunks {
    fn new(name: &str) -> Option<Self> {
        let queue = Queue::new(name)?;
        let table = format!("{}.chunks", queue.schema);
        assert_eq!(queue.outcome(&["schema", "--apply", "--checkpoints", &table]).0, Some(0));
        Some(Self { queue, table })
    }

    fn run(&self, arguments: &[&str]) -> (Option<i32>, String, String) {
        let begin = ["job", "checkpoint", arguments[0], "--checkpoints", &self.table];
        self.queue.outcome(&[&begin, &arguments[1..]].concat())
    }

    fn claim(&self, rest: &[&str]) -> String {
        let (code, handle, stderr) = self.run(&[&["claim", "m", "a"], rest].concat());
        assert_eq!(code, Some(0), "{stderr}");
        handle.trim().to_owned()
    }

    fn show(&self) -> Value {
        let (code, lines, stderr) = self.run(&["ls", "--json", "m"]);
        assert_eq!(code, Some(0), "{stderr}");
        serde_json::from_str(lines.lines().next().unwrap()).unwrap()
    }
}

#[test]
fn a_script_claims_saves_and_completes_a_chunk() {
    let Some(chunks) = Chunks::new("chunks") else { return };
    assert_eq!(chunks.run(&["ls"]).1, "no chunks\n");
    let handle = chunks.claim(&[]);
    let (code, stdout, stderr) = chunks.run(&["claim", "m", "a"]);
    assert_eq!((code, &*stdout), (Some(1), ""));
    assert!(stderr.contains("chunk a of m is held by") && stderr.contains("until 2"), "{stderr}");
    let until = chunks.show()["locked_until"].clone();
    let save = ["save", "m", "a", "--handle", &handle, "--rows", "600", "--lease", "10m"];
    assert_eq!(chunks.run(&save).0, Some(0));
    let shown = chunks.show();
    assert_eq!((&shown["held"], &shown["rows"]), (&true.into(), &600.into()));
    assert!(shown["locked_until"].as_str() > until.as_str(), "{shown} after {until}");
    assert_eq!(shown["last_synced_at"], Value::Null, "not before it is complete");
    // Without a number the claim is only renewed.
    assert_eq!(chunks.run(&["save", "m", "a", "--handle", &handle]).0, Some(0));
    assert_eq!(chunks.show()["rows"], 600);
    let complete = ["complete", "m", "a", "--handle", &handle, "--rows", "1204"];
    assert_eq!(chunks.run(&complete).0, Some(0));
    let shown = chunks.show();
    assert_eq!((&shown["held"], &shown["rows"]), (&false.into(), &1204.into()));
    assert!(shown["last_synced_at"].is_string(), "{shown}");
    let (_, table, _) = chunks.run(&["ls"]);
    assert!(table.starts_with("MATRIX") && table.contains("1204"), "{table}");
    let (code, _, stderr) = chunks.run(&complete);
    assert!(code == Some(1) && stderr.contains("was lost"), "{stderr}");
}

#[test]
fn a_lost_claim_changes_nothing() {
    let Some(chunks) = Chunks::new("chunks_lost") else { return };
    let first = chunks.claim(&["--lease", "1s"]);
    // The claim ends with its lease, without a process.
    let second = eventually("the lease ends", || {
        let (code, handle, _) = chunks.run(&["claim", "m", "a"]);
        (code == Some(0)).then(|| handle.trim().to_owned())
    });
    assert_ne!(first, second);
    for late in [&["save"][..], &["complete", "--rows", "7"]] {
        let rest = ["m", "a", "--handle", &first];
        let (code, _, stderr) = chunks.run(&[late, &rest].concat());
        assert!(code == Some(1) && stderr.contains("was lost"), "{late:?}: {code:?} {stderr}");
    }
    let shown = chunks.show();
    assert_eq!((&shown["rows"], &shown["lease_token"]), (&Value::Null, &2.into()));
    let other = ["complete", "n", "a", "--handle", &second, "--rows", "7"];
    assert_eq!(chunks.run(&other).0, Some(1), "the same chunk of another matrix");
    assert_eq!(chunks.run(&["complete", "m", "a", "--handle", &second, "--rows", "8"]).0, Some(0));
    assert_eq!(chunks.show()["rows"], 8);
}

#[test]
fn a_late_save_does_not_revive_a_claim() {
    let Some(chunks) = Chunks::new("chunks_late") else { return };
    let handle = chunks.claim(&["--lease", "1s"]);
    eventually("the lease ends", || (chunks.show()["held"] == false).then_some(()));
    assert_eq!(chunks.run(&["save", "m", "a", "--handle", &handle, "--rows", "3"]).0, Some(1));
    // Completed late, but claimed by no other worker since: accepted, as for jobs.
    assert_eq!(chunks.run(&["complete", "m", "a", "--handle", &handle, "--rows", "4"]).0, Some(0));
    assert_eq!(chunks.show()["rows"], 4);
}

#[test]
fn invalid_checkpoint_arguments_are_rejected() {
    let Some(chunks) = Chunks::new("chunks_input") else { return };
    for (arguments, code, says) in [
        (&["save", "m", "a", "--handle", "7"][..], 2, "handle"),
        (&["complete", "m", "a", "--handle", "1@w"], 2, "--rows"),
        (&["complete", "m", "a", "--handle", "1@w", "--rows", "-1"], 2, "-1"),
        (&["claim", "m", ""], 2, "chunk_hash"),
        (&["claim", "m", "a", "--lease", "10ms"], 2, "10ms"),
        (&["ls", "--limit", "0"], 2, "limit"),
    ] {
        let (exit, _, stderr) = chunks.run(arguments);
        assert_eq!(exit, Some(code), "{arguments:?}: {stderr}");
        assert!(stderr.contains(says) && stderr.lines().count() == 1, "{arguments:?}: {stderr}");
    }
    let missing = ["job", "checkpoint", "ls", "--checkpoints", "no_such_chunks"];
    let (code, _, stderr) = chunks.queue.outcome(&missing);
    assert!(code == Some(125) && stderr.contains("--checkpoints no_such_chunks"), "{stderr}");
}
