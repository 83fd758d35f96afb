//! Folders that cannot be used: one clear line each.

use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use tenure::{Client, Error, ErrorKind, FileStore};

use super::skip::skip;
use super::support::{Folder, Worker};

/// The error of a folder that is refused: of one line, with what is wrong and with the folder's name.
async fn refused(url: &str, part: &str) -> Error {
    let error = Client::connect(url).await.err().unwrap_or_else(|| panic!("{url} was not refused"));
    let message = error.to_string();
    assert!(message.contains(part), "{message}");
    assert!(!message.contains('\n'), "{message}");
    error
}

fn url(path: &Path) -> String {
    format!("file:{}", path.display())
}

fn is_root() -> bool {
    Command::new("id").arg("-u").output().is_ok_and(|id| id.stdout == b"0\n")
}

fn chmod(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("ours");
}

#[tokio::test]
async fn a_folder_is_made_for_its_user_alone() {
    let folder = Folder::new();
    folder.client().lock("a/b").acquire().await.expect("free").release().await.expect("ours");
    let mode = |part: &str| {
        std::fs::metadata(folder.0.join(part)).expect("there").permissions().mode() & 0o777
    };
    for part in ["", "locks", "semaphores", "seats"] {
        assert_eq!(mode(part), 0o700, "{part}");
    }
    assert_eq!(mode("locks/a%2fb"), 0o600);
}

#[tokio::test]
async fn folders_that_cannot_be_trusted_are_refused() {
    let folder = Folder::new();
    drop(folder.open());
    let link = folder.0.with_extension("link");
    symlink(&folder.0, &link).expect("a link");
    let error = refused(&url(&link), "symbolic link: name the folder").await;
    std::fs::remove_file(&link).expect("ours");
    assert_eq!(error.kind(), ErrorKind::Denied);

    chmod(&folder.0, 0o770);
    refused(&url(&folder.0), "chmod go-w").await;
    let shared = Client::connect(&format!("{}?shared", url(&folder.0))).await.expect("on purpose");
    drop(shared.lock("key").acquire().await.expect("free"));
    let queue = std::fs::metadata(folder.0.join("locks/key")).expect("there");
    assert_eq!(queue.permissions().mode() & 0o777, 0o660, "others of the folder's group may");

    let file = folder.0.join("file");
    std::fs::write(&file, "").expect("ours");
    refused(&url(&file), "no folder").await;
    refused(&url(&file.join("below")), "cannot make").await;
    refused(&url(&folder.0.join("no/where")), "parent does not exist").await;
}

#[tokio::test]
async fn a_folder_of_another_user_is_refused() {
    if !is_root() {
        return skip("only root can give a folder away");
    }
    let folder = Folder::new();
    drop(folder.open());
    std::os::unix::fs::chown(&folder.0, Some(65_534), None).expect("root may");
    let error = refused(&url(&folder.0), "belongs to user 65534, not to us (user 0)").await;
    assert_eq!(error.kind(), ErrorKind::Denied);
    Client::connect(&format!("{}?shared", url(&folder.0))).await.expect("on purpose");
}

#[tokio::test]
async fn a_folder_that_cannot_be_made_or_written_is_refused() {
    // Root writes wherever there is a file system that takes it.
    let error = refused("file:/sys/tenure", "cannot make the store's folder /sys/tenure").await;
    assert!(error.to_string().contains("not permitted") || error.to_string().contains("read-only"));
    assert_eq!(error.kind(), ErrorKind::Denied);
    if is_root() {
        return skip("root can write to any folder");
    }
    let folder = Folder::new();
    drop(folder.open());
    chmod(&folder.0.join("locks"), 0o500);
    let error = folder.client().lock("key").acquire().await.expect_err("not writable");
    assert_eq!(error.kind(), ErrorKind::Denied);
    chmod(&folder.0.join("locks"), 0o700);
}

#[tokio::test]
async fn a_full_disk_is_told_at_once_and_leaves_nothing() {
    let folder = Folder::new();
    std::fs::create_dir(&folder.0).expect("ours");
    // A small disk that only the worker sees, and that goes with it.
    let script = r#"mount -t tmpfs -o size=64k,mode=700 tenure-test "$TENURE_TEST_FOLDER" || exit 77; exec "$0" "$@""#;
    let mut command = Command::new("unshare");
    let worker = Worker::command(&folder, "fill");
    command.args(["-m", "sh", "-c", script]).arg(worker.get_program()).args(worker.get_args());
    command.envs(worker.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let filler = folder.0.join("filler");
    command.env("TENURE_TEST_NAME", &filler);
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) if !is_root() || status.code() == Some(77) => {
            skip("no disk can be mounted here");
        }
        other => panic!("the worker failed: {other:?}"),
    }
}

/// The worker's part: on a disk that is full nothing is granted, and once there is room it goes on.
pub(crate) async fn fill(client: &Client, filler: &Path) {
    let page = [7; 4096];
    let mut file = std::fs::File::create(filler).expect("room for a name");
    while std::io::Write::write_all(&mut file, &page).is_ok() {}
    for key in ["one", "two"] {
        // Without a timeout: more time would not help.
        let error = client.lock(key).acquire().await.expect_err("the disk is full");
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        assert!(error.to_string().contains("the disk is full: free some space"), "{error}");
    }
    drop(file);
    std::fs::remove_file(filler).expect("ours");
    for key in ["one", "two"] {
        let state = client.inspect(key).await.expect("readable");
        assert!(state.holders.is_empty() && state.waiters.is_empty(), "{state:?}");
        client.lock(key).acquire().await.expect("room").release().await.expect("ours");
    }
}

#[tokio::test]
async fn the_default_folder_is_that_of_the_environment() {
    // Set for another process: all tests share the environment of this process.
    let folder = Folder::new();
    let mut command = Worker::command(&folder, "default");
    command.env("TENURE_DIR", &folder.0).env("TENURE_TEST_NAME", &folder.0);
    Worker::spawn(&mut command).succeeds().await;
}

/// The worker's part.
pub(crate) async fn by_default(expected: &str) {
    let client = Client::connect("file:").await.expect("a folder of the test's own");
    assert_eq!(client.store().to_string(), format!("file:{expected}"));
}

#[test]
fn a_store_can_be_opened_without_a_runtime_and_used_by_several() {
    let folder = Folder::new();
    let client = Client::with_store(std::sync::Arc::new(FileStore::open(&folder.0).expect("ours")));
    let runtime =
        || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let (first, second) = (runtime(), runtime());
    let guard = first.block_on(client.lock("key").acquire()).expect("free");
    // The first runtime stands still from here on; its holder is asked, and the second's waiter is served.
    let waiting = second.block_on(client.lock("key").timeout(Duration::from_secs(20)).enqueue());
    let waiting = waiting.expect("enqueued");
    first.block_on(guard.release()).expect("ours");
    let guard = second.block_on(waiting.wait()).expect("its turn");
    drop(first);
    let waiting = runtime().block_on(client.lock("key").enqueue()).expect("enqueued");
    drop(waiting);
    second.block_on(guard.release()).expect("ours");
}

#[test]
fn in_a_runtime_without_io_waiters_look_by_themselves() {
    let folder = Folder::new();
    let client = folder.client();
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        let guard = client.lock("key").acquire().await.expect("free");
        let pending = client.lock("key").enqueue().await.expect("enqueued");
        guard.release().await.expect("ours");
        pending.wait().await.expect("its turn").release().await.expect("ours");
    });
}
