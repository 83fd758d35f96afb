//! `top`: in a terminal, and not without one.

use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::Stdio;
use std::sync::{Arc, Mutex};

use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use crate::support::{Scene, eventually};

#[test]
fn top_shows_holds_until_quit() {
    let scene = Scene::new();
    let _holder = scene.holder("reports/nightly");
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    let name = ptsname(&ours, Vec::new()).unwrap();
    let theirs: OwnedFd =
        rustix::fs::open(name, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).unwrap();
    let size = Winsize { ws_row: 24, ws_col: 100, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(ours.as_fd(), size).unwrap();
    let end = || Stdio::from(theirs.try_clone().unwrap());
    let mut command = scene.tenure(&["top", "--every", "100ms"]);
    let mut child = command.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
    let mut screen = std::fs::File::from(ours.try_clone().unwrap());
    let mut keys = std::fs::File::from(ours);
    let seen = Arc::new(Mutex::new(String::new()));
    let text = Arc::clone(&seen);
    std::thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(read @ 1..) = screen.read(&mut bytes) {
            text.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..read]));
        }
    });
    // Blanks are jumped over, so that only single words are there as they stand.
    for word in ["reports/nightly", "NAME", "names"] {
        eventually(word, || seen.lock().unwrap().contains(word).then_some(()));
    }
    keys.write_all(b"q").unwrap();
    let code = eventually("it quits", || child.try_wait().unwrap()).code();
    assert_eq!(code, Some(0));
    let (code, _, stderr) = scene.outcome(&["top"]);
    assert_eq!(code, Some(125));
    assert!(stderr.contains("top needs a terminal"), "{stderr}");
}
