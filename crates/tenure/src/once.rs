//! Once per period: at most one run of something in each slot of time, whoever of a fleet asks.

use std::fmt;
use std::time::{Duration, SystemTime};

use tenure_core::Key;
use tenure_core::once::{self, Period, SlotStatus};

pub use tenure_core::once::Slot;

use crate::guard::Guard;
use crate::store::{DurableNotes, Identity, KeySpace};
use crate::{Client, Error, ErrorKind, LockRequest, Result};

/// How long a run that may be retried is believed to live without a word, unless told otherwise.
const DEFAULT_RETRY_TTL: Duration = Duration::from_secs(15);

/// A request to run something that is to be run once. Made by [`Client::once`].
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
/// Slots are cut by the clock on the wall of whoever asks: hosts whose clocks differ by more than the time between the
/// start of a slot and the run disagree on which slot it is. Each slot is run at most once all the same, and none after a
/// later one: that is an error, and nothing is run.
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

/// Whether this process runs the slot.
///
/// See [`OnceRequest`] for an example.
#[derive(Debug)]
pub enum Once {
    /// It does. What it does is to be told by [`OnceRun::done`] or [`OnceRun::failed`].
    Run(OnceRun),
    /// Another did, or does; who, where that can be told.
    Ran(Option<Identity>),
}

/// A slot that is ours to run.
///
/// Dropping it is [`failed`](Self::failed), in the background.
#[must_use = "the outcome of the run is to be told"]
pub struct OnceRun {
    client: Client,
    /// `None` once the outcome was told.
    guard: Option<Guard>,
    key: Key,
    mark: String,
    slot: Option<Slot>,
    keep: Duration,
    retry: bool,
}

impl Client {
    /// Something that is run at most once in each period, by one of all who ask.
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

impl OnceRequest {
    /// Once in each period of this length. Periods are counted from the Unix epoch: those of a day begin at midnight UTC.
    pub fn per(mut self, period: Duration) -> Self {
        self.slot_spec = SlotSpec::Per(period);
        self
    }

    /// Once in a slot that the caller names, such as a date, remembered for `keep`.
    pub fn slot(mut self, slot: impl Into<String>, keep: Duration) -> Self {
        self.slot_spec = SlotSpec::Named { slot: slot.into(), keep };
        self
    }

    /// A run that fails, or whose process ends, may be tried again in its slot. Without this whatever happens to a run is
    /// all that happens in its slot.
    pub fn retry(mut self, on: bool) -> Self {
        self.retry = on;
        self
    }

    /// With [`retry`](Self::retry): how long a process that is gone is waited for on stores that cannot notice; 15 s by
    /// default.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// The time that the work needs to stop where the hold is lost.
    pub fn stop_grace(mut self, time: Duration) -> Self {
        self.stop_grace = time;
        self
    }

    /// Who we are to others; `host:pid:nonce` by default.
    pub fn id(mut self, id: impl Into<String>) -> Self {
        self.id = Some(id.into());
        self
    }

    /// What time it is, for tests; the clock on the wall says it otherwise.
    pub fn at(mut self, wall: SystemTime) -> Self {
        self.wall = Some(wall);
        self
    }

    /// Says whether the slot is ours to run. Where it is, nobody else will be told so.
    ///
    /// # Errors
    ///
    /// `Invalid` for a bad name or period, and where a later slot was run: a clock is wrong, here or where that was run.
    /// `Contention` where the run of a slot long past still goes on. `Unsupported` where the store cannot remember
    /// anything without a process. Otherwise what the store says; nothing is to be run then.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives back what was granted meanwhile.
    pub async fn begin(self) -> Result<Once> {
        let store = self.client.store().clone();
        let can = store.capabilities();
        let name = self.name.as_ref().map_err(copy_error)?.clone();
        let at = |error: Error| error.on(&name).at(&store);
        let (key, slot, mark, keep) = self.plan(&name).map_err(at)?;
        let marks = store.durable_notes();
        if !can.detached && marks.is_none() {
            return Err(at(Error::new(
                ErrorKind::Unsupported,
                "this store remembers nothing without a process: choose another",
            )));
        }
        if let Some(slot) = slot
            && let Some(ran) = find_recorded_run(&self.client, marks, &name, slot, keep).await?
        {
            return Ok(ran);
        }
        let request = self.with_id(self.client.lock(&key)).note(&mark);
        let request = if marks.is_some() {
            request.ttl(self.ttl).stop_grace(self.stop_grace)
        } else {
            // A run that may not be repeated is marked for good before it begins.
            let ttl = if self.retry { self.ttl } else { keep };
            request.ttl(ttl).stop_grace(self.stop_grace.min(ttl / 5)).detached()
        };
        let guard = match request.try_acquire().await {
            Ok(guard) => guard,
            Err(error) if error.kind().is_held_by_another() => {
                let holder = store.inspect(&key, KeySpace::Lock).await?.holders.into_iter().next();
                let by = holder.and_then(|holder| holder.by);
                return match (slot, by.as_ref().and_then(|by| Slot::parse(&by.note))) {
                    (Some(slot), Some(found)) => match slot.status(found) {
                        SlotStatus::AlreadyRun => Ok(Once::Ran(by)),
                        SlotStatus::Superseded => {
                            Err(at(clock_behind_error(slot, found, by.as_ref())))
                        }
                        SlotStatus::Runnable => Err(at(still_running_error(by.as_ref()))),
                    },
                    _ => Ok(Once::Ran(by)),
                };
            }
            Err(error) => return Err(error),
        };
        let client = self.client.clone();
        let retry = self.retry;
        let mut run = OnceRun { client, guard: Some(guard), key, mark, slot, keep, retry };
        if let Some(marks) = marks {
            // Only now is nobody else about to write it.
            if let Some(ran) = run.read(marks, self.now()).await? {
                run.release_guard().await?;
                return Ok(Once::Ran(ran));
            }
            if !run.retry {
                run.write(marks).await?;
            }
        }
        Ok(Once::Run(run))
    }

