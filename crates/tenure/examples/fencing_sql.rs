//! A holder that was evicted, or paused for too long, cannot write: the database compares fencing tokens.
//!
//! `DATABASE_URL=postgres://… cargo run -p tenure --example fencing_sql`

use std::env;
use std::error::Error;

use tenure::fence::sql;
use tenure::{Client, Guard};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = env::var("DATABASE_URL")
        .map_err(|_| "set the database: DATABASE_URL=postgres://USER@HOST/DATABASE")?;
    let (db, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await?;
    tokio::spawn(connection);
    db.batch_execute("SET search_path = pg_temp").await?; // leaves nothing behind
    db.batch_execute("CREATE TABLE reports (body text); INSERT INTO reports VALUES ('')").await?;
    db.batch_execute(sql::TABLE).await?;

    let client = Client::connect("memory:").await?;
    let late = client.lock("reports").acquire().await?;
    install(&db, &late).await?;
    println!("the first holder saves: {}", save(&db, &late, "draft").await?);

    client.store().evict(late.key(), late.fencing_token(), "it hangs").await?;
    let current = client.lock("reports").acquire().await?;
    install(&db, &current).await?;
    let (refused, saved) = (save(&db, &late, "late").await?, save(&db, &current, "final").await?);
    println!("the first holder, evicted meanwhile, saves: {refused}; the current holder: {saved}");
    assert!(!refused && saved);
    current.release().await?;
    Ok(())
}

/// Installs the holder's token. A new holder does this before it reads anything.
async fn install(db: &tokio_postgres::Client, guard: &Guard) -> Result<(), Box<dyn Error>> {
    let token = sql::value(guard.fencing_token())?;
    match db.execute(sql::INSTALL, &[&guard.key().as_str(), &token]).await? {
        0 => Err("a newer holder has installed its token".into()),
        _ => Ok(()),
    }
}

/// Saves the text and returns true; false if a newer holder has installed its token.
async fn save(
    db: &tokio_postgres::Client,
    guard: &Guard,
    text: &str,
) -> Result<bool, Box<dyn Error>> {
    let (key, token) = (guard.key().as_str(), sql::value(guard.fencing_token())?);
    let admit = sql::ADMIT;
    let write = format!("{admit} UPDATE reports SET body = $3 WHERE EXISTS (SELECT FROM admitted)");
    Ok(db.execute(&write, &[&key, &token, &text]).await? == 1)
}
