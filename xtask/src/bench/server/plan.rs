//! The loads, their figures, and the limits of the figures.

/// One load, and the figures that are taken from it.
pub(super) struct LoadStep {
    /// Name in the table.
    pub(super) name: String,
    /// The load with its options, as `tenure-load` takes them.
    pub(super) load: Vec<String>,
    /// Load on the echo server, for comparison: the same load if it needs no locks, or one with the same system calls.
    pub(super) echo: Option<Vec<String>>,
    /// The load needs a new server, because free memory of a server that has already grown would hide growth. Rates are
    /// better taken from a server that has run for a while.
    pub(super) fresh: bool,
    /// The load needs our server's metrics over HTTP, on a server of its own.
    pub(super) http: bool,
    /// Number of runs on each server per repetition. If another process takes the core for a second, the median of many
    /// short runs is affected less than one long run.
    pub(super) rounds: usize,
    pub(super) figures: Vec<Figure>,
}

/// One figure of a load.
pub(super) struct Figure {
    pub(super) name: &'static str,
    /// JSON pointer of the figure in the load's output.
    pub(super) pointer: &'static str,
    /// Divisor that converts the figure to `unit`.
    pub(super) scale: f64,
    pub(super) unit: &'static str,
    pub(super) limit: Option<Limit>,
}

/// Limit of a figure. The bench reports a figure beyond its limit, but does not fail.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Limit {
    /// At least this multiple of the echo's figure.
    MinOfEcho(f64),
    /// At most this multiple of the echo's figure.
    MaxOfEcho(f64),
    /// At most this figure.
    Max(f64),
}

/// Size of the loads.
#[derive(Clone, Copy)]
pub(super) struct Size {
    seconds: f64,
    keys: usize,
    connections: usize,
}

impl Size {
    /// The size for which the limits are set.
    pub(super) const FULL: Self = Self { seconds: 1.5, keys: 1_000_000, connections: 9_000 };
    /// A small size, for a functional check and rough figures.
    pub(super) const QUICK: Self = Self { seconds: 0.5, keys: 100_000, connections: 2_000 };
}

/// All loads, in the order of the table.
pub(super) fn steps(size: Size) -> Vec<LoadStep> {
    let mut steps: Vec<_> = [1, 10, 100, 1_000].map(|conns| uncontended(conns, size)).into();
    steps.extend(rates(size));
    steps.push(scraped(size));
    steps.extend(memory(size));
    steps.extend(latencies(size));
    steps
}

fn uncontended(conns: usize, size: Size) -> LoadStep {
    let rate = figure("rate", "/pairs_per_s", "pairs/s").limit(Limit::MinOfEcho(0.85));
    let cpu = figure("CPU", "/server_cpu_us_per_pair", "µs/pair").limit(Limit::MaxOfEcho(1.4));
    let p99 = figure("p99", "/pair/p99_us", "µs");
    let load = format!("uncontended --conns {conns} --secs {}", size.seconds);
    step(format!("own key, {conns} conns"), &load, [rate, cpu, p99]).with_echo()
}

fn rates(size: Size) -> [LoadStep; 6] {
    let Size { seconds, .. } = size;
    let per_pair = "/server_cpu_us_per_pair";
    [
        step(
            "pipelined, depth 128",
            &format!("pipeline --depth 128 --secs {seconds}"),
            [
                figure("rate", "/requests_per_s", "req/s").limit(Limit::MinOfEcho(0.5)),
                figure("CPU", "/server_cpu_us_per_request", "µs/req"),
            ],
        )
        .with_echo(),
        step(
            "two-phase, 100 conns",
            &format!("two-phase --conns 100 --secs {seconds}"),
            [figure("rate", "/pairs_per_s", "pairs/s"), figure("CPU", per_pair, "µs/pair")],
        )
        .with_echo(),
        step(
            "connect, l, r, close",
            &format!("churn --secs {seconds}"),
            [
                figure("rate", "/cycles_per_s", "cycles/s"),
                figure("CPU", "/server_cpu_us_per_cycle", "µs/cycle"),
            ],
        )
        .with_echo(),
        step(
            "hot key, 100 waiters",
            // One holder and a hundred waiters.
            &format!("contended --conns 101 --secs {seconds}"),
            [
                figure("hand-offs", "/pairs_per_s", "/s"),
                figure("CPU", per_pair, "µs/hand-off").limit(Limit::Max(15.0)),
                figure("gap p50", "/gap/p50_us", "µs"),
                figure("fairness", "/fairness", "Jain"),
            ],
        )
        // A hand-off is two requests and two replies, none of which overlap: on the echo, a pair on one connection.
        .with_echo_load(&format!("uncontended --conns 1 --secs {seconds}")),
        step(
            "hot key, two-phase",
            &format!("two-phase --hot --conns 101 --secs {seconds}"),
            [figure("hand-offs", "/pairs_per_s", "/s"), figure("CPU", per_pair, "µs/hand-off")],
        ),
        step(
            "4k idle + 4k half requests",
            &format!("slowloris --secs {seconds}"),
            [
                figure("honest p99", "/p99_ratio", "times").limit(Limit::Max(2.0)),
                figure("honest rate", "/rate_ratio", "times"),
            ],
        )
        .with_echo(),
    ]
}

