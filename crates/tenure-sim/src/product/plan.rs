//! The plan of a run: everything that its seed decides before the run begins.

use std::fmt;
use std::time::Duration;

use tenure_core::Random;

/// A run of the product. Equal plans give equal runs.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Seed of the random numbers that are drawn during the run.
    pub seed: u64,
    /// Number of client processes.
    pub clients: usize,
    /// Number of users per client process: tasks that acquire and release.
    pub users: usize,
    /// True if each client has one more user, which asks for holders all the time.
    pub chatty: bool,
    /// Number of keys.
    pub keys: u64,
    /// Duration of the phase with faults.
    pub length: Duration,
    /// Shortest ttl that users request; the longest is four times as long.
    pub ttl: Duration,
    /// Kinds of work that users do, with their weights.
    pub work: Vec<(Work, u64)>,
    /// Properties of the links between clients and the server.
    pub link: Link,
    /// Largest error of a clock's rate, in parts per million.
    pub drift: u64,
    /// Properties of the server.
    pub server: ServerPlan,
    /// Faults, ordered by time.
    pub faults: Vec<ScheduledFault>,
}

/// Properties of the links between clients and the server.
#[derive(Clone, Copy, Debug)]
pub struct Link {
    /// Shortest delay of a segment.
    pub delay: Duration,
    /// Largest random addition to the delay.
    pub jitter: Duration,
    /// Probability that a segment is lost and sent again.
    pub loss: f64,
    /// Bytes that a connection takes in one direction before its reader has read any.
    pub window: usize,
}

impl Link {
    /// A window that no reply fills.
    pub const WIDE_WINDOW: usize = 64 << 10;
}

/// Properties of the server.
#[derive(Clone, Copy, Debug)]
pub struct ServerPlan {
    /// True if the server has a data directory. Without one it is never killed: its promises end with the process.
    pub durable: bool,
    /// Size of a segment of the journal.
    pub segment_bytes: u64,
    /// Time after which the server closes a connection whose client does not read.
    pub write_timeout: Duration,
}

/// Kind of work that a user does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Acquires an exclusive lock, and waits for it as long as necessary.
    Lock,
    /// Acquires a shared lock.
    Share,
    /// Acquires a slot of a semaphore.
    Slot,
    /// Acquires a lock if it is free.
    TryLock,
    /// Waits for a lock with a time limit.
    TimedLock,
    /// Joins the queue first and waits later.
    TwoPhase,
    /// Gives up a wait at a random time.
    Cancel,
    /// Holds a lock until another client asks for it.
    HandOff,
    /// Holds a lock for longer than its maximum.
    MaxHold,
    /// Detaches a hold, and renews or releases it by its handle.
    Detach,
    /// Breaks the present hold of a key.
    Break,
    /// Takes part in an election.
    Elect,
    /// Runs a task once per period.
    Once,
    /// Asks for the holders of a key, several times.
    Inspect,
    /// Holds a lock without renewals until its deadline.
    Outlast,
}

impl Work {
    /// All kinds of work.
    pub const ALL: [Self; 15] = [
        Self::Lock,
        Self::Share,
        Self::Slot,
        Self::TryLock,
        Self::TimedLock,
        Self::TwoPhase,
        Self::Cancel,
        Self::HandOff,
        Self::MaxHold,
        Self::Detach,
        Self::Break,
        Self::Elect,
        Self::Once,
        Self::Inspect,
        Self::Outlast,
    ];
}

/// A fault, and the time at which it begins.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScheduledFault {
    /// Real time since the start of the run.
    pub at: Duration,
    /// The fault.
    pub fault: Fault,
}

