//! Holders that are killed, stopped or evicted, or whose files are removed, and the waiters behind them.

use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use tenure::store::{Answer, Claim, Mode, QueueKind};
use tenure::{Client, ErrorKind, Key, Loss, Store};

use super::support::{Folder, Worker, send, state, until, until_shown};

/// The child of a worker, which outlives it. Killed in the end.
struct Orphan(String);

impl Orphan {
    async fn of(folder: &Folder) -> Self {
        folder.tells("child ").await;
        let told = folder.told();
        let pid = told.lines().find_map(|line| line.strip_prefix("child "));
        Self(pid.expect("told of a child").to_owned())
    }
}

impl Drop for Orphan {
    fn drop(&mut self) {
        send("KILL", &self.0);
    }
}

#[tokio::test]
async fn a_killed_holder_is_freed_within_milliseconds() {
    let (folder, rounds) = (Folder::new(), 10);
    let client = folder.client();
    let mut slowest = Duration::ZERO;
    for _ in 0..rounds {
        let mut worker = Worker::start(&folder, "hold", "the-worker");
        until_shown(&client, "key", 1, 0).await;
        let shown = state(&client, "key").await;
        assert_eq!(shown.holders[0].by.as_ref().expect("named").id, "the-worker");
        let pending = client.lock("key").enqueue().await.expect("enqueued");
        let began = Instant::now();
        worker.kill();
        pending.wait().await.expect("freed").release().await.expect("ours");
        slowest = slowest.max(began.elapsed());
    }
    assert!(slowest < Duration::from_millis(200), "freed after {slowest:?}");
}

#[tokio::test]
async fn eight_processes_count_to_1600() {
    let folder = Folder::new();
    let client = folder.client();
    let counter = folder.0.join("counter");
    std::fs::write(&counter, "0 0").expect("a folder of our own");
    let workers: Vec<_> = (0..8)
        .map(|_| {
            let mut command = Worker::command(&folder, "conform");
            command.env("TENURE_CONFORMANCE_TASK", "count");
            command.env("TENURE_CONFORMANCE_KEY", "key").env("TENURE_CONFORMANCE_TTL_MS", "15000");
            command
                .env("TENURE_CONFORMANCE_FILE", &counter)
                .env("TENURE_CONFORMANCE_ROUNDS", "200");
            Worker::spawn(&mut command)
        })
        .collect();
    for worker in workers {
        worker.succeeds().await;
    }
    let sum = std::fs::read_to_string(&counter).expect("the counter");
    let (rounds, token) = sum.split_once(' ').expect("two numbers");
    assert_eq!(rounds, "1600");
    let next = client.lock("key").acquire().await.expect("free").fencing_token();
    assert!(next > token.parse().expect("a token"), "{next} after {token}");
}

#[tokio::test]
async fn processes_are_served_in_the_order_in_which_they_came() {
    let folder = Folder::new();
    let client = folder.client();
    let guard = client.lock("key").acquire().await.expect("free");
    let mut workers = Vec::new();
    for place in 1..=5 {
        workers.push(Worker::start(&folder, "pass", &place.to_string()));
        until_shown(&client, "key", 1, place).await;
    }
    // A waiter that ends in the middle of the queue is skipped.
    workers.remove(2).kill();
    until_shown(&client, "key", 1, 4).await;
    guard.release().await.expect("ours");
    for worker in workers {
        worker.succeeds().await;
    }
    assert_eq!(folder.told(), "1\n2\n4\n5\n");
}

#[tokio::test]
async fn tokens_grow_over_a_wipe_of_the_folder() {
    let folder = Folder::new();
    let client = folder.client();
    let mut last = tenure::FencingToken::default();
    for round in 0..6 {
        let guard = client.lock("key").try_acquire().await.expect("free");
        assert!(guard.fencing_token() > last, "{last} before {}", guard.fencing_token());
        last = guard.fencing_token();
        guard.release().await.expect("ours");
        if round % 2 == 0 {
            std::fs::remove_dir_all(&folder.0).expect("ours");
        } else {
            let queue = folder.0.join("locks/key");
            let length = std::fs::metadata(&queue).expect("there").len();
            std::fs::write(queue, vec![0; length.try_into().expect("short")]).expect("ours");
        }
    }
}

