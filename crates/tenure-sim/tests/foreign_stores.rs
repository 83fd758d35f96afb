//! Stores on foreign servers: a stream and a bucket, with faults that each seed draws.

use tenure_core::Rules;
use tenure_sim::{Breach, FaultKind, Faults, Setup, Stats, StoreKind, shrink_run, simulate};

fn check(store: StoreKind) {
    let mut total = Stats::default();
    for seed in 0..3_000 {
        let setup = Setup::drawn(store, seed);
        let Ok(stats) = simulate(seed, &setup) else {
            panic!("{}", shrink_run(seed, &setup).expect("the same run breaks again"));
        };
        total += stats;
    }
    println!("{store:?}: {total:?}");
    let Stats { guards, losses, lost_writes, excused_overlaps, .. } = total;
    assert!(guards > 50_000 && losses > 4_000, "too tame: {total:?}");
    assert!(lost_writes > 5_000 && excused_overlaps > 300, "too few losses: {total:?}");
}

#[test]
fn a_stream_keeps_every_promise_whatever_a_seed_draws() {
    check(StoreKind::Stream);
}

#[test]
fn a_bucket_keeps_every_promise_whatever_a_seed_draws() {
    check(StoreKind::Bucket);
}

#[test]
fn seeds_draw_no_fault_one_or_many() {
    let kinds = |seed| {
        let drawn = Faults::drawn(seed);
        FaultKind::ALL.iter().filter(|kind| drawn.without(**kind).is_some()).count()
    };
    let mut seeds = [0; FaultKind::ALL.len() + 1];
    (0..1_000).for_each(|seed| seeds[kinds(seed)] += 1);
    assert!(seeds[0] > 100 && seeds[1] > 100 && seeds[8..].iter().sum::<u32>() > 100, "{seeds:?}");
}

/// First breach of a setup, and whether the setup with all duties fulfilled has none in the same seeds.
fn broken(broken: &Setup, whole: &Setup) -> Breach {
    if let Some(violation) = (0..400).find_map(|seed| simulate(seed, whole).err()) {
        panic!("{violation}");
    }
    let found = (0..400).find_map(|seed| simulate(seed, broken).err());
    found.expect("nothing broke").breach
}

fn stale(store: StoreKind) -> Setup {
    let setup = Setup::new(store);
    Setup { faults: Faults { stale_read: 0.3, ..setup.faults }, ..setup }
}

fn losing(store: StoreKind) -> Setup {
    let setup = Setup::new(store);
    Setup { faults: Faults { lose_writes: 1.0, ..setup.faults }, ..setup }
}

#[test]
fn a_claim_that_was_decided_on_an_old_read_must_name_its_version() {
    for store in [StoreKind::Stream, StoreKind::Bucket] {
        let setup = stale(store);
        let breach = broken(&Setup { claims_name_version: false, ..setup }, &setup);
        assert!(matches!(breach, Breach::TwoHolders | Breach::LateLost), "{store:?}: {breach}");
    }
}

#[test]
fn a_token_needs_an_epoch_where_a_stream_may_be_created_again() {
    let setup = losing(StoreKind::Stream);
    let breach = broken(&Setup { tokens_have_epochs: false, ..setup }, &setup);
    assert_eq!(breach, Breach::TokenFell);
}

/// The excuse for a lost record is no excuse for a broken rule.
#[test]
fn rules_are_needed_where_writes_are_lost_as_well() {
    let rules = Rules { renewal_names_version: false, ..Rules::ALL };
    for store in [StoreKind::Stream, StoreKind::Bucket] {
        let setup = losing(store);
        let breach = broken(&Setup { rules, ..setup }, &setup);
        assert!(matches!(breach, Breach::TwoHolders | Breach::LateLost), "{store:?}: {breach}");
    }
}

#[test]
fn a_failing_run_is_shortened() {
    let rules = Rules { keep_margin: false, ..Rules::ALL };
    let setup = |seed| Setup { rules, ..Setup::drawn(StoreKind::Stream, seed) };
    let kinds = |faults: &Faults| {
        let has = |kind: &&FaultKind| {
            let mut without = *faults;
            without.set(**kind, 0.0);
            without != *faults
        };
        FaultKind::ALL.iter().filter(has).count()
    };
    let found = (0..1_000)
        .find(|seed| simulate(*seed, &setup(*seed)).is_err() && kinds(&setup(*seed).faults) > 3);
    let seed = found.expect("nothing broke without the margin");
    let shrunk = shrink_run(seed, &setup(seed)).expect("the same run breaks again");
    println!("{shrunk}");
    let small = shrunk.case.setup;
    assert_eq!((small.clients, small.keys), (2, 1));
    assert!(small.length <= 12.5 && kinds(&small.faults) < 4, "{small:?}");
    assert!(simulate(shrunk.case.seed, &small).is_err(), "what is printed can be run again");
}
