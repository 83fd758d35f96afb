//! `Date` and `Last-Modified` are two clocks: a proxy replaces the first. No difference between them makes two holders,
//! and a dead holder is still taken over.

use std::time::{Duration, Instant};

use tenure::ErrorKind;
use tenure::store::{FindingLevel, KeySpace};

use crate::fake::Fake;
use crate::faults::{client, lock, until};

const LEASE: Duration = Duration::from_millis(1_200);

fn skewed(seconds: i64) -> Fake {
    let fake = Fake::quick();
    fake.set(|manner| manner.date = seconds);
    fake
}

/// A live holder renews; a client that tries and a client that waits stay outside.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_date_that_differs_from_last_modified_makes_no_second_holder() {
    let mut running = tokio::task::JoinSet::new();
    for skew in [600, 20, 2, -20] {
        running.spawn(async move {
            let fake = skewed(skew);
            let (one, two) = (client(&fake).await, client(&fake).await);
            let guard = lock(&one).acquire().await.expect("free");
            // One look has nothing but the headers, and believes those that are further apart than this.
            if skew < 30 {
                let tried = lock(&two).try_acquire().await;
                let error = tried.map(|_| ()).expect_err("a second holder, by one try");
                assert_eq!(error.kind(), ErrorKind::Held, "{skew}: {error}");
            }
            let waited = lock(&two).timeout(LEASE * 3).acquire().await;
            let error = waited.map(|_| ()).expect_err("a second holder, by waiting");
            assert_eq!(error.kind(), ErrorKind::Timeout, "{skew}: {error}");
            assert!(guard.is_held(), "{skew}: it was renewed all the time");
            guard.release().await.expect("ours");
        });
    }
    running.join_all().await;
}

/// A holder that cannot renew holds until its deadline, and the next one comes after that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_that_does_not_renew_is_lost_before_the_next_one_has_it() {
    let mut running = tokio::task::JoinSet::new();
    for skew in [20, 1, 0, -1, -20] {
        running.spawn(async move {
            let fake = skewed(skew);
            let (one, two) = (client(&fake).await, client(&fake).await);
            let granted = Instant::now();
            let guard = lock(&one).keep_alive(false).acquire().await.expect("free");
            let next = lock(&two).acquire().await.expect("taken over");
            assert!(!guard.is_held(), "{skew}: two hold it after {:?}", granted.elapsed());
            assert!(granted.elapsed() < LEASE * 3, "{skew}: {:?}", granted.elapsed());
            drop(next);
        });
    }
    running.join_all().await;
}

/// A record that its owner left to its lease `seconds` ago.
async fn left(fake: &Fake, seconds: u64) {
    let guard = lock(&client(fake).await).acquire().await.expect("free");
    guard.detach().await.expect("left to its lease");
    fake.age("p/k", seconds);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_holder_is_taken_over_soon_after_its_lease_and_margin() {
    let fake = Fake::quick();
    let (one, two) = (client(&fake).await, client(&fake).await);
    let guard = lock(&one).acquire().await.expect("free");
    let waiting = tokio::spawn(lock(&two).acquire());
    until("a bell", || fake.names().contains(&"p/k.bell".to_owned())).await;
    guard.detach().await.expect("left to its lease");
    let end = fake.modified("p/k") + (LEASE + LEASE / 6).as_secs_f64();
    drop(waiting.await.expect("no panic").expect("taken over"));
    let late = fake.now() - end;
    println!("taken over {late:.3} s after the lease and its margin");
    assert!((-0.05..1.0).contains(&late), "{late}");
}

/// A waiter that finds an old record watches it for a third of its lease and a request, if the clocks agree.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_that_comes_late_watches_for_a_while() {
    for (skew, least) in [(0, LEASE / 3 + LEASE / 4), (20, LEASE + LEASE / 6)] {
        let fake = skewed(skew);
        left(&fake, 8).await;
        let began = Instant::now();
        drop(lock(&client(&fake).await).acquire().await.expect("taken over"));
        let took = began.elapsed();
        println!("{skew} s of skew: taken over after {took:?}");
        assert!((least..LEASE * 3).contains(&took), "{skew}: {took:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_try_takes_over_what_is_older_than_three_leases_and_half_a_minute() {
    // Three leases and half a minute are 33.6 s.
    for (age, granted) in [(8, false), (32, false), (35, true)] {
        let fake = Fake::quick();
        left(&fake, age).await;
        let one = client(&fake).await;
        match lock(&one).try_acquire().await {
            Ok(guard) => assert!(granted && guard.is_held(), "granted after {age} s"),
            Err(error) => {
                assert!(!granted && error.kind() == ErrorKind::Held, "{age}: {error}");
                assert!(error.to_string().contains("try again in"), "it does not say why: {error}");
                let shown = one.store().inspect(&"k".parse().expect("a key"), KeySpace::Lock).await;
                let holder = &shown.expect("shown").holders[0];
                assert_eq!(
                    holder.lease_left,
                    Some(Duration::ZERO),
                    "shown as long as it bars others"
                );
            }
        }
    }
}

/// A client that tries again and again has watched the record meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tries_of_one_client_add_up_to_an_observation() {
    let fake = skewed(-20);
    left(&fake, 0).await;
    let one = client(&fake).await;
    let began = Instant::now();
    while let Err(error) = lock(&one).try_acquire().await {
        assert_eq!(error.kind(), ErrorKind::Held, "{error}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let took = began.elapsed();
    assert!((LEASE + LEASE / 6..LEASE * 3).contains(&took), "{took:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_doctor_compares_the_two_clocks() {
    for (skew, expected) in
        [(0, FindingLevel::Ok), (20, FindingLevel::Failed), (-20, FindingLevel::Failed)]
    {
        let fake = skewed(skew);
        let one = client(&fake).await;
        let findings = one.store().examine(Duration::from_secs(10)).await;
        let found = findings.iter().find(|finding| finding.what == "store clocks");
        let found = found.unwrap_or_else(|| panic!("nothing about the clocks: {findings:?}"));
        assert_eq!(found.level, expected, "{found:?}");
    }
}

/// A hand-over works whatever `Date` says, and never lasts longer than the lease from the moment of the release.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hand_over_counts_from_before_it_was_made() {
    for skew in [20, 0, -20] {
        let fake = skewed(skew);
        let (one, two) = (client(&fake).await, client(&fake).await);
        let guard = lock(&one).acquire().await.expect("free");
        let waiting = tokio::spawn(lock(&two).acquire());
        until("a bell", || fake.names().contains(&"p/k.bell".to_owned())).await;
        guard.release().await.expect("ours");
        let released = Instant::now();
        let next = waiting.await.expect("no panic").expect("next");
        let (left, passed) = (next.remaining(), released.elapsed());
        assert!(left + passed <= LEASE, "{skew}: {left:?} left after {passed:?}");
        assert!(passed < LEASE, "{skew}: only after {passed:?}");
        next.release().await.expect("ours");
    }
}
