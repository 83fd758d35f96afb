//! Panics of the shipped code. A runtime catches those of its tasks, so they are noted where they happen.

use std::cell::{Cell, RefCell};
use std::panic;
use std::sync::Once;

thread_local! {
    static WATCHED: Cell<bool> = const { Cell::new(false) };
    static FIRST: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Runs `f`, and notes the panics of this thread meanwhile. The deliberate end of a killed server is not one: it unwinds
/// without a panic.
pub(super) fn watch<T>(f: impl FnOnce() -> T) -> T {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let others = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if WATCHED.get() {
                FIRST.with_borrow_mut(|first| {
                    first.get_or_insert_with(|| info.to_string());
                });
            } else {
                others(info);
            }
        }));
    });
    WATCHED.set(true);
    let result = f();
    WATCHED.set(false);
    result
}

/// Takes the message of the first panic that was noted.
pub(super) fn take() -> Option<String> {
    FIRST.take()
}
