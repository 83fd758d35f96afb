//! The dashboard and the alerts name only what is really exported, lead to pages that are there, and come when they should.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::http::{HTTP, metrics};
use crate::{Served, services};

const DASHBOARD: &str = "packaging/grafana/tenure.json";
const RULES: &str = "packaging/prometheus/tenure.rules.yml";
const SCENES: &str = "packaging/prometheus/tenure.test.yml";

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(file: &str) -> String {
    fs::read_to_string(repository().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// Each name that can be scraped, with the labels of its series.
type Exported = BTreeMap<String, BTreeSet<String>>;

/// From the table that the library describes itself by, and from a real server.
fn exported() -> Exported {
    let mut exported = Exported::new();
    for metric in tenure::metrics::METRICS {
        let labels: BTreeSet<_> = metric.labels.iter().map(|label| (*label).to_owned()).collect();
        for name in series_of(metric.name, metric.kind == tenure::metrics::Kind::Histogram) {
            exported.entry(name).or_default().extend(labels.clone());
        }
    }
    let served = Served::start(&HTTP);
    let (_, samples) = metrics(&served.http);
    for series in samples.keys() {
        let (name, labels) = series.split_once('{').unwrap();
        let labels = labels.trim_end_matches('}').split(',');
        let labels = labels.map(|label| label.split('=').next().unwrap().to_owned());
        exported.entry(name.to_owned()).or_default().extend(labels);
    }
    for labels in exported.values_mut() {
        // Labels that Prometheus adds.
        labels.extend(["instance", "job"].map(str::to_owned));
    }
    exported
}

fn series_of(name: &str, histogram: bool) -> Vec<String> {
    if !histogram {
        return vec![name.to_owned()];
    }
    ["_bucket", "_count", "_sum"].map(|end| format!("{name}{end}")).into()
}

/// What an expression of `PromQL` reads.
#[derive(Debug, Default, PartialEq, Eq)]
struct Reads {
    /// Each name, with the labels that it is selected by.
    names: Vec<(String, Vec<String>)>,
    /// Labels that results are grouped or matched by.
    groups: Vec<String>,
}

/// Takes an expression apart as far as names and labels go. What is a sound expression, promtool judges.
fn reads(expression: &str) -> Reads {
    const GROUPING: [&str; 6] = ["by", "without", "on", "ignoring", "group_left", "group_right"];
    const WORDS: [&str; 5] = ["and", "or", "unless", "offset", "bool"];
    let mut reads = Reads::default();
    let text = without_texts(expression);
    let mut rest = text.as_str();
    while let Some(begin) = rest.find(|c: char| c.is_ascii_alphabetic() || c == '_' || c == '[') {
        let (head, tail) = rest.split_at(begin);
        // `1h`, `0.99`, `$__rate_interval`: no names.
        let part_of_number = head.ends_with(|c: char| c.is_ascii_digit() || c == '$' || c == '.');
        if let Some(range) = tail.strip_prefix('[') {
            rest = range.split_once(']').expect("a range ends").1;
            continue;
        }
        let end = tail.find(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != ':');
        let (word, tail) = tail.split_at(end.unwrap_or(tail.len()));
        let next = tail.trim_start();
        if part_of_number || WORDS.contains(&word) {
            rest = tail;
        } else if GROUPING.contains(&word) {
            let (labels, after) = next[1..].split_once(')').expect("a list of labels ends");
            reads.groups.extend(list(labels));
            rest = after;
        } else if let Some(selector) = next.strip_prefix('{') {
            let (labels, after) = selector.split_once('}').expect("a selector ends");
            let labels = labels.split(',').map(|one| one.split(['=', '!']).next().unwrap().trim());
            reads.names.push((word.to_owned(), labels.map(str::to_owned).collect()));
            rest = after;
        } else {
            // What is followed by a list is a function, or an aggregation.
            let called = next.starts_with('(')
                || GROUPING.iter().any(|word| next.starts_with(&format!("{word} (")));
            if !called {
                reads.names.push((word.to_owned(), Vec::new()));
            }
            rest = tail;
        }
    }
    reads
}

/// Texts may hold anything.
fn without_texts(expression: &str) -> String {
    expression.split('"').step_by(2).collect()
}

fn list(text: &str) -> impl Iterator<Item = String> + '_ {
    text.split(',').map(|one| one.trim().to_owned()).filter(|one| !one.is_empty())
}

/// What is wrong with an expression.
fn faults(expression: &str, exported: &Exported) -> Vec<String> {
    let Reads { names, groups } = reads(expression);
    let mut faults = Vec::new();
    let mut known = BTreeSet::new();
    for (name, labels) in &names {
        let Some(own) = exported.get(name) else {
            faults.push(format!("nobody exports {name}"));
            continue;
        };
        for label in labels.iter().filter(|label| !own.contains(*label)) {
            faults.push(format!("{name} has no label {label}"));
        }
        known.extend(own.clone());
        if name.ends_with("_bucket") {
            known.insert("le".to_owned());
        }
    }
    for label in groups.iter().filter(|label| !known.contains(*label)) {
        faults.push(format!("nothing in it has the label {label}"));
    }
    if names.is_empty() {
        faults.push("it reads nothing".to_owned());
    }
    faults
}

/// All expressions of the dashboard, each with where it stands.
fn of_dashboard() -> Vec<(String, String)> {
    let board: Value = serde_json::from_str(&read(DASHBOARD)).unwrap();
    let mut found = Vec::new();
    let mut ids = BTreeSet::new();
    for panel in board["panels"].as_array().unwrap() {
        let title = panel["title"].as_str().unwrap();
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{title}: its id is another's, too");
        if panel["type"] == "row" {
            continue;
        }
        assert!(!panel["description"].as_str().unwrap().is_empty(), "{title}: says nothing");
        let targets = panel["targets"].as_array().unwrap();
        assert!(!targets.is_empty(), "{title}: shows nothing");
        for target in targets {
            let expression = target["expr"].as_str().unwrap().to_owned();
            found.push((format!("panel {title:?}"), expression));
        }
    }
    for note in board["annotations"]["list"].as_array().unwrap() {
        found.push((format!("annotation {}", note["name"]), note["expr"].as_str().unwrap().into()));
    }
    for variable in board["templating"]["list"].as_array().unwrap() {
        let Some(query) = variable["definition"].as_str() else { continue };
        let inner = query.strip_prefix("label_values(").and_then(|rest| rest.strip_suffix(')'));
        let (name, label) = inner.unwrap_or_else(|| panic!("{query}")).split_once(", ").unwrap();
        found
            .push((format!("variable {}", variable["name"]), format!("sum by ({label}) ({name})")));
    }
    found
}

/// An alert as the file has it: its fields by name. promtool reads the file as YAML; here its lines are enough.
type Alert = BTreeMap<String, String>;

fn alerts() -> Vec<Alert> {
    let text = read(RULES);
    let mut alerts: Vec<Alert> = Vec::new();
    let mut field: Option<(usize, String)> = None;
    for line in text.lines().filter(|line| !line.trim_start().starts_with('#')) {
        let depth = line.len() - line.trim_start().len();
        let line = line.trim();
        if let Some(name) = line.strip_prefix("- alert: ") {
            alerts.push(Alert::from([("alert".to_owned(), name.to_owned())]));
            field = None;
            continue;
        }
        let Some(alert) = alerts.last_mut() else { continue };
        match &field {
            Some((of, name)) if depth > *of => {
                let value = alert.get_mut(name).unwrap();
                value.push(' ');
                value.push_str(line);
            }
            _ => {
                field = None;
                if let Some((name, value)) = line.split_once(':') {
                    let value = value.trim().trim_start_matches(">-").to_owned();
                    alert.insert(name.to_owned(), value);
                    if name == "expr" {
                        field = Some((depth, name.to_owned()));
                    }
                }
            }
        }
    }
    alerts
}

/// The headings of a page, as links name them.
fn headings(page: &str) -> BTreeSet<String> {
    let lines = page.lines().filter(|line| line.starts_with('#'));
    lines
        .map(|line| {
            let text = line.trim_start_matches('#').trim().to_lowercase();
            let kept = text.chars().filter(|c| c.is_alphanumeric() || *c == ' ' || *c == '-');
            kept.collect::<String>().replace(' ', "-")
        })
        .collect()
}

#[test]
fn boards_and_alerts_name_only_what_is_exported() {
    let exported = exported();
    let alerts = alerts();
    assert!(alerts.len() > 10, "{alerts:?}");
    let of_alerts =
        alerts.iter().map(|alert| (format!("alert {}", alert["alert"]), alert["expr"].clone()));
    let expressions: Vec<_> = of_dashboard().into_iter().chain(of_alerts).collect();
    assert!(expressions.len() > 50, "{}", expressions.len());
    let wrong: Vec<String> = expressions
        .iter()
        .flat_map(|(place, expression)| {
            let faults = faults(expression, &exported);
            faults.into_iter().map(move |fault| format!("{place}: {fault}: {expression}"))
        })
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_alert_leads_to_a_page_that_is_there() {
    for alert in alerts() {
        let name = &alert["alert"];
        let link = alert.get("runbook_url").unwrap_or_else(|| panic!("{name} has no runbook"));
        let (page, heading) = link.split_once('#').unwrap();
        let headings = headings(&read(page));
        assert!(headings.contains(heading), "{name}: {link}: {headings:?}");
    }
}

#[test]
fn operate_page_lists_exactly_the_exported_metrics() {
    let page = read("docs/operate.md");
    let exported = exported();
    for metric in tenure::metrics::METRICS {
        let row = page
            .lines()
            .find(|line| line.starts_with('|') && line.contains(&format!("`{}`", metric.name)));
        let row = row.unwrap_or_else(|| panic!("{} is not in docs/operate.md", metric.name));
        for label in metric.labels {
            assert!(row.contains(&format!("`{label}`")), "{}: no {label} in {row}", metric.name);
        }
    }
    // And the other way round: whatever it calls by a name of ours is there.
    let words = page.split('`').skip(1).step_by(2).map(|code| code.split('{').next().unwrap());
    for word in words.filter(|word| word.starts_with("tenure_")) {
        let plain = word.trim_end_matches('…');
        let there = exported.keys().any(|name| {
            if plain == word {
                name.starts_with(plain) && is_series(name, plain)
            } else {
                name.starts_with(plain)
            }
        });
        assert!(there, "docs/operate.md speaks of {word}, which nobody exports");
    }
}

/// Whether `name` is `family`, or one of the series of that histogram.
fn is_series(name: &str, family: &str) -> bool {
    matches!(name.strip_prefix(family), Some("" | "_bucket" | "_count" | "_sum"))
}

#[test]
fn prometheus_takes_the_alerts_and_they_come_when_they_should() {
    let Some(promtool) = services::promtool() else { return };
    let run = |arguments: &[&str]| {
        let output =
            Command::new(&promtool).args(arguments).current_dir(repository()).output().unwrap();
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(output.status.success(), "promtool {arguments:?}: {said}");
    };
    run(&["check", "rules", RULES]);
    run(&["test", "rules", SCENES]);
    let scenes = read(SCENES);
    for alert in alerts() {
        let name = &alert["alert"];
        assert!(scenes.contains(name), "{name} comes in no scene of {SCENES}");
    }
    // What the dashboard asks is sound, too, once its variables are filled in.
    let folder = tempfile::TempDir::new().unwrap();
    let mut text = "groups:\n- name: dashboard\n  rules:\n".to_owned();
    for (number, (_, expression)) in of_dashboard().into_iter().enumerate() {
        let expression = expression.replace("$__rate_interval", "1m");
        writeln!(text, "  - record: panel_{number}\n    expr: '{expression}'").unwrap();
    }
    let file = folder.path().join("dashboard.yml");
    fs::write(&file, text).unwrap();
    run(&["check", "rules", &file.display().to_string()]);
}

#[test]
fn expressions_are_taken_apart() {
    let all = reads(
        r#"histogram_quantile(0.99, sum by (le, store) (rate(a_bucket{x=~"$b",y!="c d"}[$__rate_interval]))) > 1.5
           or max_over_time(b[1h]) unless on (job) c offset 10m"#,
    );
    let names: Vec<_> =
        all.names.iter().map(|(name, labels)| (name.as_str(), labels.len())).collect();
    assert_eq!(names, [("a_bucket", 2), ("b", 0), ("c", 0)]);
    assert_eq!(all.names[0].1, ["x", "y"]);
    assert_eq!(all.groups, ["le", "store", "job"]);
    let exported = Exported::from([("b".to_owned(), BTreeSet::from(["job".to_owned()]))]);
    assert!(faults("sum by (job) (b)", &exported).is_empty());
    assert_eq!(faults("sum by (job) (d)", &exported).len(), 2);
    assert_eq!(faults("sum by (class) (b)", &exported).len(), 1);
    assert_eq!(faults(r#"b{class="x"}"#, &exported).len(), 1);
    assert_eq!(faults("vector(0)", &exported), ["it reads nothing"]);
}
