//! Command lines in messages.

use std::path::PathBuf;
use std::process::Command;

/// The command line, for messages: the program's name and its arguments.
pub(crate) fn line(command: &Command) -> String {
    let program = PathBuf::from(command.get_program());
    let program = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let arguments = command.get_args().map(|argument| argument.to_string_lossy().into_owned());
    std::iter::once(program).chain(arguments).collect::<Vec<_>>().join(" ")
}
