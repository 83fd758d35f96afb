//! Rules for the manifests of the workspace.

use anyhow::{Result, bail};
use serde_json::Value;

use crate::repo;

/// The crate of pure logic, which must not have dependencies.
const CORE: &str = "tenure-core";

/// Fields that are set once, in the top manifest, and inherited by every package.
const SHARED: &[&str] = &["version", "edition", "rust_version", "license"];

pub(super) fn check() -> Result<()> {
    let faults = faults(&repo::metadata()?);
    if !faults.is_empty() {
        bail!("{}", faults.join("\n"));
    }
    Ok(())
}

fn faults(metadata: &Value) -> Vec<String> {
    let packages = metadata["packages"].as_array().map(Vec::as_slice).unwrap_or_default();
    let Some(core) = packages.iter().find(|package| package["name"] == CORE) else {
        return vec![format!("there is no package {CORE}")];
    };
    let mut faults = dependencies_of_the_core(core);
    for package in packages {
        faults.extend(metadata_mismatches(package, core));
    }
    faults
}

/// Faults for dependencies of the core; its tests may have dependencies.
fn dependencies_of_the_core(core: &Value) -> Vec<String> {
    let dependencies = core["dependencies"].as_array().into_iter().flatten();
    dependencies
        .filter(|dependency| dependency["kind"] != "dev")
        .map(|dependency| {
            format!("{CORE} must depend on nothing, but depends on {}", dependency["name"])
        })
        .collect()
}

fn metadata_mismatches(package: &Value, core: &Value) -> Vec<String> {
    let name = &package["name"];
    let mut faults = Vec::new();
    for field in SHARED {
        if package[field].is_null() {
            faults.push(format!("{name} has no {field}: inherit it from the workspace"));
        } else if package[field] != core[field] {
            let (ours, theirs) = (&package[field], &core[field]);
            faults.push(format!(
                "{name} has {field} {ours}, {CORE} has {theirs}: inherit it from the workspace"
            ));
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn package(name: &str, dependencies: &Value) -> Value {
        json!({
            "name": name, "version": "0.1.0", "edition": "2024", "rust_version": "1.88", "license": "MIT",
            "dependencies": dependencies,
        })
    }

    #[test]
    fn a_core_with_dependencies_of_its_tests_only_is_fine() {
        let core = package(CORE, &json!([{"name": "proptest", "kind": "dev"}]));
        let other = package("tenure", &json!([{"name": "tokio", "kind": null}]));
        assert_eq!(faults(&json!({"packages": [core, other]})), [""; 0]);
    }

    #[test]
    fn a_dependency_of_the_core_is_a_fault() {
        for kind in [Value::Null, json!("build")] {
            let core = package(CORE, &json!([{"name": "tokio", "kind": kind}]));
            let faults = faults(&json!({"packages": [core]}));
            assert!(faults.len() == 1 && faults[0].contains("tokio"), "{faults:?}");
        }
    }

    #[test]
    fn versions_that_differ_or_are_absent_are_faults() {
        let core = package(CORE, &json!([]));
        let mut other = package("tenure", &json!([]));
        other["version"] = json!("0.2.0");
        other["rust_version"] = Value::Null;
        let faults = faults(&json!({"packages": [core, other]}));
        assert_eq!(faults.len(), 2, "{faults:?}");
        assert!(faults[0].contains("0.2.0") && faults[1].contains("rust_version"), "{faults:?}");
    }

    #[test]
    fn a_workspace_without_the_core_is_a_fault() {
        assert_eq!(faults(&json!({"packages": []})).len(), 1);
    }
}
