//! libfaketime: a library that changes the time that a program reads. Tests start servers of their own with it.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use super::{Environment, Running, Service};
use crate::setup::{Tool, apt_install};

pub(super) const SERVICE: Service =
    Service { name: "libfaketime", tool: Tool { name: "libfaketime", find, install }, start };

/// Parent of the library folders, one per architecture.
const LIBRARIES: &str = "/usr/lib";

fn find() -> Option<PathBuf> {
    let folders = fs::read_dir(LIBRARIES).ok()?.flatten();
    let mut libraries = folders.map(|folder| folder.path().join("faketime/libfaketime.so.1"));
    libraries.find(|library| library.is_file())
}

fn install() -> Result<()> {
    apt_install(&["libfaketime"])
}

fn start(_: &Path, _: &Environment) -> Result<Running> {
    let library = find().context("the library is gone")?.display().to_string();
    Ok(Running { environment: vec![("TENURE_TEST_FAKETIME", library)], groups: vec![] })
}
