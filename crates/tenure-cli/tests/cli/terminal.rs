//! A session at a terminal: a shell with job control, and keys typed into it.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::session::{CTRL_Z, PROMPT, Session};
use crate::support::{Scene, eventually, runs};

const CTRL_C: &str = "\x03";

#[test]
fn ctrl_c_ends_the_child_and_the_shell_s_loop() {
    let scene = Scene::new();
    let mut session = Session::new(&scene);
    session.enter("$TENURE run demo sh -c 'echo ready; exec sleep 300'");
    session.shows("ready");
    session.types(CTRL_C);
    assert_eq!(session.code(), "130");
    assert_eq!(scene.outcome(&["run", "--try", "demo", "true"]).0, Some(0));
    session
        .enter("for i in 1 2; do $TENURE run demo sh -c 'echo ready-$0; exec sleep 300' $i; done");
    session.shows("ready-1");
    session.types(CTRL_C);
    // A shell that is interrupted forgets what was typed ahead.
    let between = session.shows(PROMPT);
    assert!(!between.contains("ready-2"), "{between}");
}

#[test]
fn a_child_that_handles_ctrl_c_goes_on() {
    let scene = Scene::new();
    let mut session = Session::new(&scene);
    session.enter("$TENURE run demo sh -c 'trap \"echo caught; exit 4\" INT; echo ready; read x'");
    session.shows("ready");
    session.types(CTRL_C);
    session.shows("caught");
    assert_eq!(session.code(), "4");
}

#[test]
fn ctrl_z_stops_the_job_and_fg_continues_it() {
    let scene = Scene::new();
    let mut session = Session::new(&scene);
    session.enter("$TENURE run demo sh -c 'echo ready; read x; echo got $x'");
    session.shows("ready");
    for _ in 0..2 {
        session.stop();
        // The shell has its terminal back, and the lock is still held.
        session.enter("$TENURE run -n demo true; echo th''ere $?");
        session.shows("there 75");
        // The shell may tell of the stop once more before it does what it is told.
        session.enter("echo be''fore; fg");
        session.shows("before");
        session.shows("run demo sh");
    }
    session.enter("some words");
    session.shows("got some words");
    assert_eq!(session.code(), "0");
}

#[test]
fn a_child_reads_the_terminal_from_its_first_moment_on() {
    let scene = Scene::new();
    let mut session = Session::new(&scene);
    for round in 0..20 {
        session.enter("$TENURE run demo head -n 1");
        session.enter(&format!("line {round}"));
        session.shows(&format!("line {round}\r\n"));
        assert_eq!(session.code(), "0");
    }
}

#[test]
fn a_child_sets_the_terminal_s_modes() {
    let scene = Scene::new();
    let mut session = Session::new(&scene);
    let script =
        "stty raw -echo; echo ready; dd bs=1 count=1 2>/dev/null | od -An -tx1; stty sane -echo";
    session.enter(&format!("$TENURE run demo sh -c '{script}'"));
    session.shows("ready");
    session.types(CTRL_C);
    session.shows("03");
    assert_eq!(session.code(), "0");
}

#[test]
fn in_a_pipeline_the_child_gets_the_terminal_when_it_asks_for_it() {
    let scene = Scene::new();
    let mut session = Session::new(&scene);
    session.enter("$TENURE run demo sh -c 'echo ready; read x < /dev/tty; echo got $x' | cat");
    session.shows("ready");
    session.enter("some words");
    session.shows("got some words");
    assert_eq!(session.code(), "0");
}

#[test]
fn a_job_in_the_background_stops_when_it_reads_the_terminal() {
    let scene = Scene::new();
    let mut session = Session::new(&scene);
    session.enter("$TENURE run demo sh -c 'echo ready; read x; echo got $x' &");
    session.shows("ready");
    // The shell tells of it before its next prompt.
    let mut stopped = false;
    for _ in 0..500 {
        session.enter("jobs; echo a''sked");
        stopped = session.shows("asked").contains("Stopped");
        if stopped {
            break;
        }
    }
    assert!(stopped, "the job was not stopped");
    session.enter("fg");
    session.shows("run demo sh");
    session.enter("some words");
    session.shows("got some words");
    assert_eq!(session.code(), "0");
}

