//! `--watch`: stores and job queues that the page shows beside the server's own keys.

use tenure::jobs::{JobRow, JobState, Schema};
use tenure::store::{HolderState, Identity, KeyState};
use tenure::{Client, Error, ErrorKind};
use tenure_server::http::{
    HolderView, InspectFuture, JobError, JobFuture, JobView, NameView, QueueView, StoreView,
    WatchedJobs, WatchedStore,
};
use tokio::sync::OnceCell;

use crate::queue_monitor::{QueueMonitor, QueueReading};
use crate::{client, humanize, keys};

/// Maximum number of names of a store that are shown, and of running and of failed jobs.
const MAX_NAMES: usize = 200;
const MAX_JOBS: usize = 20;

/// Parses a URL of `--watch`. Errors contain no secrets.
pub(super) fn parse_watch_url(url: &str) -> Result<Box<dyn WatchedStore>, String> {
    let refused = |error: Error| format!("--watch: {}", error.chain());
    let (scheme, _) = url.split_once(':').unwrap_or((url, ""));
    let (base, queue) = split_queue(url);
    if let (Some(queue), "postgres" | "postgresql") = (&queue, scheme) {
        Schema::of_queue(queue).map_err(refused)?;
        check_url(&base).map_err(refused)?;
        let display_name = format!("{}, queue {queue}", without_secrets(&base));
        return Ok(Box::new(WatchedQueue {
            url: base,
            display_name,
            queue: queue.clone(),
            connected: OnceCell::new(),
        }));
    }
    // Connecting reaches out to these servers at once. A watched server that is down must not keep this one from
    // starting, so their URLs are checked only when the page is first read.
    if !matches!(scheme, "nats" | "tenure" | "tenures") {
        check_url(url).map_err(refused)?;
    }
    let (url, display_name) = (url.to_owned(), without_secrets(url));
    Ok(Box::new(WatchedLocks { url, display_name, connected: OnceCell::new() }))
}

/// Checks the URL of a store that connects only when it is used.
fn check_url(url: &str) -> tenure::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| {
        Error::new(ErrorKind::Unavailable, "cannot start a runtime").because(error)
    })?;
    runtime.block_on(client::builder().connect(url)).map(drop)
}

/// Splits `queue=NAME` off the options of a URL.
fn split_queue(url: &str) -> (String, Option<String>) {
    let Some((base, options)) = url.split_once('?') else { return (url.to_owned(), None) };
    let (queues, others): (Vec<&str>, Vec<&str>) =
        options.split('&').partition(|option| option.starts_with("queue="));
    let queue = queues.last().and_then(|option| option.strip_prefix("queue=")).map(str::to_owned);
    let rest = others.join("&");
    (if rest.is_empty() { base.to_owned() } else { format!("{base}?{rest}") }, queue)
}

/// The URL without options, user name and password.
fn without_secrets(url: &str) -> String {
    let base = url.split(['?', '#']).next().unwrap_or_default();
    match base.split_once("://") {
        Some((scheme, rest)) => {
            let place = rest.rsplit_once('@').map_or(rest, |(_, place)| place);
            format!("{scheme}://{place}")
        }
        None => base.to_owned(),
    }
}

/// A store of locks, elections and semaphores.
struct WatchedLocks {
    url: String,
    display_name: String,
    connected: OnceCell<Client>,
}

impl WatchedLocks {
    async fn snapshot(&self) -> tenure::Result<StoreView> {
        let client =
            self.connected.get_or_try_init(|| client::builder().connect(&self.url)).await?;
        let (keys, more) = client.list_first("", MAX_NAMES).await?;
        Ok(StoreView::Holds { names: keys.iter().map(name).collect(), more })
    }
}

/// A job queue.
struct WatchedQueue {
    url: String,
    display_name: String,
    queue: String,
    connected: OnceCell<QueueMonitor>,
}

impl WatchedQueue {
    async fn monitor(&self) -> tenure::Result<&QueueMonitor> {
        let connect = || QueueMonitor::connect(&self.url, &self.queue);
        self.connected.get_or_try_init(connect).await
    }

    async fn snapshot(&self) -> tenure::Result<StoreView> {
        let monitor = self.monitor().await?;
        let reading = monitor.read(MAX_JOBS).await?;
        let states = |is: &dyn Fn(JobState) -> bool| {
            JobState::ALL
                .into_iter()
                .filter(|state| is(*state))
                .map(|state| state.to_string())
                .collect()
        };
        let estimated = states(&|state| reading.is_estimate(state));
        let at_least = states(&|state| reading.is_at_least(state));
        let count = |state: JobState| (state.to_string(), reading.count(state));
        let counts = JobState::ALL.into_iter().map(count).collect();
        let QueueReading { summary, rates } = reading;
        let job = |row: &JobRow| job(row, monitor);
        Ok(StoreView::Jobs(QueueView {
            counts,
            estimated,
            at_least,
            paused: summary.paused.as_ref().map(|pause| pause.reason.clone().unwrap_or_default()),
            oldest: summary.oldest_available,
            rates,
            running: summary.running.iter().map(job).collect(),
            failed: summary.failed.iter().map(job).collect(),
        }))
    }
}

impl WatchedStore for WatchedLocks {
    fn name(&self) -> String {
        self.display_name.clone()
    }

