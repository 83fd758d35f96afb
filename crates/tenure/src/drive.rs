//! The one driver of the state machines: it waits for events, reads the clock and measures requests.

use std::future::Future;

use tenure_core::{Machine, Time};

use crate::Clock;
use crate::race::{Either, before, race};
use crate::telemetry::Labels;

/// State machine with its clock and its metrics.
///
/// The acquire loop, the keeper of a hold and the task of an election each drive their machine with it. They differ in
/// the events that they wait for, and in the order in which they check them.
pub(crate) struct Drive<M> {
    pub(crate) machine: M,
    pub(crate) clock: Clock,
    pub(crate) labels: Labels,
}

impl<M: Machine> Drive<M> {
    pub(crate) fn now(&self) -> Time {
        self.clock.now()
    }

    /// Reports an event to the machine. The clock is read here, after the event.
    pub(crate) fn handle(&mut self, input: M::Input) {
        self.machine.handle(input, self.clock.now());
    }

    /// Reports the timers that are due to the machine.
    pub(crate) fn handle_timeout(&mut self) {
        self.machine.handle_timeout(self.clock.now());
    }

    /// Waits until one of two events occurs; `first` is checked before `second`. Returns `None` if a timer of the
    /// machine is due before both, which the machine has then handled.
    ///
    /// A request in flight is passed by reference and polled again in the next call: a timer or another event never
    /// interrupts it. The driver decides whether to drop it.
    ///
    /// # Cancel safety
    ///
    /// As safe as both futures.
    pub(crate) async fn until<A, B>(
        &mut self,
        first: impl Future<Output = A>,
        second: impl Future<Output = B>,
    ) -> Option<Either<A, B>> {
        let due = self.machine.poll_timeout().unwrap_or(Time::MAX);
        let event = before(&self.clock, due, race(first, second)).await;
        if event.is_none() {
            self.handle_timeout();
        }
        event
    }

    /// Records the duration of a request to the store that has just ended.
    pub(crate) fn record(&self, op: &'static str, began: Time) {
        self.labels.op(op, self.clock.now().since(began));
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::time::Duration;

    use tokio::sync::oneshot;

    use super::*;
    use crate::{ManualClock, MemoryStore};

    /// Machine with one timer, which records when the timer was handled.
    struct OneTimer {
        due: Option<Time>,
        handled: Option<Time>,
    }

    impl Machine for OneTimer {
        type Input = ();
        type Command = ();

        fn handle(&mut self, (): (), _: Time) {}

        fn handle_timeout(&mut self, now: Time) {
            (self.due, self.handled) = (None, Some(now));
        }

        fn poll_timeout(&self) -> Option<Time> {
            self.due
        }

        fn poll_command(&mut self) -> Option<()> {
            None
        }
    }

    const SECOND: Duration = Duration::from_secs(1);

    fn drive() -> (Drive<OneTimer>, ManualClock) {
        let (clock, hand) = Clock::manual();
        let machine = OneTimer { due: Some(clock.now() + SECOND), handled: None };
        (Drive { machine, clock, labels: Labels::new(&MemoryStore::new(), "test") }, hand)
    }

    #[tokio::test]
    async fn a_timer_is_handled_while_a_request_is_in_flight() {
        let (mut drive, hand) = drive();
        let (answer, request) = oneshot::channel();
        let mut request = pin!(request);
        hand.advance(SECOND);
        let event = drive.until(&mut request, std::future::pending::<()>()).await;
        assert!(event.is_none());
        assert_eq!(drive.machine.handled, Some(drive.now()));
        answer.send(7).expect("the request is still polled");
        let event = drive.until(&mut request, std::future::pending::<()>()).await;
        assert!(matches!(event, Some(Either::First(Ok(7)))));
    }

    #[tokio::test]
    async fn an_event_that_has_occurred_comes_before_a_timer_and_the_first_before_the_second() {
        let (mut drive, hand) = drive();
        hand.advance(SECOND);
        let event = drive.until(std::future::ready(1), std::future::ready(2)).await;
        assert!(matches!(event, Some(Either::First(1))));
        let event = drive.until(std::future::pending::<()>(), std::future::ready(2)).await;
        assert!(matches!(event, Some(Either::Second(2))));
        assert_eq!(drive.machine.handled, None);
    }
}
