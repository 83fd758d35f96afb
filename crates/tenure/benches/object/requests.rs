//! The requests that holding and waiting cost, scaled to an hour and held to the table of docs/object.md.

use std::time::Duration;

use tenure::retry::FixedInterval;
use tenure::{Client, LockRequest};

use crate::fake::{Fake, Op};
use crate::{Limit, report};

/// How long requests are counted.
const COUNTED: Duration = Duration::from_secs(120);
/// For so long a waiter looks often.
const KEEN: Duration = Duration::from_secs(61);
/// What the name of a bell ends with.
const BELL: &str = ".bell";
const MINUTE: Duration = Duration::from_secs(60);

/// Requests in an hour.
#[derive(Clone, Copy)]
struct Hourly {
    writes: f64,
    /// Looks at the bell.
    bells: f64,
    /// Looks at the lock.
    locks: f64,
    /// Looks at what is not there.
    vain: f64,
}

/// All at the same time, each on a store of its own: they do little but wait.
pub(super) async fn measure() {
    let idle = |more: &'static str, ttl| holder(more, ttl);
    let (long, slow, short, looking, waiter, third, follower) = tokio::join!(
        idle("", MINUTE),
        idle("&bell=2s", MINUTE),
        idle("", MINUTE / 4),
        idle("&look=2s", MINUTE),
        waiter(),
        third(),
        follower(),
    );
    let table = |writes, bells, locks| Hourly { writes, bells, locks, vain: 0.0 };
    told("holder, ttl 60s", long, table(180.0, 7_200.0, 0.0));
    told("holder, ttl 60s, bell=2s", slow, table(180.0, 1_800.0, 0.0));
    told("holder, ttl 15s", short, table(720.0, 7_200.0, 0.0));
    told("holder, ttl 60s, look=2s", looking, table(180.0, 7_200.0, 1_800.0));
    let [early, late] = waiter;
    told("waiter at the bell, first minute", early, table(720.0, 0.0, 14_400.0));
    told("waiter at the bell, later", late, table(720.0, 0.0, 3_600.0));
    told("waiter for the place", third, table(0.0, 3_600.0, 3_600.0));
    told("follower that tries every 5s", follower, table(0.0, 720.0, 720.0));
}

/// Prints what was counted beside what the table says. A count that begins or ends in the middle may have one more.
fn told(who: &str, counted: Hourly, table: Hourly) {
    let one = 3_600.0 / KEEN.as_secs_f64();
    let pairs = [
        ("writes", counted.writes, table.writes),
        ("looks at the bell", counted.bells, table.bells),
        ("looks at the lock", counted.locks, table.locks),
    ];
    for (what, counted, table) in pairs {
        let limit = if table == 0.0 { 0.0 } else { (table + one).round() };
        report(&format!("{who}: {what} an hour"), counted, Limit::AtMost(limit));
    }
    // 720 hours, $5 for a million writes, $0.40 for a million reads; on Google's store what is absent is free.
    let dollars = |writes: f64, reads: f64| 720.0 * (writes * 5.0 + reads * 0.4) / 1e6;
    let Hourly { writes, bells, locks, vain } = counted;
    let google = dollars(writes, locks + bells - vain);
    report(&format!("{who}: a month on Google's store, $"), google, Limit::None);
    report(&format!("{who}: a month elsewhere, $"), dollars(writes, locks + bells), Limit::None);
}

async fn client(fake: &Fake, more: &str) -> Client {
    Client::connect(&format!("{}{more}", fake.store("b"))).await.expect("a good URL")
}

fn lock(client: &Client) -> LockRequest {
    client.lock("k")
}

/// Requests of a holder without waiters.
async fn holder(more: &str, ttl: Duration) -> Hourly {
    let fake = Fake::real();
    let guard = lock(&client(&fake, more).await).ttl(ttl).acquire().await.expect("free");
    let counted = count(&fake, COUNTED).await;
    guard.release().await.expect("ours");
    counted
}

/// Leaves a lock held, without a client that renews it or listens.
async fn left(fake: &Fake) {
    let guard = lock(&client(fake, "").await).ttl(MINUTE * 20).acquire().await.expect("free");
    guard.detach().await.expect("left to its lease");
}

async fn waiter() -> [Hourly; 2] {
    let fake = Fake::real();
    left(&fake).await;
    let waiting = lock(&client(&fake, "").await).enqueue().await.expect("queued");
    let early = count(&fake, KEEN).await;
    let late = count(&fake, COUNTED).await;
    drop(waiting);
    [early, late]
}

async fn third() -> Hourly {
    let fake = Fake::real();
    left(&fake).await;
    // Another waiter has the place, and makes no requests.
    let bell = serde_json::json!({ "waiterId": "another", "leaseMs": 15_000, "lifeMs": 3_600_000 });
    fake.put("b/k.bell", bell.to_string());
    let waiting = lock(&client(&fake, "").await).enqueue().await.expect("waits for the place");
    let counted = count(&fake, COUNTED).await;
    drop(waiting);
    counted
}

async fn follower() -> Hourly {
    let fake = Fake::real();
    left(&fake).await;
    let client = client(&fake, "").await;
    let retry = FixedInterval { interval: Duration::from_secs(5) };
    let election = client.election("k").retry(retry).build().expect("a good request");
    election.start().await.expect("it takes part");
    let counted = count(&fake, COUNTED).await;
    drop(election);
    counted
}

async fn count(fake: &Fake, span: Duration) -> Hourly {
    fake.seen();
    tokio::time::sleep(span).await;
    let seen = fake.seen();
    let hour = 3_600.0 / span.as_secs_f64();
    let of = |ops: &[Op], bell: bool| {
        let of_bell = |name: &str| name.ends_with(BELL) == bell;
        let seen = seen.iter().filter(|(op, name, _)| ops.contains(op) && of_bell(name));
        f64::from(u32::try_from(seen.count()).unwrap_or(u32::MAX)) * hour
    };
    let writes = [Op::Write, Op::Delete];
    let vain = seen.iter().filter(|(op, _, status)| *op == Op::Read && *status == 404).count();
    Hourly {
        vain: f64::from(u32::try_from(vain).unwrap_or(u32::MAX)) * hour,
        writes: of(&writes, false) + of(&writes, true),
        bells: of(&[Op::Read], true),
        locks: of(&[Op::Read], false),
    }
}
