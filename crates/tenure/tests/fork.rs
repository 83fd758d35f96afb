//! A forked copy of a process, which has one thread and none of the library's: it can take locks of its own, and takes
//! nothing from its parent.
#![cfg(all(target_os = "linux", feature = "blocking", feature = "server"))]
#![allow(unsafe_code, reason = "there is no other way to fork")]
#![expect(clippy::unwrap_used, reason = "helpers of tests are tests, which clippy cannot see")]

#[path = "services/mod.rs"]
mod services;

use std::cell::RefCell;
use std::io::{PipeReader, PipeWriter, Read as _, Write as _};
use std::net::TcpListener;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use nix::unistd::{ForkResult, fork};
use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, waitpid};
use tenure::{ErrorKind, blocking};
use tenure_server::{Engine, Server, Settings};

/// Much longer than any of it takes: what has not ended by then hangs.
const LIMIT: Duration = Duration::from_secs(20);
const TTL: Duration = Duration::from_secs(1);

/// One fork at a time: a copy would keep the pipes of another test open.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A forked copy of this process, which runs `work` and says what came of it.
struct Copy {
    pid: Pid,
    said: PipeReader,
}

impl Copy {
    fn run(work: impl FnOnce() -> String) -> Self {
        let (said, mut tell) = std::io::pipe().unwrap();
        // SAFETY: the copy has this thread alone. It runs `work`, in which the library is tested and nothing is printed,
        // writes to a pipe and kills itself: it never returns to the harness. Memory can be allocated in it, since the C
        // library holds its own locks over the fork.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                let outcome = catch_unwind(AssertUnwindSafe(work));
                let text = outcome.unwrap_or_else(|_| "it panicked".to_owned());
                let _ = tell.write_all(text.as_bytes());
                let _ = kill_process(getpid(), Signal::KILL);
                unreachable!("it was killed")
            }
            ForkResult::Parent { child } => {
                Self { pid: Pid::from_raw(child.as_raw()).unwrap(), said }
            }
        }
    }

    /// What it said, once it has ended.
    fn said(&self) -> String {
        let mut said = self.said.try_clone().unwrap();
        let text = within_limit(move || {
            let mut text = String::new();
            said.read_to_string(&mut text).map(|_| text)
        });
        text.map_or_else(|| "it hangs".to_owned(), Result::unwrap)
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        let _ = kill_process(self.pid, Signal::KILL);
        let _ = waitpid(Some(self.pid), WaitOptions::empty());
    }
}

/// What comes of something that may hang.
fn within_limit<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (send, receive) = mpsc::channel();
    thread::spawn(move || send.send(work()).ok());
    receive.recv_timeout(LIMIT).ok()
}

/// The URL of a lock server on a thread of this process.
fn server() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let engine = Engine::new(Settings::default(), None, 1, 1);
    let (server, _) = Server::new(listener, None, engine, Duration::ZERO).unwrap();
    let url = format!("tenure://{}", server.address().unwrap());
    thread::spawn(move || server.run());
    url
}

/// A runtime of a copy's own, for the API that does not block.
fn on_runtime(work: impl Future<Output = String>) -> String {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.unwrap().block_on(work)
}

fn wait_for(go: &PipeReader) {
    let mut go = go.try_clone().unwrap();
    let told = within_limit(move || go.read_exact(&mut [0]));
    told.expect("the other process hangs").unwrap();
}

fn tell(go: &mut PipeWriter) {
    go.write_all(&[0]).unwrap();
}

#[test]
fn a_copy_stops_waiting_when_its_time_is_up() {
    let _alone = alone();
    let url = server();
    let client = blocking::Client::connect(&url).unwrap();
    let guard = client.lock("held").ttl(TTL).acquire().unwrap();
    let copy = Copy::run(|| {
        let begun = Instant::now();
        let client = blocking::Client::connect(&url).unwrap();
        let asked = client.lock("held").timeout(Duration::from_millis(200)).acquire();
        let waited = begun.elapsed();
        let kind = asked.map(drop).map_err(|error| error.kind());
        assert!(waited >= Duration::from_millis(200), "{waited:?}");
        if waited < Duration::from_secs(5) { format!("{kind:?}") } else { format!("{waited:?}") }
    });
    assert_eq!(copy.said(), format!("{:?}", Err::<(), _>(ErrorKind::Timeout)));
    assert!(guard.is_held());
    guard.release().unwrap();
}

#[test]
fn a_copy_keeps_what_it_took() {
    let _alone = alone();
    let url = server();
    // The parent's clock and runtime have their threads by now.
    let client = blocking::Client::connect(&url).unwrap();
    client.lock("first").ttl(TTL).acquire().unwrap().release().unwrap();
    let blocks = Copy::run(|| {
        let client = blocking::Client::connect(&url).unwrap();
        let guard = client.lock("blocks").ttl(TTL).acquire().unwrap();
        let lost = guard.lost(TTL * 2);
        format!("{lost:?} {}", guard.is_held())
    });
    let polls = Copy::run(|| {
        on_runtime(async {
            let client = tenure::Client::connect(&url).await.unwrap();
            let guard = client.lock("polls").ttl(TTL).acquire().await.unwrap();
            tokio::time::sleep(TTL * 2).await;
            format!("{}", guard.is_held())
        })
    });
    assert_eq!((&*blocks.said(), &*polls.said()), ("None true", "true"));
}

