//! Debian packages, without the services they would start.

use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use nix::unistd::Uid;

use crate::command;

/// The script that Debian asks before a package starts its service; exit code 101 says no.
const POLICY: &str = "/usr/sbin/policy-rc.d";

/// Installs packages as root or through sudo, and keeps them from starting services.
pub(crate) fn apt_install(packages: &[&str]) -> Result<()> {
    if command::on_path("apt-get").is_none() {
        bail!("this machine has no apt-get; install by hand: {}", packages.join(" "));
    }
    let _quiet = Policy::forbid_services()?;
    // Without the package lists of a fresh container, `install` knows no package at all: hence the second try.
    let mut install = vec!["install", "--yes", "--no-install-recommends"];
    install.extend(packages);
    if command::show(&mut apt_get(&install)).is_err() {
        command::show(&mut apt_get(&["update"]))?;
        command::show(&mut apt_get(&install))?;
    }
    Ok(())
}

fn apt_get(arguments: &[&str]) -> Command {
    let mut command = if Uid::effective().is_root() {
        Command::new("apt-get")
    } else {
        // Fails with its own words instead of asking for a password that nobody is there to type.
        let mut sudo = Command::new("sudo");
        sudo.args(["--non-interactive", "apt-get"]);
        sudo
    };
    // Another apt-get may be at work, as on a machine that has just started: wait for it, within reason.
    command
        .args(["--quiet", "--option", "DPkg::Lock::Timeout=120"])
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive");
    command
}

/// Forbids the start of services while it lives. A policy that the machine already has is left alone.
struct Policy {
    ours: bool,
}

impl Policy {
    fn forbid_services() -> Result<Self> {
        if !Uid::effective().is_root() || !Path::new("/usr/sbin").is_dir() {
            return Ok(Self { ours: false });
        }
        match OpenOptions::new().write(true).create_new(true).mode(0o755).open(POLICY) {
            Ok(mut file) => {
                let policy = Self { ours: true };
                file.write_all(b"#!/bin/sh\nexit 101\n").context("writing policy-rc.d")?;
                Ok(policy)
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(Self { ours: false }),
            Err(error) => Err(error).context("creating policy-rc.d"),
        }
    }
}

impl Drop for Policy {
    fn drop(&mut self) {
        if self.ours {
            let _ = fs::remove_file(POLICY);
        }
    }
}
