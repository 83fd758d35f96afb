//! Relay in front of the server that holds back every request and every reply until the scheduler releases it.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::rc::Rc;

use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;

use crate::protocol::{self, ServerReply, StatementGroup};

/// A connection: the number of its client, and its number among the connections of that client.
pub(crate) type Line = (usize, u32);

/// Decision about a request that is held back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StatementVerdict {
    /// It reaches the server.
    Pass,
    /// It is lost with its connection.
    Cut,
    /// Its client sees the end of the connection; the request itself may still reach the server later.
    Delay,
}

/// Decision about a reply that is held back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplyVerdict {
    Deliver,
    Cut,
}

/// Report to the scheduler.
pub(crate) enum TurnEvent {
    /// A request arrived and waits.
    Sent { line: Line, sql: String, verdict: oneshot::Sender<StatementVerdict> },
    /// The server has answered, and the answer waits.
    Answered { line: Line, reply: ReplySummary, verdict: oneshot::Sender<ReplyVerdict> },
    /// The server's side of the connection ended before the answer.
    Broken { line: Line },
    /// A client has ended an operation.
    Ended { client: usize },
}

/// The part of a reply that the scheduler needs.
pub(crate) struct ReplySummary {
    pub(crate) effect: String,
    pub(crate) in_transaction: bool,
}

pub(crate) type EventSender = mpsc::UnboundedSender<TurnEvent>;

/// The relay of one run. Dropping it closes its ports and connections.
pub(crate) struct Turnstile {
    shared: Rc<TurnstileShared>,
    /// Number of the server's run; a new number ends connections to the old run.
    run: watch::Sender<u64>,
    listeners: Vec<JoinHandle<()>>,
}

struct TurnstileShared {
    server_port: Cell<u16>,
    /// Like a pooler in transaction mode: idle connections of clients survive a crash of the server.
    pooled: bool,
    /// Nothing is held back.
    open: Cell<bool>,
    events: EventSender,
    /// Connections of clients; true inside a transaction.
    lines: RefCell<BTreeMap<Line, bool>>,
    opened: RefCell<BTreeMap<usize, u32>>,
    /// Process of each connection's last session, also of connections that have ended.
    pids: RefCell<BTreeMap<Line, i32>>,
    /// Connections that the scheduler ends.
    doomed: watch::Sender<BTreeSet<Line>>,
}

impl Turnstile {
    pub(crate) fn new(server_port: u16, pooled: bool, events: EventSender) -> Self {
        let shared = TurnstileShared {
            server_port: Cell::new(server_port),
            pooled,
            open: Cell::new(false),
            events,
            lines: RefCell::default(),
            opened: RefCell::default(),
            pids: RefCell::default(),
            doomed: watch::Sender::default(),
        };
        Self { shared: Rc::new(shared), run: watch::Sender::new(0), listeners: Vec::new() }
    }

    /// Opens the port of the next client.
    pub(crate) async fn listen(&mut self) -> u16 {
        let client = self.listeners.len();
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (shared, run) = (Rc::clone(&self.shared), self.run.subscribe());
        self.listeners.push(tokio::task::spawn_local(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((near, _)) = listener.accept().await {
                let link = TurnstileLink::new(client, Rc::clone(&shared), run.clone());
                connections.spawn_local(async move {
                    // An error is the end of either side.
                    drop(link.serve(near).await);
                });
            }
        }));
        port
    }

    /// Holds back nothing from now on.
    pub(crate) fn open(&self) {
        self.shared.open.set(true);
    }

    /// Tells connections that the server was restarted or replaced. Returns those that ended with it, once they have.
    pub(crate) async fn server_replaced(&self, port: u16) -> Vec<Line> {
        let shared = &self.shared;
        shared.server_port.set(port);
        let doomed: Vec<Line> = {
            let lines = shared.lines.borrow();
            let ends = |(_, in_transaction): &(&Line, &bool)| !shared.pooled || **in_transaction;
            lines.iter().filter(ends).map(|(line, _)| *line).collect()
        };
        self.run.send_modify(|run| *run += 1);
        self.gone(&doomed).await;
        doomed
    }

    /// Ends these connections: their clients and the server see it at once.
    pub(crate) async fn end(&self, lines: &[Line]) {
        self.shared.doomed.send_modify(|doomed| doomed.extend(lines));
        self.gone(lines).await;
    }

    /// Waits until these connections have ended.
    pub(crate) async fn gone(&self, lines: &[Line]) {
        while lines.iter().any(|line| self.shared.lines.borrow().contains_key(line)) {
            tokio::task::yield_now().await;
        }
    }

    /// Connections of clients, and the process of each one's session.
    pub(crate) fn sessions(&self) -> Vec<(Line, i32)> {
        let (lines, pids) = (self.shared.lines.borrow(), self.shared.pids.borrow());
        let known = lines.keys().filter_map(|line| Some((*line, *pids.get(line)?)));
        known.collect()
    }

    /// Process of a connection's session, even if the connection has ended.
    pub(crate) fn pid(&self, line: Line) -> Option<i32> {
        self.shared.pids.borrow().get(&line).copied()
    }

    pub(crate) fn in_transaction(&self) -> bool {
        self.shared.lines.borrow().values().any(|in_transaction| *in_transaction)
    }
}

impl Drop for Turnstile {
    fn drop(&mut self) {
        self.listeners.iter().for_each(JoinHandle::abort);
    }
}

/// One connection of a client.
struct TurnstileLink {
    line: Line,
    shared: Rc<TurnstileShared>,
    run: watch::Receiver<u64>,
    /// Run of the server that the server's side of this connection reaches.
    reached: u64,
}

