//! A place in the queue first, then a message to another process, then the wait: the other process can prepare.
//!
//! `cargo run -p tenure --example two_phase`

use std::env;

#[tokio::main]
async fn main() -> tenure::Result<()> {
    let store = env::var("TENURE_STORE").unwrap_or("memory:".to_owned());
    let client = tenure::Client::connect(&store).await?;
    let first = client.lock("printer").acquire().await?;

    let place = client.lock("printer").enqueue().await?;
    println!("we have a place in the queue: later claims come after ours");
    let later = client.lock("printer").enqueue().await?;

    first.release().await?;
    let second = place.wait().await?;
    println!("our turn, with token {}", second.fencing_token());
    // Dropping a place leaves the queue.
    drop(later);
    second.release().await
}
