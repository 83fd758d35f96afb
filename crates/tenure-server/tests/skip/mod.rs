//! Reports of tests that cannot run here. The test harness itself would count them as passed.

use std::fs::OpenOptions;
use std::io::{Write as _, stderr};

/// Reports that the running test, or the rest of it, is skipped.
///
/// `cargo xtask test` names a file in `TENURE_TEST_SKIPS`, and lists at its end what was skipped.
#[allow(dead_code, reason = "not every test program skips")]
pub(crate) fn skip(reason: &str) {
    let thread = std::thread::current();
    let line = format!("{}: {}\n", thread.name().unwrap_or("a test"), reason.replace('\n', " "));
    // Not `eprintln!`: the harness shows the output of failed tests only.
    let _ = write!(stderr(), "skipped: {line}");
    if let Some(file) = std::env::var_os("TENURE_TEST_SKIPS") {
        // One write per line: test programs append at the same time.
        let mut file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(file)
            .expect("a file of skipped tests");
        file.write_all(line.as_bytes()).expect("the skipped test is recorded");
    }
}