fn scraped(size: Size) -> LoadStep {
    let step = step(
        "metrics read 10 times a second",
        &format!("scraped --secs {}", size.seconds),
        [
            figure("server's time", "/percent", "%").limit(Limit::Max(1.0)),
            figure("rate, 100 conns", "/rate_ratio", "times"),
        ],
    );
    LoadStep { http: true, rounds: 1, ..step }
}

fn memory(size: Size) -> [LoadStep; 3] {
    let Size { keys, connections, .. } = size;
    let each = || figure("memory", "/bytes_each", "bytes");
    [
        step(
            format!("used idle conn at {}", thousands(connections)),
            &format!("mem-idle --conns {connections}"),
            [each().limit(Limit::Max(2_500.0))],
        )
        .with_echo()
        .fresh(),
        step(
            format!("held key at {}", thousands(keys)),
            &format!("mem-hold --keys {keys}"),
            [each().limit(Limit::Max(300.0))],
        )
        .fresh(),
        step(
            format!("parked waiter at {}", thousands(connections)),
            &format!("mem-waiters --conns {connections}"),
            [each().limit(Limit::Max(400.0))],
        )
        .fresh(),
    ]
}

fn latencies(size: Size) -> [LoadStep; 3] {
    let Size { keys, .. } = size;
    [
        step(
            "expiry to grant, 100k leases",
            "expiry",
            [
                figure("late p50", "/late/p50_us", "ms").per(1e3),
                figure("late p99", "/late/p99_us", "ms").per(1e3).limit(Limit::Max(5.0)),
            ],
        )
        .fresh(),
        step(
            format!("close to grant, {} keys", thousands(keys)),
            &format!("close-cost --keys {keys}"),
            [
                figure("p50", "/granted/p50_us", "ms").per(1e3).limit(Limit::Max(1.0)),
                figure("p99", "/granted/p99_us", "ms").per(1e3),
            ],
        )
        .fresh(),
        step(
            "2,000 back to back",
            "burst-order",
            [
                figure("inversions", "/inversions", "pairs").limit(Limit::Max(0.0)),
                figure("hand-offs", "/hand_offs_per_s", "/s"),
            ],
        )
        .fresh(),
    ]
}

fn step<const N: usize>(name: impl Into<String>, load: &str, figures: [Figure; N]) -> LoadStep {
    let (name, load, figures) = (name.into(), words(load), figures.into());
    LoadStep { name, load, echo: None, fresh: false, http: false, rounds: 3, figures }
}

fn words(load: &str) -> Vec<String> {
    load.split(' ').map(str::to_owned).collect()
}

fn figure(name: &'static str, pointer: &'static str, unit: &'static str) -> Figure {
    Figure { name, pointer, scale: 1.0, unit, limit: None }
}

fn thousands(count: usize) -> String {
    match count {
        1_000_000.. => format!("{}M", count / 1_000_000),
        1_000.. => format!("{}k", count / 1_000),
        _ => count.to_string(),
    }
}

impl LoadStep {
    fn with_echo(self) -> Self {
        Self { echo: Some(self.load.clone()), ..self }
    }

    fn with_echo_load(self, load: &str) -> Self {
        Self { echo: Some(words(load)), ..self }
    }

    fn fresh(self) -> Self {
        Self { fresh: true, rounds: 1, ..self }
    }
}

impl Figure {
    fn limit(self, limit: Limit) -> Self {
        Self { limit: Some(limit), ..self }
    }

    fn per(self, scale: f64) -> Self {
        Self { scale, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_to_the_echo_is_only_asked_for_where_the_echo_is_measured() {
        for step in steps(Size::FULL) {
            let to_echo = |figure: &Figure| {
                matches!(figure.limit, Some(Limit::MinOfEcho(_) | Limit::MaxOfEcho(_)))
            };
            assert!(step.echo.is_some() || !step.figures.iter().any(to_echo), "{}", step.name);
        }
    }

    #[test]
    fn every_step_has_its_own_name() {
        for size in [Size::FULL, Size::QUICK] {
            let mut names: Vec<_> = steps(size).into_iter().map(|step| step.name).collect();
            let all = names.len();
            names.sort();
            names.dedup();
            assert_eq!(names.len(), all);
        }
    }
}
