//! The exit codes.

use std::os::unix::fs::PermissionsExt;

use crate::support::{Scene, Server};

#[test]
fn the_command_s_own_end_is_ours() {
    let scene = Scene::new();
    for (script, code) in [("exit 0", 0), ("exit 7", 7), ("exit 255", 255), ("kill -TERM $$", 143)]
    {
        let (got, stdout, stderr) = scene.outcome(&["run", "demo", "--", "sh", "-c", script]);
        assert_eq!(got, Some(code), "{script}: {stderr}");
        assert_eq!((stdout.as_str(), stderr.as_str()), ("", ""), "{script}");
    }
    let (code, stdout, _) = scene.outcome(&["run", "demo", "echo", "hello"]);
    assert_eq!((code, stdout.as_str()), (Some(0), "hello\n"));
}

#[test]
fn a_command_that_cannot_run_leaves_nothing_held() {
    let scene = Scene::new();
    std::fs::write(scene.path("plain"), "no program").unwrap();
    std::fs::write(scene.path("script"), "#!/no/such/interpreter\n").unwrap();
    std::fs::set_permissions(scene.path("script"), PermissionsExt::from_mode(0o755)).unwrap();
    for (program, code) in
        [("no-such-program", 127), ("./plain", 126), ("./script", 127), (".", 126)]
    {
        let (got, _, stderr) = scene.outcome(&["run", "demo", program]);
        assert_eq!(got, Some(code), "{program}: {stderr}");
        assert!(stderr.starts_with(&format!("tenure: cannot run {program}: ")), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        assert_eq!(scene.outcome(&["status", "demo"]).0, Some(75));
    }
}

#[test]
fn a_held_lock_is_not_acquired() {
    let scene = Scene::new();
    let _holder = scene.holder("demo");
    for arguments in [
        &["run", "--try", "demo", "true"][..],
        &["run", "-n", "demo", "true"],
        &["run", "--wait", "50ms", "demo", "true"],
        &["run", "-w", "0", "demo", "true"],
    ] {
        let (code, _, stderr) = scene.outcome(arguments);
        assert_eq!(code, Some(75), "{arguments:?}: {stderr}");
        assert!(stderr.starts_with("tenure: demo on file:"), "{stderr}");
    }
    let (code, _, stderr) = scene.outcome(&["run", "--quiet", "--try", "demo", "true"]);
    assert_eq!((code, stderr.as_str()), (Some(75), ""));
    assert_eq!(scene.outcome(&["run", "--try", "another", "true"]).0, Some(0));
}

#[test]
fn a_semaphore_has_as_many_slots_as_it_is_given() {
    let scene = Scene::new();
    let slot = ["run", "--limit", "2", "demo", "--", "sh", "-c", "echo ready; exec sleep 300"];
    let mut holders = [scene.start(&slot), scene.start(&slot)];
    for holder in &mut holders {
        assert_eq!(holder.line(), "ready");
    }
    assert_eq!(scene.outcome(&["run", "--try", "--limit", "2", "demo", "true"]).0, Some(75));
    drop(holders);
    assert_eq!(scene.outcome(&["run", "--wait", "20s", "--limit", "2", "demo", "true"]).0, Some(0));
}

#[test]
fn a_hold_that_ends_stops_the_command_and_says_so() {
    let scene = Scene::new();
    let server = Server::start(&scene, &[]);
    let hold = ["run", "-s", &server.url, "--ttl", "600ms", "--max-hold", "900ms", "demo", "--"];
    let gentle =
        [&hold[..], &["sh", "-c", "trap 'echo told; exit 3' TERM; sleep 300 & wait"]].concat();
    let (code, stdout, stderr) = scene.outcome(&gentle);
    assert_eq!((code, stdout.as_str()), (Some(79), "told\n"), "{stderr}");
    assert!(stderr.starts_with("tenure: lost demo: it was held for as long as"), "{stderr}");
    let stubborn = [&hold[..], &["sh", "-c", "trap '' TERM; sleep 300; echo late"]].concat();
    let (code, stdout, _) = scene.outcome(&stubborn);
    assert_eq!((code, stdout.as_str()), (Some(79), ""));
}

#[test]
fn a_longest_hold_within_the_time_to_stop_is_refused_with_both_values() {
    let scene = Scene::new();
    for (flags, values) in [
        // By default the time to stop is a fifth of the ttl of 15s.
        (&["--max-hold", "2s"][..], ["max-hold 2s", "kill-after 3s"]),
        (&["--max-hold", "3s"], ["max-hold 3s", "kill-after 3s"]),
        (&["--max-hold", "1s", "--kill-after", "2s"], ["max-hold 1s", "kill-after 2s"]),
        (&["--max-hold", "1s", "--limit", "2"], ["max-hold 1s", "kill-after 3s"]),
    ] {
        let arguments = [&["run"], flags, &["demo", "--", "sh", "-c", "echo ran"]].concat();
        let (code, stdout, stderr) = scene.outcome(&arguments);
        assert_eq!((code, stdout.as_str()), (Some(2), ""), "{arguments:?}: {stderr}");
        assert!(values.iter().all(|value| stderr.contains(value)), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
    let fits = ["run", "--max-hold", "60s", "demo", "true"];
    assert_eq!(scene.outcome(&fits).0, Some(0));
    assert_eq!(
        scene.outcome(&["run", "--max-hold", "1s", "--kill-after", "0", "demo", "true"]).0,
        Some(0)
    );
}

#[test]
fn an_invalid_url_of_a_store_is_a_bad_configuration_for_every_command() {
    let scene = Scene::new();
    let url = "postgres://localhost/app?sslmode=nonsense";
    for command in [
        &["run", "demo", "true"][..],
        &["run", "--try", "demo", "true"],
        &["lead", "demo", "true"],
        &["once", "--per", "1h", "demo", "true"],
        &["acquire", "demo"],
        &["renew", "demo", "--handle", "1"],
        &["release", "demo", "--handle", "1"],
        &["status", "demo"],
        &["ls"],
        &["watch", "demo"],
        &["history", "demo"],
        &["break", "demo", "--token", "1", "--reason", "test"],
        &["gc"],
        &["doctor"],
        &["bench", "--for", "1s"],
        &["schema", "--locks"],
        &["work", "queue", "true"],
        &["job", "ls", "queue"],
        &["job", "add", "queue"],
    ] {
        let arguments = match command {
            ["job", action, rest @ ..] => [&["job", action, "-s", url], rest].concat(),
            [name, rest @ ..] => [&[name, "-s", url], rest].concat(),
            [] => unreachable!("each has a name"),
        };
        let (code, stdout, stderr) = scene.outcome(&arguments);
        assert_eq!((code, stdout.as_str()), (Some(125), ""), "{arguments:?}: {stderr}");
        assert!(stderr.contains("sslmode"), "{arguments:?}: {stderr}");
    }
    // As pgleaderlock names it.
    for command in ["lead", "acquire", "status"] {
        let arguments = [command, "--dsn", url, "--key1", "1", "--key2", "2"];
        let (code, _, stderr) = scene.outcome(&arguments);
        assert!(code == Some(125) && stderr.contains("sslmode"), "{command}: {code:?}: {stderr}");
    }
}

#[test]
fn every_help_lists_its_exit_codes() {
    let scene = Scene::new();
    for command in
        ["run", "lead", "acquire", "renew", "release", "status", "doctor", "completions", "man"]
    {
        let (code, stdout, _) = scene.outcome(&[command, "--help"]);
        assert_eq!(code, Some(0), "{command}");
        assert!(stdout.contains("Exit codes:"), "{command}: {stdout}");
        assert!(stdout.contains("125"), "{command}: {stdout}");
    }
}

#[test]
fn completions_and_the_manual_are_printed() {
    let scene = Scene::new();
    for shell in ["bash", "zsh", "fish"] {
        let (code, stdout, _) = scene.outcome(&["completions", shell]);
        assert!(
            code == Some(0) && stdout.contains("tenure") && stdout.contains("status"),
            "{shell}"
        );
    }
    let (code, stdout, _) = scene.outcome(&["man"]);
    assert!(code == Some(0) && stdout.contains(".TH tenure") && stdout.contains("kill\\-after"));
    assert!(!stdout.contains("__guard"), "the guardian is not for people");
}
