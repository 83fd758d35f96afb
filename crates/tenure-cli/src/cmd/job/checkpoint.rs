//! `tenure job checkpoint`: claims chunks of a table of checkpoints, for scripts.
//!
//! A claim outlives its process: the handle that it prints renews and completes it.

use std::time::{Duration, SystemTime};

use clap::{Args, Subcommand};
use serde_json::json;
use tenure::jobs::{
    CheckpointClaim, CheckpointHandle, CheckpointRow, Checkpoints, DEFAULT_CHECKPOINTS_TABLE,
};
use tenure::{Error, ErrorKind};

use crate::args::store::DatabaseUrl;
use crate::args::value::duration;
use crate::exit::{self, Exit};
use crate::keys::columns;
use crate::{humanize, report};

#[derive(Subcommand)]
pub(crate) enum CheckpointSubcommand {
    /// Claim a chunk, which is inserted if it is new, and print the handle of the claim
    #[command(after_help = exit::CHECKPOINT)]
    Claim(Claim),
    /// Renew the claim of a chunk, and store its number of rows so far
    #[command(after_help = exit::CHECKPOINT)]
    Save(Save),
    /// Complete a chunk with its number of rows, and release it
    #[command(after_help = exit::CHECKPOINT)]
    Complete(Complete),
    /// List chunks
    #[command(after_help = exit::CHECKPOINT)]
    Ls(ListChunks),
}

/// The table of a subcommand.
#[derive(Args)]
pub(crate) struct TableArgs {
    #[command(flatten)]
    store: DatabaseUrl,
    /// Name of the table
    #[arg(long, value_name = "TABLE", default_value = DEFAULT_CHECKPOINTS_TABLE)]
    checkpoints: String,
    /// Print JSON, one object per line
    #[arg(long)]
    json: bool,
}

/// The chunk of a subcommand.
#[derive(Args)]
pub(crate) struct ChunkArgs {
    #[command(flatten)]
    table: TableArgs,
    /// Id of the matrix
    matrix: String,
    /// Hash that names the chunk
    chunk: String,
}

#[derive(Args)]
pub(crate) struct LeaseArgs {
    /// Time that the claim lasts unless it is saved again
    #[arg(long, value_name = "DURATION", default_value = "2m", value_parser = duration)]
    lease: Duration,
}

#[derive(Args)]
pub(crate) struct Claim {
    #[command(flatten)]
    chunk: ChunkArgs,
    #[command(flatten)]
    lease: LeaseArgs,
}

#[derive(Args)]
pub(crate) struct Save {
    #[command(flatten)]
    chunk: ChunkArgs,
    #[command(flatten)]
    lease: LeaseArgs,
    /// The handle that the claim printed
    #[arg(long)]
    handle: CheckpointHandle,
    /// Number of rows so far
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(0..))]
    rows: Option<i64>,
}

#[derive(Args)]
pub(crate) struct Complete {
    #[command(flatten)]
    chunk: ChunkArgs,
    /// The handle that the claim printed
    #[arg(long)]
    handle: CheckpointHandle,
    /// Number of rows of the chunk
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(0..))]
    rows: i64,
}

#[derive(Args)]
pub(crate) struct ListChunks {
    #[command(flatten)]
    table: TableArgs,
    /// Only chunks of this matrix
    matrix: Option<String>,
    /// Maximum number of chunks
    #[arg(long, value_name = "N", default_value = "100", value_parser = clap::value_parser!(u16).range(1..=10_000))]
    limit: u16,
}

pub(super) async fn run(command: &CheckpointSubcommand) -> Exit {
    let done = match command {
        CheckpointSubcommand::Claim(arguments) => claim(arguments).await,
        CheckpointSubcommand::Save(arguments) => save(arguments).await,
        CheckpointSubcommand::Complete(arguments) => complete(arguments).await,
        CheckpointSubcommand::Ls(arguments) => list(arguments).await,
    };
    done.unwrap_or_else(|exit| exit)
}

impl TableArgs {
    async fn connect(&self, lease: Option<Duration>) -> Result<Checkpoints, Exit> {
        let url = self.store.postgres_url().map_err(|(message, exit)| {
            report::print_line(&message);
            exit
        })?;
        let mut options = Checkpoints::options().connections(1);
        if let Some(lease) = lease {
            options = options.lease(lease).heartbeat(lease / 4);
        }
        let connected = Checkpoints::connect_with(url, &self.checkpoints, options).await;
        connected.map_err(|error| crate::cmd::report_error(&error))
    }
}