/// A fault. `client` is the number of a client, `lasts` the duration of the fault.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(missing_docs, reason = "the fields are explained by the fault")]
pub enum Fault {
    /// No segment passes in one or both directions. TCP sends them again when the partition ends.
    Partition { client: usize, up: bool, down: bool, lasts: Duration },
    /// Segments of a client take longer.
    Slow { client: usize, extra: Duration, lasts: Duration },
    /// The connections of a client break. Each side notices after a time, or never.
    Reset { client: usize, client_after: Option<Duration>, server_after: Option<Duration> },
    /// A proxy closes the connections of a client. Each side sees the end of the stream after a time, or never.
    ProxyClose { client: usize, client_after: Option<Duration>, server_after: Option<Duration> },
    /// A client does not read what it receives.
    SlowReader { client: usize, lasts: Duration },
    /// A client process is stopped between two of its steps.
    PauseClient { client: usize, lasts: Duration },
    /// A client process is stopped right after it has read its clock.
    StopClient { client: usize, readings: u64, lasts: Duration },
    /// A client process is killed and started again.
    KillClient { client: usize, restart_after: Duration },
    /// The clock of a client changes its rate.
    SlewClient { client: usize, ppm: i64 },
    /// The clock of the server changes its rate.
    SlewServer { ppm: i64 },
    /// The wall clock of a client, or of the server, is set.
    StepWallClock { client: Option<usize>, by: Duration, back: bool },
    /// The server process is stopped after some of its operations.
    StopServer { point: ServerPoint, operations: u64, lasts: Duration },
    /// The server process is killed after some of its operations.
    KillServer { point: ServerPoint, operations: u64, restart_after: Duration },
    /// The machine of the server crashes after some operations of the server. Unsynced writes may be lost.
    CrashMachine { point: ServerPoint, operations: u64, restart_after: Duration },
    /// The server is told to stop.
    ShutDownServer { restart_after: Duration },
    /// The disk of the server has no space left.
    FillDisk { lasts: Duration },
}

/// Operations of the server that a fault counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerPoint {
    /// All operations.
    Any,
    /// Readings of the clock.
    Clock,
    /// Reads from sockets.
    Read,
    /// Writes to sockets.
    Write,
    /// Changes of the disk.
    Disk,
}

const MS: Duration = Duration::from_millis(1);

impl Plan {
    /// Draws the plan of a seed.
    pub fn draw(seed: u64) -> Self {
        let mut draw = Draw(Random::new(seed ^ 0x7465_6e75_7265_0001));
        let clients = 2 + draw.index(3);
        let users = 1 + draw.index(3);
        let ttl = draw.span(400 * MS, 2_000 * MS);
        let length = ttl * 4 + draw.span(Duration::ZERO, ttl * 16);
        let durable = draw.chance(0.9);
        let mut plan = Self {
            seed,
            clients,
            users,
            chatty: draw.chance(0.4),
            keys: if draw.chance(0.3) { 2 } else { 1 },
            length,
            ttl,
            work: draw.work(),
            link: Link {
                delay: draw.span(Duration::from_micros(50), 5 * MS),
                jitter: if draw.chance(0.5) { draw.span(MS, ttl / 8) } else { MS },
                loss: if draw.chance(0.3) { 0.05 * draw.0.unit() } else { 0.0 },
                window: if draw.chance(0.3) { 256 } else { Link::WIDE_WINDOW },
            },
            drift: if draw.chance(0.5) { 80_000 } else { 0 },
            server: ServerPlan {
                durable,
                segment_bytes: if draw.chance(0.5) { 700 } else { 16 << 10 },
                write_timeout: draw.span(ttl / 2, ttl * 2),
            },
            faults: Vec::new(),
        };
        match draw.0.below(20) {
            0..=2 => plan.draw_stops(&mut draw),
            3..=4 if durable => plan.draw_kills(&mut draw),
            _ => plan.draw_faults(&mut draw),
        }
        plan
    }

    /// Draws a busy run in which the server is stopped right after it has read its clock, and holds that are not renewed:
    /// a lease that is counted from too early shows in such a run only.
    fn draw_stops(&mut self, draw: &mut Draw) {
        self.users = 3;
        self.chatty = true;
        self.work = vec![(Work::Outlast, 4), (Work::TryLock, 2), (Work::Lock, 1)];
        let stops = 1 + draw.0.below(6);
        for _ in 0..stops {
            let at = draw.span(Duration::ZERO, self.length);
            let (point, operations) = (ServerPoint::Clock, draw.0.below(3));
            let lasts = draw.span(self.ttl / 3, self.ttl);
            let fault = Fault::StopServer { point, operations, lasts };
            self.faults.push(ScheduledFault { at, fault });
        }
        self.faults.sort_by_key(|fault| fault.at);
    }

