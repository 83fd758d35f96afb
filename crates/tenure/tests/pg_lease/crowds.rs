//! Many holds of one process: few connections, few statements.

use std::time::{Duration, Instant};

use tenure::Client;

use crate::services;
use crate::support::{Schema, with_schema};

const HOLDS: usize = 1_000;
/// Long enough that no hold is lost if the machine stalls for some seconds: other tests start database servers meanwhile.
const TTL: Duration = Duration::from_secs(18);
/// Time for which statements are counted: several intervals of renewal.
const COUNTED: Duration = Duration::from_secs(36);

#[test]
fn a_thousand_holds_take_five_connections_and_two_renewals_an_interval() {
    let Some(url) = services::postgres() else { return };
    with_schema(&url, async |schema| {
        let db = schema.connect().await;
        db.batch_execute(&count_updates(&schema)).await.unwrap();
        let name = format!("crowd {}", schema.name);
        let url = format!("{}&application_name={}", schema.url(), name.replace(' ', "%20"));
        let client = Client::connect(&url).await.unwrap();
        // Acquired by and by, over more than an interval: nothing makes them due together.
        let mut guards = Vec::new();
        for nth in 0..HOLDS {
            let request = client.lock(format!("key {nth}")).ttl(TTL);
            guards.push(request.timeout(TTL * 10).acquire().await.unwrap());
            if nth % 100 == 0 {
                tokio::time::sleep(TTL / 24).await;
            }
        }
        let waiter = schema.client().lock("key 0").enqueue().await.unwrap();
        let begun = Instant::now();
        let before = updates(&db, &schema).await;
        let mut most = 0;
        while begun.elapsed() < COUNTED {
            let lost = guards.iter().filter(|guard| !guard.is_held()).count();
            assert_eq!(lost, 0, "lost after {:?}", begun.elapsed());
            let sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1";
            most = most.max(db.query_one(sql, &[&name]).await.unwrap().get::<_, i64>(0));
            tokio::time::sleep(COUNTED / 150).await;
        }
        let statements = updates(&db, &schema).await - before;
        let intervals = begun.elapsed().as_secs_f64() / (TTL / 3).as_secs_f64();
        #[expect(clippy::cast_precision_loss, reason = "a few")]
        let rate = statements as f64 / intervals;
        println!("{most} connections, {rate:.2} renewal statements per interval");
        assert!(most <= 5, "{most} connections");
        // One statement more may fall into the time than whole intervals have.
        assert!(
            rate <= 2.0 + 1.0 / intervals,
            "{statements} statements in {intervals:.1} intervals"
        );
        drop((waiter, guards));
        client.idle().await;
    });
}

/// Counts statements that change something; a claim in vain is none.
fn count_updates(schema: &Schema) -> String {
    format!(
        "CREATE TABLE {0}.updates (n serial);
         CREATE FUNCTION {0}.note() RETURNS trigger LANGUAGE plpgsql AS
             'BEGIN IF EXISTS (SELECT FROM done) THEN INSERT INTO {0}.updates DEFAULT VALUES; END IF; RETURN NULL; END';
         CREATE TRIGGER note AFTER UPDATE ON {0}.locks REFERENCING NEW TABLE AS done
             FOR EACH STATEMENT EXECUTE FUNCTION {0}.note();",
        schema.name
    )
}

async fn updates(db: &tokio_postgres::Client, schema: &Schema) -> i64 {
    let sql = format!("SELECT count(*) FROM {}.updates", schema.name);
    db.query_one(&sql, &[]).await.unwrap().get(0)
}