#[test]
fn a_parent_keeps_what_it_holds_when_a_copy_takes_locks() {
    let _alone = alone();
    let url = server();
    let client = blocking::Client::connect(&url).unwrap();
    client.lock("first").ttl(TTL).acquire().unwrap().release().unwrap();
    // All timers so far have fired: a kernel timer that is shared would be free to be set to any time.
    on_runtime(async {
        let clock = tenure::Clock::system();
        clock.sleep_until(clock.now() + TTL).await;
        String::new()
    });
    let (begin, mut go) = std::io::pipe().unwrap();
    let (done, mut taken) = std::io::pipe().unwrap();
    let copy = Copy::run(|| {
        wait_for(&begin);
        on_runtime(async {
            let client = tenure::Client::connect(&url).await.unwrap();
            let guard = client.lock("copy").ttl(TTL * 9).acquire().await.unwrap();
            tell(&mut taken);
            tokio::time::sleep(TTL * 2).await;
            format!("{}", guard.is_held())
        })
    });
    let guard = client.lock("parent").ttl(TTL).acquire().unwrap();
    tell(&mut go);
    wait_for(&done);
    // The copy's timers are seconds away: they must not be the parent's.
    let lost = guard.lost(TTL * 2);
    assert!(lost.is_none() && guard.is_held(), "{lost:?}");
    assert_eq!(copy.said(), "true");
    guard.release().unwrap();
}

#[test]
fn a_copy_neither_has_nor_releases_the_hold_of_its_parent() {
    let _alone = alone();
    let client = blocking::Client::connect(&server()).unwrap();
    let guard = RefCell::new(Some(client.lock("parent").ttl(TTL).acquire().unwrap()));
    let copy = Copy::run(|| {
        let inherited = guard.take().unwrap();
        let held = inherited.is_held();
        let released = inherited.release().map_err(|error| error.kind());
        format!("{held} {released:?}")
    });
    assert_eq!(copy.said(), "false Err(NotHeld)");
    let guard = guard.take().unwrap();
    assert!(guard.is_held());
    guard.release().unwrap();
}

#[test]
fn a_copy_that_drops_a_hold_of_its_parent_does_not_end_it() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let url = format!("file:{}", folder.path().join("store").display());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let client = runtime.block_on(tenure::Client::connect(&url)).unwrap();
    let guard = runtime.block_on(client.lock("parent").acquire()).unwrap();
    // With the runtime, its tasks are dropped, and with them the hold.
    let inherited = RefCell::new(Some((runtime, guard)));
    let copy = Copy::run(|| {
        drop(inherited.take());
        "dropped".to_owned()
    });
    assert_eq!(copy.said(), "dropped");
    let (runtime, guard) = inherited.take().unwrap();
    assert!(guard.is_held());
    let error = runtime.block_on(client.lock("parent").try_acquire()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Held);
    runtime.block_on(guard.release()).unwrap();
}

#[test]
fn a_copy_that_drops_what_it_inherited_cuts_no_connection() {
    let Some(url) = services::postgres() else { return };
    let _alone = alone();
    let name = format!("tenure_fork_{}", std::process::id());
    let join = if url.contains('?') { '&' } else { '?' };
    let mine = format!("{url}{join}application_name={name}&table={name}");
    let store = tenure::PgLeaseStore::open(&mine).unwrap();
    let sessions = || {
        on_runtime(async {
            let (db, connection) =
                tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
            tokio::spawn(connection);
            let sql = "SELECT coalesce(string_agg(pid::text, ' ' ORDER BY pid), 'none')
                       FROM pg_stat_activity WHERE application_name = $1";
            db.query_one(sql, &[&name]).await.unwrap().get(0)
        })
    };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.unwrap();
    runtime.block_on(store.apply_schema()).unwrap();
    let client = RefCell::new(Some(tenure::Client::with_store(std::sync::Arc::new(store))));
    let before = sessions();
    let copy = Copy::run(|| {
        drop(client.take());
        "dropped".to_owned()
    });
    assert_eq!(copy.said(), "dropped");
    let client = client.take().unwrap();
    let found = runtime.block_on(client.inspect("any")).unwrap();
    assert!(found.holders.is_empty());
    assert_eq!(sessions(), before, "the parent goes on with the session that it had");
    drop(client);
    let drop_table = format!("DROP TABLE {name}");
    on_runtime(async {
        let (db, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        db.batch_execute(&drop_table).await.unwrap();
        String::new()
    });
}

#[cfg(feature = "jobs")]
#[test]
fn a_copy_cannot_complete_a_job_of_its_parent() {
    use tenure::jobs::{JobState, NewJob, Queue, Schema};

    let Some(url) = services::postgres() else { return };
    let _alone = alone();
    let name = format!("tenure_fork_jobs_{}", std::process::id());
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.unwrap();
    let (queue, id, guard) = runtime.block_on(async {
        Schema::of_queue(&name).unwrap().apply(&url).await.unwrap();
        let queue = Queue::connect(&url, &name).await.unwrap();
        let id = queue.enqueue(NewJob::json("1").unwrap()).await.unwrap().id;
        let guard = queue.claim_many(1).await.unwrap().pop().unwrap();
        (queue, id, guard)
    });
    let guard = RefCell::new(Some(guard));
    let copy = Copy::run(|| {
        let inherited = guard.take().unwrap();
        on_runtime(async move {
            let completed = inherited.complete().await;
            completed
                .map_or_else(|error| format!("{:?}", error.kind()), |()| "completed".to_owned())
        })
    });
    assert_eq!(copy.said(), "NotHeld");
    let guard = guard.take().unwrap();
    runtime.block_on(async {
        assert_eq!(queue.show(&id).await.unwrap().unwrap().state, JobState::Running);
        guard.complete().await.unwrap();
    });
    let drop_table = format!("DROP TABLE {name}");
    on_runtime(async {
        let (db, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        db.batch_execute(&drop_table).await.unwrap();
        String::new()
    });
}