impl TurnstileLink {
    fn new(client: usize, shared: Rc<TurnstileShared>, run: watch::Receiver<u64>) -> Self {
        let nth = {
            let mut opened = shared.opened.borrow_mut();
            let nth = opened.entry(client).or_default();
            *nth += 1;
            *nth
        };
        shared.lines.borrow_mut().insert((client, nth), false);
        Self { line: (client, nth), shared, run, reached: 0 }
    }

    async fn serve(mut self, mut near: TcpStream) -> io::Result<()> {
        near.set_nodelay(true)?;
        let startup = protocol::read_startup(&mut near).await?;
        let (mut far, greeting) = self.dial(&startup).await?;
        near.write_all(&greeting.bytes).await?;
        loop {
            let group = tokio::select! {
                biased;
                () = self.cut() => return pass_last_words(&mut far, &mut near).await,
                group = protocol::read_group(&mut near) => group?,
            };
            let Some(group) = group else { return Ok(()) };
            let Some(verdict) = self.admit(&group).await else { return Ok(()) };
            match verdict {
                StatementVerdict::Cut => return Ok(()),
                StatementVerdict::Pass => {}
                StatementVerdict::Delay => {
                    drop(near);
                    // Sent again by the scheduler's will, without a client.
                    let Some(StatementVerdict::Pass) = self.admit(&group).await else {
                        return Ok(());
                    };
                    return self.execute(&mut far, &group, &startup).await.map(drop);
                }
            }
            let Some(reply) = self.execute(&mut far, &group, &startup).await? else {
                return Ok(());
            };
            near.write_all(&reply.bytes).await?;
        }
    }

    /// Waits for the decision about a request; `None` if the server's end came first.
    async fn admit(&mut self, group: &StatementGroup) -> Option<StatementVerdict> {
        if self.shared.open.get() {
            return Some(StatementVerdict::Pass);
        }
        let (verdict, decided) = oneshot::channel();
        let sent = TurnEvent::Sent { line: self.line, sql: group.sql.clone(), verdict };
        self.shared.events.send(sent).ok()?;
        tokio::select! {
            biased;
            verdict = decided => verdict.ok(),
            () = self.cut() => None,
        }
    }

    /// Has the server execute a request. Returns the reply if it is to be delivered.
    async fn execute(
        &mut self,
        far: &mut TcpStream,
        group: &StatementGroup,
        startup: &[u8],
    ) -> io::Result<Option<ServerReply>> {
        if self.reached != *self.run.borrow() {
            if !self.shared.pooled {
                // Only a pooler would pass the request to another server.
                return Err(io::ErrorKind::ConnectionReset.into());
            }
            *far = self.dial(startup).await?.0;
        }
        let executed = async {
            far.write_all(&group.bytes).await?;
            protocol::read_reply(far).await
        };
        let reply = match executed.await {
            Ok(reply) => reply,
            Err(error) => {
                // The scheduler waits for this, unless the run is over.
                let _ = self.shared.events.send(TurnEvent::Broken { line: self.line });
                return Err(error);
            }
        };
        self.shared.lines.borrow_mut().insert(self.line, reply.in_transaction);
        if self.shared.open.get() {
            return Ok(Some(reply));
        }
        let (verdict, decided) = oneshot::channel();
        let ServerReply { effect, in_transaction, .. } = &reply;
        let summary = ReplySummary { effect: effect.clone(), in_transaction: *in_transaction };
        let answered = TurnEvent::Answered { line: self.line, reply: summary, verdict };
        if self.shared.events.send(answered).is_err() {
            return Ok(None);
        }
        let delivered = tokio::select! {
            biased;
            verdict = decided => verdict == Ok(ReplyVerdict::Deliver),
            () = self.cut() => false,
        };
        Ok(delivered.then_some(reply))
    }

    /// Connects to the server and passes the client's first message. Returns the answer to it.
    async fn dial(&mut self, startup: &[u8]) -> io::Result<(TcpStream, ServerReply)> {
        self.reached = *self.run.borrow_and_update();
        let mut far = TcpStream::connect(("127.0.0.1", self.shared.server_port.get())).await?;
        far.set_nodelay(true)?;
        far.write_all(startup).await?;
        let greeting = protocol::read_reply(&mut far).await?;
        if let Some(pid) = greeting.pid {
            self.shared.pids.borrow_mut().insert(self.line, pid);
        }
        Ok((far, greeting))
    }

    /// Resolves when this connection ends without its client.
    async fn cut(&mut self) {
        let (line, mut doomed) = (self.line, self.shared.doomed.subscribe());
        tokio::select! {
            () = self.server_gone() => {}
            // The turnstile lives as long as its connections: the wait does not fail.
            _ = doomed.wait_for(|doomed| doomed.contains(&line)) => {}
        }
    }

    /// Resolves when the server of this connection is gone, unless the connection survives that.
    async fn server_gone(&mut self) {
        let reached = self.reached;
        // An error means that the turnstile is gone.
        if self.run.wait_for(|run| *run != reached).await.is_err() {
            return;
        }
        let in_transaction = self.shared.lines.borrow().get(&self.line).copied();
        if self.shared.pooled && in_transaction != Some(true) {
            std::future::pending::<()>().await;
        }
    }
}

/// Passes on the error with which a server has ended a session, if it has.
async fn pass_last_words(far: &mut TcpStream, near: &mut TcpStream) -> io::Result<()> {
    let mut words = [0; 1024];
    match far.try_read(&mut words) {
        Ok(length) => near.write_all(&words[..length]).await,
        Err(_) => Ok(()),
    }
}

impl Drop for TurnstileLink {
    fn drop(&mut self) {
        self.shared.lines.borrow_mut().remove(&self.line);
    }
}