#[test]
fn a_wait_is_one_line_that_goes_away() {
    let scene = Scene::new();
    let holder = scene.holder("demo");
    let mut session = Session::new(&scene);
    session.enter("$TENURE run demo echo mi''ne");
    session.shows("tenure: waiting for demo: held by ");
    session.shows(&format!("(pid {}) for ", holder.id()));
    session.shows(", you are 1st");
    holder.signal(Signal::SIGTERM);
    let between = session.shows("mine");
    assert!(between.ends_with("\r\x1b[K"), "{between:?}");
    assert!(!between.contains('\n'), "{between:?}");
    assert_eq!(session.code(), "0");
}

#[test]
fn the_scope_of_a_new_store_is_said_once_and_to_people_only() {
    let scene = Scene::new();
    let said =
        format!("tenure: locks in {} hold for this host, this user\r\n", scene.store().display());
    let mut session = Session::new(&scene);
    for (flags, told) in [("", true), ("", false), ("--quiet", false), ("--json", false)] {
        // But for the second time, the store is new.
        if flags.is_empty() == told {
            session.enter("rm -rf $TENURE_DIR");
        }
        session.enter(&format!("$TENURE run {flags} demo echo do''ne"));
        let before = session.shows("done");
        assert_eq!(before.contains(&said), told, "{flags}: {before:?}");
        assert_eq!(before.contains("this host"), told, "{flags}: {before:?}");
        assert_eq!(session.code(), "0");
    }
    session.enter("rm -rf $TENURE_DIR; $TENURE status 2>no-terminal; $TENURE status; echo do''ne");
    let before = session.shows("done");
    assert!(!before.contains("this host"), "{before:?}");
    assert_eq!(scene.read("no-terminal"), "");
    session.enter("rm -rf $TENURE_DIR; $TENURE status -s file:$TENURE_DIR/..//other; echo do''ne");
    let before = session.shows("done");
    assert!(!before.contains("this host"), "of a folder that was named: {before:?}");
}

#[test]
fn ctrl_c_and_ctrl_z_work_while_waiting() {
    let scene = Scene::new();
    let _holder = scene.holder("demo");
    let mut session = Session::new(&scene);
    session.enter("$TENURE run demo true");
    session.shows("you are 1st");
    session.stop();
    session.enter("fg");
    session.shows("you are 1st");
    session.types(CTRL_C);
    assert_eq!(session.code(), "130");
    assert_eq!(scene.waiters("demo"), 0);
}

#[test]
fn a_script_has_the_terminal_back_after_the_child() {
    let scene = Scene::new();
    let mut session = Session::new(&scene);
    let script =
        r#"$TENURE run demo sh -c "read y; echo had \$y"; echo ready; read x; echo got $x"#;
    session.enter(&format!("sh -c '{script}'"));
    session.enter("a word");
    session.shows("had a word");
    session.shows("ready");
    session.enter("some words");
    session.shows("got some words");
    assert_eq!(session.code(), "0");
}

#[test]
fn ctrl_z_is_ignored_in_an_orphaned_process_group() {
    let scene = Scene::new();
    let tenure = env!("CARGO_BIN_EXE_tenure");
    let script = "echo ready; read x; echo got $x";
    let mut session = Session::of(&scene, &[tenure, "run", "demo", "sh", "-c", script]);
    session.shows("ready");
    session.types(CTRL_Z);
    session.enter("some words");
    session.shows("got some words");
}

#[test]
fn a_terminal_that_hangs_up_ends_the_child() {
    let scene = Scene::new();
    let mut session = Session::new(&scene);
    session.enter("echo \"shell $$.\"");
    session.shows("shell ");
    let shell: i32 = session.shows(".").parse().unwrap();
    session.enter("$TENURE run demo sh -c 'echo ready $$.; exec sleep 300'");
    session.shows("ready ");
    let child: i32 = session.shows(".").parse().unwrap();
    // With the leader of its session a terminal hangs up.
    kill(Pid::from_raw(shell), Signal::SIGKILL).unwrap();
    eventually("the child is gone", || (!runs(child)).then_some(()));
    assert_eq!(scene.outcome(&["run", "--wait", "20s", "demo", "true"]).0, Some(0));
}
