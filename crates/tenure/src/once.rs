//! Once per period: at most one run of a task per time slot across all hosts.

use std::fmt;
use std::time::{Duration, SystemTime};

use tenure_core::Key;
use tenure_core::once::{self, Period, SlotStatus};

pub use tenure_core::once::Slot;

use crate::guard::Guard;
use crate::store::{DurableNotes, Identity, KeySpace};
use crate::units::in_whole_units;
use crate::{Client, Error, ErrorKind, LockRequest, Result};

/// Default ttl of a run that may be retried.
const DEFAULT_RETRY_TTL: Duration = Duration::from_secs(15);

/// Request to run a task at most once per slot. Made by [`Client::once`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// use std::time::Duration;
/// use tenure::once::Once;
///
/// let client = tenure::Client::connect("memory:once-doc").await?;
/// let hourly = || client.once("reports").per(Duration::from_secs(3600));
/// match hourly().begin().await? {
///     Once::Run(run) => { /* the work */ run.done().await? }
///     Once::Ran(by) => println!("run already, by {by:?}"),
/// }
/// assert!(matches!(hourly().begin().await?, Once::Ran(_)));
/// # Ok(()) }
/// ```
///
/// The wall clock of the requesting host determines the slot. Two hosts can disagree on the current slot if their
/// clocks differ by more than the time between the start of the slot and the run. Even then each slot is run at most
/// once. A slot is never run after a later slot: that is an error, and nothing is run.
#[must_use = "a request does nothing until it is begun"]
#[derive(Debug)]
pub struct OnceRequest {
    client: Client,
    name: Result<Key>,
    slot_spec: SlotSpec,
    retry: bool,
    ttl: Duration,
    stop_grace: Duration,
    id: Option<String>,
    wall: Option<SystemTime>,
}

#[derive(Clone, Debug)]
enum SlotSpec {
    Unspecified,
    Per(Duration),
    Named { slot: String, keep: Duration },
}

/// Decision for one slot: this process runs it, or another process has.
///
/// Not `#[non_exhaustive]`, unlike other enums of this crate: there is no third decision, and a match without a wildcard
/// arm cannot run the task by mistake.
///
/// See [`OnceRequest`] for an example.
#[derive(Debug)]
#[must_use = "a run that is dropped uses up its slot"]
pub enum Once {
    /// This process runs the slot. Report the outcome with [`OnceRun::done`] or [`OnceRun::failed`].
    Run(OnceRun),
    /// Another process has run the slot, or is running it; with its identity, if known.
    Ran(Option<Identity>),
}

/// Slot that this process is to run.
///
/// Dropping it has the effect of [`failed`](Self::failed), in the background.
#[must_use = "report the outcome of the run with `done` or `failed`"]
pub struct OnceRun {
    client: Client,
    /// `None` once the outcome was reported.
    guard: Option<Guard>,
    key: Key,
    mark: String,
    slot: Option<Slot>,
    keep: Duration,
    retry: bool,
}

impl Client {
    /// Starts a request to run a task at most once per slot, on one of all hosts that request it.
    pub fn once(&self, name: impl AsRef<str>) -> OnceRequest {
        OnceRequest {
            client: self.clone(),
            name: Key::new(name.as_ref()).map_err(Into::into),
            slot_spec: SlotSpec::Unspecified,
            retry: false,
            ttl: DEFAULT_RETRY_TTL,
            stop_grace: Duration::ZERO,
            id: None,
            wall: None,
        }
    }
}

/// Number of claims of a slot whose holder is gone each time it is looked at.
const MAX_CLAIMS: usize = 3;

impl OnceRequest {
    /// Runs once per period of this length. Periods count from the Unix epoch: a period of one day begins at midnight
    /// UTC.
    pub fn per(mut self, period: Duration) -> Self {
        self.slot_spec = SlotSpec::Per(period);
        self
    }

    /// Runs once per named slot, such as a date. The run is remembered for `keep`.
    pub fn slot(mut self, slot: impl Into<String>, keep: Duration) -> Self {
        self.slot_spec = SlotSpec::Named { slot: slot.into(), keep };
        self
    }

    /// Lets a run that failed, or whose process died, be retried within its slot. Without this, each slot has one
    /// attempt.
    pub fn retry(mut self, on: bool) -> Self {
        self.retry = on;
        self
    }

    /// With [`retry`](Self::retry): sets the time after which the run of a dead process may be retried, on stores that
    /// cannot detect its death; 15 s by default.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// Sets the time that the work needs to stop when the hold is about to be lost.
    pub fn stop_grace(mut self, time: Duration) -> Self {
        self.stop_grace = time;
        self
    }

