//! What `tenure doctor` finds out about a bucket: rights, conditions, settings, clock.

use std::time::{Duration, SystemTime};

use tenure_core::object::takeover::{CLOCKS_AGREE_WITHIN, WriteStamp};

use super::bucket::{BucketDeadline, BucketError, ReadResult, SwapResult};
use super::inner::{ObjectInner, nonce};
use super::{BucketStore, clean};
use crate::store::Finding;
use crate::store::examine::basics;

/// How many create the same object at once.
const RACERS: u8 = 4;
/// How far apart two writes of the same object are.
const REWRITE_PAUSE: Duration = Duration::from_millis(1_100);
/// From how much on a clock that is wrong makes credentials fail.
const MAX_CLOCK_SKEW: Duration = Duration::from_secs(300);

pub(super) async fn examine(
    store: &BucketStore,
    inner: &ObjectInner,
    limit: Duration,
) -> Vec<Finding> {
    let mut findings = basics(store, limit).await;
    if findings.iter().any(Finding::is_unreachable) {
        return findings;
    }
    let until = inner.until(limit);
    let name = match nonce() {
        Ok(nonce) => format!("{}tenure-doctor-{nonce}", inner.options.prefix),
        Err(error) => {
            findings.push(Finding::error("randomness", &error));
            return findings;
        }
    };
    match conditions(inner, &name, until).await {
        Ok(found) => findings.extend(found),
        Err(trouble) => findings.push(failed(inner, "rights", trouble)),
    }
    findings.push(match clean::verify_conditional_remove(inner, until).await {
        Ok(()) => Finding::ok("removing", "an object at another version stays"),
        // Locks do without it.
        Err(error) => Finding::warning("removing", error.to_string())
            .advise("`tenure gc` does nothing here: what released locks leave stays"),
    });
    if let Err(trouble) = inner.bucket.erase(&name, until).await {
        findings.push(
            failed(inner, "removal", trouble)
                .advise(format!("remove the object {name} by hand, and give the right to")),
        );
    }
    match inner.bucket.settings(until).await {
        Ok(settings) => findings.extend(settings.into_iter().map(|setting| {
            if setting.good {
                Finding::ok(setting.what, setting.detail)
            } else {
                Finding::warning(setting.what, setting.detail).advise(setting.advice)
            }
        })),
        // Who may use locks need not be allowed to read the bucket's settings.
        Err(trouble) => {
            let error = trouble.explain_read(&*inner.bucket);
            let detail = format!("could not be read: {error}");
            findings.push(Finding::warning("bucket settings", detail).advise(
                "have somebody who may look: soft delete and versioning keep a copy of every renewal",
            ));
        }
    }
    findings
}

/// Whether of several who create at once one wins, and a write at an old version none.
async fn conditions(
    inner: &ObjectInner,
    name: &str,
    until: BucketDeadline,
) -> Result<Vec<Finding>, BucketError> {
    let race = |racer: u8| {
        let body = format!("{{\"doctor\":{racer}}}").into_bytes();
        inner.bucket.swap(name, None, body, until)
    };
    let (one, two, three, four) = tokio::join!(race(1), race(2), race(3), race(4));
    let mut winners = Vec::new();
    for raced in [one, two, three, four] {
        match raced {
            Ok(SwapResult::Won(written)) => winners.push(written.version),
            // Too many at once is no win.
            Ok(SwapResult::Lost) | Err(BucketError::Throttled) => {}
            Err(trouble) => return Err(trouble),
        }
    }
    let mut findings = vec![match winners.len() {
        1 => Finding::ok("create race", format!("of {RACERS} at once, one won")),
        n => Finding::failed("create race", format!("of {RACERS} at once, {n} won")).advise(
            "this store ignores conditions: no lock on it excludes anybody; choose another",
        ),
    }];
    let Some(first) = winners.first() else { return Ok(findings) };
    let read = inner.bucket.read(name, None, until).await?;
    let ReadResult::Present { now, .. } = read else {
        let detail = "what was written just now is not there";
        findings.push(
            Finding::failed("consistency", detail)
                .advise("reads must show the last write: choose another store"),
        );
        return Ok(findings);
    };
    findings.push(clock(now));
    // Buckets with a limit take a second write of the same name a second later.
    inner.clock.sleep_until(inner.clock.now() + REWRITE_PAUSE).await;
    let sent = inner.clock.now();
    let second = inner.bucket.swap(name, Some(first), b"{}".to_vec(), until).await?;
    if let SwapResult::Won(written) = &second {
        let replied = inner.clock.now();
        findings.push(store_clocks(inner.stamp(name, written, sent, replied, until).await));
    }
    inner.clock.sleep_until(inner.clock.now() + REWRITE_PAUSE).await;
    let stale = inner.bucket.swap(name, Some(first), b"{\"stale\":1}".to_vec(), until).await?;
    findings.push(match (second, stale) {
        (SwapResult::Won(_), SwapResult::Lost) => {
            Finding::ok("replacing", "a write at an old version is refused")
        }
        (SwapResult::Lost, _) => {
            Finding::failed("replacing", "a write at the newest version is refused")
                .advise("something else writes there, or the store tells wrong versions")
        }
        (SwapResult::Won(_), SwapResult::Won(_)) => {
            Finding::failed("replacing", "a write at an old version is done").advise(
                "this store ignores conditions: no lock on it excludes anybody; choose another",
            )
        }
    });
    findings.push(Finding::ok("rights", "objects can be read, created and replaced"));
    Ok(findings)
}

/// Compares the two clocks of a store at a write: one stamps objects, the other dates answers.
fn store_clocks(stamp: Option<WriteStamp>) -> Finding {
    let what = "store clocks";
    let Some(stamp) = stamp else {
        return Finding::warning(what, "the store did not say when it wrote an object").advise(
            "run the doctor again; without it a dead holder is taken over later, by observation",
        );
    };
    let off = stamp.difference();
    let which = if stamp.date > stamp.modified { "ahead of" } else { "behind" };
    let detail = format!("Date is {:.1} s {which} Last-Modified", off.as_secs_f64());
    if stamp.clocks_agree() {
        return Finding::ok(what, detail);
    }
    Finding::failed(what, format!("{detail}: more than {} s", CLOCKS_AGREE_WITHIN.as_secs())).advise(
        "a proxy replaces the store's Date (nginx does unless told `proxy_pass_header Date`), answers are slow, or the \
         store's machines differ: let the header pass, or set the clocks; until then a dead holder is taken over later, \
         a holder may not hear of a waiter, and more than 3 leases and 30 s may give two holders",
    )
}

/// How far our own clock is from the store's. No lock is counted by it; signatures are.
fn clock(store: Duration) -> Finding {
    let ours = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let which = if ours > store { "ahead" } else { "behind" };
    let off = ours.abs_diff(store);
    let detail = format!("our clock is {} s {which} of the store's", off.as_secs());
    if off < MAX_CLOCK_SKEW {
        Finding::ok("clock offset", detail)
    } else {
        Finding::warning("clock offset", detail)
            .advise("set the clock: locks do not depend on it, but credentials do")
    }
}

fn failed(inner: &ObjectInner, what: &str, trouble: BucketError) -> Finding {
    Finding::error(what, &trouble.explain_read(&*inner.bucket))
}
