//! A primary and, if needed, a standby: crashed and promoted by the scheduler, and used again by the next seed.

use std::time::{Duration, Instant};

use tokio_postgres::{Client, NoTls};

use crate::server::Server;

/// A role whose commits are acknowledged before they are on disk, unless a statement asks for more.
pub(crate) const LAZY_ROLE: &str = "lazy";

/// Settings of every server. The delay of the WAL writer keeps commits of [`LAZY_ROLE`] off the disk until a crash.
const SETTINGS: &str = "wal_writer_delay = 10s\nwal_retrieve_retry_interval = 50ms\nautovacuum = off\n\
                        checkpoint_timeout = 1h\n";

pub(crate) struct ServerPair {
    primary: Server,
    standby: Option<Server>,
    /// The standby gets no more commits.
    cut_off: bool,
    /// Connection of the referee, which does not go through the turnstile.
    referee: Option<Client>,
    pub(crate) crashes: u64,
    pub(crate) promotions: u64,
}

impl ServerPair {
    /// A new primary; `None` if the test has to be skipped.
    pub(crate) async fn start() -> Option<Self> {
        let primary = Server::start_with(None, SETTINGS)?;
        let mut pair = Self {
            primary,
            standby: None,
            cut_off: false,
            referee: None,
            crashes: 0,
            promotions: 0,
        };
        let role = format!(
            "CREATE ROLE {LAZY_ROLE} SUPERUSER LOGIN; ALTER ROLE {LAZY_ROLE} SET synchronous_commit = off"
        );
        pair.run(&role).await;
        Some(pair)
    }

    pub(crate) fn port(&self) -> u16 {
        self.primary.port
    }

    pub(crate) fn url(&self) -> String {
        self.primary.url()
    }

    /// The referee's connection. Its commits do not wait for the disk: waiting would also write the commits of clients
    /// before them, and hide that those did not wait.
    pub(crate) async fn db(&mut self) -> &Client {
        if self.referee.as_ref().is_none_or(Client::is_closed) {
            let (db, connection) = tokio_postgres::connect(&self.url(), NoTls).await.unwrap();
            tokio::spawn(connection);
            db.batch_execute("SET synchronous_commit = off").await.unwrap();
            self.referee = Some(db);
        }
        self.referee.as_ref().expect("connected above")
    }

    pub(crate) async fn run(&mut self, sql: &str) {
        self.db().await.batch_execute(sql).await.unwrap();
    }

    /// Makes a standby if there is none. From then on commits wait until the standby has them.
    pub(crate) async fn replicate(&mut self) {
        if self.standby.is_none() {
            self.standby = Some(self.primary.standby());
        }
        self.set_synchronous("*").await;
        let sql = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'";
        let begun = Instant::now();
        while self.db().await.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) == 0 {
            assert!(begun.elapsed() < Duration::from_secs(60), "the standby does not connect");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Lets commits be acknowledged without a standby, and removes a standby that was cut off.
    pub(crate) async fn end_replication(&mut self) {
        self.set_synchronous("").await;
        if std::mem::take(&mut self.cut_off) {
            self.standby = None;
        }
    }

    async fn set_synchronous(&mut self, names: &str) {
        self.run(&format!("ALTER SYSTEM SET synchronous_standby_names = '{names}'")).await;
        self.run("SELECT pg_reload_conf()").await;
        // Signals reach sessions one by one.
        let begun = Instant::now();
        let shown = "SHOW synchronous_standby_names";
        while self.db().await.query_one(shown, &[]).await.unwrap().get::<_, String>(0) != names {
            assert!(begun.elapsed() < Duration::from_secs(60), "the setting is not read");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Cuts the standby off: it does not get any later commit, and no commit waits for it.
    pub(crate) async fn cut_off_standby(&mut self) {
        self.set_synchronous("").await;
        self.cut_off = true;
        let standby = self.standby.as_ref().expect("made before");
        let (db, connection) = tokio_postgres::connect(&standby.url(), NoTls).await.unwrap();
        tokio::spawn(connection);
        db.batch_execute("ALTER SYSTEM SET primary_conninfo = ''").await.unwrap();
        db.batch_execute("SELECT pg_reload_conf()").await.unwrap();
        let begun = Instant::now();
        let sql = "SELECT count(*) FROM pg_stat_wal_receiver";
        while db.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) > 0 {
            assert!(begun.elapsed() < Duration::from_secs(60), "the standby still receives");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Stops the primary as `pg_ctl stop -m immediate` does, and starts it again.
    pub(crate) fn crash(&mut self) {
        self.primary.down();
        self.primary.up();
        self.referee = None;
        self.crashes += 1;
    }

    /// Stops the primary as a crash would, and makes the standby the primary.
    pub(crate) async fn promote(&mut self) {
        self.primary.down();
        self.referee = None;
        let standby = self.standby.take().expect("made before");
        standby.promote();
        self.primary = standby;
        self.cut_off = false;
        self.promotions += 1;
        self.set_synchronous("").await;
    }
}
