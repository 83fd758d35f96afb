//! Joining a queue: adds a claim, granted if its turn is now.

use std::sync::Arc;
use std::time::Duration;

use super::claim::{ClaimState, KnownClaims};
use super::format::QueueLine;
use super::hold;
use super::inspect::version_of;
use super::layout::Folder;
use super::liveness;
use super::locked_queue::LockedQueue;
use super::notification::MAX_WATCHED;
use super::open_files::OpenFiles;
use super::place::FilePlace;
use crate::store::{Answer, Claim, Contended, Mode};
use crate::{Error, ErrorKind, Result};

/// Adds a claim to the queue of its key, unless the key is held and the claim does not wait. A repeated claim is answered
/// with its hold or place, if it still has one.
pub(super) async fn join(
    files: &Arc<OpenFiles>,
    claims: &Arc<KnownClaims>,
    claim: &Claim,
    limit: Duration,
) -> Result<Answer> {
    if let Some(answer) = claims.find(claim.id).and_then(|known| answer(&known, false)) {
        return Ok(answer);
    }
    let space = claim.mode.space();
    loop {
        let (liveness, queue) = files.for_claim(&claim.by, &claim.key, space)?;
        // No await between writing the line and creating its `ClaimState`: a future that is dropped in between would
        // leave a line that this process never removes.
        let joined =
            files.with_locked(&queue, limit, |queue| add(files, claim, liveness.name, queue));
        let (line, waiter, tell) = match joined.await {
            Ok(Some(Joined::Added { line, waiter, tell })) => (line, waiter, tell),
            Ok(Some(Joined::Contended(contended))) => {
                files.keep(liveness);
                return Ok(Answer::Contended(contended));
            }
            Ok(None) => {
                files.forget();
                continue;
            }
            Err(error) => {
                files.keep(liveness);
                return Err(error);
            }
        };
        let state = ClaimState::new(files, claims, queue, claim.id, liveness, line);
        for owner in tell {
            liveness::touch(&files.folder, owner);
        }
        return answer(&state, waiter).ok_or_else(|| {
            Error::new(ErrorKind::Unavailable, "the place was lost at once: try again")
        });
    }
}

/// Answer with the claim's hold or place; `None` if it has left the queue. `waiter`: another claim waits.
fn answer(claim: &Arc<ClaimState>, waiter: bool) -> Option<Answer> {
    Some(match claim.token()? {
        0 => Answer::Queued(Box::new(FilePlace::new(claim))),
        token => Answer::Granted(hold::grant(claim, token, waiter)),
    })
}

/// Outcome of adding a claim to a queue.
enum Joined {
    Added {
        line: QueueLine,
        /// True if another claim waits.
        waiter: bool,
        /// Owners of the holds to notify of a hand-off request.
        tell: Vec<u64>,
    },
    Contended(Contended),
}

fn add(
    files: &OpenFiles,
    claim: &Claim,
    owner: u64,
    queue: &mut LockedQueue<'_>,
) -> Result<Joined> {
    let folder = &files.folder;
    check_slots(folder, queue, claim.mode)?;
    for line in queue.cut_off().to_vec() {
        if !liveness::is_alive(folder, line.owner) {
            queue.remove(line)?;
        }
    }
    let free = queue.blockers(folder, u64::MAX, claim.mode, |_| {})?.is_empty();
    if !free && !claim.queue {
        return Ok(Joined::Contended(contended(folder, queue)));
    }
    let waiter = queue.lines().iter().any(|line| line.token == 0);
    // The first waiter notifies the holders. A holder that is granted later learns of waiters with its grant.
    let told = queue.lines().iter().filter(|_| !free && !waiter);
    let tell = told.map(|line| line.owner).take(MAX_WATCHED).collect();
    let line = queue.add(owner, claim.mode, free, files.now())?;
    Ok(Joined::Added { line, waiter, tell })
}

/// Refuses a semaphore of another size than the one in use.
fn check_slots(folder: &Folder, queue: &mut LockedQueue<'_>, mode: Mode) -> Result<()> {
    let others: Vec<_> = queue.lines().iter().filter(|line| line.mode != mode).copied().collect();
    let Mode::Slot { limit } = mode else { return Ok(()) };
    for line in others {
        if liveness::is_alive(folder, line.owner) {
            let Mode::Slot { limit: used } = line.mode else { continue };
            let message = format!(
                "the semaphore is in use with {used} slots, not {limit}: use the same number, or wait until it \
                 is free"
            );
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        queue.remove(line)?;
    }
    Ok(())
}

fn contended(folder: &Folder, queue: &LockedQueue<'_>) -> Contended {
    let lines = queue.lines();
    let mut holders = lines.iter().filter(|line| line.token != 0);
    let holder = holders.find_map(|line| liveness::identity_of(folder, line.owner));
    Contended { holder, version: version_of(lines), retry_after: None, note: None }
}
