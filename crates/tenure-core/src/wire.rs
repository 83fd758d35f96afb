//! Wire protocol of the lock server: parses and writes requests and replies, without sockets.
//!
//! A request is three lines (command, key, argument), a reply is one line. This is the protocol of dflockd and of its
//! deployed clients. Our extension of the protocol affects only clients that send `hello`. [`Framer`] finds the three
//! lines in the bytes received so far, [`Request::parse`] parses them, [`Reply`] writes and parses replies.
//!
//! ```
//! use tenure_core::wire::{Framed, Framer, Request};
//!
//! let mut framer = Framer::default();
//! let bytes = b"l\nprinter\n10 33\nping\n";
//! let Framed::Request { lines, len } = framer.next(bytes) else { panic!("three lines are there") };
//! assert!(matches!(Request::parse(lines), Ok(Request::Lock { key: b"printer", timeout: 10, .. })));
//! assert_eq!(framer.next(&bytes[len..]), Framed::Partial);
//! ```

mod field;
mod frame;
mod reply;
mod request;
#[cfg(test)]
mod tests;
mod write;

pub use self::frame::{Framed, Framer, Lines, MAX_AUTH_LINE, MAX_HELLO_LINE, MAX_LINE};
pub use self::reply::{Push, Reply};
pub use self::request::{
    ClaimId, ExtensionRequest, MAX_SECONDS, MAX_SEMAPHORE_SLOTS, Malformed, Request,
};
pub use self::write::{write_number, write_token};