    /// Longest ttl that users request.
    pub fn max_ttl(&self) -> Duration {
        self.ttl * 4
    }

    /// Time at which all faults have ended.
    pub fn faults_end(&self) -> Duration {
        let ends = self.faults.iter().map(|ScheduledFault { at, fault }| *at + fault.lasts());
        ends.max().unwrap_or_default().max(self.length)
    }

    /// Draws a run in which the server is killed between its replies and its writes, and holds that outlive their
    /// connections: a grant that is answered before it is on the disk shows best in such a run.
    fn draw_kills(&mut self, draw: &mut Draw) {
        self.work = vec![(Work::Detach, 4), (Work::Lock, 2), (Work::Once, 1)];
        let kills = 1 + draw.0.below(12);
        for _ in 0..kills {
            let at = draw.span(Duration::ZERO, self.length);
            let point = [ServerPoint::Write, ServerPoint::Disk][draw.index(2)];
            let (operations, restart_after) = (draw.0.below(3), draw.span(MS, self.ttl / 4));
            let fault = Fault::KillServer { point, operations, restart_after };
            self.faults.push(ScheduledFault { at, fault });
        }
        self.faults.sort_by_key(|fault| fault.at);
    }

    /// Draws which kinds of faults occur, and how often.
    fn draw_faults(&mut self, draw: &mut Draw) {
        // Some runs have one kind of fault, some have many, a few have none.
        let kinds: Vec<usize> = match draw.0.below(10) {
            0 => Vec::new(),
            1..=2 => vec![draw.index(FAULT_KINDS)],
            // Of the server, which has the most to keep.
            3..=4 => (11..=13).filter(|_| draw.chance(0.5)).collect(),
            _ => (0..FAULT_KINDS).filter(|_| draw.chance(0.3)).collect(),
        };
        if kinds.is_empty() {
            return;
        }
        // Some faults break a promise only in a narrow window: many runs are hit again and again.
        let count = if draw.chance(0.4) { 10 + draw.index(40) } else { 1 + draw.index(10) };
        for _ in 0..count {
            let kind = kinds[draw.index(kinds.len())];
            let at = draw.span(Duration::ZERO, self.length);
            if let Some(fault) = self.draw_fault(kind, draw) {
                self.faults.push(ScheduledFault { at, fault });
            }
        }
        self.faults.sort_by_key(|fault| fault.at);
        // The server reads its wall clock only when it starts: a step after the last start would have no effect.
        let mut starts = false;
        for ScheduledFault { fault, .. } in self.faults.iter_mut().rev() {
            starts |= matches!(
                fault,
                Fault::KillServer { .. }
                    | Fault::CrashMachine { .. }
                    | Fault::ShutDownServer { .. }
            );
            if let Fault::StepWallClock { client: client @ None, .. } = fault
                && !starts
            {
                *client = Some(draw.index(self.clients));
            }
        }
    }

