//! The suite itself: it notices stores that break the contract, each in one way.
#![expect(clippy::unwrap_used, reason = "helpers of tests are tests, which clippy cannot see")]

mod wrong_store;

use std::sync::Arc;

use async_trait::async_trait;
use tenure::conformance::{self, Harness, Report};
use tenure::store::Store;
use tokio::task::JoinSet;

use wrong_store::{Flaw, Shared, WrongStore};

/// Flaws, each with a case that must notice it and a part of the message.
const NOTICED: &[(Flaw, &str, &str)] = &[
    (Flaw::AbandonDoesNothing, "an_abandoned_place_is_gone", "an empty queue after Place::abandon"),
    (Flaw::AbandonKeepsTheGrant, "abandoning_releases_a_grant", "a free key after Place::abandon"),
    (Flaw::WaitIgnoresItsLimit, "a_wait_returns_at_its_limit", "Place::wait with limit"),
    (Flaw::ListIgnoresThePrefix, "keys_are_listed_in_order", "Store::list returns for the prefix"),
    (Flaw::ListShowsEndedHolds, "only_keys_in_use_are_listed", "a key that was released"),
    (Flaw::ListShowsEndedHolds, "evicted_keys_are_not_listed", "a key whose hold was broken"),
    (Flaw::HoldersAreNameless, "holders_and_waiters_are_shown", "without its identity"),
    (
        Flaw::ResumesByHalfAHandle,
        "a_forged_handle_is_refused",
        "expected Invalid or NotHeld from Hold::renew by parts of two handles, got Ok",
    ),
    (
        Flaw::ResumesByToken,
        "a_forged_handle_is_refused",
        "expected Invalid or NotHeld from Store::resume by the token alone, got Ok",
    ),
    (
        Flaw::EvictsLocksOnly,
        "an_evicted_slot_is_free",
        "expected Ok from Store::evict of a slot, got NotHeld",
    ),
    (Flaw::DeadReadersStay, "a_dead_reader_is_freed", "a dead holder was kept for"),
    (Flaw::DeadSlotHoldersStay, "a_dead_slot_holder_is_freed", "a dead holder was kept for"),
    (Flaw::CleanEndsHolds, "cleaning_keeps_holds_and_tokens", "after Store::clean"),
    (Flaw::CleanResetsTokens, "cleaning_keeps_holds_and_tokens", ", then "),
    (Flaw::CountsOwnGrants, "grants_of_other_clients_are_counted", "another client's between"),
    (
        Flaw::RenewalRevives,
        "a_silent_holder_is_freed",
        "expected NotHeld or Lost from Hold::renew of an expired hold, after its successor's release, got Ok",
    ),
    (
        Flaw::KeysAreCaseless,
        "any_key_is_a_lock_of_its_own",
        "which is free (the store takes it for \"A|",
    ),
];

struct OnWrongStore(Flaw, Arc<Shared>);

#[async_trait]
impl Harness for OnWrongStore {
    async fn open(&self) -> Arc<dyn Store> {
        Arc::new(WrongStore::new(self.0, Arc::clone(&self.1)))
    }
}

async fn run(flaw: Flaw, case: &str) -> Report {
    conformance::run_only(OnWrongStore(flaw, Arc::default()), &[case]).await
}

/// Fails unless the case passes on the right store, and fails with this text on the wrong one.
async fn check(flaw: Flaw, case: &str, part: &str) -> Result<(), String> {
    let (wrong, right) = (run(flaw, case).await, run(Flaw::None, case).await);
    if right.passed() != 1 {
        return Err(format!("{case} fails on a store without flaws: {right}"));
    }
    if wrong.failed() != 1 {
        return Err(format!("{flaw:?} was not noticed: {wrong}"));
    }
    let is_noticed = wrong.to_string().contains(part);
    if is_noticed { Ok(()) } else { Err(format!("{flaw:?}: not {part:?} in {wrong}")) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flaws_are_noticed_by_their_cases() {
    let mut running = JoinSet::new();
    for (flaw, case, part) in NOTICED {
        running.spawn(async move { (flaw, case, part, check(*flaw, case, part).await) });
    }
    let mut again = Vec::new();
    while let Some(ended) = running.join_next().await {
        let (flaw, case, part, checked) = ended.expect("no panic");
        if checked.is_err() {
            again.push((flaw, case, part));
        }
    }
    // All at once, on a busy machine, a lease may have ended for lack of time. Alone, it does not.
    for (flaw, case, part) in again {
        check(*flaw, case, part).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn skipped_cases_are_counted_and_name_their_need() {
    let report = run(Flaw::None, "tokens_grow_over_a_restart").await;
    assert_eq!((report.passed(), report.failed(), report.skipped()), (0, 0, 1));
    let text = report.to_string();
    assert!(text.contains("there is nothing to restart (needs `Harness::restart`)"), "{text}");
    assert!(text.ends_with("0 passed, 0 failed, 1 skipped"), "{text}");
}
