//! Every order of events in a small world.

use tenure_core::Rules;
use tenure_sim::SmallWorld;

#[test]
fn no_order_of_events_gives_two_holders() {
    let (states, found) = SmallWorld::SMALL.explore(2);
    println!("{states} states");
    assert_eq!(found, ["acquired", "handed over", "lost"], "what may happen, and nothing else");
    assert!(states > 1_000_000, "{states} states");
}

#[test]
fn without_a_rule_some_order_of_events_gives_two_holders() {
    let all = Rules::ALL;
    for rules in [
        Rules { keep_margin: false, ..all },
        Rules { count_from_request: false, ..all },
        Rules { only_clear_answers_extend: false, ..all },
    ] {
        let (states, found) = SmallWorld { rules, ..SmallWorld::SMALL }.explore_until_failure(2);
        println!("{states} states, {found:?}: {rules:?}");
        let failed = ["one holder", "tokens grow", "lost before the next"];
        assert!(failed.iter().any(|name| found.contains(name)), "{rules:?}: {found:?}");
    }
}
