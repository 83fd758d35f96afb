//! The commands of the README work as they stand.

use std::path::Path;
use std::process::Command;

/// The lines of the README's shell blocks.
fn commands(readme: &str) -> Vec<&str> {
    let blocks = readme.split("```").skip(1).step_by(2);
    blocks.filter_map(|block| block.strip_prefix("sh\n")).flat_map(str::lines).collect()
}

#[test]
fn every_command_of_the_readme_succeeds() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let readme = std::fs::read_to_string(root.join("README.md")).expect("there is a README");
    let commands = commands(&readme);
    assert!(commands.contains(&"cargo xtask test"), "{commands:?}");
    // The test command is what runs this test.
    for line in commands.into_iter().filter(|line| *line != "cargo xtask test") {
        let output = Command::new("sh").args(["-c", line]).current_dir(&root).output();
        let output = output.expect("there is a shell");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{line}: {}\n{errors}", output.status);
    }
}
