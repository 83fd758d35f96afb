//! `tenure completions`: prints the completion script for a shell.

use clap_complete::Shell;

use crate::args;
use crate::exit::Exit;

pub(crate) fn run(shell: Shell) -> Exit {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut args::grammar(), "tenure", &mut text);
    super::print(&text)
}