    /// Sets the id under which this process is shown; `host:pid:nonce` by default.
    pub fn id(mut self, id: impl Into<String>) -> Self {
        self.id = Some(id.into());
        self
    }

    /// Sets the time of the request, for tests. The default is the wall clock.
    pub fn at(mut self, wall: SystemTime) -> Self {
        self.wall = Some(wall);
        self
    }

    /// Decides if this process runs the slot. On [`Once::Run`], no other process is given the slot.
    ///
    /// # Errors
    ///
    /// After any error, do not run the task.
    ///
    /// - `Invalid` if the name or the period is invalid, or if a later slot was run: the clock of this host or of the
    ///   other host is wrong.
    /// - `Contention` if the run of a slot long past has not ended.
    /// - `Unavailable` if the store answered only after the slot was over.
    /// - `Unsupported` if the store keeps no record without a process.
    /// - Otherwise the error of the store.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, a grant that arrives meanwhile is released.
    pub async fn begin(self) -> Result<Once> {
        // The clock that cannot be set is read first: a stop between the two readings makes the grant look later, not
        // earlier.
        let clock = self.client.clock().clone();
        let began = clock.now();
        let first = since_epoch(self.wall.unwrap_or_else(SystemTime::now));
        // From here on the wall clock is counted by the clock that cannot be set.
        let wall = || first + clock.now().since(began);
        for _ in 1..MAX_CLAIMS {
            if let Some(once) = self.try_begin(wall).await? {
                return Ok(once);
            }
        }
        self.try_begin(wall).await?.ok_or_else(|| {
            let message = "the slot was held by another process, and no longer is: try again";
            let error = Error::new(ErrorKind::Unavailable, message).at(self.client.store());
            self.name.iter().fold(error, Error::on)
        })
    }

    /// Claims the slot. Returns `None` if another process held it, and held it no longer when it was looked at: whether
    /// the slot was run is not known then, and must be found out from the beginning.
    async fn try_begin(&self, wall: impl Fn() -> Duration) -> Result<Option<Once>> {
        let store = self.client.store().clone();
        let can = store.capabilities();
        let name = self.name.as_ref().map_err(copy_error)?.clone();
        let at = |error: Error| error.on(&name).at(&store);
        let (key, slot, mark, keep) = self.plan(&name, wall()).map_err(at)?;
        let notes = store.durable_notes();
        if !can.detached && notes.is_none() {
            return Err(at(Error::new(
                ErrorKind::Unsupported,
                "this store keeps no record without a process: use another store",
            )));
        }
        if let Some(slot) = slot
            && let Some(ran) = find_recorded_run(&self.client, notes, &name, slot, keep).await?
        {
            return Ok(Some(ran));
        }
        let request = self.with_id(self.client.lock(&key)).note(&mark);
        let request = if notes.is_some() {
            request.ttl(self.ttl).stop_grace(self.stop_grace)
        } else {
            // A run without retries must be recorded before it begins, for the whole slot: if its process dies, only
            // the lease of this hold keeps another process from running the slot again.
            let ttl = if self.retry { self.ttl } else { keep };
            request.ttl(ttl).stop_grace(self.stop_grace.min(ttl / 5)).detached()
        };
        let guard = match request.try_acquire().await {
            Ok(guard) => guard,
            Err(error) if error.kind().is_held_by_another() => {
                let holder = store.inspect(&key, KeySpace::Lock).await?.holders.into_iter().next();
                // The holder has left since, or it was this claim, whose grant ended before it was confirmed. In both
                // cases the slot may not have been run.
                let Some(holder) = holder else { return Ok(None) };
                let by = holder.by;
                return match (slot, by.as_ref().and_then(|by| Slot::parse(&by.note))) {
                    (Some(slot), Some(found)) => match slot.status(found) {
                        SlotStatus::AlreadyRun => Ok(Some(Once::Ran(by))),
                        SlotStatus::Superseded => {
                            Err(at(clock_behind_error(slot, found, by.as_ref())))
                        }
                        SlotStatus::Runnable => Err(at(still_running_error(by.as_ref()))),
                    },
                    _ => Ok(Some(Once::Ran(by))),
                };
            }
            Err(error) => return Err(error),
        };
        let client = self.client.clone();
        let retry = self.retry;
        let mut run = OnceRun { client, guard: Some(guard), key, mark, slot, keep, retry };
        // Counted by a clock that cannot be set, from before the slot was computed.
        if let Some(slot) = slot.filter(|_| notes.is_none())
            && wall() > slot.latest_grant(store.max_ttl())
        {
            run.release_guard().await?;
            let message = "the store granted the slot only after the slot was over: it may have been run, and \
                           nothing is run now";
            return Err(at(Error::new(ErrorKind::Unavailable, message)));
        }
        if let Some(notes) = notes {
            // Read under the lock: between the first look and the grant, another process may have run the slot and
            // recorded it. From here on no other process can.
            if let Some(ran) = run.read(notes, wall()).await? {
                run.release_guard().await?;
                return Ok(Some(Once::Ran(ran)));
            }
            if !run.retry {
                run.write(notes).await?;
            }
        }
        Ok(Some(Once::Run(run)))
    }

