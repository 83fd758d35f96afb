//! Eviction: breaks the hold of another client.

use tenure_core::{FencingToken, Key};

use super::api::{REQUEST_TIMEOUT, WriteOutcome};
use super::inner::NatsInner;
use crate::store::KeySpace;
use crate::{Error, ErrorKind, Result};

/// Breaks the hold with this token in one key space; false if no hold has it.
pub(super) async fn evict(
    inner: &NatsInner,
    key: &Key,
    space: KeySpace,
    token: FencingToken,
) -> Result<bool> {
    let subject = inner.subject(key, space);
    let until = inner.api.deadline_after(REQUEST_TIMEOUT);
    // A renewal may come between the read and the write, and the write is then refused: read again. The hold is
    // found by its token in each round, so that a retry never breaks the hold of a later grant.
    for _ in 0..5 {
        let known = inner.read(&subject, until).await?;
        let epoch = inner.lineage().epoch();
        let evicted = known
            .record
            .holders
            .iter()
            .find(|holder| FencingToken::new(epoch, holder.number(known.sequence)) == token);
        let Some(claim) = evicted.map(|holder| holder.claim) else { return Ok(false) };
        let next = known.record.release(claim, known.sequence);
        let next = next.expect("the record contains the holder");
        match inner.put(&subject, known.sequence, next, until).await? {
            (WriteOutcome::Done(_), _) => return Ok(true),
            (WriteOutcome::Conflict, _) => {}
            (WriteOutcome::Unclear(error), _) => return Err(error),
        }
    }
    let message = "the record was changed by a concurrent write each time: try again";
    Err(Error::new(ErrorKind::Contention, message))
}
