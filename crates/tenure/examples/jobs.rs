//! Jobs in a table of PostgreSQL: claimed by lease, tried again where they fail, completed once.
//!
//! `DATABASE_URL=postgres://… cargo run -p tenure --example jobs --features jobs`

use std::env;
use std::error::Error;
use std::time::Duration;

use tenure::jobs::{Failure, Job, NewJob, Queue, Schema, Worker};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = env::var("DATABASE_URL")
        .map_err(|_| "say which database: DATABASE_URL=postgres://USER@HOST/DATABASE")?;
    // A table of our own, to leave nothing behind; yours has its name for good, and any number of workers.
    let schema = format!("tenure_example_{}", std::process::id());
    let table = format!("{schema}.jobs");
    Schema::of_queue(&table)?.apply(&url).await?;
    let worked = work(&url, &table).await;
    let (db, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await?;
    tokio::spawn(connection);
    db.batch_execute(&format!("DROP SCHEMA {schema} CASCADE")).await?;
    worked?;
    Ok(())
}

async fn work(url: &str, table: &str) -> tenure::Result<()> {
    let queue = Queue::connect(url, table).await?;
    for report in 1..=3 {
        // Twice enqueued is once done, as long as it is not done.
        let job = NewJob::of(&report)?.unique_key(format!("report {report}"));
        queue.enqueue(job.clone()).await?;
        queue.enqueue(job).await?;
    }
    let worker = Worker::new(queue, |job: Job| async move {
        let report: u32 = job.payload_as()?;
        println!("report {report}, attempt {}, token {}", job.attempt(), job.fencing_token());
        if report == 2 && job.attempt() == 1 {
            return Err(Failure::retry_in(Duration::from_millis(100), "its data is not there yet"));
        }
        Ok(())
    });
    // A service would shut down by a signal; this one ends when nothing is left.
    let tally = worker.concurrency(2).until_empty(true).run(std::future::pending()).await?;
    println!("{} done, {} tried again", tally.completed, tally.retried);
    Ok(())
}
