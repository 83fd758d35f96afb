//! A program that the other commands need, and its installation.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context as _, Result};

/// A program that is installed if it is not found.
pub(crate) struct Tool {
    pub(crate) name: &'static str,
    /// Path of the program, if it is installed.
    pub(crate) find: fn() -> Option<PathBuf>,
    pub(crate) install: fn() -> Result<()>,
}

/// Returns the path of the tool, after installing the tool if it is missing.
pub(crate) fn ensure(tool: &Tool) -> Result<PathBuf> {
    if let Some(path) = (tool.find)() {
        return Ok(path);
    }
    println!("{} is missing: installing it", tool.name);
    let began = Instant::now();
    (tool.install)().with_context(|| format!("installing {}", tool.name))?;
    let path = (tool.find)();
    let path = path.with_context(|| format!("{} was installed but is not found", tool.name))?;
    println!("{} installed in {:.1} s", tool.name, began.elapsed().as_secs_f64());
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tool_that_is_there_is_not_installed() {
        let tool = Tool {
            name: "there",
            find: || Some("/bin/there".into()),
            install: || anyhow::bail!("must not be called"),
        };
        assert_eq!(ensure(&tool).unwrap(), PathBuf::from("/bin/there"));
    }

    #[test]
    fn an_installation_that_leaves_nothing_is_an_error() {
        let tool = Tool { name: "absent", find: || None, install: || Ok(()) };
        let error = ensure(&tool).unwrap_err();
        assert!(error.to_string().contains("absent was installed but is not found"), "{error}");
    }
}
