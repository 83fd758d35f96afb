//! A terminal of a test's own, with a shell in it.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use crate::support::Scene;

pub(crate) const CTRL_Z: &str = "\x1a";
pub(crate) const PROMPT: &str = "prompt> ";

/// A shell at a terminal of its own.
pub(crate) struct Session {
    shell: Child,
    keyboard: File,
    screen: Arc<Mutex<String>>,
    /// How much of the screen was looked at.
    seen: usize,
}

impl Session {
    /// A shell with job control.
    pub(crate) fn new(scene: &Scene) -> Self {
        let mut session = Self::of(scene, &["bash", "--norc", "--noprofile", "-i"]);
        // What is typed is shown as well; so that it is not taken for output, the answers are spelled differently.
        session.enter("stty -echo; echo be''gun");
        session.shows("begun\r\n");
        session
    }

    /// This program as the leader of a session.
    pub(crate) fn of(scene: &Scene, program: &[&str]) -> Self {
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
            .env("PS1", PROMPT)
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

    pub(crate) fn types(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    pub(crate) fn enter(&mut self, line: &str) {
        self.types(&format!("{line}\n"));
    }

    /// Waits until `text` is on the screen, after what was looked at before; what came before it.
    pub(crate) fn shows(&mut self, text: &str) -> String {
        self.insist("", text)
    }

    /// As [`shows`](Self::shows), typing `keys` until it is there, as people do: a shell's `fg` undoes a Ctrl-Z that comes
    /// between its giving the terminal and its continuing the job.
    pub(crate) fn insist(&mut self, keys: &str, text: &str) -> String {
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

    /// Stops the job in the foreground, and waits until the shell lists it as stopped.
    ///
    /// The prompt shows that the shell has the terminal. "Stopped" need not be printed with it: if Ctrl-Z follows `fg`
    /// closely, the shell has not yet noticed that the job ran. A Ctrl-Z too many discards the input typed ahead, so the
    /// command is typed until it is executed.
    pub(crate) fn stop(&mut self) {
        self.insist(CTRL_Z, PROMPT);
        let listed = self.insist("\njobs; echo at th''e prompt\n", "at the prompt");
        assert!(listed.contains("Stopped"), "{listed:?}");
    }

    /// The exit code of the last command.
    pub(crate) fn code(&mut self) -> String {
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
