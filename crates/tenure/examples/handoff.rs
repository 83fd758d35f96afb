//! A long job that makes room when somebody asks: it finishes its step, and the one who waits goes on from there.
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

    let guard = client.lock("index").acquire().await?; // waiting is asking
    println!("the next holder has it");
    guard.release().await?;
    let steps = job.await.expect("the job does not panic")?;
    println!("the long job was at step {steps} when it was asked");
    Ok(())
}

/// Returns how many steps it made before it was asked to make room.
async fn long_job(client: Client) -> tenure::Result<u32> {
    let guard = client.lock("index").acquire().await?;
    let mut steps = 0;
    loop {
        guard.run(tokio::time::sleep(Duration::from_millis(20))).await?; // a step
        steps += 1;
        // Is it asked for? Never waits.
        let asked = tokio::time::timeout(Duration::ZERO, guard.handoff_requested()).await.is_ok();
        if asked {
            guard.release().await?;
            return Ok(steps);
        }
    }
}
