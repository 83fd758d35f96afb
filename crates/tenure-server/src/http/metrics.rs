//! Server metrics in the text format of Prometheus. No label contains a key.

use std::fmt::Write as _;

use tenure_core::table::Histogram;

use super::server_info;
use crate::engine::ServerMetrics;

/// Text of all metrics.
pub(super) fn text(metrics: &ServerMetrics) -> String {
    let ServerMetrics { counters, stats, sizes, .. } = metrics;
    let mut page = MetricsText(String::new());
    let at_once = stats.granted.saturating_sub(stats.wait_times.count());
    page.family("tenure_acquire_total", "counter", "Attempts to acquire, by outcome.");
    for (outcome, count) in [
        ("acquired", stats.granted),
        ("held", counters.contended),
        ("timeout", counters.timeouts),
        ("refused", counters.refused),
    ] {
        page.sample("tenure_acquire_total", &format!("outcome=\"{outcome}\""), count);
    }
    let help = "Wait before a grant; 0 for a claim that was granted at once.";
    page.histogram("tenure_acquire_wait_seconds", help, &stats.wait_times, at_once);
    let help = "Duration of holds that have ended.";
    page.histogram("tenure_hold_seconds", help, &stats.hold_times, 0);
    let help = "Remaining lease when a renewal arrived: small before a hold is lost.";
    page.histogram("tenure_lease_margin_seconds", help, &stats.lease_left, 0);
    page.family("tenure_renew_total", "counter", "Renewals, by outcome.");
    for (outcome, count) in [("ok", stats.renewed), ("refused", counters.renewals_refused)] {
        page.sample("tenure_renew_total", &format!("outcome=\"{outcome}\""), count);
    }
    page.family("tenure_lost_total", "counter", "Holds that ended without a release, by reason.");
    for (reason, count) in [
        ("expired", stats.expired),
        ("evicted", stats.evicted),
        ("disconnected", stats.disconnected),
        ("abandoned", stats.abandoned),
    ] {
        page.sample("tenure_lost_total", &format!("reason=\"{reason}\""), count);
    }
    let oldest = metrics.oldest_wait.unwrap_or_default().as_secs_f64();
    page.gauge("tenure_held", "Current holds.", sizes.holds as u64);
    page.gauge("tenure_waiting", "Waiting claims.", sizes.waiters as u64);
    page.family("tenure_waiting_oldest_seconds", "gauge", "Age of the oldest waiting claim.");
    page.sample("tenure_waiting_oldest_seconds", "", oldest);
    page.counter("tenure_released_total", "Holds released.", stats.released);
    page.gauge("tenure_server_keys", "Names in use.", sizes.keys as u64);
    page.gauge("tenure_server_connections", "Open connections.", metrics.connections as u64);
    page.counter("tenure_server_connections_total", "Connections accepted.", counters.connections);
    let help = "Connections rejected.";
    page.counter("tenure_server_turned_away_total", help, counters.connections_rejected);
    page.counter("tenure_server_requests_total", "Requests.", counters.requests);
    page.counter("tenure_server_wrong_tokens_total", "Wrong auth tokens.", counters.auth_failures);
    page.gauge("process_resident_memory_bytes", "Resident memory.", server_info::memory());
    page.family("tenure_build_info", "gauge", "1, with the version as a label.");
    page.sample("tenure_build_info", concat!("version=\"", env!("CARGO_PKG_VERSION"), "\""), 1);
    page.0
}

/// Builder of the text.
struct MetricsText(String);

impl MetricsText {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        self.line(format_args!("# HELP {name} {help}\n# TYPE {name} {kind}"));
    }

    fn sample(&mut self, name: &str, labels: &str, value: impl std::fmt::Display) {
        let comma = if labels.is_empty() { "" } else { "," };
        self.line(format_args!("{name}{{store=\"server\"{comma}{labels}}} {value}"));
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.family(name, "counter", help);
        self.sample(name, "", value);
    }

    fn gauge(&mut self, name: &str, help: &str, value: u64) {
        self.family(name, "gauge", help);
        self.sample(name, "", value);
    }

    /// Writes a histogram, with `zeros` additional observations of 0.
    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram, zeros: u64) {
        self.family(name, "histogram", help);
        let bucket = format!("{name}_bucket");
        for (bound, count) in histogram.bounds() {
            self.sample(&bucket, &format!("le=\"{}\"", bound.as_secs_f64()), count + zeros);
        }
        let count = histogram.count() + zeros;
        self.sample(&bucket, "le=\"+Inf\"", count);
        self.sample(&format!("{name}_sum"), "", histogram.sum().as_secs_f64());
        self.sample(&format!("{name}_count"), "", count);
    }

    fn line(&mut self, arguments: std::fmt::Arguments<'_>) {
        self.0.write_fmt(arguments).expect("writing to a String cannot fail");
        self.0.push('\n');
    }
}
