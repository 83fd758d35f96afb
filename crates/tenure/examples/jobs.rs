//! Jobs in a table of PostgreSQL: claimed by lease, retried after a failure, completed once.
//!
//! `DATABASE_URL=postgres://… cargo run -p tenure --example jobs --features jobs`

use std::env;
use std::error::Error;
use std::time::Duration;

use tenure::jobs::{Failure, Job, NewJob, Queue, Schema, Worker};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = env::var("DATABASE_URL")
        .map_err(|_| "set the database: DATABASE_URL=postgres://USER@HOST/DATABASE")?;
    // A temporary schema, so that the example leaves nothing behind. A real table has a fixed name and any number of
    // workers.
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
        // The second job is dropped: a job with this unique key is still pending.
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
    // A service would shut down on a signal; this worker ends when the queue is empty.
    let tally = worker.concurrency(2).until_empty(true).run(std::future::pending()).await?;
    println!("{} completed, {} retried", tally.completed, tally.retried);
    Ok(())
}
