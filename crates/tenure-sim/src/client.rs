//! A client: a process with its own clock, and the tasks of its user.

use tenure_core::Time;

use crate::clock::Clock;
use crate::in_flight::StreamProcess;
use crate::message::ReplyMessage;
use crate::task::Task;

#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "the faults are independent")]
pub(crate) struct Client {
    pub(crate) clock: Clock,
    /// Error of its wall clock, in nanoseconds.
    wall: i64,
    pub(crate) paused: bool,
    pub(crate) dead: bool,
    pub(crate) partitioned: bool,
    /// Replies that arrived while it was paused.
    pub(crate) inbox: Vec<ReplyMessage>,
    pub(crate) tasks: Vec<Task>,
    /// True while its user waits for an answer or works under a guard.
    pub(crate) busy: bool,
    /// Time of its user's next acquire.
    pub(crate) idle_until: Time,
    alarm: Option<u64>,
    /// Number of the process, which is another after each restart.
    pub(crate) incarnation: u64,
    /// Knowledge of a stream.
    pub(crate) stream: StreamProcess,
}

impl Client {
    /// A client that runs. `wall` is the error of its wall clock; its user begins at `idle_until`.
    pub(crate) fn new(
        clock: Clock,
        wall: i64,
        idle_until: Time,
        incarnation: u64,
        stream: StreamProcess,
    ) -> Self {
        Self {
            clock,
            wall,
            paused: false,
            dead: false,
            partitioned: false,
            inbox: Vec::new(),
            tasks: Vec::new(),
            busy: false,
            idle_until,
            alarm: None,
            incarnation,
            stream,
        }
    }

    /// True if the client runs, so that messages reach it.
    pub(crate) fn awake(&self) -> bool {
        !self.paused && !self.dead
    }

    /// Time of its wall clock, in nanoseconds.
    pub(crate) fn wall(&self, now: u64) -> i64 {
        self.wall + i64::try_from(self.clock.read(now).as_nanos()).unwrap_or(i64::MAX)
    }

    /// Sets the alarm to the next time at which something is due. Returns that time if no earlier alarm was set.
    pub(crate) fn set_alarm(&mut self, now: u64) -> Option<u64> {
        let user = if self.busy { Time::MAX } else { self.idle_until };
        let next = self.tasks.iter().map(Task::poll_timeout).fold(user, Time::min);
        let due = self.clock.when(next, now).filter(|_| self.awake())?;
        if self.alarm.is_some_and(|set| set <= due) {
            return None;
        }
        self.alarm = Some(due);
        Some(due)
    }

    /// Takes the alarm if it is set to this time. An alarm that was moved is at another time.
    pub(crate) fn take_alarm(&mut self, now: u64) -> bool {
        self.alarm.take_if(|at| *at == now).is_some()
    }
}
