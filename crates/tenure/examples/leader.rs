//! One leader among several participants: here two, of which the first steps down and the second takes over.
//!
//! `cargo run -p tenure --example leader`

use std::env;
use std::time::Duration;

use tenure::{Client, Election};

#[tokio::main]
async fn main() -> tenure::Result<()> {
    let store = env::var("TENURE_STORE").unwrap_or("memory:".to_owned());
    let client = Client::connect(&store).await?;
    let first = take_part(&client, "first").await?;
    first.wait_for_leadership(Duration::from_secs(10)).await?;
    let second = take_part(&client, "second").await?;

    let leadership = first.leadership().expect("it leads");
    leadership.run(async { println!("the first does the work of the leader") }).await?;

    first.step_down(None).await?;
    second.wait_for_leadership(Duration::from_secs(10)).await?;
    println!("the second leads: {}", second.is_leader());

    second.shutdown(None).await?;
    first.shutdown(None).await
}

async fn take_part(client: &Client, name: &'static str) -> tenure::Result<Election> {
    client
        .election("scheduler")
        .id(name)
        .on_acquired(move |leadership| {
            println!("{name}: leads with token {}", leadership.fencing_token());
        })
        .on_released(move || println!("{name}: has stepped down"))
        .on_lost(move |reason| println!("{name}: lost leadership: {reason}"))
        .start()
        .await
}
