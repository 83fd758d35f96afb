//! A queue of jobs on a real server, for tests of the command.

use std::process::Command;

use serde_json::Value;

use crate::services;
use crate::support::Scene;

/// A queue of the test's own.
pub(crate) struct Queue {
    pub(crate) scene: Scene,
    pub(crate) url: String,
    pub(crate) schema: String,
    pub(crate) table: String,
}

impl Queue {
    pub(crate) fn new(name: &str) -> Option<Self> {
        let url = services::postgres()?;
        let schema = format!("tenure_work_{}_{name}", std::process::id());
        let table = format!("{schema}.jobs");
        let queue = Self { scene: Scene::new(), url, schema, table };
        let (code, _, stderr) = queue.outcome(&["schema", "--apply", "--queue", &queue.table]);
        assert_eq!(code, Some(0), "{stderr}");
        Some(queue)
    }

    pub(crate) fn tenure(&self, arguments: &[&str]) -> Command {
        let mut command = self.scene.tenure(arguments);
        command.env("TENURE_STORE", &self.url);
        command
    }

    pub(crate) fn outcome(&self, arguments: &[&str]) -> (Option<i32>, String, String) {
        let output = self.tenure(arguments).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    }

    pub(crate) fn add(&self, rest: &[&str]) -> String {
        let (code, id, stderr) = self.outcome(&[&["job", "add", &self.table], rest].concat());
        assert_eq!(code, Some(0), "{stderr}");
        id.trim().to_owned()
    }

    pub(crate) fn show(&self, id: &str) -> Value {
        let (code, shown, stderr) = self.outcome(&["job", "show", "--json", &self.table, id]);
        assert_eq!(code, Some(0), "{stderr}");
        serde_json::from_str(&shown).unwrap()
    }

    pub(crate) fn state(&self, id: &str) -> String {
        self.show(id)["state"].as_str().unwrap().to_owned()
    }

    pub(crate) fn psql(&self) -> Command {
        let mut psql = Command::new(services::postgres_programs().unwrap().join("psql"));
        psql.args([&*self.url, "-XAtq", "-v", "ON_ERROR_STOP=1"]);
        psql
    }

    pub(crate) fn sql(&self, sql: &str) -> String {
        let output = self.psql().args(["-c", sql]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.sql(&format!("DROP SCHEMA {} CASCADE", self.schema));
    }
}