    fn plan(&self, name: &Key, wall: Duration) -> Result<(Key, Option<Slot>, String, Duration)> {
        let invalid = |message: String| Error::new(ErrorKind::Invalid, message);
        match &self.slot_spec {
            SlotSpec::Unspecified => {
                Err(invalid("neither a period nor a slot is set: set one of the two".to_owned()))
            }
            SlotSpec::Per(length) => {
                let period = Period::new(*length).map_err(|error| invalid(error.to_string()))?;
                let longest = self.client.store().max_ttl();
                let slot = period.slot_at(wall);
                let keep = slot.mark_ttl(longest, wall).ok_or_else(|| {
                    let longest = longest.unwrap_or_default();
                    invalid(format!(
                        "the store keeps no lease longer than {longest:.1?}, and this slot lasts longer: raise its \
                         limit (tenure serve --max-lease), or shorten the period"
                    ))
                })?;
                Ok((slot.key(name)?, Some(slot), slot.mark(), keep))
            }
            SlotSpec::Named { slot, keep } => {
                if keep.is_zero() {
                    return Err(invalid(
                        "a slot that is kept for 0s is never remembered: keep it longer".to_owned(),
                    ));
                }
                Ok((once::named_key(name, slot)?, None, format!("once {slot}"), *keep))
            }
        }
    }

    fn with_id(&self, request: LockRequest) -> LockRequest {
        match &self.id {
            Some(id) => request.id(id),
            None => request,
        }
    }
}

impl OnceRun {
    /// Guard of the hold under which the slot is run.
    pub fn guard(&self) -> &Guard {
        self.guard.as_ref().expect("the outcome takes the run along")
    }

    /// The slot, if it belongs to a [period](OnceRequest::per).
    pub fn slot(&self) -> Option<Slot> {
        self.slot
    }

    /// Records that the run succeeded: the slot is not run again.
    ///
    /// # Errors
    ///
    /// The error of the store, or `Lost` if the hold was lost: then another process may run the slot again.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, a slot that [may be retried](OnceRequest::retry) may stay without a record.
    pub async fn done(mut self) -> Result<()> {
        let store = self.client.store().clone();
        if let Some(notes) = store.durable_notes() {
            if self.retry {
                self.write(notes).await?;
            }
            return self.release_guard().await;
        }
        let Some(guard) = self.guard.take() else { return Ok(()) };
        let handle = guard.detach().await?;
        if self.retry { self.client.renew(&self.key, &handle, self.keep).await } else { Ok(()) }
    }

    /// Records that the run failed. If it [may be retried](OnceRequest::retry), any process may run the slot now;
    /// otherwise the slot is not run again.
    ///
    /// # Errors
    ///
    /// The error of the store.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the operation continues in the background.
    pub async fn failed(mut self) -> Result<()> {
        if self.retry || self.client.store().durable_notes().is_some() {
            return self.release_guard().await;
        }
        match self.guard.take() {
            Some(guard) => guard.detach().await.map(drop),
            None => Ok(()),
        }
    }

    async fn release_guard(&mut self) -> Result<()> {
        match self.guard.take() {
            Some(guard) => guard.release().await,
            None => Ok(()),
        }
    }

    /// Reads the note of this slot: `Some` with the identity of the process that ran it, if it was run.
    async fn read(
        &self,
        notes: &dyn DurableNotes,
        now: Duration,
    ) -> Result<Option<Option<Identity>>> {
        let found = notes.read(&self.key).await?;
        let Some(found) = found.as_deref().and_then(SlotNote::parse) else { return Ok(None) };
        let ran = match (self.slot, Slot::parse(&found.mark)) {
            (Some(slot), Some(other)) => slot == other,
            _ => found.mark == self.mark && now < found.until,
        };
        Ok(ran.then_some(Some(found.by)))
    }

