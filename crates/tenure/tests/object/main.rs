//! Object stores pass the whole suite: the fake of Google's JSON API in quick time and in its own, moto and azurite.
#![cfg(all(unix, feature = "object"))]

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tenure::conformance::{self, Harness};
use tenure::store::{Capabilities, Handoff, Liveness, QueueKind};
use tenure::{Client, Store};

mod acquire;
mod clocks;
mod fake;
mod faults;
mod input;
mod peers;
mod races;
mod random;
#[path = "../services/mod.rs"]
mod services;
mod vectors;

use fake::Fake;

struct OnStore {
    url: String,
}

const URL: &str = "TENURE_TEST_OBJECT_URL";

#[async_trait]
impl Harness for OnStore {
    async fn open(&self) -> Arc<dyn Store> {
        Arc::clone(Client::connect(&self.url).await.expect("a good URL").store())
    }

    fn worker(&self) -> Option<Command> {
        let mut command = Command::new(std::env::current_exe().ok()?);
        command.args(["--exact", "worker", "--nocapture"]).env(URL, &self.url);
        command.stdout(std::process::Stdio::null());
        Some(command)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker() {
    let Ok(url) = std::env::var(URL) else { return };
    let client = Client::connect(&url).await.expect("a good URL");
    conformance::work(Arc::clone(client.store())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_fake_passes_the_suite() {
    let mut expected = Capabilities::new(Liveness::Lease);
    expected.queue = QueueKind::Single;
    expected.handoff = Handoff::Polled { every: Duration::from_millis(30) };
    expected.detached = true;
    expected.list = true;
    expected.identities = true;
    expected.evict = true;
    expected.ordered_tokens = true;
    expected.min_ttl = Duration::from_millis(200);
    // Most of it is waiting: the shares wait together.
    let mut shares = tokio::task::JoinSet::new();
    for share in 0..3 {
        let fake = Fake::quick();
        let harness = OnStore { url: fake.store("suite") };
        assert_eq!(harness.open().await.capabilities(), expected);
        shares.spawn(conformance::run_share(harness, share, 3));
    }
    let mut passed = 0;
    while let Some(report) = shares.join_next().await {
        let report = report.expect("no panic");
        assert_eq!(report.failed(), 0, "{report}");
        passed += report.passed();
    }
    assert_eq!(passed, 66);
}

/// What needs no lease to run out, where that takes ten seconds and more.
const SOON: &[&str] = &[
    "tokens_grow",
    "failed_try_names_the_holder",
    "release_frees_it",
    "dropping_a_guard_releases",
    "release_twice_is_refused",
    "a_renewal_never_creates",
    "a_repeated_claim_is_the_same",
    "ttl_below_the_minimum_is_rejected",
    "eviction_needs_the_token",
    "a_wait_ends_at_its_timeout",
    "two_phases_time_out",
    "a_wait_returns_at_its_limit",
    "an_abandoned_place_is_gone",
    "a_pending_that_is_dropped_leaves",
    "a_waiter_asks_for_hand_off",
    "holders_and_waiters_are_shown",
    "keys_are_listed_in_order",
    "evicted_keys_are_not_listed",
    "a_forged_handle_is_refused",
    "an_unavailable_store_differs_from_a_held_lock",
    "a_claim_whose_reply_is_lost_is_found_again",
    "a_claim_that_is_lost_is_sent_again",
    "a_place_whose_wait_fails_is_found_again",
    "a_release_whose_reply_is_lost_is_a_release",
    "a_dropped_acquire_leaves_nothing",
    "waiting_for_leadership",
    "shutdown_releases",
];

/// What does, each by itself and at the same time.
const LATE: &[&str] = &[
    "a_hold_that_is_not_renewed_is_lost_before_another_has_it",
    "a_dead_holder_is_freed",
    "a_silent_holder_is_freed",
    "an_evicted_holder_learns_of_it",
    "releasing_a_lost_hold_leaves_the_next_holder_unaffected",
    "lost_does_not_wait_for_a_request_that_hangs",
    "vanished_waiter_does_not_block_the_queue",
    "a_renewal_whose_reply_is_lost_changes_nothing",
    "a_long_outage_is_a_loss",
    "a_killed_process_is_freed",
];

/// The suite in whole seconds. What takes long goes on beside the rest, in so many streams as the server bears.
async fn passes(url: String, late: &'static [&'static str], streams: usize) {
    let store = Client::connect(&url).await.expect("a good URL");
    assert_eq!(store.store().capabilities().min_ttl, Duration::from_secs(10));
    let mut running = tokio::task::JoinSet::new();
    for names in late.chunks(late.len().div_ceil(streams)) {
        let harness = OnStore { url: url.clone() };
        running.spawn(async move { (conformance::run_only(harness, names).await, names.len()) });
    }
    conformance::run_only(OnStore { url }, SOON).await.expect(SOON.len());
    while let Some(ended) = running.join_next().await {
        let (report, cases) = ended.expect("no panic");
        report.expect(cases);
    }
}

/// In one test, because they do little but wait, and tests at a time are as few as processors.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whole_seconds_s3_and_azure_pass_the_suite() {
    let fake = Fake::real();
    fake.set(|manner| manner.limited = false);
    let s3 = async {
        let Some(endpoint) = services::s3() else { return };
        passes(format!("s3://locks/suite?endpoint={endpoint}"), &LATE[..3], 1).await;
    };
    let azure = async {
        let Some(endpoint) = services::azure() else { return };
        passes(format!("az://locks/suite?endpoint={endpoint}"), &LATE[..3], 1).await;
    };
    tokio::join!(passes(fake.store("whole"), LATE, LATE.len()), s3, azure);
}
