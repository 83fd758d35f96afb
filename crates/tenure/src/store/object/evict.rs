//! Eviction: breaks the hold of another client.

use tenure_core::{FencingToken, Key};

use super::inner::{ObjectInner, PutResult, REQUEST_TIMEOUT};
use crate::{Error, ErrorKind, Result};

/// Breaks the hold with this token; false if no hold has it.
pub(super) async fn evict(inner: &ObjectInner, key: &Key, token: FencingToken) -> Result<bool> {
    let name = inner.name(key)?;
    let until = inner.until(REQUEST_TIMEOUT);
    // A renewal may come between the read and the write, and the write is then refused: read again.
    for _ in 0..5 {
        let known = inner.read_lock(&name, None, until).await?;
        let held = known.sight.is_held(&known.watch(true), inner.options.grain);
        let Some(record) = known.sight.record.as_ref().filter(|_| held) else {
            return Ok(false);
        };
        let fence = record.fence.unwrap_or_default();
        if token != FencingToken::new(0, fence) {
            return Ok(false);
        }
        let now = known.now(inner.clock.now());
        let Some(next) = record.release(&record.owner, fence, None, now) else {
            return Ok(false);
        };
        match inner.put(&name, &known, next, until).await? {
            PutResult::Won(_) => return Ok(true),
            PutResult::Lost => {}
            PutResult::Throttled => {
                inner.wait_write_interval(until).await;
            }
            PutResult::Unclear(error, _) => return Err(error),
        }
    }
    let message = "the record was changed by a concurrent write each time: try again";
    Err(Error::new(ErrorKind::Contention, message))
}
