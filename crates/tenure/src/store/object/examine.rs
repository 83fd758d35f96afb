//! Findings for `tenure doctor` about a bucket: permissions, conditional writes, settings, clocks.

use std::time::{Duration, SystemTime};

use tenure_core::object::takeover::{CLOCKS_AGREE_WITHIN, WriteStamp};

use super::bucket::{BucketDeadline, BucketError, ReadResult, SwapResult};
use super::clean;
use super::inner::{ObjectInner, nonce};
use crate::store::Finding;

/// Number of simultaneous attempts to create the same object.
const RACERS: u8 = 4;
/// Pause between two writes of the same object.
const REWRITE_PAUSE: Duration = Duration::from_millis(1_100);
/// Clock difference from which credentials may fail.
const MAX_CLOCK_SKEW: Duration = Duration::from_secs(300);

/// Findings about a bucket that answers.
pub(super) async fn findings(inner: &ObjectInner, until: BucketDeadline) -> Vec<Finding> {
    let mut findings = Vec::new();
    let name = match nonce() {
        Ok(nonce) => format!("{}tenure-doctor-{nonce}", inner.options.prefix),
        Err(error) => {
            findings.push(Finding::error("randomness", &error));
            return findings;
        }
    };
    match conditions(inner, &name, until).await {
        Ok(found) => findings.extend(found),
        Err(error) => findings.push(failed(inner, "rights", error)),
    }
    findings.push(match clean::verify_conditional_remove(inner, until).await {
        Ok(()) => Finding::ok("removing", "an object at another version stays"),
        // Locks work without it.
        Err(error) => Finding::warning("removing", error.to_string())
            .advise("`tenure gc` does nothing here: objects of released locks stay"),
    });
    if let Err(error) = inner.bucket.erase(&name, until).await {
        findings.push(failed(inner, "removal", error).advise(format!(
            "remove the object {name} by hand, and grant the permission to remove objects"
        )));
    }
    match inner.bucket.settings(until).await {
        Ok(settings) => findings.extend(settings.into_iter().map(|setting| {
            if setting.good {
                Finding::ok(setting.what, setting.detail)
            } else {
                Finding::warning(setting.what, setting.detail).advise(setting.advice)
            }
        })),
        // A client that may use locks need not be allowed to read the bucket's settings.
        Err(error) => {
            let error = error.explain_read(&*inner.bucket);
            let detail = format!("could not be read: {error}");
            findings.push(Finding::warning("bucket settings", detail).advise(
                "have an administrator check: soft delete and versioning keep a copy of every renewal",
            ));
        }
    }
    findings
}

/// Tests that one of several simultaneous creations wins, and that a write at an old version is refused.
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
            // A throttled attempt did not win.
            Ok(SwapResult::Lost) | Err(BucketError::Throttled) => {}
            Err(error) => return Err(error),
        }
    }
    let mut findings = vec![match winners.len() {
        1 => Finding::ok("create race", format!("of {RACERS} at once, one won")),
        n => Finding::failed("create race", format!("of {RACERS} at once, {n} won")).advise(
            "this store ignores conditions: locks on it exclude no client; use another store",
        ),
    }];
    let Some(first) = winners.first() else { return Ok(findings) };
    let read = inner.bucket.read(name, None, until).await?;
    let ReadResult::Present { now, .. } = read else {
        let detail = "an object that was just written is not there";
        findings.push(
            Finding::failed("consistency", detail)
                .advise("reads must show the last write: use another store"),
        );
        return Ok(findings);
    };
    findings.push(clock(now));
    // Buckets with a write limit accept the next write of the same name a second later.
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
                .advise("another program writes there, or the store reports wrong versions")
        }
        (SwapResult::Won(_), SwapResult::Won(_)) => {
            Finding::failed("replacing", "a write at an old version is accepted").advise(
                "this store ignores conditions: locks on it exclude no client; use another store",
            )
        }
    });
    findings.push(Finding::ok("rights", "objects can be read, created and replaced"));
    Ok(findings)
}

/// Compares the two clocks of a store at a write: one stamps objects, the other dates replies.
fn store_clocks(stamp: Option<WriteStamp>) -> Finding {
    let what = "store clocks";
    let Some(stamp) = stamp else {
        return Finding::warning(what, "the store did not report the time of a write").advise(
            "run the doctor again; without it a dead holder is taken over later, by observation",
        );
    };
    let off = stamp.difference();
    let direction = if stamp.date > stamp.modified { "ahead of" } else { "behind" };
    let detail = format!("Date is {:.1} s {direction} Last-Modified", off.as_secs_f64());
    if stamp.clocks_agree() {
        return Finding::ok(what, detail);
    }
    Finding::failed(what, format!("{detail}: more than {} s", CLOCKS_AGREE_WITHIN.as_secs())).advise(
        "a proxy replaces the store's Date (nginx does unless configured with `proxy_pass_header Date`), replies are slow, or \
         the store's machines differ: pass the header, or set the clocks; until then a dead holder is taken over later, a \
         holder may miss a hand-off request, and a difference of more than 3 leases and 30 s may admit two holders",
    )
}

/// Compares our wall clock with the store's. Locks do not depend on it, but signatures do.
fn clock(store: Duration) -> Finding {
    let ours = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let direction = if ours > store { "ahead of" } else { "behind" };
    let off = ours.abs_diff(store);
    let detail = format!("our clock is {} s {direction} the store's", off.as_secs());
    if off < MAX_CLOCK_SKEW {
        Finding::ok("clock offset", detail)
    } else {
        Finding::warning("clock offset", detail)
            .advise("set the clock: locks do not depend on it, but credentials do")
    }
}

fn failed(inner: &ObjectInner, what: &str, error: BucketError) -> Finding {
    Finding::error(what, &error.explain_read(&*inner.bucket))
}
