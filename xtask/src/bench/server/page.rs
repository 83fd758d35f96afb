//! The page with the results of the last full run.

use std::fmt::Write as _;
use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result};

use super::table::{Row, format_figure};
use crate::repo;

const PATH: &str = "docs/benchmarks.md";
const BEGIN: &str = "<!-- results: written by `cargo xtask bench server --page` -->\n";
const END: &str = "<!-- end of results -->\n";

/// Replaces the results in the page with these rows.
pub(super) fn write(rows: &[Row], peers: &[String], conditions: &str) -> Result<()> {
    let path = repo::root().join(PATH);
    let page = fs::read_to_string(&path).with_context(|| format!("reading {PATH}"))?;
    let about = format!("{}, {}. {conditions}", today(), machine());
    let page = replaced(&page, &markdown(rows, peers, &about))?;
    fs::write(&path, page).with_context(|| format!("writing {PATH}"))?;
    println!("wrote {PATH}");
    Ok(())
}

fn replaced(page: &str, results: &str) -> Result<String> {
    let parts = || {
        let (before, rest) = page.split_once(BEGIN)?;
        let (_, after) = rest.split_once(END)?;
        Some(format!("{before}{BEGIN}\n{results}\n{END}{after}"))
    };
    parts().with_context(|| format!("{PATH} has no place for results: {BEGIN}"))
}

fn markdown(rows: &[Row], peers: &[String], about: &str) -> String {
    let mut text = format!("{about}\n\n| load | figure | echo | tenure | ratio | limit |");
    for name in peers {
        write!(text, " {name} |").expect("a string takes it");
    }
    text.push_str("\n|---|---|--:|--:|--:|---|");
    text.push_str(&"--:|".repeat(peers.len()));
    for row in rows {
        let ratio = row.ratio.map_or(String::new(), |ratio| format!("{ratio:.2}"));
        let (echo, ours) = (format_figure(row.echo), format_figure(row.ours));
        let (load, figure, unit, verdict) = (&row.load, row.figure, row.unit, row.verdict());
        let line =
            format!("\n| {load} | {figure}, {unit} | {echo} | {ours} | {ratio} | {verdict} |");
        text.push_str(&line);
        for name in peers {
            let figure = row.peers.iter().find(|(peer, _)| peer == name).map(|(_, figure)| *figure);
            write!(text, " {} |", format_figure(figure)).expect("a string takes it");
        }
    }
    text.push('\n');
    text
}

/// Description of this machine.
fn machine() -> String {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name"));
    let model =
        model.map_or("an unnamed processor", |name| name.trim_start_matches([' ', '\t', ':']));
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let kernel = read("/proc/sys/kernel/osrelease");
    format!("{cores} cores of {model}, Linux {}", kernel.trim())
}

/// The day, in UTC.
fn today() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let (year, month, day) = date(now.as_secs() / 86_400);
    format!("{year}-{month:02}-{day:02}")
}

/// The date that is `days` days after 1970-01-01.
fn date(mut days: u64) -> (u64, u64, u64) {
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    let months = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 1;
    for length in months {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(date(0), (1970, 1, 1));
        assert_eq!(date(11_016), (2000, 2, 29));
        assert_eq!(date(20_453), (2025, 12, 31));
        assert_eq!(date(20_454), (2026, 1, 1));
    }

    #[test]
    fn results_replace_those_before_and_nothing_else() {
        let page = format!("# A\n\n{BEGIN}\nold\n\n{END}\nafter\n");
        let page = replaced(&page, "new\n").unwrap();
        assert_eq!(page, format!("# A\n\n{BEGIN}\nnew\n\n{END}\nafter\n"));
        assert!(replaced("# A\n", "new").is_err());
    }

    #[test]
    fn the_page_of_the_repository_has_a_place_for_results() {
        let page = fs::read_to_string(repo::root().join(PATH)).unwrap();
        assert!(replaced(&page, "").is_ok());
    }
}
