//! Debian packages, installed without starting their services.

use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use nix::unistd::Uid;

use crate::command;

/// The script that Debian runs before a package starts its service; exit code 101 forbids the start.
const POLICY: &str = "/usr/sbin/policy-rc.d";

/// Installs packages as root or through sudo. As root it also keeps them from starting services.
pub(crate) fn apt_install(packages: &[&str]) -> Result<()> {
    if command::on_path("apt-get").is_none() {
        bail!("this machine has no apt-get; install by hand: {}", packages.join(" "));
    }
    let _quiet = Policy::forbid_services()?;
    // A fresh container has no package lists, and `install` finds no package: hence the second try after `update`.
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
        // sudo must fail with a message: in an unattended run a password prompt would wait forever.
        let mut sudo = Command::new("sudo");
        sudo.args(["--non-interactive", "apt-get"]);
        sudo
    };
    // Another apt-get may hold the lock, as on a machine that has just started: wait at most 120 s for it.
    command
        .args(["--quiet", "--option", "DPkg::Lock::Timeout=120"])
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive");
    command
}

/// Forbids the start of services until it is dropped. A policy that the machine already has is not changed.
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
