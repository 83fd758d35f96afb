//! Transition table of the election, as data.
//!
//! [`TABLE`] decides each of the 84 pairs of a state and an input. The machine in [`election`](super) takes every step
//! from this table, and [`markdown`] prints the same data for readers.
//!
//! A row either ignores its input or lists cases. The first case whose conditions all hold applies: the machine changes
//! its state, reports the change, and then performs the actions from left to right. The last case of a row has no
//! condition, so every input has an outcome.

mod page;
mod rows;
mod types;

pub use page::markdown;
pub use rows::TABLE;
pub use types::{Action, Case, ElectionState, InputKind, Outcome, Row, When};

/// Row of a state and an input.
pub fn row(from: ElectionState, input: InputKind) -> &'static Row {
    &TABLE[from as usize][input as usize]
}

#[cfg(test)]
mod tests;
