//! Detached holds, handles and records of `once` that one version leaves in a store and the other finds there.

use std::process::{Command, Output};

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::build::Programs;
use super::judge::Violation;
use super::log::Version;
use super::site::Site;
use crate::command;

/// Exit code of `acquire` if the lock is held.
const EXIT_HELD: i32 = 1;

/// Exit code of a command that must not run: a code that tenure itself never returns.
const EXIT_RAN: i32 = 42;

/// Checks detached holds, handles and records of `once` across versions, in both directions.
pub(super) fn check(
    site: &mut Site,
    programs: &Programs,
    forward_only: bool,
) -> Result<Vec<Violation>> {
    let mut found = Vec::new();
    let servers = if forward_only { &[Version::New][..] } else { &Version::BOTH };
    for &server in servers {
        let before = if forward_only { server } else { server.other() };
        for kill in [false, true] {
            check_restart(site, programs, (before, server), kill, &mut found)?;
        }
        for one in Version::BOTH {
            let name = format!("crossing-{server}-{one}");
            let mut case =
                CrossVersionCase { site, programs, name, server, one, found: &mut found };
            case.check_hand_over()?;
            case.check_once()?;
        }
    }
    Ok(found)
}

/// Checks that a hold outlives a restart of the lock server as another version: no other client gets it, and its handle
/// stays valid.
fn check_restart(
    site: &mut Site,
    programs: &Programs,
    (before, after): (Version, Version),
    kill: bool,
    found: &mut Vec<Violation>,
) -> Result<()> {
    site.driver.restart(programs, before, kill)?;
    let name = format!("outlives-{before}-{}", if kill { "kill" } else { "stop" });
    let (server, one) = (before, before);
    let mut case = CrossVersionCase { site, programs, name: name.clone(), server, one, found };
    let left = case.acquire_detached()?;
    site.driver.restart(programs, after, kill)?;
    let Some((_, handle)) = left else { return Ok(()) };
    let mut case = CrossVersionCase { site, programs, name, server: after, one, found };
    case.check_found_hold(after, &handle)
}

/// A case in which one version leaves something in the store and the other finds it.
struct CrossVersionCase<'a> {
    site: &'a Site,
    programs: &'a Programs,
    /// Name of the lock, and of the command that runs once.
    name: String,
    server: Version,
    one: Version,
    found: &'a mut Vec<Violation>,
}

impl CrossVersionCase<'_> {
    /// Checks that the other version sees the hold, is refused, renews and releases by the handle, and then acquires
    /// with a larger token.
    fn check_hand_over(&mut self) -> Result<()> {
        let (one, other) = (self.one, self.one.other());
        let Some((token, handle)) = self.acquire_detached()? else { return Ok(()) };
        self.check_found_hold(other, &handle)?;
        let second = self.run_tenure(other, "acquire", &["--json", "--ttl", "60s"])?;
        let Some((later, handle)) = self.granted(other, &second)? else { return Ok(()) };
        if later <= token {
            self.report(other, &format!("got the token {later} after {token}"));
        }
        let released = self.run_tenure(one, "release", &["--handle", &handle])?;
        self.expect(0, one, "releases by the handle", &released);
        Ok(())
    }

    /// Acquires and leaves the hold; returns its token and its handle.
    fn acquire_detached(&mut self) -> Result<Option<(u128, String)>> {
        let left = self.run_tenure(self.one, "acquire", &["--json", "--ttl", "60s"])?;
        self.granted(self.one, &left)
    }

    /// Checks that the other version sees the hold, is refused the lock, and renews and releases by the handle.
    fn check_found_hold(&mut self, other: Version, handle: &str) -> Result<()> {
        let seen = self.run_tenure(other, "status", &[])?;
        self.expect(0, other, "sees the hold", &seen);
        let refused = self.run_tenure(other, "acquire", &["--ttl", "60s"])?;
        self.expect(EXIT_HELD, other, "is refused what is held", &refused);
        let renewed = self.run_tenure(other, "renew", &["--handle", handle, "--ttl", "60s"])?;
        self.expect(0, other, "renews by the handle", &renewed);
        let released = self.run_tenure(other, "release", &["--handle", handle])?;
        self.expect(0, other, "releases by the handle", &released);
        Ok(())
    }

    /// Checks that a command that one version has run in a slot is not run again by the other.
    fn check_once(&mut self) -> Result<()> {
        let (one, other) = (self.one, self.one.other());
        let slot = "slot";
        let first = self.run_tenure(one, "once", &["--slot", slot, "--", "true"])?;
        self.expect(0, one, "runs once", &first);
        let script = format!("exit {EXIT_RAN}");
        let second =
            self.run_tenure(other, "once", &["--slot", slot, "--", "sh", "-c", &script])?;
        self.expect(0, other, "does not run again what ran in the slot", &second);
        Ok(())
    }

    fn run_tenure(&self, version: Version, what: &str, rest: &[&str]) -> Result<Output> {
        let url = &self.site.lanes[0].url;
        let mut tenure: Command = self.programs.tenure(version);
        tenure.args([what, "--store", url, &self.name]).args(rest);
        command::output(tenure.envs(self.site.environment.iter().cloned()))
    }

    /// Token and handle that `acquire` printed.
    fn granted(&mut self, version: Version, output: &Output) -> Result<Option<(u128, String)>> {
        self.expect(0, version, "acquires what is free", output);
        if !output.status.success() {
            return Ok(None);
        }
        let line: Value =
            serde_json::from_slice(&output.stdout).context("parsing the output of acquire")?;
        let text = |field: &str| {
            line[field].as_str().with_context(|| format!("acquire printed no {field}"))
        };
        Ok(Some((text("token")?.parse()?, text("handle")?.to_owned())))
    }

    fn expect(&mut self, code: i32, version: Version, what: &str, output: &Output) {
        if output.status.code() != Some(code) {
            let printed = command::printed(output);
            let text = format!("expected: {what}; {}: {}", output.status, printed.trim_end());
            self.report(version, &text);
        }
    }

    fn report(&mut self, version: Version, what: &str) {
        let (one, server) = (self.one, self.server);
        let name = &self.name;
        let text = format!("{name}: {version} after {one}, on the {server} server: {what}");
        self.found.push(Violation::Other(text));
    }
}
