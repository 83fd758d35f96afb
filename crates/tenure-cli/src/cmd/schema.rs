//! `tenure schema`: prints or applies the SQL of the PostgreSQL tables.

use clap::Args;
use tenure::jobs::{self, Schema as JobSchema};
use tenure::{PgAdvisoryStore, PgLeaseStore, Result};

use crate::args::store::StoreUrl;
use crate::exit::{self, Exit};
use crate::report;

#[derive(Args)]
#[command(after_help = exit::SCHEMA)]
pub(crate) struct Schema {
    #[command(flatten)]
    store: StoreUrl,
    /// Apply the SQL; an incompatible table is refused and not changed
    #[arg(long)]
    apply: bool,
    /// Only the table of locks
    #[arg(long)]
    locks: bool,
    /// Only this table of jobs; may be given several times
    #[arg(long, value_name = "TABLE")]
    queue: Vec<String>,
    /// Only this table of checkpoints; may be given several times
    #[arg(long, value_name = "TABLE")]
    checkpoints: Vec<String>,
}

impl Schema {
    /// The requested tables of jobs and checkpoints; the default tables if none is named.
    fn tables(&self) -> Result<Vec<JobSchema>> {
        let selected = self.locks || !self.queue.is_empty() || !self.checkpoints.is_empty();
        if !selected {
            let defaults = [
                JobSchema::of_queue(jobs::DEFAULT_JOBS_TABLE),
                JobSchema::of_checkpoints(jobs::DEFAULT_CHECKPOINTS_TABLE),
            ];
            return defaults.into_iter().collect();
        }
        let queues = self.queue.iter().map(|table| JobSchema::of_queue(table));
        queues.chain(self.checkpoints.iter().map(|it| JobSchema::of_checkpoints(it))).collect()
    }

    fn has_locks(&self) -> bool {
        self.locks || (self.queue.is_empty() && self.checkpoints.is_empty())
    }
}

pub(crate) fn run(arguments: &Schema) -> Exit {
    match arguments.store.advisory() {
        Some(Err(error)) => return super::report_error(&error),
        Some(Ok(store)) => {
            if let Some(sql) = store.schema() {
                return advisory_schema(arguments, store, &sql);
            }
        }
        None => {}
    }
    let store = match arguments.store.postgres() {
        Some(store) => store,
        // Printing needs no server: without a URL, the SQL has the default table names.
        None if !arguments.apply => PgLeaseStore::open("postgres://"),
        None => {
            report::print_line(
                "only PostgreSQL has a schema: give its URL with --store postgres://…",
            );
            return Exit::Usage;
        }
    };
    let (store, tables) = match store.and_then(|store| Ok((store, arguments.tables()?))) {
        Ok(both) => both,
        Err(error) => return super::report_error(&error),
    };
    if let (true, Some(url)) = (arguments.apply, arguments.store.postgres_url()) {
        return super::on_runtime(apply(arguments, store, &tables, url));
    }
    let locks = if arguments.has_locks() { store.schema() } else { String::new() };
    let tables = tables.iter().map(JobSchema::sql).collect::<Vec<_>>();
    let texts: Vec<&str> =
        std::iter::once(&*locks).filter(|sql| !sql.is_empty()).chain(tables).collect();
    super::print(texts.join("\n").as_bytes())
}

/// Prints or applies the table that counts the terms of advisory locks.
fn advisory_schema(arguments: &Schema, store: PgAdvisoryStore, sql: &str) -> Exit {
    if !arguments.apply {
        return super::print(sql.as_bytes());
    }
    super::on_runtime(async move {
        match store.apply_schema().await {
            Ok(()) => Exit::Success,
            Err(error) => {
                report::print_line(&error.chain());
                Exit::Failed
            }
        }
    })
}

async fn apply(arguments: &Schema, store: PgLeaseStore, tables: &[JobSchema], url: &str) -> Exit {
    let applied = async {
        if arguments.has_locks() {
            store.apply_schema().await?;
        }
        for table in tables {
            table.apply(url).await?;
        }
        Ok::<(), tenure::Error>(())
    };
    match applied.await {
        Ok(()) => Exit::Success,
        Err(error) => {
            report::print_line(&error.chain());
            Exit::Failed
        }
    }
}
