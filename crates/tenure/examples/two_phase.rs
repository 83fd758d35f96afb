//! Take a place in the queue first, tell somebody, then wait: another process can prepare what depends on the order.
//!
//! `cargo run -p tenure --example two_phase`

use std::env;

#[tokio::main]
async fn main() -> tenure::Result<()> {
    let store = env::var("TENURE_STORE").unwrap_or("memory:".to_owned());
    let client = tenure::Client::connect(&store).await?;
    let first = client.lock("printer").acquire().await?;

    let place = client.lock("printer").enqueue().await?;
    println!("our place is taken: whoever comes now, comes after us");
    let later = client.lock("printer").enqueue().await?;

    first.release().await?;
    let second = place.wait().await?;
    println!("our turn, with token {}", second.fencing_token());
    // Dropping a place gives it up.
    drop(later);
    second.release().await
}
