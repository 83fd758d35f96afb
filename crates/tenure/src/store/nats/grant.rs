//! Grants: the conditional write that grants a claim, its token, and its withdrawal if no token can be trusted.

use std::sync::Arc;

use tenure_core::FencingToken;
use tenure_core::record::{LineageMark, RecordClaim, RecordDecision, WriteFate};

use super::api::{ApiDeadline, WriteOutcome};
use super::format::KeyRecord;
use super::hold::NatsHold;
use super::inner::{NatsInner, as_unknown};
use super::keys::KnownKey;
use super::layout::BucketLayout;
use super::lineage::{self, TokenError, went_back_error};
use super::stream;
use crate::store::{Answer, Claim, Contended, Grant, LeaseStart, Version};
use crate::{Error, ErrorKind, Result};

/// Makes one attempt at a claim, without regard to the ticket queue.
pub(super) async fn claim_now(
    inner: &Arc<NatsInner>,
    claim: &Claim,
    until: ApiDeadline,
) -> Result<Answer> {
    let subject = inner.subject(&claim.key, claim.mode.space());
    let request = RecordClaim { id: claim.id, mode: claim.mode, lease: claim.ttl, by: &*claim.by };
    // Optimistic: if a record that was seen recently allows the grant, the grant is written without a read, in a
    // single request. If the record has changed since, the server refuses the write, and the claim continues with a
    // read.
    if let Some(known) = inner.keys.known(&subject)
        && known.may_be_overwritten(inner.now(), inner.api.connections())
        && let RecordDecision::Write(next) = inner.decide(&known, &request)
        && let Some(grant) = take(inner, claim, &subject, &known, next, until).await?
    {
        return Ok(Answer::Granted(grant));
    }
    inner.refresh_server_time(until).await?;
    // Two rounds: the second only if another write came between our read and our write.
    let mut unread_version = Version::default();
    for _ in 0..2 {
        let known = inner.read(&subject, until).await?;
        match inner.decide(&known, &request) {
            RecordDecision::AlreadyGranted(_) => {
                return granted_before(inner, claim, subject, known, until).await;
            }
            RecordDecision::Contended(holder) => {
                return Ok(Answer::Contended(inner.contended(&known, holder)));
            }
            RecordDecision::LimitMismatch(other) => {
                let message =
                    format!("the semaphore is in use with {other} slots: use the same number");
                return Err(Error::new(ErrorKind::Invalid, message));
            }
            RecordDecision::Write(next) => {
                unread_version = Version(!u128::from(known.sequence));
                if let Some(grant) = take(inner, claim, &subject, &known, next, until).await? {
                    return Ok(Answer::Granted(grant));
                }
            }
        }
    }
    // Another client was quicker twice, and its record was not read. The complement of a sequence is a version that
    // no state of the key has: a caller that waits for a change from that version is woken at once, and claims
    // again.
    Ok(Answer::Contended(Contended { version: unread_version, ..Contended::default() }))
}

/// Writes `next`, the record that contains our grant, if the record is still the known one; `None` if another write
/// came first.
pub(super) async fn take(
    inner: &Arc<NatsInner>,
    claim: &Claim,
    subject: &str,
    known: &KnownKey,
    next: KeyRecord,
    until: ApiDeadline,
) -> Result<Option<Grant>> {
    inner.recheck_settings(until).await?;
    if known.connection != inner.api.connections() {
        // Reconnected since the record was read: `KnownKey::may_be_overwritten` says why that counts as a conflict.
        return Ok(None);
    }
    let before = inner.lineage().mark();
    // A claim with a ticket raises `served` to its place in the queue. No other claim changes `served`.
    let place = (next.served > known.record.served).then_some(next.served);
    let put = inner.put(subject, known.sequence, next, inner.write_deadline(until)).await?;
    let (landed, lease_start, before) = match put {
        (WriteOutcome::Done(_), written) => (written, LeaseStart::FromRequest, before),
        (WriteOutcome::Conflict, _) => return Ok(None),
        (WriteOutcome::Unclear(error), _) => {
            let Ok(found) = inner.read(subject, until).await else {
                return Err(as_unknown(error));
            };
            match found.record.fate_of_grant(claim.id, found.sequence, known.sequence) {
                // The grant is there, but this or an earlier write may have made it: its age is unknown. The lease
                // is counted from a confirming renewal instead.
                WriteFate::Landed => {
                    let before = inner.lineage().mark_of_earlier_write();
                    (found, LeaseStart::FromConfirm, before)
                }
                WriteFate::Refused => return Ok(None),
                WriteFate::Unsettled => return Err(as_unknown(error)),
            }
        }
    };
    // The connection may have broken after `write` had checked it. The write was then sent over the next connection,
    // and may have replaced the record of another holder: `KnownKey::may_be_overwritten`.
    if inner.api.connections() != known.connection {
        let message = "the connection was replaced while the claim was written";
        let withdrawn = withdraw(inner, claim, subject, &landed, until).await;
        return if withdrawn { Ok(None) } else { Err(Error::new(ErrorKind::Unknown, message)) };
    }
    // After the write, the bucket's info is read again in three cases:
    // - The key had no record. The stream may be a new one of the same name, or may have dropped a holder's record.
    // - nlock's layout: another participant may have changed the ttl, which is checked with every grant.
    // - A recheck is due: the settings are doubtful since the last check.
    let due = inner.settings_check.is_due(inner.api.connections());
    let reread = known.sequence == 0 || inner.layout != BucketLayout::Native || due;
    let epoch = match epoch_of(inner, claim, &landed, before, reread, until).await {
        Ok(epoch) => epoch,
        Err(error) => return Err(undo(inner, claim, subject, &landed, error, until).await),
    };
    match granted(inner, claim, subject.to_owned(), landed, epoch, lease_start, place) {
        Answer::Granted(grant) => Ok(Some(grant)),
        _ => Ok(None),
    }
}

