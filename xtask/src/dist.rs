//! `cargo xtask dist`: builds a release in `target/dist`.
//!
//! A release is an archive and a Debian package, both with a static program, and the archives of the published crates.

mod crates;
mod oldest_rust;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, bail};

use crate::platforms::{self, Extent};
use crate::{command, repo};

/// A file of the package: its path in the repository, its path in the package, and its mode.
type PackageFile = (&'static str, &'static str, u32);

/// Files that are copied from the repository; `GENERATED_FILES` lists the others.
const PACKAGE_FILES: &[PackageFile] = &[
    ("packaging/systemd/tenure.service", "usr/lib/systemd/system/tenure.service", 0o644),
    ("packaging/systemd/tenure.socket", "usr/lib/systemd/system/tenure.socket", 0o644),
    ("packaging/systemd/tenure.sysusers", "usr/lib/sysusers.d/tenure.conf", 0o644),
    ("packaging/systemd/tenure.default", "etc/default/tenure", 0o644),
    ("packaging/grafana/tenure.json", "usr/share/tenure/grafana/tenure.json", 0o644),
    (
        "packaging/prometheus/tenure.rules.yml",
        "usr/share/tenure/prometheus/tenure.rules.yml",
        0o644,
    ),
    ("packaging/deb/copyright", "usr/share/doc/tenure/copyright", 0o644),
    ("LICENSE-MIT", "usr/share/doc/tenure/LICENSE-MIT", 0o644),
    ("LICENSE-APACHE", "usr/share/doc/tenure/LICENSE-APACHE", 0o644),
    ("README.md", "usr/share/doc/tenure/README.md", 0o644),
    ("CHANGELOG.md", "usr/share/doc/tenure/CHANGELOG.md", 0o644),
    ("packaging/deb/conffiles", "DEBIAN/conffiles", 0o644),
    ("packaging/deb/postinst", "DEBIAN/postinst", 0o755),
    ("packaging/deb/prerm", "DEBIAN/prerm", 0o755),
    ("packaging/deb/postrm", "DEBIAN/postrm", 0o755),
];

/// Flags for a static program that gets random numbers from the system call `getrandom`.
///
/// A static program does not find `getrandom` of the C library. It would need `/dev/random`, which not every root file
/// system has.
const RUSTFLAGS: &str = "-C target-feature=+crt-static --cfg getrandom_backend=\"linux_getrandom\"";

/// Files that the program prints: its arguments, and the path in the package.
const GENERATED_FILES: &[(&[&str], &str)] = &[
    (&["man"], "usr/share/man/man1/tenure.1"),
    (&["completions", "bash"], "usr/share/bash-completion/completions/tenure"),
    (&["completions", "fish"], "usr/share/fish/vendor_completions.d/tenure.fish"),
    (&["completions", "zsh"], "usr/share/zsh/vendor-completions/_tenure"),
];

