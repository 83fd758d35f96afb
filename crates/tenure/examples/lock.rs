//! A lock around some work, which stops when the lock is lost.
//!
//! `cargo run -p tenure --example lock`; with `TENURE_STORE=file:` start it in two terminals.

use std::env;
use std::time::Duration;

#[tokio::main]
async fn main() -> tenure::Result<()> {
    let store = env::var("TENURE_STORE").unwrap_or("memory:".to_owned());
    let client = tenure::Client::connect(&store).await?;
    let guard = client
        .lock("reports/nightly")
        .ttl(Duration::from_secs(10))
        .timeout(Duration::from_secs(60))
        .note("the example")
        .acquire()
        .await?;
    println!("holding the lock with token {}", guard.fencing_token());

    // If the hold is lost, the work is dropped at its next await, before another client can hold the lock.
    guard.run(tokio::time::sleep(Duration::from_millis(200))).await?;
    guard.release().await?;
    println!("released");
    Ok(())
}
