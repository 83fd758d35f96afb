//! The election machine: one participant that claims a key, leads while it holds it, and lets go of it.

pub mod table;
