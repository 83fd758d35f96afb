//! `once`: fleets of processes at once, on every store that can remember.

use std::collections::BTreeSet;
use std::process::Stdio;
use std::time::{Duration, SystemTime};

use crate::support::Scene;
use crate::{Served, services};

/// How many processes ask at once, and over how many periods.
const FLEET: usize = 20;
const PERIODS: usize = 3;
const PERIOD: Duration = Duration::from_secs(2);

/// Waits until a period has begun, so that a fleet is within it.
fn begin_of_period() {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let into = Duration::from_millis((now.as_millis() % PERIOD.as_millis()).try_into().unwrap());
    std::thread::sleep(PERIOD.saturating_sub(into) + Duration::from_millis(5));
}

/// A fleet of cron jobs over some periods: no slot has two runs, and none that was asked for has none.
fn fleet(scene: &Scene, store: &str, flags: &[&str]) {
    let period = format!("{}s", PERIOD.as_secs());
    let arguments = [
        &["once", "-s", store, "nightly", "--per", &period][..],
        flags,
        &["--", "sh", "-c", "echo $TENURE_SLOT >>log"],
    ]
    .concat();
    let mut seen = BTreeSet::new();
    for _ in 0..PERIODS {
        begin_of_period();
        let children: Vec<_> = (0..FLEET)
            .map(|_| scene.tenure(&arguments).stderr(Stdio::piped()).spawn().unwrap())
            .collect();
        for child in children {
            let output = child.wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(0), "{said}");
            // A process that did not run the command names the slot in which another process did.
            let slot =
                said.split("in the slot ").nth(1).map(|rest| rest.split(',').next().unwrap());
            seen.extend(slot.map(str::to_owned));
        }
    }
    let log = scene.read("log");
    let ran: BTreeSet<String> = log.lines().map(str::to_owned).collect();
    assert_eq!(log.lines().count(), ran.len(), "a slot was run twice: {log}");
    assert!(seen.is_subset(&ran), "{seen:?} were said to have run, {ran:?} did");
    assert!(ran.len() >= PERIODS, "{ran:?}");
}

#[test]
fn a_fleet_runs_each_period_once_on_this_host() {
    let scene = Scene::new();
    let store = format!("file:{}", scene.store().display());
    fleet(&scene, &store, &[]);
}

#[test]
fn a_fleet_runs_each_period_once_at_a_server() {
    let served = Served::start(&[]);
    fleet(&served.scene, &served.url, &[]);
}

#[test]
fn a_fleet_runs_each_period_once_on_lease_rows() {
    let Some(url) = services::postgres() else { return };
    let scene = Scene::new();
    let schema = format!("tenure_once_{}", std::process::id());
    let url = format!("{url}?table={schema}.locks");
    let applied = scene.outcome(&["schema", "-s", &url, "--apply"]);
    assert_eq!(applied.0, Some(0), "{}", applied.2);
    fleet(&scene, &url, &["--retry"]);
}

#[test]
fn a_fleet_runs_each_period_once_on_nats() {
    let Some(url) = services::nats() else { return };
    let scene = Scene::new();
    fleet(&scene, &format!("{url}/once-{}", std::process::id()), &[]);
}

/// Outcomes of attempts in one slot that has a name.
fn attempt(scene: &Scene, store: &str, flags: &[&str], script: &str) -> (Option<i32>, String) {
    let first = ["once", "-s", store, "nightly", "--slot", "2026-11-15"];
    let arguments = [&first[..], flags, &["--", "sh", "-c", script]].concat();
    let (code, _, stderr) = scene.outcome(&arguments);
    (code, stderr)
}

#[test]
fn a_failed_run_is_repeated_only_with_retry() {
    let served = Served::start(&[]);
    let scene = Scene::new();
    for store in [format!("file:{}", scene.store().display()), served.url.clone()] {
        let (code, _) = attempt(&scene, &store, &["--retry"], "exit 7");
        assert_eq!(code, Some(7));
        let (code, stderr) = attempt(&scene, &store, &["--retry"], "exit 0");
        assert_eq!((code, &*stderr), (Some(0), ""));
        let (code, stderr) = attempt(&scene, &store, &["--retry"], "exit 7");
        assert_eq!(code, Some(0), "{stderr}");
        assert_eq!(stderr.lines().count(), 1);
        assert!(stderr.contains("was already started in slot 2026-11-15"), "{stderr}");
    }
    let other = served.url.clone();
    let (code, _, _) = scene.outcome(&["once", "-s", &other, "x", "--per", "1h", "--", "false"]);
    assert_eq!(code, Some(1));
    let (code, _, _) = scene.outcome(&["once", "-s", &other, "x", "--per", "1h", "--", "false"]);
    assert_eq!(code, Some(0), "not told to try again");
}

#[test]
fn a_day_is_kept_for_as_long_as_the_server_keeps_anything() {
    let served = Served::start(&[]);
    let daily = ["nightly", "--per", "1d", "--", "sh", "-c", "echo $TENURE_SLOT"];
    let (code, first, stderr) = served.outcome("once", &daily);
    assert_eq!((code, first.len()), (Some(0), "2026-11-15T00:00:00Z\n".len()), "{stderr}");
    assert_eq!(served.outcome("once", &daily).1, "", "not a second time");
    let (code, stdout, stderr) =
        served.outcome("once", &["nightly", "--per", "60d", "--", "echo", "ran"]);
    assert_eq!((code, &*stdout), (Some(125), ""), "it could be run twice");
    assert!(stderr.contains("--max-lease"), "{stderr}");
}

#[test]
fn a_killed_run_is_not_repeated_either() {
    let served = Served::start(&[]);
    let scene = Scene::new();
    for store in [format!("file:{}", scene.store().display()), served.url.clone()] {
        let run = |script| ["once", "-s", &store, "x", "--per", "1h", "--", "sh", "-c", script];
        let mut first = scene.start(&run("echo ready; exec sleep 300"));
        assert_eq!(first.line(), "ready");
        // Dropped, it is killed with -9; its guardian sees to its command.
        drop(first);
        let (code, stdout, stderr) = scene.outcome(&run("echo again"));
        assert_eq!((code, &*stdout), (Some(0), ""), "{stderr}");
        let (code, _, stderr) = scene.outcome(&["once", "-s", &store, "x", "--per", "0", "true"]);
        assert_eq!(code, Some(2), "{stderr}");
        assert!(stderr.contains("must be greater than 0"), "{stderr}");
    }
}
