//! What only the command shows: contenders whose clock is wrong, and a child that is gone when its lock is lost.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::fake::Fake;
use crate::{Limit, report};

/// The lease in the trials, and what stores that tell whole seconds add to it.
const TTL: Duration = Duration::from_secs(12);
const SLACK: Duration = Duration::from_secs(2);

pub(super) fn measure() {
    let Ok(program) = std::env::var("TENURE_BENCH_COMMAND") else {
        println!("clocks and losses are measured by `cargo xtask bench object`");
        return;
    };
    match std::env::var("TENURE_TEST_FAKETIME") {
        Ok(library) => clocks(&program, &library),
        Err(_) => println!("no libfaketime: clocks that are wrong are not measured"),
    }
    losses(&program);
}

fn tenure(program: &str, store: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args([arguments[0], "--store", store]).args(&arguments[1..]).stdin(Stdio::null());
    command
}

/// Contenders ten minutes ahead and behind, for locks that are left to their leases.
fn clocks(program: &str, library: &str) {
    let fake = Fake::real();
    fake.set(|manner| manner.limited = false);
    let store = fake.store("c");
    let ttl = format!("{}s", TTL.as_secs());
    let mut contenders = Vec::new();
    let mut stolen = 0;
    for (key, offset) in [("ahead", "+600"), ("behind", "-600")] {
        let under = |arguments: &[&str]| {
            let mut command = tenure(program, &store, arguments);
            command.env("LD_PRELOAD", library).env("FAKETIME", offset);
            command.env("FAKETIME_DONT_FAKE_MONOTONIC", "1").env("DONT_FAKE_MONOTONIC", "1");
            command
        };
        let left = tenure(program, &store, &["acquire", "--ttl", &ttl, key]).output();
        assert!(left.expect("it runs").status.success(), "{key} is free");
        let granted = Instant::now();
        let tried = under(&["run", "--try", key, "true"]).output().expect("it runs");
        stolen += u32::from(tried.status.code() != Some(75));
        let waits = under(&["run", "-w", "60s", key, "echo", "in"]).stdout(Stdio::piped()).spawn();
        contenders.push((key, granted, waits.expect("it starts")));
    }
    for (key, granted, mut contender) in contenders {
        line(&mut contender);
        let off = granted.elapsed().as_secs_f64() - (TTL + SLACK).as_secs_f64();
        stolen += u32::from(granted.elapsed() < TTL);
        let what = format!("clock 10 min {key}: take-over after its right time, s");
        report(&what, off.abs(), Limit::AtMost(2.0));
        contender.wait().expect("a child of ours");
    }
    report("clocks 10 min ahead and behind: stolen", stolen.into(), Limit::Exactly(0.0));
}

/// The object is removed, replaced by something else, and taken by another, each under a running command.
fn losses(program: &str) {
    let fake = Fake::real();
    let store = fake.store("l");
    let ttl = format!("{}s", TTL.as_secs());
    let thief = r#"{"ownerId":"thief","expiresAt":99999999999}"#;
    let deeds = [("removed", None), ("overwritten", Some("no lock")), ("taken", Some(thief))];
    let interval = (TTL / 3).as_secs_f64();
    let running = deeds.map(|(deed, body)| {
        let script = "echo $$; exec sleep 300";
        let mut command =
            tenure(program, &store, &["run", "--ttl", &ttl, "--quiet", deed, "sh", "-c", script]);
        let mut run =
            command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("it starts");
        let pid = line(&mut run);
        match body {
            None => fake.remove(&format!("l/{deed}")),
            Some(body) => fake.put(&format!("l/{deed}"), body),
        }
        let at = Instant::now();
        let ended = std::thread::spawn(move || {
            let code = run.wait().expect("a child of ours").code().unwrap_or(-1);
            (code, at.elapsed().as_secs_f64())
        });
        (deed, pid, ended)
    });
    for (deed, pid, ended) in running {
        let (code, took) = ended.join().expect("no panic");
        report(
            &format!("object {deed}: `tenure run` ends with"),
            code.into(),
            Limit::Exactly(79.0),
        );
        // The loss is told at once; stopping the command takes a moment more.
        let limit = Limit::AtMost(interval + 0.5);
        report(
            &format!("object {deed}: s until it has ended, renewal every {interval} s"),
            took,
            limit,
        );
        let left = Path::new("/proc").join(&pid).exists();
        report(
            &format!("object {deed}: children left"),
            u32::from(left).into(),
            Limit::Exactly(0.0),
        );
    }
}

/// The next line that it prints.
fn line(child: &mut Child) -> String {
    let mut line = String::new();
    let stdout = child.stdout.as_mut().expect("piped");
    BufReader::new(stdout).read_line(&mut line).expect("a line");
    line.trim_end().to_owned()
}
