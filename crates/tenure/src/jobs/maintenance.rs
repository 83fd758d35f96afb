//! Tasks of a worker beside its jobs, also while it claims none.

use std::convert::Infallible;

use super::shared::QueueShared;
use crate::Result;

impl QueueShared {
    async fn maintain_once(&self) -> Result<()> {
        self.refresh_controls().await?;
        #[cfg(feature = "schedules")]
        if self.controls.take_due_schedules()
            && let Some(place) = self.control_place().await?
        {
            self.fire_schedules(&place).await?;
        }
        Ok(())
    }

    /// Keeps the settings of the queue up to date and fires its schedules while a worker runs. A worker whose tasks are all busy does not claim,
    /// and would not read them.
    pub(super) async fn maintain(&self) -> Infallible {
        loop {
            let due = self.controls.next_reading();
            self.db.clock.sleep_until(due).await;
            if let Err(error) = self.maintain_once().await {
                // Claims fail for the same reason, and report it.
                tracing::debug!(name: "tenure.request_failed", store = %self.db, %error);
                self.db
                    .clock
                    .sleep_until(self.db.clock.now() + super::controls::CONTROL_INTERVAL)
                    .await;
            }
        }
    }
}