    fn plan(&self, name: &Key) -> Result<(Key, Option<Slot>, String, Duration)> {
        let invalid = |message: String| Error::new(ErrorKind::Invalid, message);
        match &self.slot_spec {
            SlotSpec::Unspecified => {
                Err(invalid("once per what? give a period or a slot".to_owned()))
            }
            SlotSpec::Per(length) => {
                let period = Period::new(*length).map_err(|error| invalid(error.to_string()))?;
                let (now, longest) = (self.now(), self.client.store().max_ttl());
                let slot = period.slot_at(now);
                let keep = slot.mark_ttl(longest, now).ok_or_else(|| {
                    let longest = longest.unwrap_or_default();
                    invalid(format!(
                        "the store remembers nothing for longer than {longest:?}, and this slot lasts longer: raise its \
                         limit (tenure serve --max-lease), or shorten the period"
                    ))
                })?;
                Ok((slot.key(name)?, Some(slot), slot.mark(), keep))
            }
            SlotSpec::Named { slot, keep } => {
                if keep.is_zero() {
                    return Err(invalid(
                        "a slot that is kept for 0 is never remembered".to_owned(),
                    ));
                }
                Ok((once::named_key(name, slot)?, None, format!("once {slot}"), *keep))
            }
        }
    }

    fn now(&self) -> Duration {
        since_epoch(self.wall.unwrap_or_else(SystemTime::now))
    }

    fn with_id(&self, request: LockRequest) -> LockRequest {
        match &self.id {
            Some(id) => request.id(id),
            None => request,
        }
    }
}

impl OnceRun {
    /// What is held while it runs.
    pub fn guard(&self) -> &Guard {
        self.guard.as_ref().expect("the outcome takes the run along")
    }

    /// The slot, where it is one of a period.
    pub fn slot(&self) -> Option<Slot> {
        self.slot
    }

    /// It was done: nobody runs this slot again.
    ///
    /// # Errors
    ///
    /// What the store says, or that the hold was lost: then another may run the slot again.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future may leave the slot unmarked where it [may be retried](OnceRequest::retry).
    pub async fn done(mut self) -> Result<()> {
        let store = self.client.store().clone();
        if let Some(marks) = store.durable_notes() {
            if self.retry {
                self.write(marks).await?;
            }
            return self.release_guard().await;
        }
        let Some(guard) = self.guard.take() else { return Ok(()) };
        let handle = guard.detach().await?;
        if self.retry { self.client.renew(&self.key, &handle, self.keep).await } else { Ok(()) }
    }

    /// It failed: where it may be retried, another may run this slot now.
    ///
    /// # Errors
    ///
    /// What the store says.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future does the same in the background.
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

    /// Who ran this slot, if it was run, by its mark.
    async fn read(
        &self,
        marks: &dyn DurableNotes,
        now: Duration,
    ) -> Result<Option<Option<Identity>>> {
        let found = marks.read(&self.key).await?;
        let Some(found) = found.as_deref().and_then(SlotNote::parse) else { return Ok(None) };
        let ran = match (self.slot, Slot::parse(&found.mark)) {
            (Some(slot), Some(other)) => slot == other,
            _ => found.mark == self.mark && now < found.until,
        };
        Ok(ran.then_some(Some(found.by)))
    }

    async fn write(&self, marks: &dyn DurableNotes) -> Result<()> {
        let by = (*Identity::of_process()?).clone();
        let until = since_epoch(SystemTime::now()) + self.keep;
        marks.write(&self.key, &SlotNote { until, mark: self.mark.clone(), by }.to_string()).await
    }
}

impl Drop for OnceRun {
    fn drop(&mut self) {
        if let Some(guard) = self.guard.take()
            && !self.retry
            && self.client.store().durable_notes().is_none()
        {
            // The mark is all that keeps another from running this slot.
            guard.detach_in_background();
        }
    }
}

impl fmt::Debug for OnceRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnceRun").field("guard", &self.guard).finish_non_exhaustive()
    }
}

/// Looks at all marks of a name: what they say of a slot, unless it may be run.
async fn find_recorded_run(
    client: &Client,
    marks: Option<&dyn DurableNotes>,
    name: &Key,
    slot: Slot,
    keep: Duration,
) -> Result<Option<Once>> {
    let (store, prefix) = (client.store(), Slot::prefix(name));
    let mut found: Vec<(Slot, Option<Identity>)> = Vec::new();
    if let Some(marks) = marks {
        // A mark has no clock of a store to end it: one that says to be of the far future is of a clock that was wrong.
        let soon = slot.begins() + keep;
        let written = marks.list(&prefix).await?;
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

/// A mark as it is written down.
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
    let by = by.map_or_else(|| "another".to_owned(), |by| by.id.clone());
    let message = format!(
        "a slot that begins {ahead:?} later was run by {by}: the clock of this host is behind, or that of the other \
         ahead; nothing was run"
    );
    Error::new(ErrorKind::Invalid, message)
}

fn still_running_error(by: Option<&Identity>) -> Error {
    let by = by.map_or_else(|| "another".to_owned(), |by| by.id.clone());
    let message =
        format!("a run of {} periods ago still goes on, by {by}", once::MARK_KEYS_PER_NAME);
    Error::new(ErrorKind::Contention, message)
}

/// The same error, for somebody else.
fn copy_error(error: &Error) -> Error {
    Error::new(error.kind(), error.to_string())
}
