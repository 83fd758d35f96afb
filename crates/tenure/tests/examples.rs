//! Every example runs to its end.

use std::path::Path;
use std::process::Command;

mod services;

/// Cargo builds the examples with the tests, into a folder beside theirs.
fn run(example: &str, environment: &[(&str, &str)]) -> String {
    let tests = std::env::current_exe().expect("this program is somewhere");
    let folder = tests.parent().and_then(Path::parent).expect("in target/…/deps").join("examples");
    let mut command = Command::new(folder.join(example));
    command.env_remove("TENURE_STORE").envs(environment.iter().copied());
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{example}: {error}: cargo build --examples"));
    let (said, wrong) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{example}: {said}{wrong}");
    said.into_owned()
}

#[test]
fn each_does_what_it_says() {
    for (example, says) in [
        ("lock", "released"),
        ("two_phase", "our turn, with token"),
        ("semaphore", "ten downloads, at most 3 at a time"),
        ("leader", "the second leads: true"),
        ("handoff", "the next holder has the lock"),
    ] {
        let said = run(example, &[]);
        assert!(said.contains(says), "{example}: {said}");
    }
}

#[test]
fn lock_example_uses_the_store_from_the_environment() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = format!("file:{}", folder.path().display());
    let said = run("lock", &[("TENURE_STORE", &store)]);
    assert!(said.contains("released"), "{said}");
    assert!(folder.path().join("locks").is_dir(), "it was used");
}

#[test]
fn a_database_refuses_a_stale_token() {
    let Some(url) = services::postgres() else { return };
    let said = run("fencing_sql", &[("DATABASE_URL", &url)]);
    assert!(said.contains("saves: false; the current holder: true"), "{said}");
}

#[cfg(feature = "conformance")]
#[test]
fn stores_of_another_crate_pass_the_suite() {
    let said = run("custom_store", &[]);
    assert!(said.contains("cases of the suite passed"), "{said}");
    assert!(said.contains("held under token"), "{said}");
    let said = run("queue_store", &[]);
    assert!(said.contains("cases of the suite passed"), "{said}");
    assert!(said.contains("ok    processes_exclude_each_other"), "{said}");
}