/// Answers with the grant that an earlier sending of the claim obtained.
pub(super) async fn granted_before(
    inner: &Arc<NatsInner>,
    claim: &Claim,
    subject: String,
    known: KnownKey,
    until: ApiDeadline,
) -> Result<Answer> {
    let before = inner.lineage().mark_of_earlier_write();
    let epoch = match epoch_of(inner, claim, &known, before, true, until).await {
        Ok(epoch) => epoch,
        Err(error) => return Err(undo(inner, claim, &subject, &known, error, until).await),
    };
    Ok(granted(inner, claim, subject, known, epoch, LeaseStart::FromConfirm, None))
}

fn granted(
    inner: &Arc<NatsInner>,
    claim: &Claim,
    subject: String,
    known: KnownKey,
    epoch: u64,
    lease_start: LeaseStart,
    place: Option<u64>,
) -> Answer {
    let KnownKey { sequence, record, connection: known_connection, .. } = known;
    let holder = record.holder(claim.id);
    let number = holder.map_or(sequence, |holder| holder.number(sequence));
    let token = FencingToken::new(epoch, number);
    let age = holder.map(|holder| holder.held_for).unwrap_or_default();
    let hold = NatsHold {
        inner: Arc::clone(inner),
        key: claim.key.clone(),
        space: claim.mode.space(),
        subject,
        claim: claim.id,
        token,
        sequence,
        record,
        connection: known_connection,
        held_since: inner.now() - age,
        place,
    };
    let hold = Box::new(hold);
    Answer::Granted(Grant { token, lease_start, handoff_requested: false, grants: None, hold })
}

/// Undoes a grant that landed and gets no token, if `error` says that none of its tokens can be trusted. Returns
/// the error for the claim.
///
/// - The stream went back: the token may have been handed out before.
/// - The bucket was edited, and may have dropped the record of a live holder: the key only looked free.
///
/// The write has landed. So after any other error, and if it cannot be undone, the outcome of the claim is unknown:
/// "not granted" would leave the hold behind.
async fn undo(
    inner: &NatsInner,
    claim: &Claim,
    subject: &str,
    landed: &KnownKey,
    error: TokenError,
    until: ApiDeadline,
) -> Error {
    let error = match error {
        TokenError::WentBack(went_back) => went_back_error(went_back),
        TokenError::Failed(error) => match error.kind() {
            ErrorKind::NotHeld => {
                return Error::new(ErrorKind::Misconfigured, error.to_string());
            }
            ErrorKind::Misconfigured => error,
            _ => return as_unknown(error),
        },
    };
    if withdraw(inner, claim, subject, landed, until).await {
        return error;
    }
    Error::new(ErrorKind::Unknown, error.to_string())
}

/// Releases a grant in the record `landed`, which no caller has got. True if the grant is certainly gone.
async fn withdraw(
    inner: &NatsInner,
    claim: &Claim,
    subject: &str,
    landed: &KnownKey,
    until: ApiDeadline,
) -> bool {
    let Some(released) = landed.record.release(claim.id, landed.sequence) else { return true };
    let undone = inner.put(subject, landed.sequence, released, until).await;
    matches!(undone, Ok((WriteOutcome::Done(_), _)))
}

/// Epoch of a grant in the record `landed`. `before` was taken before the write was sent.
///
/// A stream that was deleted and created again counts from 1, under another epoch. A number that was seen before is
/// a sign of that, and the stream's info is then read. `reread` reads the info in any case: if the key had no
/// record, the write may have landed in a new stream that is already past the highest sequence seen.
async fn epoch_of(
    inner: &NatsInner,
    claim: &Claim,
    landed: &KnownKey,
    before: LineageMark,
    reread: bool,
    until: ApiDeadline,
) -> Result<u64, TokenError> {
    let holder = landed.record.holder(claim.id);
    let number = holder.map_or(landed.sequence, |holder| holder.number(landed.sequence));
    if !inner.lineage().doubts(number, before) && !reread {
        return Ok(inner.lineage().epoch());
    }
    let before_info = inner.lineage().mark();
    let counters = inner.settings_check.counters_now(inner.api.connections());
    let info = stream::info(&inner.api, &inner.stream, until).await.map_err(Error::from)?;
    inner.check_bucket_ttl(&info)?;
    // A dropped record looks like a key that was never held. Only the settings show that the bucket drops records.
    inner.check_settings(&info, counters)?;
    let mut lineage = inner.lineage();
    let now = inner.api.clock.now();
    let state = lineage::refresh(&mut lineage, &info, before_info, now)?;
    match (lineage.epoch_of(number, before, Some(state)), inner.layout) {
        (Ok(epoch), _) => Ok(epoch),
        // A restart of the server empties memory storage, which is normal in this layout. The server's time becomes
        // a new, larger epoch, so that tokens still grow.
        (Err(_), BucketLayout::Nlock { .. }) => {
            lineage.begin_epoch(info.server_time()?, landed.sequence);
            Ok(lineage.epoch())
        }
        (Err(went_back), BucketLayout::Native) => Err(went_back.into()),
    }
}
