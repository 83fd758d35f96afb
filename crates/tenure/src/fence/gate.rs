//! Fencing gate within a process.

use std::sync::MutexGuard;

use super::Stale;
use crate::FencingToken;
use crate::mutex::Mutex;

/// Admits tokens that are at least as new as the newest it has seen, and refuses older ones.
///
/// Keep one gate beside each resource that a lock protects, in the process that owns the resource; share it by
/// reference or `Arc`. A call blocks only while another call on the same gate runs, so the gate suits both async and
/// sync code.
///
/// The gate remembers the newest token in memory. If the resource outlives the gate, store the newest token with the
/// resource and create the gate with [`starting_at`](Self::starting_at).
///
/// ```
/// use std::sync::Mutex;
/// use tenure::FencingToken;
/// use tenure::fence::Gate;
///
/// let (old, new) = (FencingToken::new(0, 6), FencingToken::new(0, 7));
/// let (gate, report) = (Gate::new(), Mutex::new(String::new()));
/// let save = |token, text: &str| gate.write(token, || *report.lock().unwrap() = text.to_owned());
///
/// save(old, "draft")?;
/// gate.admit(new)?; // the next holder, before it reads
/// assert!(save(old, "late").is_err());
/// save(new, "final")?;
/// assert_eq!(*report.lock().unwrap(), "final");
/// # Ok::<(), tenure::fence::Stale>(())
/// ```
#[derive(Debug, Default)]
pub struct Gate {
    newest: Mutex<FencingToken>,
}

impl Gate {
    /// A gate that has seen no token.
    pub const fn new() -> Self {
        Self::starting_at(FencingToken::NONE)
    }

    /// A gate that has seen this token, for a resource that outlives its process.
    pub const fn starting_at(newest: FencingToken) -> Self {
        Self { newest: Mutex::new(newest) }
    }

    /// Admits `token` if it is at least as new as the newest seen, and remembers it.
    ///
    /// A new holder calls this to install its token before it reads. A write after it is safe only if no newer token
    /// can be admitted before the write is done: lock the resource before this call until the write is done, or use
    /// [`write`](Self::write).
    ///
    /// # Errors
    ///
    /// [`Stale`] if a newer token was seen, and for [`FencingToken::NONE`].
    pub fn admit(&self, token: FencingToken) -> Result<(), Stale> {
        self.write(token, || ())
    }

    /// Runs `write` if `token` is at least as new as the newest seen, and admits no other token until it is done.
    ///
    /// Keep `write` short: it blocks the threads of other writers. A `write` that calls this gate again deadlocks. The
    /// token is remembered even if `write` panics or fails.
    ///
    /// # Errors
    ///
    /// [`Stale`] if a newer token was seen, and for [`FencingToken::NONE`]; `write` was not run then.
    pub fn write<T>(&self, token: FencingToken, write: impl FnOnce() -> T) -> Result<T, Stale> {
        let mut newest = self.lock();
        // A new gate has seen NONE. Without the second check, a holder without a token would be as new as that.
        if token < *newest || token.is_none() {
            return Err(Stale { offered: token, newest: *newest });
        }
        *newest = token;
        Ok(write())
    }

    /// The newest token seen; [`FencingToken::NONE`] if none was seen.
    pub fn newest(&self) -> FencingToken {
        *self.lock()
    }

    /// The lock, poisoned or not: a panic in a `write` cannot leave the token half written.
    fn lock(&self) -> MutexGuard<'_, FencingToken> {
        self.newest.lock()
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    const fn token(number: u64) -> FencingToken {
        FencingToken::new(0, number)
    }

    #[test]
    fn the_newest_may_come_again_and_an_older_one_may_not() {
        let gate = Gate::new();
        assert_eq!(gate.newest(), token(0));
        for number in [1, 3, 3, 5, 5] {
            assert_eq!(gate.admit(token(number)), Ok(()), "{number}");
            assert_eq!(gate.newest(), token(number));
        }
        assert_eq!(gate.admit(token(4)), Err(Stale { offered: token(4), newest: token(5) }));
        assert_eq!(gate.newest(), token(5), "a refused token changes nothing");
        assert_eq!(gate.admit(FencingToken::new(1, 0)), Ok(()), "a new epoch outweighs numbers");
    }

    #[test]
    fn a_holder_without_a_token_is_refused_by_a_gate_that_has_seen_none() {
        for gate in [Gate::new(), Gate::starting_at(token(5))] {
            let stale = gate.admit(FencingToken::NONE).unwrap_err();
            assert!(stale.to_string().contains("no fencing token"), "{stale}");
            let error = crate::Error::from(stale);
            assert_eq!(error.kind(), crate::ErrorKind::Unsupported);
            assert!(error.to_string().contains("?fencing=ordered"), "{error}");
        }
    }

    #[test]
    fn a_refused_write_is_not_done() {
        let gate = Gate::starting_at(token(5));
        assert!(gate.write(token(4), || unreachable!("a stale write")).is_err());
        assert_eq!(gate.write(token(5), || "done"), Ok("done"));
    }

    #[test]
    fn gate_is_locked_during_a_write() {
        let gate = Gate::new();
        let shut = || gate.newest.try_lock().is_none();
        assert_eq!(gate.write(token(5), shut), Ok(true));
        assert!(!shut());
    }

    #[test]
    fn a_write_that_panics_leaves_a_gate_that_works_and_remembers() {
        let gate = Gate::new();
        let panicked =
            catch_unwind(AssertUnwindSafe(|| gate.write(token(5), || panic!("on purpose"))));
        assert!(panicked.is_err());
        assert_eq!(gate.newest(), token(5));
        assert!(gate.admit(token(4)).is_err());
    }
}
