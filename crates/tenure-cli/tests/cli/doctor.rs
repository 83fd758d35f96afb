//! `tenure doctor`: on stores that are well, and on those that are not.

use serde_json::Value;

use crate::support::{Scene, Server};

/// The lines for programs.
fn findings(stdout: &str) -> Vec<Value> {
    stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_store_that_is_well_says_what_it_promises() {
    let scene = Scene::new();
    let server = Server::start(&scene, &[]);
    for url in ["memory:", "file:", &server.url] {
        let (code, stdout, stderr) = scene.outcome(&["doctor", url]);
        assert_eq!(code, Some(0), "{url}: {stdout}{stderr}");
        assert!(stdout.starts_with(url.trim_end_matches('/')), "{stdout}");
        for part in ["ok    reachable", "round trip", "promises", "semaphores"] {
            assert!(stdout.contains(part), "{url}: no {part} in {stdout}");
        }
        let (code, stdout, stderr) = scene.outcome(&["doctor", "--json", "-s", url]);
        assert_eq!((code, stderr.as_str()), (Some(0), ""), "{url}: {stdout}");
        let findings = findings(&stdout);
        assert!(findings.len() >= 4, "{stdout}");
        for finding in findings {
            assert_ne!(finding["verdict"], "failed", "{finding}");
            assert!(finding["store"].as_str().unwrap().starts_with(url), "{finding}");
        }
    }
    assert_eq!(scene.outcome(&["status"]).1, "nothing is held\n");
}

#[test]
fn the_environment_names_the_store_unless_the_command_does() {
    let scene = Scene::new();
    let look = |arguments: &[&str]| {
        let output = scene.tenure(arguments).env("TENURE_STORE", "memory:here").output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(look(&["doctor"]).starts_with("memory:here\n"));
    assert!(look(&["doctor", "memory:there"]).starts_with("memory:there\n"));
    assert!(look(&["doctor", "-s", "memory:there"]).starts_with("memory:there\n"));
    let (code, _, stderr) = scene.outcome(&["doctor", "-s", "memory:", "memory:"]);
    assert_eq!(code, Some(2), "{stderr}");
}

#[test]
fn a_store_that_is_away_or_no_store_at_all_is_a_failure_of_ours() {
    let scene = Scene::new();
    let mut server = Server::start(&scene, &[]);
    server.kill();
    for url in [server.url.as_str(), "carrier-pigeon://me:hunter2@coop/"] {
        let (code, stdout, stderr) = scene.outcome(&["doctor", url]);
        assert_eq!(code, Some(125), "{url}: {stdout}{stderr}");
        assert!(!format!("{stdout}{stderr}").contains("hunter2"), "{stdout}{stderr}");
    }
    let (code, stdout, stderr) = scene.outcome(&["doctor", "postgres://127.0.0.1:1/x?user=u"]);
    assert_eq!(code, Some(125), "{stdout}{stderr}");
    assert!(stdout.contains("FAIL  reachable"), "a store that connects late: {stdout}{stderr}");
}

#[test]
fn doctor_reports_lock_server_durability_and_authentication() {
    let scene = Scene::new();
    let forgetful = Server::start(&scene, &[]);
    let (code, stdout, _) = scene.outcome(&["doctor", &forgetful.url]);
    assert_eq!(code, Some(0), "a warning is no failure: {stdout}");
    assert!(stdout.contains("WARN  data directory") && stdout.contains("--data-dir"), "{stdout}");
    assert!(stdout.contains("instance "), "{stdout}");
    let (data, secret) = (scene.path("data"), scene.path("secret"));
    std::fs::write(&secret, "hunter2\n").unwrap();
    std::fs::set_permissions(&secret, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let (data, secret) = (data.to_str().unwrap(), secret.to_str().unwrap());
    let careful = Server::start(&scene, &["--data-dir", data, "--auth-token-file", secret]);
    let url = format!("{}?auth_token_file={secret}", careful.url);
    let (code, stdout, stderr) = scene.outcome(&["doctor", &url]);
    assert_eq!(code, Some(0), "{stdout}{stderr}");
    assert!(stdout.contains("outlive a restart") && stdout.contains("accepted ours"), "{stdout}");
    assert!(!stdout.contains("WARN") && !stdout.contains("hunter2"), "{stdout}");
    let (code, _, stderr) = scene.outcome(&["doctor", &careful.url]);
    assert_eq!(code, Some(125), "{stderr}");
}

#[test]
fn a_store_that_answers_and_cannot_be_used_is_unwell() {
    let scene = Scene::new();
    assert_eq!(scene.outcome(&["run", "tenure/doctor", "true"]).0, Some(0));
    let mut damaged = 0;
    for entry in std::fs::read_dir(scene.store().join("locks")).unwrap().flatten() {
        std::fs::write(entry.path(), "no queue at all").unwrap();
        damaged += 1;
    }
    assert_eq!(damaged, 1, "the key that is looked at");
    let (code, stdout, stderr) = scene.outcome(&["doctor"]);
    assert_eq!(code, Some(1), "{stdout}{stderr}");
    assert!(stdout.contains("FAIL  inspect") && stdout.contains("is damaged"), "{stdout}");
}

#[test]
fn two_servers_behind_one_url_are_a_failure() {
    let scene = Scene::new();
    let (one, two) = (Server::start(&scene, &[]), Server::start(&scene, &[]));
    let host = |url: &str| url.trim_start_matches("tenure://").trim_end_matches('/').to_owned();
    let (code, stdout, stderr) = scene.outcome(&["doctor", &one.url]);
    assert_eq!(code, Some(0), "{stdout}{stderr}");
    assert!(stdout.contains("ok    addresses"), "{stdout}");
    let both = format!("tenure://{},{}", host(&one.url), host(&two.url));
    let (code, stdout, stderr) = scene.outcome(&["doctor", &both]);
    assert_eq!(code, Some(1), "{stdout}{stderr}");
    assert!(stdout.contains("FAIL  addresses"), "{stdout}");
}
