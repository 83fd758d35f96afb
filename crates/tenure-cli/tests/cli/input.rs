//! Bad input: one clear line that says what to do, and nothing left behind.

use crate::support::Scene;

fn refused(scene: &Scene, arguments: &[&str], code: i32, parts: &[&str]) {
    let (got, stdout, stderr) = scene.outcome(arguments);
    assert_eq!(got, Some(code), "{arguments:?}: {stderr}");
    assert_eq!(stdout, "", "{arguments:?}");
    assert_eq!(stderr.lines().count(), 1, "{arguments:?}: {stderr}");
    assert!(stderr.starts_with("tenure: "), "{arguments:?}: {stderr}");
    for part in parts {
        assert!(stderr.contains(part), "{arguments:?}: no {part} in {stderr}");
    }
}

#[test]
fn invalid_arguments_exit_2_and_name_a_valid_form() {
    let scene = Scene::new();
    let long = "x".repeat(201);
    let cases: &[(&[&str], &[&str])] = &[
        (&[], &["--help"]),
        (&["run"], &["<NAME>"]),
        (&["run", "demo"], &["<COMMAND>"]),
        (&["run", "--ttl", "soon", "demo", "true"], &["--ttl", "soon", "500ms"]),
        (&["run", "--ttl", "0", "demo", "true"], &["--ttl", "0", "greater than 0"]),
        (&["run", "--ttl", "10ms", "demo", "true"], &["10ms", "longer ttl"]),
        (
            &["run", "--ttl", "1s", "--kill-after", "1s", "demo", "true"],
            &["kill-after", "longer ttl"],
        ),
        (&["run", "--max-hold", "0", "demo", "true"], &["--max-hold"]),
        (&["run", "--limit", "0", "demo", "true"], &["--limit", "1.."]),
        (&["run", "--try", "--wait", "1s", "demo", "true"], &["--try", "--wait"]),
        (&["run", "", "true"], &["the key is empty"]),
        (&["run", "a\nb", "true"], &["U+000A"]),
        (&["run", &long, "true"], &["201 bytes"]),
        (&["run", "--note", "a\nb", "demo", "true"], &["note", "U+000A"]),
        (&["run", "--no-such-flag", "demo", "true"], &["--no-such-flag"]),
        (&["run", "--id", "", "demo", "true"], &["--id", "empty"]),
        (&["lead", "--id", " ", "demo"], &["--id", "empty"]),
        (&["once", "--per", "1h", "--id", "", "demo", "true"], &["--id", "empty"]),
        (&["once", "--slot", "", "demo", "true"], &["--slot", "empty"]),
        (&["watch", "--every", "1ns"], &["--every", "1ns", "at least 10ms"]),
        (&["top", "--every", "9ms"], &["--every", "at least 10ms"]),
        (&["serve", "--default-lease-ttl", "25h"], &["1day 1h", "--max-lease", "1day"]),
        (&["lead", "--key1", "1", "--key2", "2", "true"], &["--key1", "--dsn", "$PG_DSN"]),
        (&["acquire", "--key1", "1", "--key2", "2"], &["--key1", "postgres+advisory://"]),
        (&["status", "-s", "tenure://h", "--key1", "1", "--key2", "2"], &["--key1", "--dsn"]),
        (&["steal", "demo"], &["steal"]),
        (&["release", "demo"], &["--handle"]),
    ];
    for (arguments, parts) in cases {
        refused(&scene, arguments, 2, parts);
    }
    assert_eq!(scene.outcome(&["status"]).1, "nothing is held\n");
}

