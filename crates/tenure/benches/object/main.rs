//! `cargo xtask bench object`: hand-off between two processes on a store that takes one write a second and name, beside the
//! plain flow in the same run; the requests that holding and waiting cost; races, replies that get lost, clocks that are
//! wrong and locks that are destroyed, each with what must come of it.
//!
//! The store is a fake of Google's JSON API in this process, so a request takes next to nothing: what is left is what the
//! protocol costs. Add three round trips for the real one.

mod command;
#[path = "../../tests/object/fake.rs"]
mod fake;
mod handoff;
mod races;
mod replies;
mod requests;

use tokio::runtime::Builder;

/// What a process is told to be.
const ROLE: &str = "TENURE_BENCH_ROLE";
const STORE: &str = "TENURE_BENCH_STORE";

fn main() {
    let runtime = Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.expect("a runtime can be built");
    match std::env::var(ROLE).as_deref() {
        Ok("ours") => runtime.block_on(handoff::ours()),
        Ok("plain") => handoff::plain(),
        Ok("racer") => runtime.block_on(races::race()),
        _ => {
            // All, or those that are named.
            let named = || std::env::args().skip(1).filter(|part| !part.starts_with('-'));
            let wanted = |part: &str| named().next().is_none() || named().any(|name| name == part);
            if wanted("handoff") {
                handoff::measure();
            }
            if wanted("races") {
                races::measure();
            }
            if wanted("replies") {
                runtime.block_on(replies::measure());
            }
            if wanted("command") {
                command::measure();
            }
            if wanted("requests") {
                runtime.block_on(requests::measure());
            }
        }
    }
}

/// What a figure must be.
#[derive(Clone, Copy)]
enum Limit {
    None,
    AtMost(f64),
    Exactly(f64),
}

fn report(what: &str, figure: f64, limit: Limit) {
    let (met, limit) = match limit {
        Limit::None => (true, String::new()),
        Limit::AtMost(most) => (figure <= most, format!("at most {most}")),
        Limit::Exactly(wanted) => ((figure - wanted).abs() < 1e-9, format!("exactly {wanted}")),
    };
    println!("{what:<72} {figure:>10.3}  {limit:<16} {}", if met { "" } else { "MISSED" });
}
