//! Two workers and one lock: the second waits for the first, and each hold has a larger fencing token.

use std::time::Duration;

use tenure::{Client, Result};

async fn work(client: Client, name: &'static str) -> Result<()> {
    let guard =
        client.lock("reports/nightly").id(name).timeout(Duration::from_secs(10)).acquire().await?;
    println!("{name} holds {} with token {}", guard.key(), guard.fencing_token());
    guard.run(tokio::time::sleep(Duration::from_millis(300))).await?;
    println!("{name} is done");
    guard.release().await
}

#[tokio::main]
async fn main() -> Result<()> {
    let client = Client::connect("memory:").await?;
    tokio::try_join!(work(client.clone(), "alice"), work(client, "bob"))?;
    Ok(())
}
