//! `cargo xtask bench`: measurements, by name.

mod server;

use std::process::{Command, ExitCode};

use anyhow::Result;

use crate::command;
use crate::registry::{self, Entry, RegistryArgs};
use crate::repo;
use crate::stores::{Cluster, Folder, Stores, port};

const BENCHES: &[Entry] = &[
    Entry {
        name: "core",
        about: "the lock table alone, and what the library adds to it on the memory store",
        run: |rest| cargo_bench("tenure", "core", rest),
    },
    Entry {
        name: "file",
        about: "the file store's uncontended pair and hand-off, against a bare flock",
        run: |rest| cargo_bench("tenure", "file", rest),
    },
    Entry {
        name: "fleet",
        about: "10 to 500 followers of one advisory lock of PostgreSQL: CPU of the server, connections, take-over (--quick)",
        run: fleet,
    },
    Entry {
        name: "jobs",
        about: "jobs on PostgreSQL, one by one and in batches, against pgbench, with 0 and a million completed rows",
        run: |rest| postgres("jobs", rest),
    },
    Entry {
        name: "nats",
        about: "the NATS store against bare conditional writes, and its hand-off against a poller",
        run: |rest| {
            let stores = Stores::start_some(|name| name == "nats")?;
            let mut cargo = bench_command("tenure", "nats", rest);
            command::show(cargo.envs(stores.environment().iter().cloned()))
        },
    },
    Entry {
        name: "object",
        about: "hand-off on an object store that takes one write per second, against the plain flow; requests per hour; \
                races, lost replies, wrong clocks, losses",
        run: object,
    },
    Entry {
        name: "postgres",
        about: "elections on advisory locks of PostgreSQL under faults, with participants that are processes",
        run: |rest| postgres("pg_advisory", rest),
    },
    Entry {
        name: "postgres-lease",
        about: "lease rows of PostgreSQL: pairs against pgbench, hand-off through PgBouncer, a thousand holds",
        run: |rest| postgres("pg_lease", rest),
    },
    Entry {
        name: "server",
        about: "the lock server under every load, against a bare echo (--quick, --help)",
        run: server::run,
    },
];

pub(crate) fn run(arguments: &RegistryArgs) -> Result<ExitCode> {
    registry::run("bench", BENCHES, arguments)
}

/// Runs the bench of the object store with a built `tenure` command, which some of its cases measure.
fn object(rest: &[String]) -> Result<()> {
    let stores = Stores::start_some(|name| name == "libfaketime")?;
    command::show(&mut repo::cargo(["build", "--quiet", "--release", "--package", "tenure-cli"]))?;
    let program = repo::target()?.join("release/tenure");
    let mut cargo = bench_command("tenure", "object", rest);
    cargo.env("TENURE_BENCH_COMMAND", program);
    command::show(cargo.envs(stores.environment().iter().cloned()))
}

/// Runs the bench of large fleets against a PostgreSQL server of its own with enough connections.
fn fleet(rest: &[String]) -> Result<()> {
    Cluster::ensure()?;
    Folder::sweep("fleet");
    let folder = Folder::create("fleet")?;
    let cluster = Cluster::start_with(folder.path(), port::free, &["max_connections=600"])?;
    let mut cargo = bench_command("tenure", "pg_fleet", rest);
    command::show(cargo.env("TENURE_TEST_POSTGRES", cluster.url()))
}

/// Runs a bench against PostgreSQL and PgBouncer servers of its own, which stop when it ends.
fn postgres(bench: &str, rest: &[String]) -> Result<()> {
    let stores = Stores::start_some(|name| matches!(name, "postgresql" | "pgbouncer"))?;
    let mut cargo = bench_command("tenure", bench, rest);
    command::show(cargo.envs(stores.environment().iter().cloned()))
}

fn cargo_bench(package: &str, name: &str, rest: &[String]) -> Result<()> {
    command::show(&mut bench_command(package, name, rest))
}

fn bench_command(package: &str, name: &str, rest: &[String]) -> Command {
    let mut cargo = repo::cargo(["bench", "--quiet", "--all-features", "--package", package]);
    cargo.args(["--bench", name, "--"]).args(rest);
    cargo
}
