//! With every rule obeyed, no run breaks a promise.

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
fn the_stream_keeps_every_promise() {
    check(StoreKind::Stream);
}

/// Messages of watches that were sent before the loss are handled after it.
#[test]
fn the_stream_keeps_every_promise_while_it_loses_writes() {
    let setup = Setup::new(StoreKind::Stream);
    let faults = Faults { lose_writes: 0.5, ..setup.faults };
    for seed in 0..12_000 {
        if let Err(violation) = simulate(seed, &Setup { faults, ..setup }) {
            panic!("lost writes: {violation}");
        }
    }
}

/// Also where reads are answered with what was there before the last change.
#[test]
fn the_bucket_keeps_every_promise() {
    check(StoreKind::Bucket);
    let setup = Setup::new(StoreKind::Bucket);
    let faults = Faults { stale_read: 0.5, ..setup.faults };
    for seed in 0..2_000 {
        if let Err(violation) = simulate(seed, &Setup { faults, ..setup }) {
            panic!("old answers: {violation}");
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for store in StoreKind::ALL {
        let run = || simulate(7, &Setup::new(store)).unwrap();
        assert_eq!(run(), run());
    }
}
