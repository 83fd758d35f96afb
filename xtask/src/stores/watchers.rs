//! Programs that check what an operator sees: Prometheus's linter, and a headless browser.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use super::{Environment, Running, Service};
use crate::command;
use crate::setup::{Tool, apt_install};

pub(super) const PROMTOOL: Service = Service {
    name: "promtool",
    tool: Tool { name: "promtool", find: promtool, install: || apt_install(&["prometheus"]) },
    start: |_: &Path, _: &Environment| found("TENURE_TEST_PROMTOOL", promtool()),
};

pub(super) const CHROMIUM: Service = Service {
    name: "chromium",
    tool: Tool { name: "chromium", find: chromium, install: || apt_install(&["chromium"]) },
    start: |_: &Path, _: &Environment| found("TENURE_TEST_CHROMIUM", chromium()),
};

fn promtool() -> Option<PathBuf> {
    command::on_path("promtool")
}

fn chromium() -> Option<PathBuf> {
    command::on_path("chromium")
}

/// Environment of a program that is not started here: tests run it themselves.
fn found(variable: &'static str, program: Option<PathBuf>) -> Result<Running> {
    let program = program.context("the program is gone")?.display().to_string();
    Ok(Running { environment: vec![(variable, program)], groups: vec![] })
}