#[tokio::test]
async fn a_number_on_disk_is_never_gone_below_and_nonsense_is_refused() {
    let folder = Folder::new();
    let client = folder.client();
    drop(client.lock("key").acquire().await.expect("free"));
    until_shown(&client, "key", 0, 0).await;
    let queue = folder.0.join("locks/key");
    let text = std::fs::read_to_string(&queue).expect("text");
    let fence = text.split_once("fence ").expect("a number").1[..20].to_owned();
    let ahead = "00009999999999999999";
    std::fs::write(&queue, text.replace(&fence, ahead)).expect("ours");
    let guard = client.lock("key").acquire().await.expect("free");
    assert_eq!(guard.fencing_token().to_string(), "10000000000000000");
    guard.release().await.expect("ours");
    for nonsense in ["09999999999999999999", "1747x00000000000000 "] {
        std::fs::write(&queue, text.replace(&fence, nonsense)).expect("ours");
        let error = client.lock("key").acquire().await.expect_err("nonsense");
        assert_eq!(error.kind(), ErrorKind::Misconfigured);
        assert!(error.to_string().contains("locks/key is damaged"), "{error}");
    }
}

#[tokio::test]
async fn a_folder_removed_under_a_holder_is_a_loss_at_once() {
    let folder = Folder::new();
    let client = folder.client();
    let guard = client.lock("key").ttl(Duration::from_secs(3600)).acquire().await.expect("free");
    std::fs::remove_dir_all(&folder.0).expect("ours");
    assert_eq!(guard.lost().await.reason, Loss::Taken);
    assert!(!guard.is_held());
    let guard = folder.client().lock("key").try_acquire().await.expect("a new folder");
    guard.release().await.expect("ours");
}

/// Removes the seat file of the participant with this id.
fn rob(folder: &Folder, id: &str) {
    let seats = std::fs::read_dir(folder.0.join("seats")).expect("there");
    let mut seats = seats.map(|seat| seat.expect("readable").path());
    let of = |seat: &std::path::PathBuf| {
        std::fs::read_to_string(seat).expect("text").lines().next() == Some(id)
    };
    std::fs::remove_file(seats.find(of).expect("a seat of that id")).expect("ours");
}

#[tokio::test]
async fn removed_seat_file_loses_the_hold_and_leaves_the_next_holder_unaffected() {
    let folder = Folder::new();
    let (client, other) = (folder.client(), folder.client());
    let lock = |client: &Client, id: &str| client.lock("key").ttl(Duration::from_secs(3600)).id(id);
    let robbed = lock(&client, "holder").acquire().await.expect("free");
    let pending = lock(&other, "waiter").enqueue().await.expect("enqueued");
    rob(&folder, "holder");
    assert_eq!(robbed.lost().await.reason, Loss::Taken);
    let next = pending.wait().await.expect("granted");
    let error = robbed.release().await.expect_err("it was lost");
    assert_eq!(error.kind(), ErrorKind::Lost);
    assert_eq!(state(&client, "key").await.holders.len(), 1, "the next one keeps it");
    next.release().await.expect("ours");
}

#[tokio::test]
async fn holder_that_lost_its_seat_file_leaves_the_next_holders_line_intact() {
    let folder = Folder::new();
    let (client, other) = (folder.client(), folder.client());
    let robbed = client.lock("key").id("holder").acquire().await.expect("free");
    rob(&folder, "holder");
    // Before the robbed one hears of it another has taken its line in the file.
    let claim = claim(1);
    let answer = other.store().claim(&claim, Duration::from_secs(1)).await.expect("an answer");
    assert!(matches!(answer, Answer::Granted(_)), "{answer:?}");
    robbed.lost().await;
    drop(robbed);
    let third = client.lock("key").try_acquire().await.expect_err("held by the other");
    assert_eq!(third.kind(), ErrorKind::Held);
}

