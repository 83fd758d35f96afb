//! `tenure schema`: prints or applies the changes of the PostgreSQL tables.

use std::io::IsTerminal as _;
use std::time::Duration;

use clap::Args;
use tenure::jobs::{self, Schema as JobSchema, UndoOptions};
use tenure::{ErrorKind, PgAdvisoryStore, PgLeaseStore, Result};

use crate::args::store::StoreUrl;
use crate::args::value::duration;
use crate::exit::{self, Exit};
use crate::report;

#[derive(Args)]
#[command(after_help = exit::SCHEMA)]
pub(crate) struct Schema {
    #[command(flatten)]
    store: StoreUrl,
    /// Apply the changes; an incompatible table is refused and not changed
    #[arg(long)]
    apply: bool,
    /// Only the table of locks
    #[arg(long)]
    locks: bool,
    /// Only this table of jobs: print what it lacks; may be given several times
    #[arg(long, value_name = "TABLE")]
    queue: Vec<String>,
    /// Only this table of checkpoints: print what it lacks; may be given several times
    #[arg(long, value_name = "TABLE")]
    checkpoints: Vec<String>,
    /// Existing table with other names of columns; the queue becomes a view of it
    #[arg(long, value_name = "TABLE", conflicts_with = "locks")]
    table: Option<String>,
    /// Names of the columns in --table, for instance `id=job_id,locked_by=owner`; the others have the same name
    #[arg(long, value_name = "NAME=COLUMN,…", value_delimiter = ',', value_parser = column_pair, requires = "table")]
    columns: Vec<(String, String)>,
    /// Longest wait for a lock on a table in use; readers and writers may have to wait that long. Repeated after a pause
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = duration)]
    lock_timeout: Duration,
    /// Print SQL for any state of the tables, without a connection
    #[arg(long, conflicts_with_all = ["apply", "undo", "table"])]
    offline: bool,
    #[command(flatten)]
    removal: UndoArgs,
}

/// Removal of what was added.
#[derive(Args)]
struct UndoArgs {
    /// Print what was added to the tables and would be removed; with --apply: remove it
    #[arg(long, conflicts_with = "locks")]
    undo: bool,
    /// With --undo: also drop the columns that were added, with all their data
    #[arg(long, requires = "undo")]
    drop_columns: bool,
    /// With --undo: do not refuse while workers hold jobs
    #[arg(long, requires = "undo")]
    force: bool,
}

impl Schema {
    /// The requested tables of jobs and checkpoints; the default tables if none is named.
    fn tables(&self) -> Result<Vec<JobSchema>> {
        if !self.names_tables() && !self.locks {
            let defaults = [
                JobSchema::of_queue(jobs::DEFAULT_JOBS_TABLE),
                JobSchema::of_checkpoints(jobs::DEFAULT_CHECKPOINTS_TABLE),
            ];
            return defaults.into_iter().map(|table| self.with_options(table?)).collect();
        }
        let queues = self.queue.iter().map(|table| JobSchema::of_queue(table));
        let tables = queues.chain(self.checkpoints.iter().map(|it| JobSchema::of_checkpoints(it)));
        tables.map(|table| self.with_options(table?)).collect()
    }

    fn with_options(&self, table: JobSchema) -> Result<JobSchema> {
        let table = table.lock_timeout(self.lock_timeout).on_progress(print_progress);
        match &self.table {
            Some(base) => {
                let columns = self.columns.iter().map(|(name, column)| (&**name, &**column));
                table.mapped(base, columns)
            }
            None => Ok(table),
        }
    }

    fn names_tables(&self) -> bool {
        !self.queue.is_empty() || !self.checkpoints.is_empty()
    }

    fn has_locks(&self) -> bool {
        self.locks || !self.names_tables()
    }

    fn undo_options(&self) -> UndoOptions {
        UndoOptions::default().drop_columns(self.removal.drop_columns).force(self.removal.force)
    }

    /// The reason to refuse the combination of arguments.
    fn refusal(&self) -> Option<&'static str> {
        if self.removal.undo && !self.names_tables() {
            return Some("name the table whose changes are undone with --queue or --checkpoints");
        }
        if self.table.is_some() && self.queue.len() + self.checkpoints.len() != 1 {
            return Some("give one queue for --table, with --queue or --checkpoints");
        }
        let needs_database = self.apply || self.removal.undo || self.table.is_some();
        (needs_database && self.store.postgres_url().is_none())
            .then_some("only PostgreSQL has a schema: give its URL with --store postgres://…")
    }
}

/// Prints a line about the progress, for a person. The log of a program has errors only.
fn print_progress(line: &str) {
    if std::io::stderr().is_terminal() {
        report::print_line(line);
    }
}

/// A pair of `--columns`.
fn column_pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, column)) => Ok((name.trim().to_owned(), column.trim().to_owned())),
        None => Err("give pairs such as id=job_id".to_owned()),
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
    if let Some(refusal) = arguments.refusal() {
        report::print_line(refusal);
        return Exit::Usage;
    }
    // Printing needs no server: without a URL, the SQL has the default table names.
    let store = arguments.store.postgres().unwrap_or_else(|| PgLeaseStore::open("postgres://"));
    let (store, tables) = match store.and_then(|store| Ok((store, arguments.tables()?))) {
        Ok(both) => both,
        Err(error) => return super::report_error(&error),
    };
    match arguments.store.postgres_url() {
        Some(url) if arguments.apply => super::on_runtime(apply(arguments, store, &tables, url)),
        Some(url) if arguments.names_tables() && !arguments.offline => {
            super::on_runtime(print_changes(arguments, store, &tables, url))
        }
        _ => print_sql(arguments, &store, &tables),
    }
}

/// Prints SQL for any state of the tables.
fn print_sql(arguments: &Schema, store: &PgLeaseStore, tables: &[JobSchema]) -> Exit {
    let locks = if arguments.has_locks() { store.schema() } else { String::new() };
    let tables = tables.iter().map(JobSchema::sql).collect::<Vec<_>>();
    let texts: Vec<&str> =
        std::iter::once(&*locks).filter(|sql| !sql.is_empty()).chain(tables).collect();
    super::print(texts.join("\n").as_bytes())
}

/// Prints what the tables of the database lack, or what was added to them.
async fn print_changes(
    arguments: &Schema,
    store: PgLeaseStore,
    tables: &[JobSchema],
    url: &str,
) -> Exit {
    let mut texts = Vec::new();
    for table in tables {
        let plan = if arguments.removal.undo {
            table.undo_plan(url, arguments.undo_options()).await
        } else {
            table.plan(url).await
        };
        match plan {
            Ok(plan) => texts.push(plan.to_string()),
            Err(error)
                if error.kind() == ErrorKind::Unavailable
                    && !arguments.removal.undo
                    && arguments.table.is_none() =>
            {
                report::print_line(&error.chain());
                report::print_line("the SQL is for any state of the tables, as with --offline");
                return print_sql(arguments, &store, tables);
            }
            Err(error) => return super::report_error(&error),
        }
    }
    if arguments.locks {
        texts.insert(0, store.schema());
    }
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
            if arguments.removal.undo {
                table.undo(url, arguments.undo_options()).await?;
            } else {
                table.apply(url).await?;
            }
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
