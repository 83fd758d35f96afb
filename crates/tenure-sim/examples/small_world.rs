//! Walks the larger of the small worlds: `cargo run --release -p tenure-sim --example small_world`.

fn main() {
    let start = std::time::Instant::now();
    let (states, found) = tenure_sim::SmallWorld::LARGE.explore(2);
    println!("{states} states in {:?}: {found:?}", start.elapsed());
}