    fn draw_fault(&self, kind: usize, draw: &mut Draw) -> Option<Fault> {
        let client = draw.index(self.clients);
        let (ttl, max_ttl) = (self.ttl, self.max_ttl());
        let longest = if draw.chance(0.5) { ttl } else { max_ttl };
        let lasts = draw.span(ttl / 20, longest);
        // A step that serves a request has about ten operations, one or two of each kind: most faults strike in the
        // middle of one.
        let (point, operations) = match draw.0.below(8) {
            0..=1 => (ServerPoint::Any, draw.0.below(15)),
            2..=3 => (ServerPoint::Clock, draw.0.below(3)),
            4 => (ServerPoint::Read, draw.0.below(3)),
            5 if self.server.durable => (ServerPoint::Disk, draw.0.below(5)),
            _ => (ServerPoint::Write, draw.0.below(3)),
        };
        let longest = if draw.chance(0.5) { ttl / 50 } else { ttl * 2 };
        let restart_after = draw.span(MS, longest);
        let notices = |draw: &mut Draw| draw.chance(0.8).then(|| draw.span(Duration::ZERO, ttl));
        Some(match kind {
            0 => {
                let (up, down) = [(true, true), (true, false), (false, true)][draw.index(3)];
                Fault::Partition { client, up, down, lasts }
            }
            1 => Fault::Slow { client, extra: draw.span(MS, ttl), lasts },
            2 => {
                let (client_after, server_after) = (notices(draw), notices(draw));
                Fault::Reset { client, client_after, server_after }
            }
            3 => {
                let (client_after, server_after) = (notices(draw), notices(draw));
                Fault::ProxyClose { client, client_after, server_after }
            }
            4 => Fault::SlowReader { client, lasts },
            5 => Fault::PauseClient { client, lasts },
            6 => Fault::StopClient { client, readings: operations, lasts },
            7 => Fault::KillClient { client, restart_after },
            8..=9 if self.drift == 0 => return None,
            8 => Fault::SlewClient { client, ppm: draw.ppm(self.drift) },
            9 => Fault::SlewServer { ppm: draw.ppm(self.drift) },
            10 => {
                let client = draw.chance(0.5).then_some(client);
                let (by, back) = (draw.span(MS, Duration::from_secs(3600)), draw.chance(0.5));
                Fault::StepWallClock { client, by, back }
            }
            11 => Fault::StopServer { point, operations, lasts },
            _ if !self.server.durable => return None,
            12 => Fault::KillServer { point, operations, restart_after },
            13 => Fault::CrashMachine { point, operations, restart_after },
            14 => Fault::ShutDownServer { restart_after },
            _ => Fault::FillDisk { lasts },
        })
    }

    /// Simpler plans to try in place of this one, the largest simplifications first.
    pub fn simpler(&self) -> Vec<Self> {
        let mut plans = Vec::new();
        let half = self.faults.len() / 2;
        if half > 0 {
            plans.push(Self { faults: self.faults[..half].to_vec(), ..self.clone() });
            plans.push(Self { faults: self.faults[half..].to_vec(), ..self.clone() });
        }
        for index in 0..self.faults.len() {
            let mut faults = self.faults.clone();
            faults.remove(index);
            plans.push(Self { faults, ..self.clone() });
        }
        if self.clients > 1 {
            let clients = self.clients - 1;
            let faults = self.faults.iter().filter(|fault| fault.fault.client() != Some(clients));
            plans.push(Self { clients, faults: faults.copied().collect(), ..self.clone() });
        }
        if self.users > 1 {
            plans.push(Self { users: self.users - 1, ..self.clone() });
        }
        if self.chatty {
            plans.push(Self { chatty: false, ..self.clone() });
        }
        if self.keys > 1 {
            plans.push(Self { keys: self.keys - 1, ..self.clone() });
        }
        for index in 0..self.work.len() {
            if self.work.len() > 1 {
                let mut work = self.work.clone();
                work.remove(index);
                plans.push(Self { work, ..self.clone() });
            }
        }
        let calm = Link { jitter: MS, loss: 0.0, window: Link::WIDE_WINDOW, ..self.link };
        if self.link.loss > 0.0 {
            plans.push(Self { link: Link { loss: 0.0, ..self.link }, ..self.clone() });
        }
        if self.link.jitter > MS || self.link.window < calm.window {
            plans.push(Self { link: calm, ..self.clone() });
        }
        if self.drift > 0 {
            let slew = |fault: &&ScheduledFault| {
                matches!(fault.fault, Fault::SlewClient { .. } | Fault::SlewServer { .. })
            };
            let faults = self.faults.iter().filter(|fault| !slew(fault)).copied().collect();
            plans.push(Self { drift: 0, faults, ..self.clone() });
        }
        if self.length > self.ttl {
            plans.push(Self { length: self.length * 3 / 4, ..self.clone() });
        }
        plans
    }
}

const FAULT_KINDS: usize = Fault::KINDS.len();

impl Fault {
    /// Names of the kinds of faults.
    pub const KINDS: [&str; 16] = [
        "Partition",
        "Slow",
        "Reset",
        "ProxyClose",
        "SlowReader",
        "PauseClient",
        "StopClient",
        "KillClient",
        "SlewClient",
        "SlewServer",
        "StepWallClock",
        "StopServer",
        "KillServer",
        "CrashMachine",
        "ShutDownServer",
        "FillDisk",
    ];

