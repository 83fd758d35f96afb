//! `tenure man`: one page for the command and its subcommands.

use std::io;

use clap_mangen::Man;

use crate::args;
use crate::exit::Exit;

pub(crate) fn run() -> Exit {
    match page() {
        Ok(text) => super::print(&text),
        Err(error) => super::fail("cannot write the manual page", &error),
    }
}

fn page() -> io::Result<Vec<u8>> {
    let mut grammar = args::grammar();
    grammar.build();
    let mut text = Vec::new();
    Man::new(grammar.clone()).render(&mut text)?;
    for command in grammar.get_subcommands().filter(|command| !command.is_hide_set()) {
        let heading = format!(".SH \"{}\"\n", command.get_name().to_uppercase());
        text.extend_from_slice(heading.as_bytes());
        let man = Man::new(command.clone());
        man.render_synopsis_section(&mut text)?;
        man.render_description_section(&mut text)?;
        man.render_options_section(&mut text)?;
        man.render_extra_section(&mut text)?;
    }
    Ok(text)
}
