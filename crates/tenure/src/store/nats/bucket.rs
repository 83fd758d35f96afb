//! The bucket and its stream: created if absent, otherwise adopted or refused with a reason; never changed.

use std::time::Duration;

use serde_json::{Value, json};

use super::api::{Api, ApiDeadline, ApiError, JetStreamError, NO_STREAM};
use super::layout::BucketLayout;
use super::options::{Options, RequestedLayout};
use super::settings;
use super::stream::{StreamConfig, StreamInfo, info};
use crate::{Error, ErrorKind, Result};

/// Default bucket of nlock. If it is absent, it is created in nlock's layout.
const NLOCK_BUCKET: &str = "distributed_locks";
/// Default ttl of nlock's buckets.
const NLOCK_TTL: Duration = Duration::from_secs(30);
/// Smallest `max_age` of a bucket in tenure's layout. A shorter one would remove records that are in use.
const MIN_MAX_AGE: Duration = Duration::from_secs(24 * 60 * 60);
/// Number of replicas of a new bucket on a cluster.
const CLUSTER_REPLICAS: usize = 3;

/// Opens the bucket, and creates it if it is absent; the flag is true if it was absent.
pub(super) async fn open(
    api: &Api,
    options: &Options,
    until: ApiDeadline,
) -> Result<(StreamInfo, BucketLayout, bool)> {
    let stream = format!("KV_{}", options.bucket);
    match info(api, &stream, until).await {
        Ok(found) => {
            let layout = layout_of(&found.config, options)?;
            Ok((found, layout, false))
        }
        Err(ApiError::Refused(JetStreamError { err_code: NO_STREAM, .. })) => {
            let config = new_stream_config(&stream, options, is_cluster(api));
            let created: Result<StreamInfo, _> =
                api.request(&format!("STREAM.CREATE.{stream}"), &config, until).await;
            let created = match created {
                Ok(created) => created,
                // "Stream name in use": another client created it first, perhaps with other settings.
                Err(ApiError::Refused(JetStreamError { err_code: 10_058, .. })) => {
                    info(api, &stream, until).await?
                }
                Err(error) => return Err(explain(error, options)),
            };
            let layout = layout_of(&created.config, options)?;
            Ok((created, layout, true))
        }
        Err(error) => Err(explain(error, options)),
    }
}

fn explain(error: ApiError, options: &Options) -> Error {
    let error = Error::from(error);
    let message = format!("cannot open the bucket {}: {error}", options.bucket);
    Error::new(error.kind(), message).because(error)
}

fn is_cluster(api: &Api) -> bool {
    api.client.try_server_info().is_some_and(|info| info.cluster.is_some())
}

/// Configuration of a new bucket's stream.
fn new_stream_config(stream: &str, options: &Options, cluster: bool) -> Value {
    let bucket = &options.bucket;
    let nlock = options.layout == Some(RequestedLayout::Nlock)
        || options.layout.is_none() && bucket == NLOCK_BUCKET;
    let replicas = options.replicas.unwrap_or(match (nlock, cluster) {
        (false, true) => CLUSTER_REPLICAS,
        _ => 1,
    });
    let max_age = if nlock { options.ttl.unwrap_or(NLOCK_TTL) } else { Duration::ZERO };
    json!({
        "name": stream,
        "description": if nlock { "Distributed locks" } else { "Locks of tenure" },
        "subjects": [format!("$KV.{bucket}.>")],
        "retention": "limits",
        "discard": "new",
        "storage": if nlock { "memory" } else { "file" },
        "num_replicas": replicas,
        "max_msgs_per_subject": 1,
        "max_msgs": -1,
        "max_bytes": -1,
        "max_msg_size": -1,
        "max_consumers": -1,
        "max_age": u64::try_from(max_age.as_nanos()).unwrap_or(u64::MAX),
        "duplicate_window": u64::try_from(duplicate_window(max_age).as_nanos()).unwrap_or(u64::MAX),
        "allow_rollup_hdrs": true,
        "allow_direct": true,
        "deny_delete": true,
    })
}

/// Duplicate window, which the server requires to be no longer than `max_age`.
fn duplicate_window(max_age: Duration) -> Duration {
    let usual = Duration::from_secs(120);
    if max_age.is_zero() { usual } else { usual.min(max_age) }
}

