//! A claim that is sent again while the end of its connection is being reported.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use tenure::Store;
use tenure::store::Answer;
use tokio::sync::mpsc;

use crate::script::Script;
use crate::talking::{LIMIT, claim, connected, queued};

type Claiming = Pin<Box<dyn Future<Output = tenure::Result<Answer>> + Send>>;

/// A waker that repeats the claim 2 at once, as another thread may do at that instant. Sends the first poll of the
/// repeated claim, and the claim.
struct RepeatsClaim {
    store: Arc<dyn Store>,
    repeated: mpsc::UnboundedSender<(Poll<tenure::Result<Answer>>, Claiming)>,
}

impl Wake for RepeatsClaim {
    fn wake(self: Arc<Self>) {
        let store = Arc::clone(&self.store);
        let mut claiming: Claiming =
            Box::pin(async move { store.claim(&claim(2, true), LIMIT).await });
        let polled = claiming.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        self.repeated.send((polled, claiming)).expect("the test waits");
    }
}

#[tokio::test]
async fn a_claim_of_a_connection_that_has_just_ended_is_sent_again() {
    let script = Script::new().await;
    let (store, mut peer) = connected(&script).await;
    let mut first = queued(1, &store, &mut peer).await;
    // Learns of the end of the connection after the first claim, in the order of their ids.
    let _second = queued(2, &store, &mut peer).await;
    let (repeated, mut repetitions) = mpsc::unbounded_channel();
    let waker = Waker::from(Arc::new(RepeatsClaim { store, repeated }));
    let mut waiting = pin!(first.wait(LIMIT));
    assert!(waiting.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    drop(peer);
    let repetition = tokio::time::timeout(LIMIT, repetitions.recv()).await.expect("woken");
    let (polled, claiming) = repetition.expect("the waker exists");
    assert!(polled.is_pending(), "it got the place of the ended connection: {polled:?}");
    let (answer, _peer) = tokio::join!(claiming, async {
        let mut peer = script.greeted("1", 86_400_000).await;
        let [command, _, argument] = peer.request().await;
        assert_eq!(command, "x");
        assert!(argument.starts_with(&format!("{:032x} ", 2)), "{argument}");
        peer.say("queued").await;
        peer
    });
    assert!(matches!(answer, Ok(Answer::Queued(_))), "{answer:?}");
}
