//! A session at a terminal: a shell with job control, and keys typed into it.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use crate::support::{Scene, eventually, runs};

const CTRL_C: &str = "\x03";
const CTRL_Z: &str = "\x1a";

/// A shell at a terminal of its own.
struct Session {
    shell: Child,
    keyboard: File,
    screen: Arc<Mutex<String>>,
    /// How much of the screen was looked at.
    seen: usize,
}

impl Session {
    /// A shell with job control.
    fn new(scene: &Scene) -> Self {
        let mut session = Self::of(scene, &["bash", "--norc", "--noprofile", "-i"]);
        // What is typed is shown as well; so that it is not taken for output, the answers are spelled differently.
        session.enter("stty -echo; echo be''gun");
        session.shows("begun\r\n");
        session
    }

    /// This program as the leader of a session.
    fn of(scene: &Scene, program: &[&str]) -> Self {
        let keyboard =
            openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&keyboard).unwrap();
        unlockpt(&keyboard).unwrap();
        let name = ptsname(&keyboard, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let tty = File::from(rustix::fs::open(name, flags, Mode::empty()).unwrap());
        let stdio = || Stdio::from(tty.try_clone().unwrap());
        // `setsid` makes the terminal the controlling one.
        let shell = Command::new("setsid")
            .args(["--ctty", "--wait"])
            .args(program)
            .env("TENURE_DIR", scene.store())
            .env("TENURE", env!("CARGO_BIN_EXE_tenure"))
            .env("PS1", "prompt> ")
            .env("TERM", "dumb")
            .env_remove("TENURE_STORE")
            .env_remove("PROMPT_COMMAND")
            .current_dir(scene.path(""))
            .process_group(0)
            .stdin(stdio())
            .stdout(stdio())
            .stderr(stdio())
            .spawn()
            .unwrap();
        let keyboard = File::from(keyboard);
        let mut output = keyboard.try_clone().unwrap();
        let screen = Arc::new(Mutex::new(String::new()));
        let written = Arc::clone(&screen);
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // Ends with an error when the last of the terminal's users is gone.
            while let Ok(read @ 1..) = output.read(&mut bytes) {
                written
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push_str(&String::from_utf8_lossy(&bytes[..read]));
            }
        });
        Self { shell, keyboard, screen, seen: 0 }
    }

    fn types(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    fn enter(&mut self, line: &str) {
        self.types(&format!("{line}\n"));
    }

    /// Waits until `text` is on the screen, after what was looked at before; what came before it.
    fn shows(&mut self, text: &str) -> String {
        self.insist("", text)
    }

    /// As [`shows`](Self::shows), typing `keys` until it is there, as people do: a shell's `fg` undoes a Ctrl-Z that comes
    /// between its giving the terminal and its continuing the job.
    fn insist(&mut self, keys: &str, text: &str) -> String {
        let deadline = Instant::now() + Duration::from_secs(30);
        let mut again = Instant::now();
        loop {
            if Instant::now() >= again {
                self.types(keys);
                again += Duration::from_millis(300);
            }
            let screen = self.screen.lock().unwrap_or_else(PoisonError::into_inner);
            let unseen = &screen[self.seen..];
            if let Some(at) = unseen.find(text) {
                self.seen += at + text.len();
                return unseen[..at].to_owned();
            }
            assert!(Instant::now() < deadline, "no {text:?} in {unseen:?}");
            drop(screen);
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Stops the job in the foreground. A Ctrl-Z too many takes what was typed ahead with it, so the shell is asked for
    /// a word until it gives one.
    fn stop(&mut self) {
        self.insist(CTRL_Z, "Stopped");
        self.insist("\necho at th''e prompt\n", "at the prompt");
    }

    /// The exit code of the last command.
    fn code(&mut self) -> String {
        self.enter("echo \"code=$?.\"");
        self.shows("code=");
        self.shows(".")
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // Hanging up is what ends a session, and all that is in it.
        let _ = self.keyboard.write_all(b"\x03\nkill -9 $(jobs -p); exit\n");
        let _ = self.shell.kill();
        let _ = self.shell.wait();
    }
}

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
    let between = session.shows("prompt> ");
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
fn ctrl_z_is_nothing_where_nobody_could_continue_the_job() {
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
