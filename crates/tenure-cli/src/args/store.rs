//! The store, by URL or as pgleaderlock names it.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use tenure::{Client, ClientBuilder, Error, ErrorKind, Key, PgAdvisoryStore, PgLeaseStore};

use crate::client;
use crate::exit::Exit;

const STORE_VARIABLE: &str = "TENURE_STORE";
const DEFAULT_STORE: &str = "file:";
/// Directory of the store `file:`.
const DIRECTORY_VARIABLE: &str = "TENURE_DIR";

/// The store, by URL.
#[derive(Args)]
pub(crate) struct StoreUrl {
    /// URL of the store: file:[PATH] on this host, tenure://, tenures://, postgres://, postgres+advisory://, nats://,
    /// s3://, gs:// or az://
    #[arg(
        short,
        long,
        value_name = "URL",
        env = STORE_VARIABLE,
        hide_env_values = true,
        default_value = DEFAULT_STORE
    )]
    store: String,
}

impl StoreUrl {
    /// True if the store is the memory of this process, which no other process sees.
    pub(crate) fn is_memory(&self) -> bool {
        self.store.split_once(':').is_some_and(|(scheme, _)| scheme == "memory")
    }

    /// The reason to refuse the default directory of the file store; `None` if it is valid, or another store is used.
    ///
    /// Commands that are started in different directories would use different stores, and not exclude each other.
    pub(crate) fn relative_directory_error(&self) -> Option<String> {
        let path = self.store.strip_prefix("file:")?.split('?').next()?;
        let directory = std::env::var_os(DIRECTORY_VARIABLE).map(PathBuf::from)?;
        let refused =
            path.is_empty() && !directory.as_os_str().is_empty() && directory.is_relative();
        refused.then(|| {
            format!(
                "{DIRECTORY_VARIABLE}={} is relative to the current directory: give an absolute path",
                directory.display()
            )
        })
    }

    /// True if the URL names PostgreSQL, with lease rows or with advisory locks.
    fn is_postgres(&self) -> bool {
        let scheme = self.store.split_once(':').map_or("", |(scheme, _)| scheme);
        matches!(scheme.trim_end_matches("+advisory"), "postgres" | "postgresql")
    }

    /// The given URL, else that of the environment, else the file store of this host.
    pub(crate) fn or_default(given: Option<&String>) -> Self {
        let store = given.cloned().or_else(|| std::env::var(STORE_VARIABLE).ok());
        Self { store: store.unwrap_or_else(|| DEFAULT_STORE.to_owned()) }
    }

    /// Connects. An invalid URL is a bad configuration: see [`as_configuration`].
    pub(crate) async fn connect(&self) -> tenure::Result<Client> {
        self.connect_with(client::builder()).await
    }

    /// Connects, with settings for a store that is away.
    pub(crate) async fn connect_with(&self, builder: ClientBuilder) -> tenure::Result<Client> {
        builder.connect(&self.store).await.map_err(as_configuration)
    }

    /// Connects for an examination, which distinguishes an invalid URL from a store that is unfit.
    pub(crate) async fn connect_to_examine(&self) -> tenure::Result<Client> {
        client::builder().connect(&self.store).await
    }

    /// The URL, if it names PostgreSQL with lease rows.
    pub(crate) fn postgres_url(&self) -> Option<&str> {
        names_lease_rows(&self.store).then_some(&*self.store)
    }

    /// The store, if it is PostgreSQL with advisory locks.
    pub(crate) fn advisory(&self) -> Option<tenure::Result<PgAdvisoryStore>> {
        let advisory = self.store.split_once(':')?.0.ends_with("+advisory");
        advisory.then(|| PgAdvisoryStore::open(&self.store).map_err(as_configuration))
    }

    /// The store, if it is PostgreSQL with lease rows.
    pub(crate) fn postgres(&self) -> Option<tenure::Result<PgLeaseStore>> {
        self.postgres_url().map(|url| PgLeaseStore::open(url).map_err(as_configuration))
    }
}

