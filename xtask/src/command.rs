//! Running other programs: captured, or as a group that cannot outlive this process.

mod group;
mod line;

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use anyhow::{Context as _, Result, bail};

pub(crate) use group::Group;
pub(crate) use line::line;

/// Runs a command to its end and returns its stdout. An error contains the whole output.
pub(crate) fn stdout(command: &mut Command) -> Result<String> {
    let output = succeed(command)?;
    String::from_utf8(output.stdout)
        .with_context(|| format!("{} printed invalid UTF-8", line(command)))
}

/// Runs a command to its end and fails unless it succeeds. An error contains the whole output.
pub(crate) fn succeed(command: &mut Command) -> Result<Output> {
    let output = output(command)?;
    if !output.status.success() {
        bail!("{} failed: {}\n{}", line(command), output.status, printed(&output));
    }
    Ok(output)
}

/// Runs a command to its end and accepts any exit code.
pub(crate) fn output(command: &mut Command) -> Result<Output> {
    let output = command.stdin(Stdio::null()).output();
    output.with_context(|| format!("cannot run {}", line(command)))
}

/// Runs a command to its end, with its output on the terminal. Fails unless it succeeds.
pub(crate) fn show(command: &mut Command) -> Result<()> {
    println!("$ {}", line(command));
    let status = command.stdin(Stdio::null()).status();
    let status = status.with_context(|| format!("cannot run {}", line(command)))?;
    if !status.success() {
        bail!("{} failed: {status}", line(command));
    }
    Ok(())
}

/// The first program of that name on `PATH`.
pub(crate) fn on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// The whole output of a program, stdout first.
pub(crate) fn printed(output: &Output) -> String {
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    format!("{stdout}{stderr}").trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_carries_what_the_program_printed() {
        let error = stdout(Command::new("sh").args(["-c", "echo out; echo why >&2; exit 3"]));
        let text = format!("{:#}", error.unwrap_err());
        assert!(text.contains("sh -c"), "{text}");
        assert!(text.contains("out") && text.contains("why") && text.contains('3'), "{text}");
    }

    #[test]
    fn a_program_that_does_not_exist_is_named() {
        let error = stdout(&mut Command::new("/nowhere/tenure-no-such-program")).unwrap_err();
        assert!(format!("{error:#}").contains("tenure-no-such-program"), "{error:#}");
        assert_eq!(on_path("tenure-no-such-program"), None);
        assert!(on_path("sh").is_some());
    }
}