fn claim(id: u128) -> Claim {
    Claim::new(
        id,
        Key::new("key").expect("a key"),
        Mode::Exclusive,
        Duration::from_secs(10),
        std::sync::Arc::default(),
    )
}

#[tokio::test]
async fn a_waiter_whose_seat_was_removed_comes_again() {
    let folder = Folder::new();
    let client = folder.client();
    let held = client.lock("key").id("holder").acquire().await.expect("free");
    let pending = client.lock("key").id("waiter").enqueue().await.expect("enqueued");
    rob(&folder, "waiter");
    until_shown(&client, "key", 1, 1).await;
    held.release().await.expect("ours");
    let guard = pending.wait().await.expect("granted");
    assert_eq!(state(&client, "key").await.holders.len(), 1);
    guard.release().await.expect("ours");
}

#[tokio::test]
async fn a_folder_moved_away_is_a_loss_at_the_next_check() {
    let (folder, away) = (Folder::new(), Folder::new());
    let client = folder.client();
    let (ttl, key) = (Duration::from_millis(300), "key");
    let holding = client.lock(key).ttl(ttl).acquire().await.expect("free");
    let queue = client.lock("other").ttl(ttl).acquire().await.expect("free");
    std::fs::remove_file(folder.0.join("locks/other")).expect("ours");
    assert_eq!(queue.lost().await.reason, Loss::Taken);
    std::fs::rename(&folder.0, &away.0).expect("ours");
    assert_eq!(holding.lost().await.reason, Loss::Taken);
    client.lock(key).try_acquire().await.expect("a new folder").release().await.expect("ours");
}

#[tokio::test]
async fn a_process_stopped_within_the_mutex_delays_claims_and_nothing_else() {
    let folder = Folder::new();
    let client = folder.client();
    let ttl = Duration::from_millis(300);
    let [held, dropped] = ["key", "dropped"].map(|key| client.lock(key).ttl(ttl).acquire());
    let (held, dropped) = (held.await.expect("free"), dropped.await.expect("free"));
    let stopped: Vec<_> = ["key", "dropped"]
        .map(|key| std::fs::File::open(folder.0.join("locks").join(key)).expect("there"))
        .into();
    for file in &stopped {
        let lock = || rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive);
        until("nobody is inside", async || lock().is_ok()).await;
    }

    tokio::time::sleep(ttl * 2).await;
    assert!(held.is_held(), "a check needs no mutex");
    let other = folder.client();
    let began = Instant::now();
    // One request, whose own limit ends long before the caller would be told that nothing is clear: with a wait the two
    // ends could come together, and a busy machine decided which came first.
    let long = Duration::from_secs(4);
    let error = other.lock("key").ttl(long).try_acquire().await.expect_err("stopped");
    assert!(began.elapsed() < Duration::from_secs(10), "bounded: {:?}", began.elapsed());
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let said = error.to_string();
    assert!(said.contains("locks/key locked") && said.contains("stopped"), "{said}");

    held.release().await.expect("a release needs no mutex");
    drop(dropped);
    drop(stopped);
    for key in ["key", "dropped"] {
        until_shown(&other, key, 0, 0).await;
        other.lock(key).try_acquire().await.expect("free").release().await.expect("ours");
    }
}

