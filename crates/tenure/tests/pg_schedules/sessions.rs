//! Ends of sessions whose locks end with them, and the passing of time.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::locks::TTL;
use crate::schedule::Scheduler;
use crate::steps::SessionFault;
use crate::turnstile::Line;

/// Time that a client gets to notice the end of its connection.
pub(crate) const NOTICE_PATIENCE: Duration = Duration::from_secs(1);
/// Time that the server gets to end a session.
const END_PATIENCE: Duration = Duration::from_secs(60);

impl Scheduler<'_> {
    /// Lets time pass for clients, rows and sessions.
    pub(crate) async fn skip(&mut self, span: Duration) {
        // First for the clients: no lease may end earlier than a client thinks.
        self.record.skip(span);
        self.record.note("TIME", &format!("{} s pass", span.as_secs()), "");
        match self.plan.aging(span) {
            Some(sql) => self.pair.run(&sql).await,
            None => self.end_idle_sessions().await,
        }
    }

    /// Ends the sessions of holders that were idle for the ttl, as `idle_session_timeout` does. Their clients see
    /// nothing of it: a holder that is cut off must have reported the loss before.
    async fn end_idle_sessions(&mut self) {
        let now = self.record.now();
        let holders = self.pids("SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted");
        let holders = holders.await;
        for (line, pid) in self.turnstile.sessions() {
            let quiet = self.quiet_since.get(&line).is_some_and(|since| now >= *since + TTL);
            if quiet && holders.contains(&pid) && !self.in_flight.contains_key(&line) {
                self.terminate(pid).await;
                self.record.disturb(line.0);
                self.record.referee().end_sessions(&[line], self.record.executions());
                self.record.note_client(line.0, &format!("  session [{}]", line.1), "idle: ended");
            }
        }
    }

    /// Ends a session between two statements.
    pub(crate) async fn end_session(&mut self, line: Line, fault: SessionFault) {
        self.record.disturb(line.0);
        let session = format!("  session [{}]", line.1);
        // The server does not see the end of a connection on which it executes a statement.
        if fault == SessionFault::Cut && !self.in_flight.contains_key(&line) {
            self.record.note_client(line.0, &session, "connection cut");
        } else {
            self.record.note_client(line.0, &session, "terminated by an administrator");
            if let Some(pid) = self.turnstile.pid(line) {
                self.terminate(pid).await;
            }
        }
        // A connection with a statement at the server ends when the server ends the statement.
        if !self.in_flight.contains_key(&line) {
            self.closing.push(line);
        }
    }

    /// Waits until the sessions of connections that ended in the last step are gone, and their clients have noticed.
    /// Then no result of the next step depends on the speed of the server.
    pub(crate) async fn end_sessions(&mut self) {
        let mut ended = std::mem::take(&mut self.closing);
        ended.append(&mut self.record.closing());
        if std::mem::take(&mut self.evicted) {
            let evicted = self.evicted_lines().await;
            for line in &evicted {
                self.record.disturb(line.0);
            }
            ended.extend(evicted);
        }
        if ended.is_empty() {
            return;
        }
        self.turnstile.end(&ended).await;
        self.forget(&ended);
        self.sessions_lost(&ended).await;
        let pids: BTreeSet<i32> =
            ended.iter().filter_map(|line| self.turnstile.pid(*line)).collect();
        let begun = Instant::now();
        while !self.pids("SELECT pid FROM pg_stat_activity").await.is_disjoint(&pids) {
            assert!(begun.elapsed() < END_PATIENCE, "the server does not end sessions");
        }
        // A client that waited for a lock of these sessions has it now.
        self.settle().await;
    }

    /// Connections whose sessions a client has ended. Their clients see it at once.
    async fn evicted_lines(&mut self) -> Vec<Line> {
        let alive = self.pids("SELECT pid FROM pg_stat_activity").await;
        let sessions = self.turnstile.sessions().into_iter();
        let ended = sessions
            .filter(|(line, pid)| !alive.contains(pid) && !self.in_flight.contains_key(line));
        ended.map(|(line, _)| line).collect()
    }

    /// Judges that all sessions have ended with their server. Behind a pooler the connections survive, and no client
    /// notices: the stores' documentation excludes a session that ends on a silent link. Renewals must fail all the
    /// same.
    pub(crate) async fn all_sessions_lost(&mut self) {
        let lines = self.record.referee().lines();
        if self.plan.pooled {
            let executions = self.record.executions();
            self.record.referee().forgive_silence(executions);
        }
        self.sessions_lost(&lines).await;
    }

    /// Waits until clients have noticed the end of the sessions of their locks.
    async fn sessions_lost(&mut self, lines: &[Line]) {
        self.record.referee().end_sessions(lines, self.record.executions());
        let noticed = async {
            while self.record.referee().relies_on(lines) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        if tokio::time::timeout(NOTICE_PATIENCE, noticed).await.is_err() {
            self.record.note("CLIENTS", "notice no end of a session", "");
        }
    }

    async fn terminate(&mut self, pid: i32) {
        self.pair.run(&format!("SELECT pg_terminate_backend({pid}, 10000)")).await;
    }

    async fn pids(&mut self, sql: &str) -> BTreeSet<i32> {
        let rows = self.pair.db().await.query(sql, &[]).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    }
}
