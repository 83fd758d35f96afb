//! `tenure schema`: the SQL of the PostgreSQL tables, printed or applied.

use clap::Args;
use tenure::{PgLease, Result};

use crate::args::StoreUrl;
use crate::exit::{self, Exit};
use crate::report;

#[derive(Args)]
#[command(after_help = exit::SCHEMA)]
pub(crate) struct Schema {
    #[command(flatten)]
    store: StoreUrl,
    /// Apply it; a table that is not understood is refused and left as it is
    #[arg(long)]
    apply: bool,
}

pub(crate) fn run(arguments: &Schema) -> Exit {
    let store = match arguments.store.postgres() {
        Some(store) => store,
        // What the table is called can be known without knowing where it is.
        None if !arguments.apply => PgLease::open("postgres://"),
        None => {
            report::complain("only PostgreSQL has a schema: name it with --store postgres://…");
            return Exit::Usage;
        }
    };
    match store {
        Ok(store) if arguments.apply => super::on_runtime(apply(store)),
        Ok(store) => super::print(store.schema().as_bytes()),
        Err(error) => super::refused(&error),
    }
}

async fn apply(store: PgLease) -> Exit {
    let applied: Result<()> = store.apply_schema().await;
    match applied {
        Ok(()) => Exit::Success,
        Err(error) => {
            report::complain(&report::chain(&error));
            Exit::Failed
        }
    }
}
