//! The real services that tests run against, as the environment names them. Shared by the tests of every store.

#[path = "../../../tenure-server/tests/skip/mod.rs"]
pub(crate) mod skip;

use std::env;
use std::path::PathBuf;

/// The URL of a PostgreSQL server on which a test may make schemas; `None` where the test has to be skipped.
#[allow(dead_code, reason = "not every test program needs every service")]
pub(crate) fn postgres() -> Option<String> {
    service("TENURE_TEST_POSTGRES")
}

/// The folder of PostgreSQL's own programs, for tests that start servers of their own.
#[allow(dead_code, reason = "not every test needs every service")]
pub(crate) fn postgres_programs() -> Option<PathBuf> {
    service("TENURE_TEST_POSTGRES_BIN").map(Into::into)
}

/// The URL of a PgBouncer in transaction mode, in front of [`postgres`].
#[allow(dead_code, reason = "not every test needs every service")]
pub(crate) fn pgbouncer() -> Option<String> {
    service("TENURE_TEST_PGBOUNCER")
}

/// The program `pgbouncer`, for tests that start one of their own.
#[allow(dead_code, reason = "not every test needs every service")]
pub(crate) fn pgbouncer_program() -> Option<PathBuf> {
    service("TENURE_TEST_PGBOUNCER_PROGRAM").map(Into::into)
}

/// The URL of the same PgBouncer's pool in session mode.
#[allow(dead_code, reason = "not every test needs every service")]
pub(crate) fn pgbouncer_in_session_mode() -> Option<String> {
    let url = pgbouncer()?;
    url.rsplit_once('/').map(|(server, _)| format!("{server}/session"))
}

/// The library that shows a program another time.
#[allow(dead_code, reason = "not every test needs every service")]
pub(crate) fn faketime() -> Option<PathBuf> {
    service("TENURE_TEST_FAKETIME").map(Into::into)
}

/// Prometheus' own linter.
#[allow(dead_code, reason = "not every test program needs every service")]
pub(crate) fn promtool() -> Option<String> {
    service("TENURE_TEST_PROMTOOL")
}

/// A browser that runs without a screen.
#[allow(dead_code, reason = "not every test program needs every service")]
pub(crate) fn chromium() -> Option<String> {
    service("TENURE_TEST_CHROMIUM")
}

/// The URL of a NATS server on which a test may make buckets.
#[allow(dead_code, reason = "not every test program needs every service")]
pub(crate) fn nats() -> Option<String> {
    service("TENURE_TEST_NATS")
}

/// The same, of the version before message ttls.
#[allow(dead_code, reason = "not every test program needs every service")]
pub(crate) fn nats_older() -> Option<String> {
    service("TENURE_TEST_NATS_OLDER")
}

/// The URL of a NATS cluster of three.
#[allow(dead_code, reason = "not every test program needs every service")]
pub(crate) fn nats_cluster() -> Option<String> {
    service("TENURE_TEST_NATS_CLUSTER")
}

/// The program `nats-server`, for tests that end servers of their own.
#[allow(dead_code, reason = "not every test program needs every service")]
pub(crate) fn nats_server() -> Option<String> {
    service("TENURE_TEST_NATS_SERVER")
}

/// The address of a stand-in for S3, with the bucket `locks`.
#[allow(dead_code, reason = "not every test program needs every service")]
pub(crate) fn s3() -> Option<String> {
    service("TENURE_TEST_S3")
}

/// The address of a stand-in for Azure Blob Storage, with its account.
#[allow(dead_code, reason = "not every test program needs every service")]
pub(crate) fn azure() -> Option<String> {
    service("TENURE_TEST_AZURE")
}

/// What `variable` says. Without it the test is skipped, unless `TENURE_TEST_SERVICES=required`: then it fails.
fn service(variable: &str) -> Option<String> {
    let url = env::var(variable).ok().filter(|url| !url.is_empty());
    if url.is_none() {
        let required = env::var("TENURE_TEST_SERVICES").is_ok_and(|value| value == "required");
        assert!(!required, "{variable} is not set, and TENURE_TEST_SERVICES=required");
        skip::skip(&format!("{variable} is not set (cargo xtask test sets it)"));
    }
    url
}
