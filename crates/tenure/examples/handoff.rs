//! A long job that releases its lock when a waiter requests a hand-off: it finishes its step, and the waiter continues.
//!
//! `cargo run -p tenure --example handoff`

use std::env;
use std::time::Duration;

use tenure::Client;

#[tokio::main]
async fn main() -> tenure::Result<()> {
    let store = env::var("TENURE_STORE").unwrap_or("memory:".to_owned());
    let client = Client::connect(&store).await?;
    let job = tokio::spawn(long_job(client.clone()));
    tokio::time::sleep(Duration::from_millis(100)).await;

    let guard = client.lock("index").acquire().await?; // waiting requests the hand-off
    println!("the next holder has the lock");
    guard.release().await?;
    let steps = job.await.expect("the job does not panic")?;
    println!("the long job was at step {steps} when the hand-off was requested");
    Ok(())
}

/// Returns the number of steps that it made before the hand-off was requested.
async fn long_job(client: Client) -> tenure::Result<u32> {
    let guard = client.lock("index").acquire().await?;
    let mut steps = 0;
    loop {
        guard.run(tokio::time::sleep(Duration::from_millis(20))).await?; // a step
        steps += 1;
        // A check that does not wait.
        let asked = tokio::time::timeout(Duration::ZERO, guard.handoff_requested()).await.is_ok();
        if asked {
            guard.release().await?;
            return Ok(steps);
        }
    }
}
