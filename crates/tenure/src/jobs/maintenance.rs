//! Tasks of a worker beside its jobs, also while it claims none.

use std::convert::Infallible;

use tenure_core::Time;

use super::controls::CONTROL_INTERVAL;
use super::retention::{PRUNE_INTERVAL, Retention};
use super::shared::QueueShared;
use crate::Result;

impl QueueShared {
    /// Keeps the settings of the queue up to date, fires its schedules and deletes old jobs while a worker runs. A worker
    /// whose tasks are all busy does not claim, and would not read the settings.
    pub(super) async fn maintain(&self, retention: Retention) -> Infallible {
        let clock = &self.db.clock;
        let mut next_prune = if retention.is_limited() { clock.now() } else { Time::MAX };
        loop {
            clock.sleep_until(self.controls.next_reading().min(next_prune)).await;
            let now = clock.now();
            let is_prune_due = now >= next_prune;
            if is_prune_due {
                next_prune = now + PRUNE_INTERVAL;
            }
            let settings = self.follow_settings().await;
            let pruned = if is_prune_due { self.prune_in_turn(retention).await } else { Ok(()) };
            for error in [settings, pruned].into_iter().filter_map(Result::err) {
                tracing::warn!(name: "tenure.request_failed", store = %self.db, %error);
                clock.sleep_until(clock.now() + CONTROL_INTERVAL).await;
            }
        }
    }

    async fn follow_settings(&self) -> Result<()> {
        self.refresh_controls().await?;
        #[cfg(feature = "schedules")]
        if self.controls.take_due_schedules()
            && let Some(place) = self.control_place().await?
        {
            self.fire_schedules(&place).await?;
        }
        Ok(())
    }
}