    /// Index of the fault's kind in [`Self::KINDS`].
    pub fn kind(&self) -> usize {
        match self {
            Self::Partition { .. } => 0,
            Self::Slow { .. } => 1,
            Self::Reset { .. } => 2,
            Self::ProxyClose { .. } => 3,
            Self::SlowReader { .. } => 4,
            Self::PauseClient { .. } => 5,
            Self::StopClient { .. } => 6,
            Self::KillClient { .. } => 7,
            Self::SlewClient { .. } => 8,
            Self::SlewServer { .. } => 9,
            Self::StepWallClock { .. } => 10,
            Self::StopServer { .. } => 11,
            Self::KillServer { .. } => 12,
            Self::CrashMachine { .. } => 13,
            Self::ShutDownServer { .. } => 14,
            Self::FillDisk { .. } => 15,
        }
    }

    /// Duration of the fault.
    pub fn lasts(&self) -> Duration {
        match *self {
            Self::Partition { lasts, .. }
            | Self::Slow { lasts, .. }
            | Self::SlowReader { lasts, .. }
            | Self::PauseClient { lasts, .. }
            | Self::StopClient { lasts, .. }
            | Self::StopServer { lasts, .. }
            | Self::FillDisk { lasts } => lasts,
            Self::Reset { client_after, server_after, .. }
            | Self::ProxyClose { client_after, server_after, .. } => {
                client_after.max(server_after).unwrap_or_default()
            }
            Self::KillClient { restart_after, .. }
            | Self::KillServer { restart_after, .. }
            | Self::CrashMachine { restart_after, .. }
            | Self::ShutDownServer { restart_after } => restart_after,
            Self::SlewClient { .. } | Self::SlewServer { .. } | Self::StepWallClock { .. } => {
                Duration::ZERO
            }
        }
    }

    /// Client that the fault concerns.
    pub fn client(&self) -> Option<usize> {
        match *self {
            Self::Partition { client, .. }
            | Self::Slow { client, .. }
            | Self::Reset { client, .. }
            | Self::ProxyClose { client, .. }
            | Self::SlowReader { client, .. }
            | Self::PauseClient { client, .. }
            | Self::StopClient { client, .. }
            | Self::KillClient { client, .. }
            | Self::SlewClient { client, .. } => Some(client),
            Self::StepWallClock { client, .. } => client,
            _ => None,
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { clients, users, keys, length, ttl, link, drift, server, .. } = self;
        writeln!(
            f,
            "{clients} clients with {users} users each, {keys} keys, ttls from {ttl:?} to {:?}",
            self.max_ttl()
        )?;
        let work: Vec<String> = self.work.iter().map(|(work, _)| format!("{work:?}")).collect();
        writeln!(f, "work: {}", work.join(", "))?;
        writeln!(f, "{link:?}, clocks within {drift} ppm")?;
        writeln!(f, "{server:?}")?;
        writeln!(f, "faults within {length:?}:")?;
        for ScheduledFault { at, fault } in &self.faults {
            writeln!(f, "  {:9.6} {fault:?}", at.as_secs_f64())?;
        }
        Ok(())
    }
}

/// Random draws of a plan.
struct Draw(Random);

impl Draw {
    fn chance(&mut self, probability: f64) -> bool {
        self.0.chance(probability)
    }

    fn index(&mut self, count: usize) -> usize {
        usize::try_from(self.0.below(count as u64)).unwrap_or(0)
    }

    fn span(&mut self, from: Duration, to: Duration) -> Duration {
        from + to.saturating_sub(from).mul_f64(self.0.unit())
    }

    fn ppm(&mut self, most: u64) -> i64 {
        let most = i64::try_from(most).unwrap_or(0);
        i64::try_from(self.0.below(2 * most.unsigned_abs() + 1)).unwrap_or(0) - most
    }

    /// Draws some kinds of work. Waiting for exclusive locks is always among them: it is what most breaches need.
    fn work(&mut self) -> Vec<(Work, u64)> {
        let mut work = vec![(Work::Lock, 4)];
        if self.chance(0.2) {
            work.push((Work::Outlast, 4));
        }
        for kind in Work::ALL {
            if kind != Work::Lock && kind != Work::Outlast && self.chance(0.35) {
                work.push((kind, 1 + self.0.below(4)));
            }
        }
        work
    }
}
