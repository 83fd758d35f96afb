//! A program made of this command and a store of another crate.

use std::path::Path;
use std::process::{Command, Output};

use crate::support::Scene;

/// The example, which cargo builds beside the command with all tests.
fn example(scene: &Scene, arguments: &[&str]) -> Command {
    let folder = Path::new(env!("CARGO_BIN_EXE_tenure")).parent().unwrap().join("examples");
    let program = folder.join("with_own_store");
    assert!(program.exists(), "cargo build -p tenure-cli --examples");
    let mut command = Command::new(program);
    command.args(arguments).env("TEAM_LOCKS", scene.path("team"));
    command.env("TENURE_STORE", "team:deploys");
    command
}

fn outcome(command: &mut Command) -> (Option<i32>, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    (status.code(), String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned())
}

#[test]
fn its_scheme_works_in_every_command() {
    let scene = Scene::new();
    std::fs::create_dir(scene.path("team")).unwrap();
    let inner =
        r#""$0" run --try demo true; "$0" status demo; "$0" ls; "$0" run other -- echo ran"#;
    let mut command = example(&scene, &["run", "demo", "--", "sh", "-c", inner]);
    let program = command.get_program().to_owned();
    let (code, said) = outcome(command.arg(program));
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("already held by an enclosing tenure command"), "{said}");
    assert_eq!(said.matches("demo  lock").count(), 2, "status and ls: {said}");
    assert!(said.contains("ran"), "{said}");
    assert!(scene.path("team/deploys/locks").is_dir(), "the registered store was used");
    let (code, said) = outcome(&mut example(&scene, &["doctor"]));
    assert_eq!(code, Some(0), "{said}");
}

#[test]
fn its_refusal_reaches_the_user_and_the_plain_command_does_not_know_it() {
    let scene = Scene::new();
    let (code, said) = outcome(&mut example(&scene, &["run", "-s", "team:", "demo", "true"]));
    assert_eq!(code, Some(125), "{said}");
    assert!(said.contains("team:NAME"), "{said}");
    let (code, _, stderr) = scene.outcome(&["run", "-s", "team:deploys", "demo", "true"]);
    assert_eq!(code, Some(125), "{stderr}");
    assert!(stderr.contains("team"), "{stderr}");
}
