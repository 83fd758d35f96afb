//! `top`: in a terminal, and not without one.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use crate::support::{Scene, eventually};
use crate::watching::at_work;

/// `top` in a terminal of its own.
struct Terminal {
    child: Child,
    keys: File,
    seen: Arc<Mutex<String>>,
}

impl Terminal {
    fn start(mut command: Command) -> Self {
        let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&ours).unwrap();
        unlockpt(&ours).unwrap();
        let name = ptsname(&ours, Vec::new()).unwrap();
        let theirs: OwnedFd =
            rustix::fs::open(name, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).unwrap();
        let size = Winsize { ws_row: 24, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(ours.as_fd(), size).unwrap();
        let end = || Stdio::from(theirs.try_clone().unwrap());
        let child = command.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
        let mut screen = File::from(ours.try_clone().unwrap());
        let keys = File::from(ours);
        let seen = Arc::new(Mutex::new(String::new()));
        let text = Arc::clone(&seen);
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(read @ 1..) = screen.read(&mut bytes) {
                text.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..read]));
            }
        });
        Self { child, keys, seen }
    }

    /// Waits until words are on the screen. Blanks are jumped over, so that only single words are there as they stand.
    fn shows(&self, words: &[&str]) {
        for word in words {
            eventually(word, || self.seen.lock().unwrap().contains(word).then_some(()));
        }
    }

    fn quit(mut self) -> Option<i32> {
        self.keys.write_all(b"q").unwrap();
        eventually("it quits", || self.child.try_wait().unwrap()).code()
    }
}

#[test]
fn top_shows_holds_until_quit() {
    let scene = Scene::new();
    let _holder = scene.holder("reports/nightly");
    let terminal = Terminal::start(scene.tenure(&["top", "--every", "100ms"]));
    terminal.shows(&["reports/nightly", "NAME", "names"]);
    assert_eq!(terminal.quit(), Some(0));
    let (code, _, stderr) = scene.outcome(&["top"]);
    assert_eq!(code, Some(125));
    assert!(stderr.contains("top needs a terminal"), "{stderr}");
}

#[test]
fn top_shows_the_jobs_of_a_queue() {
    let scene = Scene::new();
    let (code, _, stderr) = scene.outcome(&["top", "--queue", "jobs"]);
    assert_eq!(code, Some(2), "{stderr}");
    assert!(stderr.contains("--store postgres://"), "{stderr}");
    let Some((queue, working)) = at_work("top") else { return };
    let terminal =
        Terminal::start(queue.tenure(&["top", "--every", "100ms", "--queue", &queue.table]));
    let worker = format!(":{}:", working.id());
    terminal.shows(&[&queue.table, "ATTEMPT", "running", &worker, "report", "/s)", "payload"]);
    queue.add(&["--payload", "7"]);
    terminal.shows(&["(oldest"]);
    assert_eq!(terminal.quit(), Some(0));
}
