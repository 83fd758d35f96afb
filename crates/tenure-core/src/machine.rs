//! The interface between a state machine and its driver.

use crate::Time;

/// State machine that a driver runs against a store, a clock and a user.
///
/// The driver reports each event with the time at which it noticed the event, which it reads after the event. It calls
/// [`handle_timeout`](Self::handle_timeout) at the instant of [`poll_timeout`](Self::poll_timeout), also while a request
/// is in flight. After each call it executes the commands of [`poll_command`](Self::poll_command) until there are none.
pub trait Machine {
    /// Event that the driver reports.
    type Input;
    /// Action that the driver executes.
    type Command;

    /// Handles an event.
    fn handle(&mut self, input: Self::Input, now: Time);

    /// Handles the timers that are due at `now`. An early, late or repeated call is harmless.
    fn handle_timeout(&mut self, now: Time);

    /// Instant at which [`handle_timeout`](Self::handle_timeout) is due; `None` if no timer is set.
    fn poll_timeout(&self) -> Option<Time>;

    /// Removes the next command.
    fn poll_command(&mut self) -> Option<Self::Command>;
}