/// The database of a queue of jobs, by URL.
#[derive(Args)]
pub(crate) struct DatabaseUrl {
    /// URL of the PostgreSQL database that has the queue: postgres://
    #[arg(short, long, value_name = "URL", env = STORE_VARIABLE, hide_env_values = true)]
    store: Option<String>,
}

impl DatabaseUrl {
    /// The URL, if it is valid and names PostgreSQL; else the reason to refuse it, and the exit code.
    pub(crate) fn postgres_url(&self) -> Result<&str, (String, Exit)> {
        let url = self.store.as_deref().filter(|url| names_lease_rows(url));
        let wrong_store = "jobs need PostgreSQL: give its URL with --store postgres://…";
        let url = url.ok_or_else(|| (wrong_store.to_owned(), Exit::Usage))?;
        // The URL alone: a connect also refuses an invalid name of a queue, which is a wrong call.
        PgLeaseStore::open(url).map_err(|error| (error.chain(), Exit::Failed))?;
        Ok(url)
    }
}

/// Turns the error of an invalid URL into one of the configuration, which has another exit code (125) than a wrong call
/// (2). The URL often comes from the environment, and names files and services that can be invalid, too.
fn as_configuration(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Invalid => Error::new(ErrorKind::Misconfigured, error.chain()),
        _ => error,
    }
}

/// True if the URL names PostgreSQL with lease rows.
fn names_lease_rows(url: &str) -> bool {
    url.split_once(':').is_some_and(|(scheme, _)| matches!(scheme, "postgres" | "postgresql"))
}

/// A lock as pgleaderlock names it: a server, and the two numbers of an advisory lock.
#[derive(Args)]
pub(crate) struct AdvisoryKeyArgs {
    /// The PostgreSQL server of an advisory lock, as a URL or as host=HOST dbname=DATABASE; with --key1, `$PG_DSN` by
    /// default
    #[arg(long, value_name = "DSN")]
    dsn: Option<String>,
    /// The first number of the advisory lock, instead of NAME; not for a store with `key=bigint`, where NAME is the number
    #[arg(long, value_name = "N", requires = "key2", allow_negative_numbers = true)]
    key1: Option<i32>,
    /// The second number of the advisory lock
    #[arg(long, value_name = "N", requires = "key1", allow_negative_numbers = true)]
    key2: Option<i32>,
}

impl AdvisoryKeyArgs {
    pub(crate) fn numbers(&self) -> Option<(i32, i32)> {
        self.key1.zip(self.key2)
    }

    /// The server, from `--dsn` or, with `--key1`, from the environment.
    pub(crate) fn dsn(&self) -> Option<String> {
        let variable = || self.key1.and_then(|_| std::env::var(PGLEADERLOCK_DSN_VARIABLE).ok());
        self.dsn.clone().or_else(variable).filter(|dsn| !dsn.is_empty())
    }

    /// The reason to refuse the two numbers: no server is named, and `store` is not PostgreSQL.
    pub(crate) fn server_error(&self, store: &StoreUrl) -> Option<String> {
        let refused = self.key1.is_some() && self.dsn().is_none() && !store.is_postgres();
        refused.then(|| {
            format!(
                "--key1 and --key2 name an advisory lock of PostgreSQL: give its server with --dsn, \
                 ${PGLEADERLOCK_DSN_VARIABLE} or --store postgres+advisory://…"
            )
        })
    }

    /// The two numbers as a key.
    pub(crate) fn key(&self) -> Option<Key> {
        self.numbers().and_then(|(first, second)| Key::new(&format!("{first},{second}")).ok())
    }

    /// Connects to the server of [`dsn`](Self::dsn), or to `store` without one.
    pub(crate) async fn connect(
        &self,
        store: &StoreUrl,
        builder: ClientBuilder,
    ) -> tenure::Result<Client> {
        match self.dsn() {
            Some(dsn) => {
                let store = PgAdvisoryStore::open(&dsn).map_err(as_configuration)?;
                Ok(Client::with_store(Arc::new(store)))
            }
            None => store.connect_with(builder).await,
        }
    }
}

/// Variable from which pgleaderlock reads its server.
const PGLEADERLOCK_DSN_VARIABLE: &str = "PG_DSN";
