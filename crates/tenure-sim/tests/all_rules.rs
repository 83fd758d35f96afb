//! With every rule obeyed, no run breaks a promise.

use tenure_sim::{Setup, Stats, StoreKind, simulate};

#[test]
fn every_promise_is_kept_on_every_store() {
    for store in StoreKind::ALL {
        let setup = Setup::new(store);
        let mut total = Stats::default();
        for seed in 0..3_000 {
            match simulate(seed, &setup) {
                Ok(stats) => total += stats,
                Err(violation) => panic!("{store:?}: {violation}"),
            }
        }
        println!("{store:?}: {total:?}");
        assert!(total.guards > 30_000 && total.losses > 3_000 && total.unknown > 300, "too tame");
    }
}
