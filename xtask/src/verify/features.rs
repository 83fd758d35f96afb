//! Each feature of each library alone, and no feature at all.

use anyhow::{Result, bail};
use serde_json::Value;

use crate::{command, repo};

/// A library with one of its features, or with none.
#[derive(Debug, PartialEq, Eq)]
struct FeatureBuild {
    package: String,
    feature: Option<String>,
}

/// Runs clippy on the libraries alone: their tests need more features than one.
pub(super) fn check() -> Result<String> {
    let builds = builds(&repo::metadata()?);
    let failures = builds.iter().filter_map(|build| build.check().err()).collect::<Vec<_>>();
    if !failures.is_empty() {
        let failures = failures.iter().map(|error| format!("{error:#}")).collect::<Vec<_>>();
        bail!("{}", failures.join("\n"));
    }
    Ok(format!("{} builds", builds.len()))
}

/// The builds of every library that has features.
fn builds(metadata: &Value) -> Vec<FeatureBuild> {
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let mut builds = Vec::new();
    for package in packages.filter(|package| has_library(package)) {
        let Some(name) = package["name"].as_str() else { continue };
        let features = package["features"].as_object().into_iter().flat_map(|all| all.keys());
        let mut features = features.filter(|feature| *feature != "default").peekable();
        if features.peek().is_none() {
            continue;
        }
        let alone = features.map(|feature| Some(feature.clone()));
        for feature in std::iter::once(None).chain(alone) {
            builds.push(FeatureBuild { package: name.to_owned(), feature });
        }
    }
    builds
}

fn has_library(package: &Value) -> bool {
    let targets = package["targets"].as_array().into_iter().flatten();
    targets.filter_map(|target| target["kind"].as_array()).flatten().any(|kind| kind == "lib")
}

impl FeatureBuild {
    fn check(&self) -> Result<()> {
        let mut cargo = repo::cargo(["clippy", "--package", &self.package, "--lib"]);
        cargo.args(["--no-default-features", "--locked", "--quiet"]);
        if let Some(feature) = &self.feature {
            cargo.args(["--features", feature]);
        }
        command::succeed(cargo.args(["--", "-D", "warnings"])).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn package(name: &str, kind: &str, features: &Value) -> Value {
        json!({"name": name, "features": features, "targets": [{"kind": [kind]}]})
    }

    #[test]
    fn a_library_is_built_without_features_and_with_each_alone() {
        let library = package("tenure", "lib", &json!({"default": ["a"], "a": [], "b": ["a"]}));
        let expected = [None, Some("a"), Some("b")].map(|feature| FeatureBuild {
            package: "tenure".to_owned(),
            feature: feature.map(str::to_owned),
        });
        assert_eq!(builds(&json!({"packages": [library]})), expected);
    }

    #[test]
    fn programs_and_libraries_without_features_are_left_to_the_step_clippy() {
        let program = package("tenure-cli", "bin", &json!({"a": []}));
        let library = package("tenure-core", "lib", &json!({}));
        assert_eq!(builds(&json!({"packages": [program, library]})), []);
    }
}
