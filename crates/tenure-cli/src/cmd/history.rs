//! `tenure history`: the recent events of a name, as a list or as a timeline.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

use clap::Args;
use tenure::store::{HistoryEvent, Identity};
use tenure::{Key, Result};

use crate::args::store::StoreUrl;
use crate::exit::{self, Exit};
use crate::{humanize, keys};

#[derive(Args)]
#[command(after_help = exit::LS)]
pub(crate) struct History {
    #[command(flatten)]
    pub(crate) store: StoreUrl,
    /// Print JSON, one event per line
    #[arg(long, conflicts_with = "svg")]
    json: bool,
    /// Print an SVG timeline of the holds
    #[arg(long)]
    svg: bool,
    /// Show the semaphore NAME instead of the lock
    #[arg(long)]
    semaphore: bool,
    /// The name of the lock
    #[arg(allow_negative_numbers = true)]
    name: Key,
}

pub(crate) fn run(arguments: &History) -> Exit {
    super::on_runtime(async {
        match events(arguments).await {
            Ok(events) if arguments.json => super::print(lines(&events, arguments).as_bytes()),
            Ok(events) if arguments.svg => super::print(
                timeline_svg(&events, arguments.name.as_str(), SystemTime::now()).as_bytes(),
            ),
            Ok(events) => super::print(table(&events).as_bytes()),
            Err(error) => {
                super::report_error(&error);
                Exit::Failed
            }
        }
    })
}

async fn events(arguments: &History) -> Result<Vec<HistoryEvent>> {
    let client = arguments.store.connect().await?;
    if arguments.semaphore {
        client.history_semaphore(&arguments.name).await
    } else {
        client.history(&arguments.name).await
    }
}

fn table(events: &[HistoryEvent]) -> String {
    if events.is_empty() {
        return "no events of this name are recorded\n".to_owned();
    }
    let mut rows = vec![["AT", "EVENT", "CLIENT", "TOKEN"].map(str::to_owned)];
    rows.extend(events.iter().map(|event| {
        let token = humanize::token(event.token);
        let client = match (&event.by, &event.reason) {
            (None, Some(reason)) => format!("reason: {}", humanize::without_control_chars(reason)),
            (None, None) => "-".to_owned(),
            (by, _) => humanize::identity(by.as_ref()),
        };
        [
            humantime::format_rfc3339_millis(event.at).to_string(),
            event.kind.replace('_', " "),
            client,
            token.unwrap_or_else(|| "-".to_owned()),
        ]
    }));
    keys::columns(&rows)
}

fn lines(events: &[HistoryEvent], arguments: &History) -> String {
    let mut text = String::new();
    for HistoryEvent { at, kind: what, token, by, reason, .. } in events {
        let at = humantime::format_rfc3339_millis(*at).to_string();
        let line = serde_json::json!({
            "event": what, "name": arguments.name.as_str(), "at": at, "token": humanize::token(*token),
            "holder": by.as_ref().map(|by| &by.id), "host": by.as_ref().map(|by| &by.host),
            "pid": by.as_ref().map(|by| by.pid), "note": by.as_ref().map(|by| &by.note), "reason": reason,
        });
        let _ = writeln!(text, "{line}");
    }
    text
}

/// A hold, from its grant to its end.
struct HoldSpan<'a> {
    from: SystemTime,
    to: Option<SystemTime>,
    by: Option<&'a Identity>,
    end_event: &'a str,
}

fn holds(events: &[HistoryEvent]) -> Vec<HoldSpan<'_>> {
    let mut holds: Vec<(tenure::FencingToken, HoldSpan<'_>)> = Vec::new();
    for HistoryEvent { at, kind: what, token, by, .. } in events {
        if what == "granted" {
            holds.push((*token, HoldSpan { from: *at, to: None, by: by.as_ref(), end_event: "" }));
        } else if what != "handoff_requested"
            && let Some((_, held)) = holds.iter_mut().find(|(of, _)| of == token)
        {
            (held.to, held.end_event) = (Some(*at), what);
        }
    }
    holds.into_iter().map(|(_, held)| held).collect()
}