/// Layout of an existing bucket.
///
/// # Errors
///
/// `Misconfigured` if the bucket has neither layout, does not match the options, or could lose records.
pub(super) fn layout_of(config: &StreamConfig, options: &Options) -> Result<BucketLayout> {
    let refuse = |why: String| {
        let bucket = &options.bucket;
        let message = format!("the bucket {bucket} is refused: {why}");
        Err(Error::new(ErrorKind::Misconfigured, message))
    };
    if !config.mirror.is_null() || config.sources.as_array().is_some_and(|list| !list.is_empty()) {
        return refuse("it mirrors another bucket and takes no writes: use that one".into());
    }
    if config.sealed {
        return refuse("it is sealed: choose another bucket".into());
    }
    let unfit = settings::unfit_settings(config, &options.bucket);
    if !unfit.is_empty() {
        return refuse(unfit.join("; "));
    }
    if config.subjects != [format!("$KV.{}.>", options.bucket)] {
        return refuse(format!("it is no key-value bucket ({:?})", config.subjects));
    }
    if config.max_msgs_per_subject != 1 {
        let kept = config.max_msgs_per_subject;
        return refuse(format!("it keeps a history of {kept}: use a bucket with a history of 1"));
    }
    let max_age = Duration::from_nanos(config.max_age);
    let nlock = config.storage == "memory" && !max_age.is_zero();
    match (nlock, options.layout) {
        (true, None | Some(RequestedLayout::Nlock)) => {
            if let Some(ttl) = options.ttl.filter(|ttl| *ttl != max_age) {
                return refuse(format!(
                    "its ttl is {max_age:?}, and {ttl:?} was requested: use the bucket's ttl"
                ));
            }
            if config.subject_delete_marker_ttl > 0 {
                return refuse(settings::marker_error(&options.bucket));
            }
            return Ok(BucketLayout::Nlock { ttl: max_age });
        }
        (true, Some(RequestedLayout::Native)) => {
            return refuse("it has nlock's form (memory, with a ttl): use form=nlock".into());
        }
        (false, Some(RequestedLayout::Nlock)) => {
            let storage = &config.storage;
            return refuse(format!(
                "it does not have nlock's form ({storage} storage, ttl {max_age:?})"
            ));
        }
        (false, None | Some(RequestedLayout::Native)) => {}
    }
    if config.storage != "file" {
        let storage = &config.storage;
        return refuse(format!(
            "it has {storage} storage, and a restart would forget all holds: use a bucket with file storage"
        ));
    }
    if !max_age.is_zero() && max_age < MIN_MAX_AGE {
        return refuse(format!(
            "its ttl of {max_age:?} would remove holds: use a bucket without a ttl"
        ));
    }
    if let Some(requested) = options.replicas.filter(|requested| *requested != config.num_replicas)
    {
        let actual = config.num_replicas;
        return refuse(format!(
            "it has {actual} replicas, and {requested} were requested: edit the bucket, or use replicas={actual}"
        ));
    }
    Ok(BucketLayout::Native)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(change: impl FnOnce(&mut Value)) -> StreamConfig {
        let mut value = new_stream_config("KV_b", &options(None), false);
        change(&mut value);
        serde_json::from_value(value).unwrap()
    }

    fn options(layout: Option<RequestedLayout>) -> Options {
        Options { bucket: "b".to_owned(), layout, ..Options::default() }
    }

    #[test]
    fn created_buckets_are_adopted() {
        assert_eq!(layout_of(&config(|_| {}), &options(None)).unwrap(), BucketLayout::Native);
        let nlock =
            Options { ttl: Some(Duration::from_secs(4)), ..options(Some(RequestedLayout::Nlock)) };
        let created = serde_json::from_value(new_stream_config("KV_b", &nlock, true)).unwrap();
        let layout = BucketLayout::Nlock { ttl: Duration::from_secs(4) };
        assert_eq!(layout_of(&created, &nlock).unwrap(), layout);
        assert_eq!(
            layout_of(&created, &options(None)).unwrap(),
            layout,
            "recognised by its settings"
        );
    }

    #[test]
    fn the_default_bucket_of_nlock_is_created_as_nlock_would() {
        let nlock = Options { bucket: NLOCK_BUCKET.to_owned(), ..Options::default() };
        let created = new_stream_config("KV_distributed_locks", &nlock, true);
        assert_eq!((&created["storage"], &created["num_replicas"]), (&json!("memory"), &json!(1)));
        assert_eq!(created["max_age"], json!(30_000_000_000_u64));
        assert_eq!(new_stream_config("KV_b", &options(None), true)["num_replicas"], json!(3));
    }

    #[test]
    fn a_bucket_of_another_kind_is_refused_with_the_reason() {
        type Change = fn(&mut Value);
        let refused: [(Change, &str); 8] = [
            (|c| c["mirror"] = json!({ "name": "KV_other" }), "mirrors another"),
            (|c| c["sources"] = json!([{ "name": "KV_other" }]), "mirrors another"),
            (|c| c["sealed"] = json!(true), "sealed"),
            (|c| c["subjects"] = json!(["orders.>"]), "no key-value bucket"),
            (|c| c["max_msgs_per_subject"] = json!(5), "history of 5"),
            (|c| c["storage"] = json!("memory"), "a restart would forget"),
            (|c| c["max_age"] = json!(60_000_000_000_u64), "ttl of 60s"),
            (|c| c["num_replicas"] = json!(3), "3 replicas, and 1 were requested"),
        ];
        for (change, part) in refused {
            let requested = Options { replicas: Some(1), ..options(Some(RequestedLayout::Native)) };
            let error = layout_of(&config(change), &requested).unwrap_err();
            assert!(error.to_string().contains(part), "{error}");
            assert_eq!(error.kind(), ErrorKind::Misconfigured);
        }
        let error = layout_of(&config(|_| {}), &options(Some(RequestedLayout::Nlock))).unwrap_err();
        assert!(error.to_string().contains("not have nlock's form"), "{error}");
    }
}
