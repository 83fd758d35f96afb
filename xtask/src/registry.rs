//! Named entries to run, shared by `bench` and `soak`.

use std::process::ExitCode;

use anyhow::Result;

/// A bench or a soak.
pub(crate) struct Entry {
    /// Name on the command line.
    pub(crate) name: &'static str,
    /// One line for `--list`.
    pub(crate) about: &'static str,
    /// Runs the entry with the arguments after its name.
    pub(crate) run: fn(&[String]) -> Result<()>,
}

#[derive(clap::Args)]
pub(crate) struct RegistryArgs {
    /// Name of the entry to run; without a name all run, one after the other
    name: Option<String>,
    /// Print the names, one per line
    #[arg(long)]
    list: bool,
    /// Arguments passed on to the entry
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    rest: Vec<String>,
}

const EXIT_USAGE: u8 = 2;

/// Runs the entries that `arguments` select; `command` is the subcommand's name, for messages.
pub(crate) fn run(command: &str, entries: &[Entry], arguments: &RegistryArgs) -> Result<ExitCode> {
    if arguments.list {
        print!("{}", listing(entries));
        return Ok(ExitCode::SUCCESS);
    }
    let Some(chosen) = choose(entries, arguments.name.as_deref()) else {
        let name = arguments.name.as_deref().unwrap_or_default();
        eprintln!("error: unknown {command} {name:?}\n");
        eprintln!("usage: cargo xtask {command} [NAME] [ARGUMENTS]\n");
        eprint!("{}", listing(entries));
        return Ok(ExitCode::from(EXIT_USAGE));
    };
    if chosen.is_empty() {
        println!("no {command} is registered yet");
    }
    for entry in chosen {
        println!("{command} {}: {}", entry.name, entry.about);
        (entry.run)(&arguments.rest)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn choose<'a>(entries: &'a [Entry], name: Option<&str>) -> Option<Vec<&'a Entry>> {
    match name {
        None => Some(entries.iter().collect()),
        Some(name) => entries.iter().find(|entry| entry.name == name).map(|entry| vec![entry]),
    }
}

fn listing(entries: &[Entry]) -> String {
    entries.iter().fold(String::new(), |text, Entry { name, about, .. }| {
        format!("{text}{name:<12} {about}\n")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENTRIES: &[Entry] = &[
        Entry { name: "one", about: "the first", run: |_| Ok(()) },
        Entry { name: "two", about: "the second", run: |_| anyhow::bail!("broke") },
    ];

    fn ask(name: Option<&str>, list: bool) -> Result<ExitCode> {
        run("bench", ENTRIES, &RegistryArgs { name: name.map(str::to_owned), list, rest: vec![] })
    }

    #[test]
    fn an_unknown_name_is_a_usage_error() {
        assert_eq!(ask(Some("three"), false).unwrap(), ExitCode::from(2));
    }

    #[test]
    fn a_name_runs_that_entry_alone() {
        assert_eq!(ask(Some("one"), false).unwrap(), ExitCode::SUCCESS);
        assert!(ask(Some("two"), false).is_err());
    }

    #[test]
    fn no_name_runs_all() {
        assert_eq!(choose(ENTRIES, None).unwrap().len(), 2);
        assert!(ask(None, false).is_err());
    }

    #[test]
    fn a_list_runs_nothing() {
        assert_eq!(ask(Some("two"), true).unwrap(), ExitCode::SUCCESS);
        assert_eq!(listing(ENTRIES), "one          the first\ntwo          the second\n");
    }
}
