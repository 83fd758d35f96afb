//! The library on systems other than Linux, and the lock server on a 32-bit processor: both must compile there. Only 64-bit
//! Linux is tested.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::{command, repo};

/// The systems beside Linux that the library supports, as `docs/choose.md` lists them.
const TARGETS: &[&str] = &["aarch64-apple-darwin", "x86_64-pc-windows-gnu"];

/// A Linux on a processor without `io_uring`, where the lock server sends its replies one by one.
const WITHOUT_IO_URING: &str = "armv7-unknown-linux-gnueabihf";

/// Features whose dependencies compile in seconds.
const QUICK_FEATURES: &str = "blocking,conformance,file,metrics,server,simulation";

/// Features to check with.
#[derive(Clone, Copy)]
pub(crate) enum Extent {
    /// Without TLS and the stores that need it.
    Quick,
    /// All of them, which compiles some 200 dependencies per system.
    AllFeatures,
}

/// Checks both for every system, with warnings as errors.
pub(crate) fn check(extent: Extent) -> Result<String> {
    let features: &[&str] = match extent {
        Extent::Quick => &["--features", QUICK_FEATURES],
        Extent::AllFeatures => &["--all-features"],
    };
    for target in TARGETS {
        check_package("tenure", target, features)?;
    }
    check_package("tenure-server", WITHOUT_IO_URING, &[])?;
    Ok(format!("{}, {WITHOUT_IO_URING}", TARGETS.join(", ")))
}

fn check_package(package: &str, target: &str, features: &[&str]) -> Result<()> {
    install(target)?;
    let mut cargo = repo::cargo(["clippy", "--package", package, "--lib", "--locked"]);
    cargo.args(["--quiet", "--target", target]).args(features);
    // Build scripts of dependencies compile C code for the target. A check links nothing, so that code is not
    // needed: an empty command replaces the compiler, which the machine need not have.
    let variable = target.replace('-', "_");
    cargo.env(format!("CC_{variable}"), "true").env(format!("AR_{variable}"), "true");
    command::succeed(cargo.args(["--", "-D", "warnings"])).map(drop)
}

/// Installs the standard library of a target if it is missing.
fn install(target: &str) -> Result<()> {
    let sysroot = command::stdout(Command::new("rustc").args(["--print", "sysroot"]))?;
    let library = PathBuf::from(sysroot.trim()).join("lib/rustlib").join(target).join("lib");
    if !library.is_dir() {
        let mut rustup = Command::new("rustup");
        command::succeed(rustup.args(["target", "add", target])).with_context(|| {
            format!("the standard library of {target} is missing, and rustup cannot install it")
        })?;
        ensure!(library.is_dir(), "rustup did not install {}", library.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_docs_list_the_systems() {
        let page = repo::root().join("docs/choose.md");
        let page = std::fs::read_to_string(page).expect("there");
        for target in TARGETS {
            assert!(page.contains(target), "docs/choose.md does not list {target}");
        }
    }
}