#[tokio::test]
async fn a_stopped_holder_is_evicted_all_the_same_and_learns_of_it() {
    let folder = Folder::new();
    let client = folder.client();
    let worker = Worker::start(&folder, "hold", "stuck");
    folder.tells("held ").await;
    worker.signal("STOP");
    let token = state(&client, "key").await.holders[0].token;
    let pending = client.lock("key").enqueue().await.expect("enqueued");
    let key = Key::new("key").expect("a key");
    client.store().evict(&key, token, "a test").await.expect("evicted");
    let guard = pending.wait().await.expect("woken although the evicted one does nothing");
    assert!(guard.fencing_token() > token);
    worker.signal("CONT");
    folder.tells("lost Evicted").await;
    assert!(guard.is_held());
    guard.release().await.expect("ours");
}

#[tokio::test]
async fn a_guardian_keeps_the_hold_of_a_killed_process_until_it_ends() {
    let folder = Folder::new();
    let client = folder.client();
    let mut worker = Worker::start(&folder, "guarded", "guardian");
    let orphan = Orphan::of(&folder).await;
    let pending = client.lock("key").enqueue().await.expect("enqueued");
    worker.kill();
    let held = client.lock("key").try_acquire().await.expect_err("the guardian keeps it");
    assert_eq!(held.kind(), ErrorKind::Held);
    assert_eq!(state(&client, "key").await.holders.len(), 1);
    drop(orphan);
    pending.wait().await.expect("the guardian has ended").release().await.expect("ours");
}

#[tokio::test]
async fn a_child_left_behind_keeps_nothing() {
    let folder = Folder::new();
    let client = folder.client();
    let mut worker = Worker::start(&folder, "guarded", "");
    let _orphan = Orphan::of(&folder).await;
    worker.kill();
    until_shown(&client, "key", 0, 0).await;
}

#[tokio::test]
async fn release_frees_the_lock_while_a_descriptor_copy_is_open() {
    let folder = Folder::new();
    let client = folder.client();
    let guard = client.lock("key").acquire().await.expect("free");
    let copy = guard.keep_open().expect("held").expect("files have descriptors");
    let flags = Command::new("true").stdin(Stdio::from(copy.try_clone().expect("a copy"))).status();
    assert!(flags.expect("true is there").success());
    guard.release().await.expect("ours");
    until_shown(&client, "key", 0, 0).await;
    // The seat is not used again: the copy would keep what another claim gets.
    let again = client.lock("key").acquire().await.expect("free");
    let seats = std::fs::read_dir(folder.0.join("seats")).expect("there").count();
    assert_eq!(seats, 1, "the seat that was lent is gone");
    let other = again.keep_open().expect("held").expect("files have descriptors");
    assert_ne!(inode(&copy), inode(&other));
}

fn inode(file: &impl AsFd) -> u64 {
    use std::os::unix::fs::MetadataExt as _;
    let file = std::fs::File::from(file.as_fd().try_clone_to_owned().expect("a copy"));
    file.metadata().expect("open").ino()
}

#[tokio::test]
async fn files_of_dead_processes_and_cancelled_waiters_are_removed() {
    let folder = Folder::new();
    let seats = || std::fs::read_dir(folder.0.join("seats")).expect("there").count();
    let mut worker = Worker::start(&folder, "hold", "");
    folder.tells("held ").await;
    worker.kill();
    assert_eq!(seats(), 1, "a killed process leaves its seat");
    let client = folder.client();
    assert_eq!(seats(), 0, "the next one to come sweeps it");
    let guard = client.lock("key").acquire().await.expect("free");
    let waiters: Vec<_> = (0..5).map(|_| tokio::spawn(client.lock("key").acquire())).collect();
    until_shown(&client, "key", 1, 5).await;
    waiters.iter().for_each(tokio::task::JoinHandle::abort);
    until_shown(&client, "key", 1, 0).await;
    guard.release().await.expect("ours");
    client.store().close().await;
    drop(client);
    assert_eq!(seats(), 0);
}

