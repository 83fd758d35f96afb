//! With every rule obeyed, no run breaks a promise.

use std::time::Duration;

use tenure_sim::{Faults, Setup, Stats, StoreKind, simulate};

fn check(store: StoreKind) {
    let setup = Setup::new(store);
    let mut total = Stats::default();
    for seed in 0..6_000 {
        match simulate(seed, &setup) {
            Ok(stats) => total += stats,
            Err(violation) => panic!("{store:?}: {violation}"),
        }
    }
    println!("{store:?}: {total:?}");
    let Stats { grants, guards, answers, unknown, losses, .. } = total;
    assert!(guards > 100_000 && losses > 10_000 && unknown > 1_600, "too tame: {total:?}");
    assert!(grants > guards && answers > guards, "nothing was given back or refused: {total:?}");
}

#[test]
fn the_lock_server_keeps_every_promise() {
    check(StoreKind::ServerClock);
}

#[test]
fn the_session_store_keeps_every_promise() {
    check(StoreKind::Session);
}

#[test]
fn the_compare_and_swap_store_keeps_every_promise() {
    check(StoreKind::Observation);
}

/// Challengers wait hardly longer than the lease here: what keeps them from being early is the holder's own margin,
/// with clocks that stay wrong, messages that take no time, and holders that are cut off.
#[test]
fn a_long_lease_is_not_taken_over_early() {
    let faults = Faults {
        delay: 0.001,
        spike: 0.0,
        hang: 0.0,
        cut: 30,
        slew: 0,
        every: 2.0,
        lasts: 3.0,
        ..Faults::MIXED
    };
    let ttl = Duration::from_secs(40);
    let setup = Setup { ttl, keys: 1, faults, ..Setup::new(StoreKind::Observation) };
    let mut losses = 0;
    for seed in 0..3_000 {
        match simulate(seed, &setup) {
            Ok(stats) => losses += stats.losses,
            Err(violation) => panic!("{violation}"),
        }
    }
    assert!(losses > 5_000, "too tame: {losses} losses");
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for store in StoreKind::ALL {
        let run = || simulate(7, &Setup::new(store)).unwrap();
        assert_eq!(run(), run());
    }
}
