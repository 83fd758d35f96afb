//! One at a time: hold a lock while something is done, and stop when it is lost.
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
    println!("holding it with token {}", guard.fencing_token());

    // The work is dropped at its next await, should the hold be lost: by then nobody else has it yet.
    guard.run(tokio::time::sleep(Duration::from_millis(200))).await?;
    guard.release().await?;
    println!("released");
    Ok(())
}
