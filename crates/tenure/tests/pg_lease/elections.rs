//! The grace window on lease rows, which count every grant.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tenure::Client;
use tenure::election::ElectionState;

use crate::link::{Link, Mode};
use crate::services;
use crate::support::{until, with_schema};

const TTL: Duration = Duration::from_secs(2);

#[test]
fn an_outage_is_told_where_another_led_in_between_and_only_then() {
    let Some(url) = services::postgres() else { return };
    with_schema(&url.clone(), async move |schema| {
        for (another, expected) in [
            (false, &["acquired", "released"][..]),
            (true, &["acquired", "lost", "acquired", "released"][..]),
        ] {
            let key = format!("another-{another}");
            let link = Link::to(&url).await;
            let ours = Client::connect(&schema.url_at(&link.url)).await.unwrap();
            let heard = Arc::new(Mutex::new(Vec::new()));
            let tell = || {
                let heard = Arc::clone(&heard);
                move |what| heard.lock().unwrap().push(what)
            };
            let (acquired, lost, released) = (tell(), tell(), tell());
            let election = ours
                .election(&key)
                .ttl(TTL)
                .reconnect_grace(Duration::from_secs(60))
                .on_acquired(move |_| acquired("acquired"))
                .on_lost(move |_| lost("lost"))
                .on_released(move || released("released"))
                .start()
                .await
                .unwrap();
            assert!(election.wait_for_leadership(TTL * 10).await.unwrap());
            link.set(Mode::Cut);
            until("the loss", async || election.state() == ElectionState::Reconnecting).await;
            if another {
                let other = schema.client().lock(&key).ttl(TTL).timeout(TTL * 10).acquire().await;
                other.unwrap().release().await.unwrap();
            }
            link.set(Mode::Open);
            assert!(election.wait_for_leadership(TTL * 15).await.unwrap());
            election.shutdown(None).await.unwrap();
            until("the end", async || heard.lock().unwrap().contains(&"released")).await;
            assert_eq!(*heard.lock().unwrap(), expected, "another led: {another}");
        }
    });
}
