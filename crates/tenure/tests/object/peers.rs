//! Programs of the plain format, as the Python implementation behaves: four fields, its own clock, release by removal.

use std::time::Duration;

use serde_json::{Value, json};
use tenure::ErrorKind;

use crate::fake::Fake;
use crate::faults::{client, lock, until};

const NAME: &str = "p/k";

/// A participant of the plain format. Its clock is the store's.
struct Plain<'a> {
    fake: &'a Fake,
    id: &'static str,
    lease: f64,
}

impl Plain<'_> {
    /// What it writes as owner.
    fn record(&self, waiter: &Value) -> Value {
        let until = waiter.as_str().map(|_| self.fake.now() + 60.0);
        json!({
            "ownerId": self.id, "expiresAt": self.fake.now() + self.lease,
            "waitingOwnerId": waiter, "waiterExpiresAt": until,
        })
    }

    /// One attempt, as its acquire makes it: takes what is free or its own to take, else registers as the waiter.
    fn try_acquire(&self) -> bool {
        let (record, generation) = self.fake.read(NAME);
        let now = self.fake.now();
        let Some(record) = record else {
            return self.fake.swap(NAME, 0, Some(&self.record(&Value::Null)));
        };
        let waiter = record["waitingOwnerId"].as_str();
        let waits = record["waiterExpiresAt"].as_f64().is_some_and(|until| until > now);
        let other = waiter.filter(|_| waits).is_some_and(|waiter| waiter != self.id);
        if record["expiresAt"].as_f64().is_some_and(|until| until < now) && !other {
            return self.fake.swap(NAME, generation, Some(&self.record(&Value::Null)));
        }
        if !other {
            let marked = json!({
                "ownerId": record["ownerId"], "expiresAt": record["expiresAt"],
                "waitingOwnerId": self.id, "waiterExpiresAt": now + 60.0,
            });
            self.fake.swap(NAME, generation, Some(&marked));
        }
        false
    }

    /// The id of the waiter that requested a hand-off, as the plain client's check for waiters finds it.
    fn waiter(&self) -> Option<String> {
        let record = self.fake.object(NAME)?;
        record["waitingOwnerId"].as_str().map(str::to_owned)
    }

    fn release(&self) {
        let (record, generation) = self.fake.read(NAME);
        assert_eq!(record.expect("held")["ownerId"], self.id);
        assert!(self.fake.swap(NAME, generation, None), "nobody else writes");
    }

    fn owns(&self) -> bool {
        self.fake.object(NAME).is_some_and(|record| record["ownerId"] == self.id)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plain_owner_is_waited_for_and_hands_over() {
    let fake = Fake::quick();
    let py = Plain { fake: &fake, id: "py", lease: 30.0 };
    assert!(py.try_acquire());
    let one = client(&fake).await;
    let refused = lock(&one).try_acquire().await.expect_err("held");
    assert!(refused.kind() == ErrorKind::Held && refused.to_string().contains("py"), "{refused}");

    let waiting = tokio::spawn(lock(&one).acquire());
    until("our mark in its record", || py.waiter().is_some()).await;
    assert!(fake.object(NAME).expect("held")["waiterExpiresAt"].is_number());
    assert!(py.owns(), "a waiter changes nothing about who owns it");
    py.release();
    let guard = waiting.await.expect("no panic").expect("handed over");
    assert!(guard.is_held() && guard.fencing_token().number() > 1_000_000);
    guard.release().await.expect("ours");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plain_owner_that_is_gone_is_taken_over_after_its_end() {
    let fake = Fake::quick();
    let py = Plain { fake: &fake, id: "py", lease: 1.0 };
    assert!(py.try_acquire());
    let end = fake.object(NAME).expect("held")["expiresAt"].as_f64().expect("a number");
    let one = client(&fake).await;
    let guard = lock(&one).acquire().await.expect("taken over");
    assert!(fake.now() >= end, "not before its end");
    assert!(fake.now() < end + 2.0, "and soon after it");
    assert!(guard.is_held() && !py.owns());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plain_waiter_is_heard_and_is_next() {
    let fake = Fake::quick();
    let py = Plain { fake: &fake, id: "py", lease: 30.0 };
    let one = client(&fake).await;
    let guard = lock(&one).acquire().await.expect("free");
    let token = guard.fencing_token();
    assert!(!py.try_acquire(), "held");
    guard.handoff_requested().await;
    assert!(guard.is_held(), "asked for, not lost");
    guard.release().await.expect("ours");
    // No other client gets the lock before the waiter.
    let refused = lock(&one).try_acquire().await.expect_err("the waiter's alone");
    assert_eq!(refused.kind(), ErrorKind::Held);
    assert!(py.try_acquire() && py.owns());
    py.release();
    let again = lock(&one).acquire().await.expect("free");
    assert!(again.fencing_token() > token, "the number grows although the record was removed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plain_contender_does_not_take_what_we_renew_and_takes_over_what_we_left() {
    let fake = Fake::quick();
    let py = Plain { fake: &fake, id: "py", lease: 30.0 };
    let one = client(&fake).await;
    let guard = lock(&one).acquire().await.expect("free");
    let begun = std::time::Instant::now();
    while begun.elapsed() < Duration::from_secs(3) {
        assert!(!py.try_acquire(), "it is renewed");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(guard.is_held());
    guard.detach().await.expect("left to its lease");
    until("a take-over", || py.try_acquire()).await;
    assert!(py.owns());
}

/// A waiter at the bell waits behind a waiter of the plain format, named in the record, and gets the lock after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bell_waiter_is_served_after_the_waiter_named_in_the_record() {
    let fake = Fake::quick();
    let py = Plain { fake: &fake, id: "py", lease: 30.0 };
    let (one, two) = (client(&fake).await, client(&fake).await);
    let guard = lock(&one).acquire().await.expect("free");
    let waiting = tokio::spawn(lock(&two).acquire());
    until("a bell", || fake.names().contains(&"p/k.bell".to_owned())).await;
    assert!(!py.try_acquire());
    guard.release().await.expect("ours");
    assert!(py.try_acquire(), "named in the record");
    until("our mark in its record", || py.waiter().is_some()).await;
    py.release();
    let guard = waiting.await.expect("no panic").expect("granted");
    guard.release().await.expect("ours");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_fields_of_the_record_are_preserved() {
    let fake = Fake::quick();
    let one = client(&fake).await;
    let record = json!({"ownerId": "x", "expiresAt": 0, "team": "storage", "waitingOwnerId": null});
    fake.put(NAME, record.to_string());
    let guard = lock(&one).acquire().await.expect("free");
    assert_eq!(fake.object(NAME).expect("held")["team"], "storage");
    guard.release().await.expect("ours");
    assert_eq!(fake.object(NAME).expect("stays")["team"], "storage");
}