async fn claim(Claim { chunk, lease }: &Claim) -> Result<Exit, Exit> {
    let ChunkArgs { table, matrix, chunk } = chunk;
    let checkpoints = table.connect(Some(lease.lease)).await?;
    let claimed = checkpoints.claim(matrix, chunk).await.map_err(|error| refusal(&error))?;
    let guard = match claimed {
        CheckpointClaim::Granted(guard) => guard,
        CheckpointClaim::Held { by, until, .. } => {
            let by = by.map_or_else(
                || "another worker".to_owned(),
                |by| humanize::without_control_chars(&by),
            );
            let until =
                until.map_or_else(String::new, |until| format!(" until {}", rfc3339(until)));
            report::print_line(&format!("chunk {chunk} of {matrix} is held by {by}{until}"));
            return Ok(Exit::Refused);
        }
        _ => {
            report::print_line(&format!("there is no chunk {chunk} of {matrix}"));
            return Ok(Exit::Refused);
        }
    };
    let (token, rows) = (guard.fencing_token().to_string(), guard.row_count());
    let synced = guard.last_synced_at().map(rfc3339);
    let handle = guard.detach().to_string();
    let text = if table.json {
        let line = json!({
            "matrix": matrix, "chunk": chunk, "handle": handle, "token": token, "rows": rows, "last_synced_at": synced,
        });
        format!("{line}\n")
    } else {
        format!("{handle}\n")
    };
    Ok(crate::cmd::print(text.as_bytes()))
}

async fn save(Save { chunk, lease, handle, rows }: &Save) -> Result<Exit, Exit> {
    let checkpoints = chunk.table.connect(Some(lease.lease)).await?;
    let saved = checkpoints.save(&chunk.matrix, &chunk.chunk, handle, *rows).await;
    saved.map_err(|error| refusal(&error))?;
    Ok(Exit::Success)
}

async fn complete(Complete { chunk, handle, rows }: &Complete) -> Result<Exit, Exit> {
    let checkpoints = chunk.table.connect(None).await?;
    let completed = checkpoints.complete(&chunk.matrix, &chunk.chunk, handle, *rows).await;
    completed.map_err(|error| refusal(&error))?;
    Ok(Exit::Success)
}

async fn list(ListChunks { table, matrix, limit }: &ListChunks) -> Result<Exit, Exit> {
    let checkpoints = table.connect(None).await?;
    let listed = checkpoints.list(matrix.as_deref(), usize::from(*limit)).await;
    let chunks = listed.map_err(|error| crate::cmd::report_error(&error))?;
    let text = if table.json {
        chunks.iter().map(line).collect()
    } else if chunks.is_empty() {
        "no chunks\n".to_owned()
    } else {
        as_table(&chunks)
    };
    Ok(crate::cmd::print(text.as_bytes()))
}

fn line(chunk: &CheckpointRow) -> String {
    let line = json!({
        "matrix": chunk.matrix_id,
        "chunk": chunk.chunk_hash,
        "held": chunk.held,
        "locked_by": chunk.locked_by,
        "locked_until": chunk.locked_until.map(rfc3339),
        "lease_token": chunk.lease_token,
        "rows": chunk.row_count,
        "last_synced_at": chunk.last_synced_at.map(rfc3339),
    });
    format!("{line}\n")
}

fn as_table(chunks: &[CheckpointRow]) -> String {
    let heads = ["MATRIX", "CHUNK", "ROWS", "SYNCED", "WORKER"];
    let mut rows = vec![heads.map(str::to_owned)];
    let now = SystemTime::now();
    for chunk in chunks {
        let age = chunk.last_synced_at.and_then(|at| now.duration_since(at).ok());
        let worker = chunk.locked_by.as_deref().filter(|_| chunk.held);
        rows.push([
            humanize::without_control_chars(&chunk.matrix_id),
            humanize::without_control_chars(&chunk.chunk_hash),
            chunk.row_count.map_or_else(|| "-".to_owned(), |rows| rows.to_string()),
            age.map_or_else(|| "never".to_owned(), |age| format!("{} ago", humanize::span(age))),
            worker.map_or_else(|| "-".to_owned(), humanize::without_control_chars),
        ]);
    }
    columns(&rows)
}

fn rfc3339(at: SystemTime) -> String {
    humantime::format_rfc3339_millis(at).to_string()
}

/// Reports an error of a chunk. A lost claim is no failure of tenure itself.
fn refusal(error: &Error) -> Exit {
    let exit = crate::cmd::report_error(error);
    if error.kind() == ErrorKind::Lost { Exit::Refused } else { exit }
}
