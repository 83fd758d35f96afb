//! The table of results: medians, ratios to the echo, and verdicts on the limits.

use std::fmt::Write as _;

use serde_json::Value;

use super::plan::{Figure, Limit, LoadStep};

/// Repetition and round: figures of the same round are compared with each other.
type RoundId = (usize, usize);

/// Result of one load on one server.
pub(super) struct Measured {
    pub(super) step: usize,
    pub(super) contender: String,
    /// Repetition and round of the measurement.
    pub(super) at: RoundId,
    pub(super) found: Value,
}

/// One line of the table.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) load: String,
    pub(super) figure: &'static str,
    pub(super) unit: &'static str,
    pub(super) echo: Option<f64>,
    pub(super) ours: Option<f64>,
    /// Median over all rounds of the ratio of our figure to the echo's figure in the same round. It is not the ratio of
    /// two medians: a slow machine affects both figures of a round, and cancels out of their ratio.
    pub(super) ratio: Option<f64>,
    pub(super) limit: Option<Limit>,
    pub(super) peers: Vec<(String, f64)>,
}

/// The rows of everything that was measured, in the order of the plan.
pub(super) fn rows(steps: &[LoadStep], measured: &[Measured], peers: &[String]) -> Vec<Row> {
    let mut rows = Vec::new();
    for (number, step) in steps.iter().enumerate() {
        for figure in &step.figures {
            let of = |name: &str| series(measured, number, name, figure);
            let (echo, ours) = (of("echo"), of("tenure"));
            let peers = peers.iter().filter_map(|name| Some((name.clone(), median(&of(name))?)));
            let row = Row {
                load: step.name.clone(),
                figure: figure.name,
                unit: figure.unit,
                ratio: median(&ratios(&ours, &echo)),
                limit: figure.limit,
                peers: peers.collect(),
                echo: median(&echo),
                ours: median(&ours),
            };
            if row.echo.is_some() || row.ours.is_some() || !row.peers.is_empty() {
                rows.push(row);
            }
        }
    }
    rows
}

/// The table as text for a terminal.
pub(super) fn text(rows: &[Row], peers: &[String]) -> String {
    let mut text = format!(
        "{:<30} {:<12} {:<12} {:>10} {:>10} {:>7}  {:<22}",
        "load", "figure", "unit", "echo", "tenure", "ratio", "limit"
    );
    for name in peers {
        write!(text, " {name:>10}").expect("a string takes it");
    }
    text.truncate(text.trim_end().len());
    text.push('\n');
    let mut last = "";
    for row in rows {
        let load = if row.load == last { "" } else { &row.load };
        last = &row.load;
        let line = format!(
            "{load:<30} {:<12} {:<12} {:>10} {:>10} {:>7}  {:<22}",
            row.figure,
            row.unit,
            format_figure(row.echo),
            format_figure(row.ours),
            row.ratio.map_or(String::new(), |ratio| format!("{ratio:.2}")),
            row.verdict(),
        );
        text.push_str(&line);
        for name in peers {
            let figure = row.peers.iter().find(|(peer, _)| peer == name).map(|(_, figure)| *figure);
            write!(text, " {:>10}", format_figure(figure)).expect("a string takes it");
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text
}

impl Row {
    /// The limit and the verdict on it; empty if the figure has no limit.
    pub(super) fn verdict(&self) -> String {
        let Some(limit) = self.limit else { return String::new() };
        let (sign, bound, times, figure) = match limit {
            Limit::MinOfEcho(bound) => (">=", bound, "x", self.ratio),
            Limit::MaxOfEcho(bound) => ("<=", bound, "x", self.ratio),
            Limit::Max(bound) => ("<=", bound, "", self.ours),
        };
        let mark = match (figure, limit) {
            (None, _) => "not measured",
            (Some(figure), Limit::MinOfEcho(_)) if figure < bound => "BELOW",
            (Some(figure), Limit::MaxOfEcho(_) | Limit::Max(_)) if figure > bound => "ABOVE",
            _ => "ok",
        };
        format!("{sign} {bound}{times} {mark}")
    }
}

/// A figure rounded to its meaningful digits.
pub(super) fn format_figure(figure: Option<f64>) -> String {
    match figure {
        None => String::new(),
        Some(figure) if figure.abs() >= 1e6 => format!("{:.2}M", figure / 1e6),
        Some(figure) if figure.abs() >= 1e4 => format!("{:.1}k", figure / 1e3),
        Some(figure) if figure.abs() >= 100.0 || figure == 0.0 => format!("{figure:.0}"),
        Some(figure) => format!("{figure:.2}"),
    }
}

/// A figure in each round in which it was taken.
fn series(
    measured: &[Measured],
    step: usize,
    contender: &str,
    figure: &Figure,
) -> Vec<(RoundId, f64)> {
    let of = measured.iter().filter(|one| one.step == step && one.contender == contender);
    let value = |one: &Measured| one.found.pointer(figure.pointer).and_then(Value::as_f64);
    of.filter_map(|one| Some((one.at, value(one)? / figure.scale))).collect()
}

fn ratios(ours: &[(RoundId, f64)], echo: &[(RoundId, f64)]) -> Vec<(RoundId, f64)> {
    let beside = |at| echo.iter().find(|(other, _)| *other == at).map(|(_, echo)| *echo);
    let ratio =
        |(at, ours): &(RoundId, f64)| Some((*at, ours / beside(*at).filter(|echo| *echo > 0.0)?));
    ours.iter().filter_map(ratio).collect()
}

fn median(series: &[(RoundId, f64)]) -> Option<f64> {
    let mut figures: Vec<_> = series.iter().map(|(_, figure)| *figure).collect();
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::super::plan::{Size, steps};
    use super::*;
    use serde_json::json;

    fn measured(contender: &str, round: usize, rate: f64, cpu: f64) -> Measured {
        let found = json!({"pairs_per_s": rate, "server_cpu_us_per_pair": cpu});
        Measured { step: 0, contender: contender.to_owned(), at: (0, round), found }
    }

    #[test]
    fn ratios_are_taken_within_a_round_and_then_their_median() {
        // The machine was half as fast in the last round: for both.
        let all = [
            measured("echo", 0, 100.0, 10.0),
            measured("tenure", 0, 90.0, 12.0),
            measured("echo", 1, 100.0, 10.0),
            measured("tenure", 1, 80.0, 15.0),
            measured("echo", 2, 50.0, 20.0),
            measured("tenure", 2, 45.0, 30.0),
        ];
        let rows = rows(&steps(Size::QUICK), &all, &[]);
        let [rate, cpu] = &rows[..] else { panic!("{rows:?}") };
        assert_eq!(
            (format_figure(rate.ratio), rate.verdict()),
            ("0.90".into(), ">= 0.85x ok".into())
        );
        assert_eq!(
            (format_figure(cpu.ratio), cpu.verdict()),
            ("1.50".into(), "<= 1.4x ABOVE".into())
        );
    }

    #[test]
    fn a_limit_without_a_figure_is_not_met() {
        let rows = rows(&steps(Size::QUICK), &[measured("echo", 0, 1.0, 1.0)], &[]);
        assert_eq!(rows[0].verdict(), ">= 0.85x not measured");
        assert!(text(&rows, &[]).contains("not measured"));
    }
}