    async fn write(&self, notes: &dyn DurableNotes) -> Result<()> {
        let by = (*Identity::of_process()?).clone();
        let until = since_epoch(SystemTime::now()) + self.keep;
        notes.write(&self.key, &SlotNote { until, mark: self.mark.clone(), by }.to_string()).await
    }
}

impl Drop for OnceRun {
    fn drop(&mut self) {
        if let Some(guard) = self.guard.take()
            && !self.retry
            && self.client.store().durable_notes().is_none()
        {
            // A release would let another process run the slot: the lease of this hold is the only record of the run.
            guard.detach_in_background();
        }
    }
}

impl fmt::Debug for OnceRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnceRun").field("guard", &self.guard).finish_non_exhaustive()
    }
}

/// Reads all records of a name. Returns `Once::Ran` if `slot` was run, an error if a later slot was run, and `None` if
/// `slot` may be run.
async fn find_recorded_run(
    client: &Client,
    notes: Option<&dyn DurableNotes>,
    name: &Key,
    slot: Slot,
    keep: Duration,
) -> Result<Option<Once>> {
    let (store, prefix) = (client.store(), Slot::prefix(name));
    let mut found: Vec<(Slot, Option<Identity>)> = Vec::new();
    if let Some(notes) = notes {
        // A note never expires. One for the far future was written under a wrong clock, and would block the name for
        // ever: it is ignored.
        let soon = slot.begins() + keep;
        let written = notes.list(&prefix).await?;
        let written = written.iter().filter_map(|text| SlotNote::parse(text));
        let slots = written.filter_map(|w| Some((Slot::parse(&w.mark)?, Some(w.by))));
        found.extend(slots.filter(|(slot, _)| slot.begins() <= soon));
    } else {
        let states = store.list(KeySpace::Lock, &prefix, None).await?;
        let holders = states.into_iter().flat_map(|state| state.holders);
        let by = holders.filter_map(|holder| holder.by);
        found.extend(by.filter_map(|by| Some((Slot::parse(&by.note)?, Some(by)))));
    }
    let judged = |wanted| {
        let mut found = found.iter();
        found.find(move |(other, _)| slot.status(*other) == wanted)
    };
    if let Some((_, by)) = judged(SlotStatus::AlreadyRun) {
        return Ok(Some(Once::Ran(by.clone())));
    }
    match judged(SlotStatus::Superseded) {
        Some((other, by)) => Err(clock_behind_error(slot, *other, by.as_ref()).on(name).at(store)),
        None => Ok(None),
    }
}

/// Note about a run, as it is written to [`DurableNotes`].
struct SlotNote {
    until: Duration,
    mark: String,
    by: Identity,
}

impl fmt::Display for SlotNote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { until, mark, by } = self;
        write!(f, "{}\n{mark}\n{}\n{}\n{}\n", until.as_millis(), by.id, by.host, by.pid)
    }
}

impl SlotNote {
    fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        let until = Duration::from_millis(lines.next()?.parse().ok()?);
        let mark = lines.next()?.to_owned();
        let (id, host) = (lines.next()?.to_owned(), lines.next()?.to_owned());
        let by = Identity { id, host, pid: lines.next()?.parse().ok()?, note: mark.clone() };
        Some(Self { until, mark, by })
    }
}

fn since_epoch(at: SystemTime) -> Duration {
    at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

fn clock_behind_error(slot: Slot, later: Slot, by: Option<&Identity>) -> Error {
    let ahead = later.begins().saturating_sub(slot.begins());
    let by = runner_name(by);
    let message = format!(
        "a slot that begins {} later was run by {by}: the clock of this host is behind, or the clock of the \
         other host is ahead; nothing was run",
        in_whole_units(ahead)
    );
    Error::new(ErrorKind::Invalid, message)
}

fn still_running_error(by: Option<&Identity>) -> Error {
    let (periods, by) = (once::MARK_KEYS_PER_NAME, runner_name(by));
    let message =
        format!("a run that was started {periods} periods ago is still running: held by {by}");
    Error::new(ErrorKind::Contention, message)
}

/// Names the process that runs or ran a slot. Leaves out the note, which contains the record of the slot.
fn runner_name(by: Option<&Identity>) -> String {
    let without_note = |by: &Identity| Identity { note: String::new(), ..by.clone() }.to_string();
    by.map_or_else(|| "another process".to_owned(), without_note)
}

/// Copies an error without its cause: the request keeps the original.
fn copy_error(error: &Error) -> Error {
    Error::new(error.kind(), error.to_string())
}
