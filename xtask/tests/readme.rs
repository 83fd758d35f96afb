//! The commands of the README succeed as written.

use std::path::Path;
use std::process::Command;

/// The README's shell blocks.
fn scripts(readme: &str) -> Vec<&str> {
    let blocks = readme.split("```").skip(1).step_by(2);
    blocks.filter_map(|block| block.strip_prefix("sh\n")).collect()
}

/// The folder of the release build, where the README's first command puts `tenure`.
fn built(root: &Path) -> std::path::PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    root.join(target).join("release")
}

#[test]
fn every_command_of_the_readme_succeeds() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let readme = std::fs::read_to_string(root.join("README.md")).expect("there is a README");
    let scripts = scripts(&readme);
    assert!(scripts.contains(&"cargo xtask test\n"), "{scripts:?}");
    let store = std::env::temp_dir().join(format!("tenure-readme-{}", std::process::id()));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let paths = std::iter::once(built(&root)).chain(std::env::split_paths(&path));
    let path = std::env::join_paths(paths).expect("no colon in the folder's name");
    // `cargo xtask test` is skipped: it runs this test.
    for script in scripts.into_iter().filter(|script| *script != "cargo xtask test\n") {
        let mut shell = Command::new("sh");
        shell.args(["-euc", script]).current_dir(&root);
        let output = shell.env("PATH", &path).env("TENURE_DIR", &store).output();
        let output = output.expect("there is a shell");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{script}: {}\n{errors}", output.status);
    }
    std::fs::remove_dir_all(&store).expect("the commands used this store");
}
