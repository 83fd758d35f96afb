//! Requests to the library, built from arguments.

use tenure::election::ElectionRequest;
use tenure::once::OnceRequest;
use tenure::retry::ExponentialBackoff;
use tenure::{Client, Key, LockRequest};

use crate::args::election::ElectionArgs;
use crate::args::hold::{HoldArgs, IdentityArgs, kill_after};
use crate::args::once::OnceArgs;

/// Applies the settings of a hold to the request for a lock or for a slot of a semaphore.
pub(super) fn with_settings(request: LockRequest, arguments: &HoldArgs) -> LockRequest {
    let request = request.ttl(arguments.ttl).stop_grace(arguments.kill_after());
    let mut request = with_identity(request, &arguments.identity);
    if arguments.shared {
        request = request.shared();
    }
    if arguments.fail_fast {
        request = request.fail_fast();
    }
    match arguments.max_hold {
        Some(max) => request.max_hold(max),
        None => request,
    }
}

/// Adds the identity that other clients read.
pub(super) fn with_identity(mut request: LockRequest, identity: &IdentityArgs) -> LockRequest {
    if let Some(id) = &identity.id {
        request = request.id(id);
    }
    match &identity.note {
        Some(note) => request.note(note),
        None => request,
    }
}

/// Builds the request to take part in an election.
pub(super) fn election(arguments: &ElectionArgs, client: &Client, name: &Key) -> ElectionRequest {
    let ttl = arguments.ttl(client.store().capabilities().min_ttl);
    let mut request = client
        .election(name)
        .ttl(ttl)
        .stop_grace(arguments.kill_after(ttl))
        .auto_reacquire(!arguments.no_auto_reacquire);
    if let Some(interval) = arguments.health_interval {
        request = request.health_interval(interval);
    }
    if arguments.retry_base.is_some() || arguments.retry_max.is_some() {
        let default = ExponentialBackoff::default();
        let base = arguments.retry_base.unwrap_or(default.base);
        let max = arguments.retry_max.unwrap_or(default.max).max(base);
        request = request.retry(ExponentialBackoff { base, max, multiplier: 2.0, jitter: 0.5 });
    }
    if arguments.fail_fast {
        request = request.fail_fast();
    }
    if let Some(grace) = arguments.reconnect_grace {
        request = request.reconnect_grace(grace);
    }
    if let Some(id) = &arguments.identity.id {
        request = request.id(id);
    }
    match &arguments.identity.note {
        Some(note) => request.note(note),
        None => request,
    }
}

/// Builds the request to run once in a slot.
pub(super) fn once(arguments: &OnceArgs, client: &Client, name: &Key) -> OnceRequest {
    let OnceArgs { per, slot, keep, retry, ttl, id, .. } = arguments;
    let mut request = client
        .once(name)
        .retry(*retry)
        .ttl(*ttl)
        .stop_grace(kill_after(arguments.kill_after, *ttl));
    request = match (slot, per) {
        (Some(slot), _) => request.slot(slot, *keep),
        (None, per) => request.per(per.unwrap_or_default()),
    };
    match id {
        Some(id) => request.id(id),
        None => request,
    }
}
