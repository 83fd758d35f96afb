//! The command `tenure` with one more store: `team:NAME` is the folder NAME of locks under `$TEAM_LOCKS`.
//!
//! The store here is the file store of tenure, so that the example is short and runs anywhere. In your program it is
//! the store of your own crate; the library's `examples/custom_store.rs` shows how to write one.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use tenure::{Client, Error, ErrorKind, FileStore, Result, Store};

fn main() -> ExitCode {
    tenure_cli::main_with(Client::builder().scheme("team", async |url: String| open(&url)))
}

fn open(url: &str) -> Result<Arc<dyn Store>> {
    let invalid = |problem| Error::new(ErrorKind::Invalid, problem);
    let root = std::env::var_os("TEAM_LOCKS").ok_or_else(|| invalid("TEAM_LOCKS is not set"))?;
    let name = url.strip_prefix("team:").unwrap_or_default();
    if name.is_empty() || name.contains(['/', '.']) {
        return Err(invalid("a store of the team is named by one word: team:NAME"));
    }
    Ok(Arc::new(FileStore::open(PathBuf::from(root).join(name))?))
}