#[test]
fn a_relative_default_directory_is_refused_by_every_command_that_would_use_it() {
    let scene = Scene::new();
    let relative = |arguments: &[&str]| {
        let mut command = scene.tenure(arguments);
        let output = command.env("TENURE_DIR", "store").output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    for arguments in [
        &["run", "demo", "true"][..],
        &["status", "-s", "file:?shared"],
        &["doctor"],
        &["bench", "--for", "1s"],
    ] {
        let (code, stderr) = relative(arguments);
        assert_eq!(code, Some(2), "{arguments:?}: {stderr}");
        let refusal = "TENURE_DIR=store is relative";
        assert!(stderr.contains(refusal) && stderr.contains("absolute path"), "{stderr}");
    }
    assert!(!scene.store().exists());
    let elsewhere = format!("file:{}", scene.path("other").display());
    assert_eq!(relative(&["run", "-s", &elsewhere, "demo", "true"]).0, Some(0));
}

#[test]
fn jobs_have_no_default_store() {
    let scene = Scene::new();
    for command in [&["job", "add"][..], &["work"]] {
        let (_, help, _) = scene.outcome(&[command, &["--help"]].concat());
        assert!(help.contains("--store <URL>") && !help.contains("[default: file:]"), "{help}");
    }
    refused(&scene, &["job", "ls", "queue"], 2, &["PostgreSQL", "--store postgres://"]);
    refused(&scene, &["work", "queue", "true"], 2, &["PostgreSQL", "--store postgres://"]);
    refused(&scene, &["work", "-s", "file:", "queue", "true"], 2, &["PostgreSQL"]);
}

#[test]
fn a_store_that_cannot_be_is_refused_without_its_password() {
    let scene = Scene::new();
    refused(&scene, &["run", "-s", "localhost", "demo", "true"], 125, &["scheme"]);
    let url = "carrier-pigeon://me:hunter2@coop/";
    let (code, _, stderr) = scene.outcome(&["run", "-s", url, "demo", "true"]);
    assert_eq!(code, Some(125));
    assert!(stderr.contains("`carrier-pigeon`") && !stderr.contains("hunter2"), "{stderr}");
    let mut help = scene.tenure(&["run", "--help"]);
    let help = help.env("TENURE_STORE", url).output().unwrap();
    assert!(!String::from_utf8(help.stdout).unwrap().contains("hunter2"));
}

#[test]
fn a_directory_that_cannot_be_used_is_named() {
    let scene = Scene::new();
    std::fs::write(scene.path("file"), "").unwrap();
    std::fs::create_dir(scene.path("real")).unwrap();
    std::os::unix::fs::symlink(scene.path("real"), scene.path("link")).unwrap();
    let path = |name: &str| scene.path(name).display().to_string();
    for folder in ["/proc/tenure", &path("file/store"), &path("link")] {
        let store = format!("file:{folder}");
        refused(&scene, &["run", "-s", &store, "demo", "true"], 125, &[folder]);
        refused(&scene, &["status", "-s", &store], 125, &[folder]);
    }
}

#[test]
fn a_full_disk_is_told_in_one_line_and_leaves_nothing() {
    let scene = Scene::new();
    std::fs::create_dir(scene.store()).unwrap();
    // A small disk that only this script sees, and that goes with it.
    let script = r#"
        mount -t tmpfs -o size=64k,mode=700 tenure-test "$TENURE_DIR" || exit 77
        cat /dev/zero >"$TENURE_DIR/filler" 2>/dev/null
        "$TENURE" run demo touch ran
        echo "code $?, $(ls "$TENURE_DIR/seats" | wc -l) seats"
        rm "$TENURE_DIR/filler"
        "$TENURE" run --try demo echo room again
    "#;
    let mut command = std::process::Command::new("unshare");
    command.args(["-m", "sh", "-c", script]).current_dir(scene.path(""));
    for (name, value) in scene.tenure(&[]).get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let Ok(output) = command.output() else {
        crate::skip::skip("there is no unshare here");
        return;
    };
    let (stdout, stderr) =
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    if output.status.code() == Some(77) || stderr.starts_with("unshare:") {
        crate::skip::skip(&format!("no disk can be mounted here: {stderr}"));
        return;
    }
    assert_eq!(stdout, "code 125, 0 seats\nroom again\n", "{stderr}");
    assert!(stderr.contains("the disk is full: free some space"), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(!scene.path("ran").exists());
}

#[test]
fn a_run_inside_a_run_of_the_same_name_is_refused() {
    let scene = Scene::new();
    let inside = |inner: &str| {
        let script = format!("exec \"$TENURE\" run {inner}");
        scene.outcome(&["run", "demo", "--", "sh", "-c", &script])
    };
    let (code, _, stderr) = inside("--wait 10s demo true");
    assert_eq!(code, Some(125));
    assert!(
        stderr.contains("held by an enclosing tenure command") && stderr.lines().count() == 1,
        "{stderr}"
    );
    assert_eq!(inside("another true").0, Some(0));
    assert_eq!(inside("--limit 1 demo true").0, Some(0), "a semaphore is another thing");
    // Also where another hold is in between.
    let (code, _, stderr) = inside("another \"$TENURE\" run --wait 10s demo true");
    assert_eq!(code, Some(125));
    assert!(
        stderr.contains("held by an enclosing tenure command") && stderr.lines().count() == 1,
        "{stderr}"
    );
    // What was inherited from a hold that is over is no reason to refuse.
    let mut late = scene.tenure(&["run", "demo", "true"]);
    late.env("TENURE_NAME", "demo").env("TENURE_TOKEN", "1");
    late.env("TENURE_STORE", format!("file:{}", scene.store().display()));
    assert_eq!(late.output().unwrap().status.code(), Some(0));
}
