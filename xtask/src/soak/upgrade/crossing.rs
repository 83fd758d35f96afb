//! What one version leaves in a store without a process, and the other one finds there.

use std::process::{Command, Output};

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::build::Programs;
use super::judge::Violation;
use super::log::Version;
use super::site::Site;
use crate::command;

/// Exit code of `acquire`: another holds it.
const HELD: i32 = 1;

/// A command that was run although it must not: a code that tenure itself never has.
const RAN: i32 = 42;

/// Tries holds without a process, handles and marks of `once` across versions, in both directions.
pub(super) fn check(
    site: &mut Site,
    programs: &Programs,
    forward_only: bool,
) -> Result<Vec<Violation>> {
    let mut found = Vec::new();
    let servers = if forward_only { &[Version::New][..] } else { &Version::BOTH };
    for &server in servers {
        site.keeper.settle(programs, server)?;
        for one in Version::BOTH {
            let mut pair = Pair { site, programs, server, one, found: &mut found };
            pair.hold()?;
            pair.once()?;
        }
    }
    Ok(found)
}

/// One version that leaves something, the other one that finds it.
struct Pair<'a> {
    site: &'a Site,
    programs: &'a Programs,
    server: Version,
    one: Version,
    found: &'a mut Vec<Violation>,
}

impl Pair<'_> {
    /// One acquires; the other sees it, is refused, renews and releases by the handle, and acquires with a larger token.
    fn hold(&mut self) -> Result<()> {
        let (one, other) = (self.one, self.one.other());
        let ttl = ["--ttl", "60s"];
        let first = self.ask(one, "acquire", &["--json", ttl[0], ttl[1]])?;
        let Some((token, handle)) = self.granted(one, &first)? else { return Ok(()) };
        let seen = self.ask(other, "status", &[])?;
        self.expect(0, other, "sees the hold", &seen);
        let refused = self.ask(other, "acquire", &ttl)?;
        self.expect(HELD, other, "is refused what is held", &refused);
        let renewed = self.ask(other, "renew", &["--handle", &handle, ttl[0], ttl[1]])?;
        self.expect(0, other, "renews by the handle", &renewed);
        let released = self.ask(other, "release", &["--handle", &handle])?;
        self.expect(0, other, "releases by the handle", &released);
        let second = self.ask(other, "acquire", &["--json", ttl[0], ttl[1]])?;
        let Some((later, handle)) = self.granted(other, &second)? else { return Ok(()) };
        if later <= token {
            self.tell(other, &format!("got the token {later} after {token}"));
        }
        let released = self.ask(one, "release", &["--handle", &handle])?;
        self.expect(0, one, "releases by the handle", &released);
        Ok(())
    }

    /// What one has run in a slot the other does not run again.
    fn once(&mut self) -> Result<()> {
        let (one, other) = (self.one, self.one.other());
        let slot = format!("{}-{}", self.server, one);
        let first = self.ask(one, "once", &["--slot", &slot, "--", "true"])?;
        self.expect(0, one, "runs once", &first);
        let script = format!("exit {RAN}");
        let second = self.ask(other, "once", &["--slot", &slot, "--", "sh", "-c", &script])?;
        self.expect(0, other, "does not run again what ran in the slot", &second);
        Ok(())
    }

    fn ask(&self, version: Version, what: &str, rest: &[&str]) -> Result<Output> {
        let name = format!("crossing-{what}", what = if what == "once" { "once" } else { "hold" });
        let url = &self.site.lanes[0].url;
        let mut tenure: Command = self.programs.tenure(version);
        tenure.args([what, "--store", url, &name]).args(rest);
        command::output(tenure.envs(self.site.environment.iter().cloned()))
    }

    /// Token and handle of a hold.
    fn granted(&mut self, version: Version, output: &Output) -> Result<Option<(u128, String)>> {
        self.expect(0, version, "acquires what is free", output);
        if !output.status.success() {
            return Ok(None);
        }
        let line: Value = serde_json::from_slice(&output.stdout).context("what acquire printed")?;
        let text = |field: &str| {
            line[field].as_str().with_context(|| format!("acquire printed no {field}"))
        };
        Ok(Some((text("token")?.parse()?, text("handle")?.to_owned())))
    }

    fn expect(&mut self, code: i32, version: Version, what: &str, output: &Output) {
        if output.status.code() != Some(code) {
            let printed = command::printed(output);
            let told = format!("expected: {what}; {}: {}", output.status, printed.trim_end());
            self.tell(version, &told);
        }
    }

    fn tell(&mut self, version: Version, what: &str) {
        let (one, server) = (self.one, self.server);
        let text = format!("{version}, of what {one} left, on a server of {server}: {what}");
        self.found.push(Violation::Other(text));
    }
}
