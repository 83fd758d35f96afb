//! The product in simulation: the shipped library and the shipped server, on simulated time, network and disk.
//!
//! Client processes run the real acquire loop, keeper, lock-server store, election and `once`, each process on a
//! single-threaded runtime of its own. The server runs its real event loop, engine and journal. Only the edges are
//! simulated: clocks, streams and files. So every decision, every byte on the wire and every byte on the disk is that
//! of the shipped code, and a run is a function of its [`Plan`], which is a function of a seed.
//!
//! A referee outside the code judges the run by the real time of the simulation.

mod client_process;
mod client_stream;
mod disk;
mod disturbance;
mod events;
mod faults;
mod host;
mod log_lines;
mod network;
mod panics;
mod plan;
mod process;
mod referee;
mod server_disk;
mod server_faults;
mod server_network;
mod server_process;
mod stats;
mod timeline;
mod wire_tap;
mod work;
mod world;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use self::log_lines::LogLines;
pub use self::plan::{Fault, Link, Plan, ScheduledFault, ServerPlan, ServerPoint, Work};
pub use self::referee::ProductBreach;
pub use self::stats::{KindCounts, ProductStats};
use self::timeline::Timeline;
use self::world::ProductWorld;
use crate::shrink::shrink;

/// Largest number of simpler plans that are tried.
const MAX_PLANS: u32 = 2_000;

/// A breach of a promise, with the plan of its run.
#[derive(Clone, Debug)]
pub struct ProductViolation {
    /// Plan of the run.
    pub plan: Plan,
    /// Kind of breach.
    pub breach: ProductBreach,
    /// Users, keys and tokens concerned.
    pub what: String,
    /// Events of the run, one line each; empty unless recorded.
    pub timeline: Vec<String>,
}

impl fmt::Display for ProductViolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { plan, breach, what, timeline } = self;
        writeln!(f, "seed {}: {breach}: {what}", plan.seed)?;
        write!(f, "{plan}")?;
        timeline.iter().try_for_each(|line| writeln!(f, "{line}"))
    }
}

impl std::error::Error for ProductViolation {}

/// Runs the plan of a seed.
///
/// # Errors
///
/// The first breach, in the simplest run that still shows it, with its timeline.
pub fn simulate_product(seed: u64) -> Result<ProductStats, Box<ProductViolation>> {
    run(Plan::draw(seed), false).map_err(|violation| Box::new(simplify(*violation)))
}

/// Runs a plan. With `record`, a violation has a timeline.
///
/// # Errors
///
/// The first breach.
pub fn run(plan: Plan, record: bool) -> Result<ProductStats, Box<ProductViolation>> {
    let timeline = if record { Timeline::recorded() } else { Timeline::default() };
    let world = ProductWorld::new(plan, timeline, events::handle);
    let ended = panics::watch(|| {
        catch_unwind(AssertUnwindSafe(|| {
            if record {
                tracing::subscriber::with_default(LogLines, || world.run());
            } else {
                world.run();
            }
        }))
    });
    if ended.is_err() {
        world.abandon();
        let (plan, breach) = (world.plan.clone(), ProductBreach::Panicked);
        let what = format!("the simulation itself: {}", panics::take().unwrap_or_default());
        return Err(Box::new(ProductViolation { plan, breach, what, timeline: Vec::new() }));
    }
    let breach = world.referee.borrow_mut().breach.take();
    if let Some((breach, what)) = breach {
        let timeline = world.timeline.take().into_lines();
        return Err(Box::new(ProductViolation {
            plan: world.plan.clone(),
            breach,
            what,
            timeline,
        }));
    }
    let referee = world.referee.borrow();
    Ok(ProductStats {
        events: world.events.get(),
        segments: world.net.borrow().segments,
        holds: referee.holds,
        losses: referee.losses,
        waits: world.tap.borrow().waits,
        server_starts: u64::from(world.host.borrow().starts),
        kinds: *world.counts.borrow(),
    })
}

/// Finds a simpler plan with the same breach, as long as there is one, and records its timeline.
fn simplify(violation: ProductViolation) -> ProductViolation {
    let breach = violation.breach;
    let simpler =
        |plan: &Plan| plan.simpler().into_iter().map(|plan| (String::new(), plan)).collect();
    let fails =
        |plan: &mut Plan| run(plan.clone(), false).err().filter(|simpler| simpler.breach == breach);
    let plan = violation.plan.clone();
    let smallest = shrink(plan, Box::new(violation), simpler, fails, MAX_PLANS);
    if let Err(recorded) = run(smallest.case, true) {
        return *recorded;
    }
    let mut unrecorded = *smallest.failure;
    let note = "no timeline: this plan failed once and passed when it was run again to record it, so the run is not a \
                function of its plan";
    unrecorded.timeline = vec![note.to_owned()];
    unrecorded
}