#[tokio::test]
async fn a_queue_has_an_end() {
    let folder = Folder::new();
    let store = folder.open();
    assert_eq!(store.capabilities().queue, QueueKind::Fifo);
    let limit = Duration::from_secs(1);
    let mut places = Vec::new();
    for id in 0..40 {
        places.push(store.claim(&claim(id), limit).await.expect("room"));
    }
    assert!(matches!(places[0], Answer::Granted(_)));
    // As if many more waited.
    let queue = folder.0.join("locks/key");
    let text = std::fs::read_to_string(&queue).expect("text");
    let (head, first) = (&text[..384], &text[384..512]);
    let crowd: Vec<_> = (1..=10_000).map(|seq| format!("{seq:016x}{}", &first[16..])).collect();
    let crowd = crowd.concat();
    std::fs::write(&queue, format!("{}{crowd}", head.replace("lines 00000028", "lines 00002710")))
        .expect("ours");
    let error = store.claim(&claim(99), limit).await.expect_err("full");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("10000"), "{error}");
    std::fs::write(&queue, text).expect("ours");
    drop(places);
    let client = Client::with_store(std::sync::Arc::new(store));
    until_shown(&client, "key", 0, 0).await;
    let length = std::fs::metadata(&queue).expect("there").len();
    drop(client.lock("key").acquire().await.expect("free"));
    assert_eq!(std::fs::metadata(&queue).expect("there").len(), length, "lines are used again");
}

#[tokio::test]
async fn a_holder_is_told_of_a_waiter_without_asking() {
    let folder = Folder::new();
    let (client, other) = (folder.client(), folder.client());
    let long = Duration::from_secs(3600);
    let guard = client.lock("key").ttl(long).acquire().await.expect("free");
    let pending = other.lock("key").enqueue().await.expect("enqueued");
    within("the holder hears of it", guard.handoff_requested()).await;
    guard.release().await.expect("ours");
    pending.wait().await.expect("handed over").release().await.expect("ours");
}

#[tokio::test]
async fn every_waiter_of_a_semaphore_gets_its_slot_as_one_comes_free() {
    let folder = Folder::new();
    let client = folder.client();
    let slot = || client.semaphore("key", 2);
    let (one, two) = (slot().acquire().await.expect("free"), slot().acquire().await.expect("free"));
    let (first, second) = (slot().enqueue().await.expect("queued"), slot().enqueue().await);
    one.release().await.expect("ours");
    let first = within("the first waiter", first.wait()).await.expect("a slot came free");
    two.release().await.expect("ours");
    let second = second.expect("queued").wait();
    let second = within("the second waiter", second).await.expect("a slot came free");
    assert!(first.is_held() && second.is_held());
}

#[tokio::test]
async fn a_lock_that_goes_a_moment_after_its_file_was_closed_is_seen() {
    let folder = Folder::new();
    let client = folder.client();
    let guard = client.lock("key").id("holder").acquire().await.expect("free");
    let copy = guard.keep_open().expect("held").expect("files have descriptors");
    let pending = folder.client().lock("key").enqueue().await.expect("enqueued");
    let waiting = tokio::spawn(pending.wait());
    until_shown(&client, "key", 1, 1).await;
    // The kernel tells of the last close before it takes the lock off: here the two are far apart.
    let seats = std::fs::read_dir(folder.0.join("seats")).expect("there");
    for seat in seats.map(|seat| seat.expect("readable").path()) {
        drop(std::fs::OpenOptions::new().write(true).open(seat).expect("ours"));
    }
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert!(!waiting.is_finished(), "it is still locked");
    rustix::fs::flock(&copy, FlockOperation::Unlock).expect("ours");
    let next = within("the next", waiting).await.expect("no panic").expect("granted");
    next.release().await.expect("ours");
}

/// Waits for what is pushed at once, and not for what a check finds by and by.
async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    let waited = tokio::time::timeout(Duration::from_secs(4), future).await;
    waited.unwrap_or_else(|_| panic!("{what} was not woken"))
}
