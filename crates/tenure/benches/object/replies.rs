//! Replies that get lost after the write was done.

use std::time::Duration;

use tenure::{Client, Guard};

use crate::fake::{Fake, Fault, Op};
use crate::{Limit, report};

const TTL: Duration = Duration::from_millis(1_200);
const ROUNDS: u32 = 5;

pub(super) async fn measure() {
    let mut right = [0_u32; 4];
    for fault in [Fault::DropReply, Fault::Fail(503)] {
        for _ in 0..ROUNDS {
            let outcome = round(fault).await;
            for (right, outcome) in right.iter_mut().zip(outcome) {
                *right += u32::from(outcome);
            }
        }
    }
    for (what, right) in ["create", "renew", "grant", "release"].into_iter().zip(right) {
        let what = format!("the reply to a {what} is lost, {} times: right", ROUNDS * 2);
        report(&what, right.into(), Limit::Exactly(f64::from(ROUNDS * 2)));
    }
}

/// Whether creation, renewal, grant and release came out right.
async fn round(fault: Fault) -> [bool; 4] {
    let fake = Fake::quick();
    let url = fake.store("p");
    let one = Client::connect(&url).await.expect("a good URL");
    let two = Client::connect(&url).await.expect("a good URL");
    let fence = || fake.object("p/k").and_then(|record| record["fence"].as_u64());
    let lose = || fake.next(Op::Write, "p/k", fault);

    lose();
    let guard: Guard = one.lock("k").ttl(TTL).acquire().await.expect("granted");
    let first = guard.fencing_token().number();
    let created = guard.is_held() && fence() == Some(first) && fake.is_quiet();

    lose();
    tokio::time::sleep(TTL * 2).await;
    let renewed = guard.is_held() && fake.is_quiet();

    let pending = two.lock("k").ttl(TTL).enqueue().await.expect("queued");
    guard.handoff_requested().await;
    lose();
    let released = guard.release().await.is_ok();
    let next = pending.wait().await.expect("granted");
    let granted = released && next.is_held() && next.fencing_token().number() == first + 1;

    lose();
    let released = next.release().await.is_ok() && fake.is_quiet();
    let free = fake.object("p/k").is_some_and(|record| record["expiresAt"] == 0.0);
    [created, renewed, granted, released && free]
}
