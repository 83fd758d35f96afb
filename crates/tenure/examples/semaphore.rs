//! At most three holders at a time, in any processes.
//!
//! `cargo run -p tenure --example semaphore`

use std::env;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::task::JoinSet;

const SLOTS: u32 = 3;

#[tokio::main]
async fn main() -> tenure::Result<()> {
    let store = env::var("TENURE_STORE").unwrap_or("memory:".to_owned());
    let client = tenure::Client::connect(&store).await?;
    let (inside, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut downloads = JoinSet::new();
    for _ in 0..10 {
        let slot = client.semaphore("downloads", SLOTS).acquire();
        let (inside, most) = (Arc::clone(&inside), Arc::clone(&most));
        downloads.spawn(async move {
            let guard = slot.await?;
            most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(20)).await;
            inside.fetch_sub(1, Ordering::SeqCst);
            guard.release().await
        });
    }
    while let Some(done) = downloads.join_next().await {
        done.expect("no download panics")?;
    }
    println!("ten downloads, at most {} at a time", most.load(Ordering::SeqCst));
    assert_eq!(most.load(Ordering::SeqCst), 3);
    Ok(())
}
