//! Claims: take the lock, or the place of the only waiter.

use std::sync::Arc;
use std::time::Duration;

use tenure_core::Time;
use tenure_core::object::ObjectDecision;
use tenure_core::object::takeover::WriteStamp;

use super::bucket::{BucketDeadline, BucketError};
use super::format::{self, RecordExtra};
use super::hold::grant;
use super::inner::{
    KnownLock, MAX_WRITE_TRIES, ObjectInner, PutResult, Ring, as_unknown, contention_error,
    holder_identity, version_of,
};
use super::place::{ObjectPlace, WaiterMark};
use crate::store::{Answer, Claim, Contended, LeaseStart};
use crate::{Error, ErrorKind, Result};

/// Makes one attempt at a claim: takes the lock, or the place.
pub(super) async fn claim(
    inner: &Arc<ObjectInner>,
    claim: &Claim,
    limit: Duration,
) -> Result<Answer> {
    let name = inner.name(&claim.key)?;
    let id = format::owner(&claim.by, claim.id);
    let until = inner.until(limit);
    let mut tried = false;
    for _ in 0..MAX_WRITE_TRIES {
        let sent = inner.clock.now();
        let known = inner
            .read_lock(&name, None, until)
            .await
            .map_err(|error| if tried { as_unknown(error) } else { error })?;
        // We have written nothing in this wait, so that the store's clocks cannot be compared. Only observation
        // counts, across earlier claims of this client.
        let watch = known.watch(!claim.queue);
        match known.sight.claim(&id, claim.ttl, RecordExtra::default, inner.options.grain, &watch) {
            ObjectDecision::AlreadyGranted => {
                // A write that landed within this request cannot be older than the request. An earlier one can.
                let lease_start =
                    if tried { LeaseStart::FromRequest } else { LeaseStart::FromConfirm };
                return Ok(Answer::Granted(grant(inner, claim, name, known, lease_start)));
            }
            ObjectDecision::Write(mut record) => {
                record.extra.info = Some((*claim.by).clone());
                match inner.put(&name, &known, record, until).await? {
                    PutResult::Won(known) => {
                        let grant = grant(inner, claim, name, *known, LeaseStart::FromRequest);
                        return Ok(Answer::Granted(grant));
                    }
                    PutResult::Lost => {}
                    PutResult::Throttled if tried => {
                        let message = "the store throttles writes";
                        return Err(Error::new(ErrorKind::Unknown, message));
                    }
                    PutResult::Throttled => return Ok(contended(inner, None)),
                    PutResult::Unclear(error, _)
                        if inner.clock.now() >= inner.request_share(until).0 =>
                    {
                        return Err(error);
                    }
                    PutResult::Unclear(..) => tried = true,
                }
            }
            ObjectDecision::WaiterAhead => {
                return wait_for_place(inner, claim, &name, known, sent);
            }
            ObjectDecision::Held => {
                if let Some(answer) = take_place(inner, claim, &name, known, sent, until).await? {
                    return Ok(answer);
                }
            }
        }
    }
    if tried {
        let message =
            "other clients changed the record each time, after a write whose outcome is unknown";
        return Err(Error::new(ErrorKind::Unknown, message));
    }
    Ok(contended(inner, None))
}

/// Answers a claim when another client has the place: it waits for the place too, or fails if it must not.
fn wait_for_place(
    inner: &Arc<ObjectInner>,
    claim: &Claim,
    name: &str,
    known: KnownLock,
    sent: Time,
) -> Result<Answer> {
    if !claim.queue {
        return Ok(contended(inner, Some(&known)));
    }
    if claim.fail_if_contended {
        return Err(contention_error(&known));
    }
    let place = ObjectPlace::new(inner, claim, name.to_owned(), known, WaiterMark::Nothing, sent);
    Ok(Answer::Queued(Box::new(place)))
}

/// Takes the place while another client holds the lock; `None` if the lock changed in between.
async fn take_place(
    inner: &Arc<ObjectInner>,
    claim: &Claim,
    name: &str,
    known: KnownLock,
    sent: Time,
    until: BucketDeadline,
) -> Result<Option<Answer>> {
    let id = format::owner(&claim.by, claim.id);
    let queued = |known: KnownLock, mark: WaiterMark, stamp: Option<WriteStamp>| {
        let mut place = ObjectPlace::new(inner, claim, name.to_owned(), known, mark, sent);
        place.stamped(stamp);
        Ok(Some(Answer::Queued(Box::new(place))))
    };
    let named = known.sight.waiter().is_some_and(|waiter| waiter.id == id);
    if named {
        return queued(known, WaiterMark::Record, None);
    }
    if !known.sight.polls_bell() {
        if !claim.queue {
            return Ok(Some(contended(inner, Some(&known))));
        }
        let Some(record) = &known.sight.record else { return Ok(None) };
        let life = known.now(inner.clock.now()) + inner.place_life();
        return match inner.put(name, &known, record.with_waiter(&id, life), until).await? {
            PutResult::Won(known) => queued(*known, WaiterMark::Record, None),
            PutResult::Lost => Ok(None),
            PutResult::Throttled => Ok(Some(contended(inner, Some(&known)))),
            PutResult::Unclear(error, _) => Err(error),
        };
    }
    let rung = inner.read_bell(name, until).await?;
    let ours = rung.bell.as_ref().is_some_and(|bell| bell.next_holder.id == id);
    if let (true, Some(version)) = (ours, &rung.version) {
        let version = version.clone();
        return queued(known, WaiterMark::Bell(version), None);
    }
    // A bell of the present owner is left over from its own wait.
    let answered =
        rung.bell.as_ref().is_some_and(|bell| known.sight.owned_by(&bell.next_holder.id));
    if rung.alive && !answered || !claim.queue {
        return wait_for_place(inner, claim, name, known, sent).map(Some);
    }
    match inner.ring(name, rung.version.as_ref(), claim, until).await {
        Ok(Ring::Won(bell)) => queued(known, WaiterMark::Bell(bell.version), bell.stamp),
        Ok(Ring::Lost) => wait_for_place(inner, claim, name, known, sent).map(Some),
        Err(BucketError::Throttled) => Ok(Some(contended(inner, Some(&known)))),
        Err(error) => Err(error.explain(&*inner.bucket)),
    }
}

fn contended(inner: &ObjectInner, known: Option<&KnownLock>) -> Answer {
    let sight = known.map(|known| &known.sight);
    let record = sight.and_then(|sight| sight.record.as_ref());
    let expired = sight.filter(|sight| sight.seems_expired(inner.options.grain));
    Answer::Contended(Contended {
        holder: record.map(holder_identity),
        version: sight.map(|sight| version_of(sight, None)).unwrap_or_default(),
        retry_after: Some(inner.options.poll * 4),
        note: expired.map(|sight| {
            format!(
                "its lease seems to be over, but the store's headers alone do not prove it: wait for the lock, or \
                 try again in {} s",
                sight.time_to_takeover().as_secs() + 1
            )
        }),
    })
}
