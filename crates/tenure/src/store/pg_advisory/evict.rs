//! Eviction: ends the session of a holder.

use tenure_core::{FencingToken, Key};

use super::session::Session;
use super::shared::{AdvisoryShared, REQUEST_TIMEOUT};
use super::{sql, tag};
use crate::store::pg::failure;
use crate::{Error, ErrorKind, Result};

/// Ends the session that holds the lock with this token; false if no session does.
pub(super) async fn evict(shared: &AdvisoryShared, key: &Key, token: FencingToken) -> Result<bool> {
    let sessions = shared.sessions_of(key).await?;
    let holder = sessions.iter().find(|held| held.granted && held.token == Some(token));
    let Some(holder) = holder else { return Ok(false) };
    let by = shared.clock.now() + REQUEST_TIMEOUT;
    let statement = |session: &Session| {
        let name = tag::plain(&holder.application_name);
        sql::evict(holder.pid, &name, session.version >= 140_000)
    };
    let ended = shared.query(by, statement, |rows| !rows.is_empty()).await;
    ended.map_err(|error| match failure::code(&error) {
        Some("42501") => {
            let message = "the role may not end the holder's session: use the holder's role, or a role with pg_signal_backend";
            Error::new(ErrorKind::Denied, message).because(error)
        }
        _ => error,
    })
}
