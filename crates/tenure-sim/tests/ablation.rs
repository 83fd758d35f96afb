//! Each rule is needed: without it a promise breaks within 100 seeds, with it none does.

use tenure_core::Rules;
use tenure_sim::{Ablation, Breach, Setup, StoreKind, simulate};

fn check(rule: &str) {
    let ablation =
        Ablation::all().into_iter().find(|a| a.rule == rule).expect("the rule is listed");
    let Some(violation) = ablation.broken(0..100) else {
        panic!("nothing broke without {rule}");
    };
    println!(
        "without {rule} ({:?}): seed {}: {:?}: {}",
        ablation.setup.store, violation.seed, violation.breach, violation.breach
    );
    if let Some(violation) = ablation.broken_with_all_rules(0..600) {
        panic!("with all rules: {violation}");
    }
}

macro_rules! rules {
    ($($rule:ident)*) => {
        $(#[test] fn $rule() { check(stringify!($rule)) })*

        /// A rule that is added without an ablation does not compile here, or fails.
        #[test]
        fn every_rule_has_its_ablation() {
            let Rules { $($rule: _),* } = Rules::ALL;
            let listed: Vec<_> = Ablation::all().iter().map(|ablation| ablation.rule).collect();
            assert_eq!(listed, [$(stringify!($rule)),*]);
            for ablation in Ablation::all() {
                let off = [$(!ablation.without.$rule),*];
                assert_eq!(off.into_iter().filter(|off| *off).count(), 1, "{}", ablation.rule);
            }
        }
    };
}

rules! {
    count_from_request
    keep_margin
    count_suspended_time
    validity_is_a_deadline
    lost_by_timer
    only_clear_answers_extend
    confirm_waited_grants
    count_from_last_look
    release_late_grants
    take_over_by_observation
    observe_from_reply
    compare_store_clocks
    distrust_store_clocks
    lost_on_broken_connection
    renewal_names_version
}

/// No rule of the machines but a duty of the stores: the requests of one claim arrive in the order of their sending.
#[test]
fn the_requests_of_a_claim_must_keep_their_order() {
    let setup = Setup { ordered: false, ..Setup::new(StoreKind::ServerClock) };
    let broken = (0..500).find_map(|seed| simulate(seed, &setup).err());
    assert_eq!(broken.map(|violation| violation.breach), Some(Breach::HeldAfterNo));
}