pub(crate) fn run() -> Result<ExitCode> {
    let target = repo::target()?;
    let folder = target.join("dist");
    fresh(&folder)?;
    oldest_rust::check()?;
    platforms::check(Extent::AllFeatures)?;
    let crates = crates::package(&target, &folder)?;
    let (program, triple) = build(&target)?;
    is_static(&program)?;
    let version = version()?;
    let tree = folder.join("root");
    lay_out(&program, &tree)?;
    let mut made = vec![
        archive(&tree, &folder, &format!("tenure-{version}-{triple}"))?,
        package(&tree, &folder, &version)?,
    ];
    made.extend(crates);
    fs::remove_dir_all(&tree).context("removing the tree that was packed")?;
    sums(&folder, &made)?;
    for file in &made {
        println!("{}", file.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// Builds a program that needs no libraries of the machine it runs on. Returns its path and its target triple.
fn build(target: &Path) -> Result<(PathBuf, String)> {
    let about = command::stdout(Command::new("rustc").arg("-vV"))?;
    let triple = about.lines().find_map(|line| line.strip_prefix("host: "));
    let triple = triple.context("rustc names no host")?.to_owned();
    let mut cargo = repo::cargo(["build", "--release", "--locked", "--package", "tenure-cli"]);
    // With `--target`, the flags apply to the program alone, not to build scripts and macros.
    cargo.args(["--target", &triple]);
    cargo.env("RUSTFLAGS", RUSTFLAGS);
    cargo.env("CARGO_PROFILE_RELEASE_STRIP", "symbols");
    command::show(&mut cargo)?;
    Ok((target.join(&triple).join("release/tenure"), triple))
}

fn is_static(program: &Path) -> Result<()> {
    let headers = command::stdout(Command::new("readelf").arg("--program-headers").arg(program))?;
    if headers.contains("INTERP") {
        bail!("{} is not static: it needs a dynamic loader", program.display());
    }
    Ok(())
}

fn version() -> Result<String> {
    let metadata = repo::metadata()?;
    let packages = metadata["packages"].as_array().context("cargo metadata names no packages")?;
    let ours = packages.iter().find(|package| package["name"] == "tenure-cli");
    let version = ours.and_then(|package| package["version"].as_str());
    Ok(version.context("cargo metadata names no version of tenure-cli")?.to_owned())
}

/// Lays out the files in `tree` as on an installed system.
fn lay_out(program: &Path, tree: &Path) -> Result<()> {
    put(&fs::read(program).context("reading the program")?, &tree.join("usr/bin/tenure"), 0o755)?;
    for (from, to, mode) in PACKAGE_FILES {
        let text = fs::read(repo::root().join(from)).with_context(|| format!("reading {from}"))?;
        put(&text, &tree.join(to), *mode)?;
    }
    for (arguments, to) in GENERATED_FILES {
        let text = command::stdout(Command::new(program).args(*arguments))?;
        put(text.as_bytes(), &tree.join(to), 0o644)?;
    }
    // Debian compresses manual pages.
    command::succeed(
        Command::new("gzip").arg("-9n").arg(tree.join("usr/share/man/man1/tenure.1")),
    )?;
    Ok(())
}

fn put(bytes: &[u8], file: &Path, mode: u32) -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    let parent = file.parent().context("a file lies in a folder")?;
    fs::create_dir_all(parent).with_context(|| format!("creating {}", parent.display()))?;
    fs::write(file, bytes).with_context(|| format!("writing {}", file.display()))?;
    let mode = fs::Permissions::from_mode(mode);
    fs::set_permissions(file, mode).with_context(|| format!("mode of {}", file.display()))
}

/// Packs the tree without the files that only Debian needs.
fn archive(tree: &Path, folder: &Path, name: &str) -> Result<PathBuf> {
    let file = folder.join(format!("{name}.tar.gz"));
    let mut tar = Command::new("tar");
    tar.args(["--create", "--gzip", "--owner=0", "--group=0", "--sort=name", "--exclude=DEBIAN"]);
    tar.arg(format!("--transform=s,^[.],{name},")).arg("--directory").arg(tree);
    command::succeed(tar.arg("--file").arg(&file).arg("."))?;
    Ok(file)
}

fn package(tree: &Path, folder: &Path, version: &str) -> Result<PathBuf> {
    let architecture =
        command::stdout(Command::new("dpkg").arg("--print-architecture"))?.trim().to_owned();
    let size =
        command::stdout(Command::new("du").args(["--summarize", "--block-size=1K"]).arg(tree))?;
    let size = size.split_whitespace().next().context("du prints a size")?;
    let control = fs::read_to_string(repo::root().join("packaging/deb/control"))
        .context("reading packaging/deb/control")?
        .replace("@VERSION@", version)
        .replace("@ARCHITECTURE@", &architecture)
        .replace("@SIZE@", size);
    put(control.as_bytes(), &tree.join("DEBIAN/control"), 0o644)?;
    let file = folder.join(format!("tenure_{version}_{architecture}.deb"));
    let mut build = Command::new("dpkg-deb");
    build.args(["--build", "--root-owner-group", "-Zxz"]).arg(tree).arg(&file);
    command::succeed(&mut build)?;
    Ok(file)
}

fn sums(folder: &Path, files: &[PathBuf]) -> Result<()> {
    let names = files.iter().filter_map(|file| file.file_name());
    let sums = command::stdout(Command::new("sha256sum").args(names).current_dir(folder))?;
    fs::write(folder.join("SHA256SUMS"), sums).context("writing SHA256SUMS")
}

fn fresh(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| format!("removing {}", folder.display()))?;
    }
    fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_the_package_is_in_the_repository() {
        for (from, ..) in PACKAGE_FILES {
            assert!(repo::root().join(from).is_file(), "{from}");
        }
    }

    #[test]
    fn the_image_has_the_program_of_a_release() {
        let file = repo::root().join("packaging/docker/Dockerfile");
        let file = fs::read_to_string(file).expect("there").replace("\\\"", "\"");
        assert!(file.contains(&format!("RUSTFLAGS=\"{RUSTFLAGS}\"")), "{file}");
    }

    #[test]
    fn settings_of_the_service_survive_an_update() {
        let kept = fs::read_to_string(repo::root().join("packaging/deb/conffiles")).expect("there");
        let etc = PACKAGE_FILES
            .iter()
            .map(|(_, to, _)| format!("/{to}"))
            .filter(|to| to.starts_with("/etc/"));
        assert!(kept.lines().eq(etc), "{kept}");
    }

    #[test]
    fn the_user_of_the_service_is_made_and_can_be_given_files() {
        let read = |name: &str| {
            fs::read_to_string(repo::root().join("packaging/systemd").join(name)).expect("there")
        };
        let unit = read("tenure.service");
        let user = unit.lines().find_map(|line| line.strip_prefix("User=")).expect("a user");
        assert!(read("tenure.sysusers").contains(&format!("\nu {user} - ")), "{user}");
        assert!(read("tenure.default").contains(&format!("--group {user} ")), "{user}");
    }

    #[test]
    fn packages_start_the_server_with_options_that_it_has() {
        let sources = ["serve.rs", "serve/auth.rs", "serve/page.rs"];
        let read = |source| repo::root().join("crates/tenure-cli/src/cmd").join(source);
        let known: String =
            sources.map(|source| fs::read_to_string(read(source)).expect("there")).concat();
        for file in ["docker/Dockerfile", "kubernetes/server.yaml", "systemd/tenure.service"] {
            let text =
                fs::read_to_string(repo::root().join("packaging").join(file)).expect("there");
            let line =
                text.lines().find(|line| line.contains("serve") && line.contains("data-dir"));
            let line = line.unwrap_or_else(|| panic!("{file} does not run `serve`"));
            for option in line.split(|c: char| !c.is_ascii_alphanumeric() && c != '-') {
                let Some(name) = option.strip_prefix("--") else { continue };
                let field = format!("{}:", name.replace('-', "_"));
                assert!(known.contains(&field), "{file}: {option}");
            }
        }
    }
}