    fn inspect(&self) -> InspectFuture<'_> {
        Box::pin(async move { self.snapshot().await.map_err(|error| error.chain()) })
    }
}

impl WatchedStore for WatchedQueue {
    fn name(&self) -> String {
        self.display_name.clone()
    }

    fn inspect(&self) -> InspectFuture<'_> {
        Box::pin(async move { self.snapshot().await.map_err(|error| error.chain()) })
    }

    fn jobs(&self) -> Option<&dyn WatchedJobs> {
        Some(self)
    }
}

impl WatchedJobs for WatchedQueue {
    fn show<'a>(&'a self, id: &'a str) -> JobFuture<'a, Option<JobView>> {
        Box::pin(async move {
            let monitor = self.monitor().await.map_err(job_error)?;
            let row = monitor.queue().show(id).await.map_err(job_error)?;
            Ok(row.map(|row| job(&row, monitor)))
        })
    }

    fn retry<'a>(&'a self, id: &'a str) -> JobFuture<'a, ()> {
        Box::pin(async move {
            let queue = self.monitor().await.map_err(job_error)?.queue();
            queue.requeue(id).await.map_err(job_error)
        })
    }

    fn cancel<'a>(&'a self, id: &'a str, reason: &'a str) -> JobFuture<'a, ()> {
        Box::pin(async move {
            let queue = self.monitor().await.map_err(job_error)?.queue();
            queue.cancel(id, reason).await.map_err(job_error)
        })
    }
}

#[expect(clippy::needless_pass_by_value, reason = "an argument of map_err")]
fn job_error(error: Error) -> JobError {
    match error.kind() {
        ErrorKind::Invalid => JobError::Refused(error.chain()),
        _ => JobError::Failed(error.chain()),
    }
}

impl std::fmt::Debug for WatchedLocks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("WatchedLocks").field(&self.display_name).finish()
    }
}

impl std::fmt::Debug for WatchedQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("WatchedQueue").field(&self.display_name).finish()
    }
}

fn name(key: &KeyState) -> NameView {
    NameView {
        name: key.key.to_string(),
        kind: keys::kind(key.space),
        holders: key.holders.iter().map(holder).collect(),
        waiting: key.waiters.len(),
        oldest_wait: keys::longest_wait(key),
    }
}

fn holder(state: &HolderState) -> HolderView {
    let Identity { id, host, pid, note } = state.by.clone().unwrap_or_default();
    let token = humanize::token(state.token).unwrap_or_else(|| "-".to_owned());
    HolderView { id, host, pid, note, token, held: state.held_for, left: state.lease_left }
}

fn job(row: &JobRow, monitor: &QueueMonitor) -> JobView {
    let can_retry = matches!(row.state, JobState::Failed | JobState::Delayed);
    let can_cancel = !matches!(row.state, JobState::Failed | JobState::Completed);
    JobView {
        id: row.id.clone(),
        state: row.state.to_string(),
        can_retry,
        can_cancel,
        priority: row.priority,
        attempt: row.attempts,
        max_attempts: row.max_attempts,
        token: row.lease_token,
        worker: row.locked_by.clone().filter(|_| row.state != JobState::Delayed),
        running_for: monitor.running_for(row),
        left: row.left,
        created_at: row.created_at,
        completed_at: row.completed_at,
        failed_at: row.failed_at,
        unique_key: row.unique_key.clone(),
        error: row.error.clone(),
        payload: row.payload.clone(),
        progress: row.progress.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_names_have_no_secrets() {
        for (url, shown) in [
            (
                "postgres://app:p@ss@db.example:5433/app?sslmode=require",
                "postgres://db.example:5433/app",
            ),
            ("postgres://app:a/b@db.example/app", "postgres://db.example/app"),
            ("tenure://:hunter2@locks:6388", "tenure://locks:6388"),
            ("nats://token@n1,n2/locks", "nats://n1,n2/locks"),
            ("file:/var/lib/a@b", "file:/var/lib/a@b"),
            ("gs://bucket/prefix", "gs://bucket/prefix"),
        ] {
            assert_eq!(without_secrets(url), shown);
        }
    }

    #[test]
    fn a_queue_is_an_option_of_the_url() {
        for (url, base, queue) in [
            ("postgres://h/d?queue=jobs", "postgres://h/d", Some("jobs")),
            ("postgres://h/d?a=1&queue=s.jobs&b=2", "postgres://h/d?a=1&b=2", Some("s.jobs")),
            ("postgres://h/d?a=1", "postgres://h/d?a=1", None),
            ("file:", "file:", None),
        ] {
            assert_eq!(split_queue(url), (base.to_owned(), queue.map(str::to_owned)));
        }
    }

    #[test]
    fn invalid_watch_url_is_rejected_without_printing_secrets() {
        for url in ["pigeon://me:hunter2@coop", "hunter2", "postgres://:hunter2@h/d?queue=no table"]
        {
            let refused = parse_watch_url(url).unwrap_err();
            assert!(refused.starts_with("--watch: ") && !refused.contains("hunter2"), "{refused}");
        }
        let down = parse_watch_url("nats://127.0.0.1:1/locks").unwrap();
        assert_eq!(down.name(), "nats://127.0.0.1:1/locks");
    }
}
