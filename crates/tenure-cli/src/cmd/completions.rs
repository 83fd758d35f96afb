//! `tenure completions`: prints the completion script for a shell.

use clap::Command;
use clap_complete::Shell;

use crate::exit::Exit;

pub(crate) fn run(shell: Shell, mut grammar: Command) -> Exit {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut grammar, "tenure", &mut text);
    super::print(&text)
}
