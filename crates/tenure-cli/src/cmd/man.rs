//! `tenure man`: prints one manual page for the command and its subcommands.

use std::io;

use clap::Command;
use clap_mangen::Man;

use crate::exit::Exit;

pub(crate) fn run(grammar: Command) -> Exit {
    match page(grammar) {
        Ok(text) => super::print(text.as_bytes()),
        Err(error) => super::fail("cannot write the manual page", &error),
    }
}

/// The text of the page.
pub(crate) fn page(mut grammar: Command) -> io::Result<String> {
    grammar.build();
    let man = Man::new(grammar.clone());
    let mut text = rendered(|to| {
        man.render_title(to)?;
        man.render_name_section(to)?;
        man.render_synopsis_section(to)?;
        man.render_description_section(to)?;
        man.render_options_section(to)?;
        man.render_version_section(to)
    })?;
    text.push_str(&list(&grammar)?);
    describe(&grammar, &mut text)?;
    // clap_mangen writes an omitted date as nothing: readers would take the next field, the version, for the date.
    Ok(text.replacen(".TH tenure 1  ", ".TH tenure 1 \"\" ", 1))
}

/// List of the subcommands. Each is a section of this page, so `tenure-run(1)` becomes `tenure run`.
fn list(grammar: &Command) -> io::Result<String> {
    let mut text = rendered(|to| Man::new(grammar.clone()).render_subcommands_section(to))?;
    for command in visible_commands(grammar) {
        let name = command.get_display_name().unwrap_or_else(|| command.get_name());
        let reference = format!("{}(1)\n", name.replace('-', "\\-"));
        text = text.replace(&reference, &format!("\\fB{}\\fR\n", full_name(command)));
    }
    Ok(text)
}

/// Appends a section for each command, and for its subcommands.
fn describe(grammar: &Command, text: &mut String) -> io::Result<()> {
    for command in visible_commands(grammar) {
        let man = Man::new(command.clone());
        let parts = rendered(|to| {
            man.render_synopsis_section(to)?;
            man.render_description_section(to)?;
            man.render_options_section(to)?;
            if command.get_after_help().is_some() { man.render_extra_section(to) } else { Ok(()) }
        })?;
        text.extend([".SH \"", &full_name(command).to_uppercase(), "\"\n"]);
        text.push_str(&parts.replace(".SH EXTRA", ".SH NOTES").replace(".SH ", ".SS "));
        if command.has_subcommands() {
            text.push_str(&list(command)?.replace(".SH ", ".SS "));
            describe(command, text)?;
        }
    }
    Ok(())
}

/// The commands that are not hidden.
fn visible_commands(grammar: &Command) -> impl Iterator<Item = &Command> {
    grammar
        .get_subcommands()
        .filter(|command| !command.is_hide_set() && command.get_name() != "help")
}

/// The command as it is typed: `tenure job add`.
fn full_name(command: &Command) -> &str {
    command.get_bin_name().unwrap_or_else(|| command.get_name())
}

fn rendered(write: impl FnOnce(&mut Vec<u8>) -> io::Result<()>) -> io::Result<String> {
    let mut text = Vec::new();
    write(&mut text)?;
    String::from_utf8(text).map_err(io::Error::other)
}
