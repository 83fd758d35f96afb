//! A hold: a row, or an element of a shared row, that names its holder.

use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use tokio_postgres::types::Type;

use super::hold_name::HoldName;
use super::renewals;
use super::shared::LeaseShared;
use super::sql::LeaseStatements;
use crate::store::pg::clock::Reading;
use crate::store::{Handle, Hold, HoldEvent, Loss, Renewed};
use crate::{Error, ErrorKind, Result};

#[derive(Debug)]
pub(super) struct LeaseHold {
    shared: Arc<LeaseShared>,
    name: HoldName,
    /// Reading of the database's clock at the last grant or renewal.
    last: Option<Reading>,
    /// True if the last renewal has found a waiter.
    awaited: Arc<AtomicBool>,
    jumped: bool,
}

impl LeaseHold {
    pub(super) fn new(shared: &Arc<LeaseShared>, name: HoldName, last: Option<Reading>) -> Self {
        shared.hold_began();
        Self { shared: Arc::clone(shared), name, last, awaited: Arc::default(), jumped: false }
    }

    fn failed(&self, error: Error) -> Error {
        error.on(&self.name.key).at(&self.shared)
    }
}

impl Drop for LeaseHold {
    fn drop(&mut self) {
        self.shared.hold_ended();
    }
}

#[async_trait]
impl Hold for LeaseHold {
    async fn renew(&mut self, ttl: Duration, limit: Duration) -> Result<Renewed> {
        let renewed = renewals::renew(&self.shared, &self.name, &self.awaited, ttl, limit).await;
        let reading = renewed.map_err(|error| self.failed(error))?;
        let jump = self.last.and_then(|last| last.jump_beyond(&reading, ttl));
        self.last = Some(reading);
        if let Some(jump) = jump {
            self.jumped = true;
            let message = format!("the clock of the database jumped by {} ms", jump / 1_000);
            // The lease may have ended for others during the jump, even if the row was renewed: `event` reports the
            // loss.
            return Err(self.failed(Error::new(ErrorKind::Unknown, message)));
        }
        Ok(Renewed { handoff_requested: self.awaited.load(Ordering::Relaxed) })
    }

    async fn event(&mut self) -> HoldEvent {
        if self.jumped {
            return HoldEvent::Lost(Loss::ClockJump);
        }
        pending().await
    }

    async fn release(&mut self, limit: Duration) -> Result<()> {
        let HoldName { space, key, shared_row, number, secret } = &self.name;
        let sql: fn(&LeaseStatements) -> &str =
            if *shared_row { |sql| &sql.release_shared } else { |sql| &sql.release };
        let by = self.shared.clock.now() + limit;
        let freed = self
            .shared
            .ask(
                sql,
                &[
                    (space, Type::INT2),
                    (&key.as_str(), Type::TEXT),
                    (number, Type::INT8),
                    (&&secret[..], Type::BYTEA),
                ],
                by,
            )
            .await;
        match freed {
            Ok((rows, _)) if rows.is_empty() => {
                Err(self.failed(Error::new(ErrorKind::NotHeld, "the hold has ended")))
            }
            Ok(_) => Ok(()),
            Err(error) => Err(self.failed(error)),
        }
    }

    fn handle(&self) -> Option<Handle> {
        Some(self.name.handle())
    }

    async fn detach(&mut self, _limit: Duration) -> Result<()> {
        Ok(())
    }
}
