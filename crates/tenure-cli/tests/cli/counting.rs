//! One at a time, counted.

use crate::support::Scene;

const PROCESSES: usize = 8;
const ROUNDS: usize = 25;

#[test]
fn no_increment_is_lost_and_tokens_only_grow() {
    let scene = Scene::new();
    std::fs::write(scene.path("count"), "0").unwrap();
    let step = "read n < count; echo $((n + 1)) > count; echo $TENURE_TOKEN >> tokens";
    std::thread::scope(|scope| {
        for _ in 0..PROCESSES {
            scope.spawn(|| {
                for _ in 0..ROUNDS {
                    let (code, _, stderr) =
                        scene.outcome(&["run", "count", "--", "sh", "-c", step]);
                    assert_eq!(code, Some(0), "{stderr}");
                }
            });
        }
    });
    assert_eq!(scene.read("count").trim(), (PROCESSES * ROUNDS).to_string());
    let tokens: Vec<u128> = scene.read("tokens").lines().map(|t| t.parse().unwrap()).collect();
    assert_eq!(tokens.len(), PROCESSES * ROUNDS);
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
}