/// A timeline: one bar per hold, gaps while the name was free, a red edge if a hold ended without a release.
fn timeline_svg(events: &[HistoryEvent], name: &str, now: SystemTime) -> String {
    const WIDTH: f64 = 960.0;
    let holds = holds(events);
    let begin = holds.first().map_or(now - Duration::from_secs(60), |held| held.from).min(now);
    let whole = now.duration_since(begin).unwrap_or_default().max(Duration::from_millis(1));
    let x = |at: SystemTime| {
        let passed = at.duration_since(begin).unwrap_or_default();
        20.0 + WIDTH * (passed.as_secs_f64() / whole.as_secs_f64()).min(1.0)
    };
    let mut svg = String::from(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 1000 90\" font-family=\"sans-serif\" font-size=\"12\">\n",
    );
    let title = format!("{name}: holders in the last {}", humanize::span(whole));
    let _ = writeln!(svg, "<text x=\"20\" y=\"18\" fill=\"#666\">{}</text>", escaped(&title));
    let _ = writeln!(
        svg,
        "<rect x=\"20\" y=\"28\" width=\"{WIDTH}\" height=\"30\" fill=\"#ddd\" fill-opacity=\"0.5\"/>"
    );
    for held in &holds {
        let (from, to) = (x(held.from), x(held.to.unwrap_or(now)));
        let holder = humanize::identity(held.by);
        let hue = held.by.map_or(0, |by| {
            by.id.bytes().fold(7_u32, |h, b| h.wrapping_mul(31).wrapping_add(b.into())) % 360
        });
        let state = if held.end_event.is_empty() { "still held" } else { held.end_event };
        let _ = writeln!(
            svg,
            "<rect x=\"{from:.1}\" y=\"28\" width=\"{:.1}\" height=\"30\" fill=\"hsl({hue},45%,55%)\"><title>{}</title></rect>",
            (to - from).max(1.0),
            escaped(&format!("{holder}, {state}")),
        );
        if !matches!(held.end_event, "" | "released") {
            let _ = writeln!(
                svg,
                "<rect x=\"{:.1}\" y=\"24\" width=\"3\" height=\"38\" fill=\"#b3261e\"/>",
                to - 1.5
            );
        }
    }
    let (first, last) =
        (humantime::format_rfc3339_seconds(begin), humantime::format_rfc3339_seconds(now));
    let _ = writeln!(svg, "<text x=\"20\" y=\"78\" fill=\"#666\">{first}</text>");
    let _ = writeln!(
        svg,
        "<text x=\"980\" y=\"78\" fill=\"#666\" text-anchor=\"end\">{last}</text>\n</svg>"
    );
    svg
}

/// Escapes untrusted text for markup.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use tenure::FencingToken;

    use super::*;

    fn event(at: u64, what: &str, token: u64, id: &str) -> HistoryEvent {
        let by = Identity { id: id.to_owned(), ..Identity::default() };
        let at = SystemTime::UNIX_EPOCH + Duration::from_secs(at);
        let mut event = HistoryEvent::new(at, what, FencingToken::new(0, token));
        event.by = (what == "granted").then_some(by);
        event
    }

    #[test]
    fn a_hold_lasts_from_its_grant_to_its_end() {
        let events = [
            event(1, "granted", 7, "a"),
            event(2, "waiting", 0, ""),
            event(3, "broken", 7, ""),
            event(3, "granted", 8, "<b>"),
            event(4, "handoff_requested", 8, ""),
        ];
        let holds = holds(&events);
        assert_eq!(holds.len(), 2);
        assert_eq!((holds[0].to, holds[0].end_event), (Some(events[2].at), "broken"));
        assert_eq!(holds[1].to, None);
        let svg = timeline_svg(&events, "a&b", SystemTime::UNIX_EPOCH + Duration::from_secs(5));
        assert!(svg.contains("&lt;b&gt;, still held") && svg.contains("a&amp;b:"), "{svg}");
        assert_eq!(svg.matches("<rect").count(), 4, "background, two holds, one bad end");
    }
}
