//! The numbers of a server, as Prometheus reads them. No label says anything of a key.

use std::fmt::Write as _;

use tenure_core::table::Spans;

use super::figures;
use crate::engine::Figures;

/// All of them.
pub(super) fn text(numbers: &Figures) -> String {
    let Figures { served, tally, counts, .. } = numbers;
    let mut page = Page(String::new());
    let at_once = tally.granted.saturating_sub(tally.waited.count());
    page.family("tenure_acquire_total", "counter", "Attempts to acquire, by how they ended.");
    for (outcome, count) in [
        ("acquired", tally.granted),
        ("held", served.busy),
        ("timeout", served.timeouts),
        ("refused", served.refused),
    ] {
        page.sample("tenure_acquire_total", &format!("outcome=\"{outcome}\""), count);
    }
    let help = "How long those waited that acquired; whoever was served at once counts as 0.";
    page.spans("tenure_acquire_wait_seconds", help, &tally.waited, at_once);
    let help = "How long holds lasted that have ended.";
    page.spans("tenure_hold_seconds", help, &tally.held, 0);
    let help = "Time left when a renewal landed: small before a hold is lost.";
    page.spans("tenure_lease_margin_seconds", help, &tally.left, 0);
    page.family("tenure_renew_total", "counter", "Renewals, by how they ended.");
    for (outcome, count) in [("ok", tally.renewed), ("refused", served.renewals_refused)] {
        page.sample("tenure_renew_total", &format!("outcome=\"{outcome}\""), count);
    }
    page.family("tenure_lost_total", "counter", "Holds that ended otherwise than by a release.");
    for (reason, count) in [
        ("expired", tally.expired),
        ("evicted", tally.evicted),
        ("disconnected", tally.disconnected),
        ("abandoned", tally.abandoned),
    ] {
        page.sample("tenure_lost_total", &format!("reason=\"{reason}\""), count);
    }
    let oldest = numbers.oldest_wait.unwrap_or_default().as_secs_f64();
    page.gauge("tenure_held", "Holds at this moment.", counts.holds as u64);
    page.gauge("tenure_waiting", "Claims that wait at this moment.", counts.waiters as u64);
    page.family(
        "tenure_waiting_oldest_seconds",
        "gauge",
        "How long the oldest of them has waited.",
    );
    page.sample("tenure_waiting_oldest_seconds", "", oldest);
    page.counter("tenure_released_total", "Holds that were released.", tally.released);
    page.gauge("tenure_server_keys", "Names in use.", counts.keys as u64);
    page.gauge("tenure_server_connections", "Connections now.", numbers.connections as u64);
    page.counter("tenure_server_connections_total", "Connections let in.", served.connections);
    let help = "Connections turned away.";
    page.counter("tenure_server_turned_away_total", help, served.turned_away);
    page.counter("tenure_server_requests_total", "Requests.", served.requests);
    page.counter("tenure_server_wrong_tokens_total", "Wrong auth tokens.", served.wrong_secrets);
    page.gauge("process_resident_memory_bytes", "Memory of the process.", figures::memory());
    page.family("tenure_build_info", "gauge", "1, with the version as a label.");
    page.sample("tenure_build_info", concat!("version=\"", env!("CARGO_PKG_VERSION"), "\""), 1);
    page.0
}

struct Page(String);

impl Page {
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

    /// A histogram; `zeros` more spans of no length are among them.
    fn spans(&mut self, name: &str, help: &str, spans: &Spans, zeros: u64) {
        self.family(name, "histogram", help);
        let bucket = format!("{name}_bucket");
        for (bound, count) in spans.bounds() {
            self.sample(&bucket, &format!("le=\"{}\"", bound.as_secs_f64()), count + zeros);
        }
        let count = spans.count() + zeros;
        self.sample(&bucket, "le=\"+Inf\"", count);
        self.sample(&format!("{name}_sum"), "", spans.sum().as_secs_f64());
        self.sample(&format!("{name}_count"), "", count);
    }

    fn line(&mut self, what: std::fmt::Arguments<'_>) {
        self.0.write_fmt(what).expect("a text takes whatever is written to it");
        self.0.push('\n');
    }
}
