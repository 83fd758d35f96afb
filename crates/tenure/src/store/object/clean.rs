//! Garbage collection for `tenure gc`: removes locks that were released long ago, and bells that are no longer rung.

use std::time::Duration;

use super::bucket::{BucketDeadline, BucketError, SwapResult};
use super::inner::{BELL, ObjectInner, REQUEST_TIMEOUT, nonce};
use crate::{Error, ErrorKind, Result};

/// Removes garbage older than `older_than`, and returns the number of removed objects.
pub(super) async fn clean(inner: &ObjectInner, older_than: Duration) -> Result<u64> {
    // A removed lock's counter is lost, and its next token is the store's time. The lock must be old enough for that
    // time to be past every token issued before.
    let older_than = older_than.max(inner.options.grain.slack());
    verify_conditional_remove(inner, inner.until(REQUEST_TIMEOUT)).await?;
    let root = &inner.options.prefix;
    let (mut after, mut removed) = (None, 0);
    loop {
        let page = inner.bucket.list(root, after.as_deref(), inner.until(REQUEST_TIMEOUT)).await;
        let page = page.map_err(|error| error.explain_read(&*inner.bucket))?;
        let Some(last) = page.last() else { return Ok(removed) };
        after = Some(last.clone());
        for name in &page {
            let removal = match name.strip_suffix(BELL) {
                Some(lock) => clean_bell(inner, lock, older_than).await,
                None => clean_lock(inner, name, older_than).await,
            };
            removed += u64::from(removal?);
        }
    }
}

/// Removes a lock that is released, has no waiter and is unchanged for long enough. True if it was removed.
async fn clean_lock(inner: &ObjectInner, name: &str, older_than: Duration) -> Result<bool> {
    let until = inner.until(REQUEST_TIMEOUT);
    let known = match inner.read_lock(name, None, until).await {
        Ok(known) => known,
        // Objects that are not locks may be in the bucket.
        Err(error) if error.kind() == ErrorKind::Misconfigured => return Ok(false),
        Err(error) => return Err(error),
    };
    let sight = &known.sight;
    let released = sight.record.as_ref().is_some_and(|record| record.expires.is_zero());
    let age = sight.date.saturating_sub(sight.modified);
    let (true, None, true, Some(version)) =
        (released, sight.waiter(), age >= older_than, &known.version)
    else {
        return Ok(false);
    };
    let removed = inner.bucket.remove(name, version, until).await;
    removed.map_err(|error| error.explain(&*inner.bucket))
}

/// Removes a lock's bell that expired long enough ago. True if it was removed.
async fn clean_bell(inner: &ObjectInner, lock: &str, older_than: Duration) -> Result<bool> {
    let until = inner.until(REQUEST_TIMEOUT);
    let rung = inner.read_bell(lock, until).await?;
    // An object with this name may be something else.
    let bell = rung.bell.is_some() || rung.empty;
    let (true, false, true, Some(version)) =
        (bell, rung.alive, rung.age >= older_than, &rung.version)
    else {
        return Ok(false);
    };
    let removed = inner.bucket.remove(&format!("{lock}{BELL}"), version, until).await;
    removed.map_err(|error| error.explain(&*inner.bucket))
}

/// Verifies, on two objects created for it, that the server refuses to remove an object at another version.
///
/// On a server that ignores the condition, a lock could be acquired between the check of its age and its removal.
pub(super) async fn verify_conditional_remove(
    inner: &ObjectInner,
    until: BucketDeadline,
) -> Result<()> {
    let root = &inner.options.prefix;
    let names = [nonce()?, nonce()?].map(|nonce| format!("{root}tenure-gc-{nonce}"));
    let proved = refuses_other_versions(inner, &names, until).await;
    for name in &names {
        if let Err(trouble) = inner.bucket.erase(name, until).await {
            tracing::debug!(name: "tenure.proof_left", object = name, ?trouble);
        }
    }
    if proved.map_err(|error| error.explain(&*inner.bucket))? {
        return Ok(());
    }
    let message = "the server ignores the version in a removal, so that a lock which was just acquired could be \
                   removed with the old ones: nothing was removed";
    Err(Error::new(ErrorKind::Unsupported, message))
}

async fn refuses_other_versions(
    inner: &ObjectInner,
    names: &[String; 2],
    until: BucketDeadline,
) -> Result<bool, BucketError> {
    let mut versions = Vec::new();
    for name in names {
        // Different content, because on some stores the version is derived from it.
        let body = format!("{{\"gc\":\"{name}\"}}").into_bytes();
        match inner.bucket.swap(name, None, body, until).await? {
            SwapResult::Won(written) => versions.push(written.version),
            SwapResult::Lost => {
                let what = format!("the new object {name} cannot be created");
                return Err(BucketError::Permanent(what));
            }
        }
    }
    let [one, _] = names;
    let [right, wrong] = &versions[..] else { return Ok(false) };
    Ok(!inner.bucket.remove(one, wrong, until).await?
        && inner.bucket.remove(one, right, until).await?)
}
