//! The simulated network: TCP connections between client processes and the server's machine.
//!
//! A connection has two directions. Each carries segments in order, with a delay; a lost segment is late, and so are
//! all segments behind it. Either side can be told that the connection ended, broke, or nothing at all.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::task::Waker;

use tenure_core::Random;

use super::plan::Link;

/// Time after which TCP sends a lost segment again. Doubled for each further loss.
const RETRANSMIT: u64 = 200_000_000;
/// Time after which a client without any answer to its segments gives up a connection.
const CLIENT_GIVES_UP: u64 = 20_000_000_000;
/// Time after which the server gives up a silent connection: its keep-alive probes are unanswered.
const SERVER_GIVES_UP: u64 = 30_000_000_000;

/// Side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Client,
    Server,
}

impl Side {
    fn other(self) -> Self {
        match self {
            Self::Client => Self::Server,
            Self::Server => Self::Client,
        }
    }
}

/// Content of a segment.
#[derive(Clone, Debug)]
pub(super) enum Segment {
    /// Request to connect.
    Connect,
    /// Answer to it.
    Connected,
    Refused,
    Data(Vec<u8>),
    /// End of the stream.
    Finish,
    Reset,
}

/// State of one side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EndState {
    /// The client has sent its request to connect.
    Connecting,
    Open,
    /// The program has closed it, or has ended.
    Closed,
    /// Reset by the peer or by the network. The error is reported once.
    Broken {
        reported: bool,
    },
    /// Its machine crashed: it neither sends nor answers.
    Vanished,
}

/// One side of a connection.
#[derive(Debug)]
pub(super) struct End {
    pub(super) state: EndState,
    /// Received bytes that were not read.
    received: VecDeque<u8>,
    /// The peer has finished sending.
    finished: bool,
    /// This side has finished sending.
    finish_sent: bool,
    /// Segments on their way to this side, by time of arrival.
    incoming: VecDeque<(u64, Segment)>,
    incoming_bytes: usize,
    last_arrival: u64,
    random: Random,
    pub(super) reader: Option<Waker>,
    pub(super) writer: Option<Waker>,
    /// Earliest time at which this side reads.
    pub(super) reads_from: u64,
}

impl End {
    fn new(random: Random, state: EndState) -> Self {
        Self {
            state,
            received: VecDeque::new(),
            finished: false,
            finish_sent: false,
            incoming: VecDeque::new(),
            incoming_bytes: 0,
            last_arrival: 0,
            random,
            reader: None,
            writer: None,
            reads_from: 0,
        }
    }

    fn wake(&mut self) -> impl Iterator<Item = Waker> + use<> {
        self.reader.take().into_iter().chain(self.writer.take())
    }
}

/// A connection.
#[derive(Debug)]
pub(super) struct SimulatedConnection {
    /// Index of the client process.
    pub(super) client: usize,
    client_end: End,
    server_end: End,
    /// Segments are swallowed: a middlebox has forgotten the connection.
    pub(super) cut: bool,
    /// A proxy has ended the stream of the server's side.
    closed_by_proxy: bool,
    /// Token under which the server watches its side.
    token: Option<usize>,
    watch_writable: bool,
}

impl SimulatedConnection {
    pub(super) fn end(&self, side: Side) -> &End {
        match side {
            Side::Client => &self.client_end,
            Side::Server => &self.server_end,
        }
    }

    pub(super) fn end_mut(&mut self, side: Side) -> &mut End {
        match side {
            Side::Client => &mut self.client_end,
            Side::Server => &mut self.server_end,
        }
    }
}

/// State of the path between a client's machine and the server's.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Path {
    /// Ends of the partitions: towards the server, towards the client.
    pub(super) blocked_until: [u64; 2],
    pub(super) slow_until: u64,
    pub(super) extra: u64,
    pub(super) reads_from: u64,
}

/// A segment to deliver, or a side that gives up.
#[derive(Clone, Copy, Debug)]
pub(super) enum Arrival {
    Segment { connection: usize, to: Side },
    GivesUp { connection: usize, side: Side },
}

/// All connections of a run.
#[derive(Debug)]
pub(super) struct Net {
    seed: u64,
    link: Link,
    pub(super) connections: Vec<SimulatedConnection>,
    pub(super) paths: Vec<Path>,
    /// Connections that wait to be accepted.
    pub(super) backlog: VecDeque<usize>,
    pub(super) backlog_changed: bool,
    /// Connections with news for the server, in the order of the news.
    ready: VecDeque<usize>,
    pub(super) listening: bool,
    pub(super) machine_up: bool,
    /// Arrivals that were scheduled since the last call of [`Net::take_arrivals`].
    arrivals: Vec<(u64, Arrival)>,
    /// Tasks to wake.
    wakers: Vec<Waker>,
    /// Clients that have received something since the last call of [`Net::take_arrivals`].
    touched: Vec<usize>,
    pub(super) segments: u64,
}

impl Net {
    pub(super) fn new(seed: u64, link: Link, clients: usize) -> Self {
        Self {
            seed,
            link,
            connections: Vec::new(),
            paths: vec![Path::default(); clients],
            backlog: VecDeque::new(),
            backlog_changed: false,
            ready: VecDeque::new(),
            listening: false,
            machine_up: true,
            arrivals: Vec::new(),
            wakers: Vec::new(),
            touched: Vec::new(),
            segments: 0,
        }
    }

    /// Arrivals to schedule.
    pub(super) fn take_arrivals(&mut self) -> Vec<(u64, Arrival)> {
        std::mem::take(&mut self.arrivals)
    }

    /// Tasks to wake, and the clients that they belong to.
    pub(super) fn take_wakers(&mut self) -> (Vec<Waker>, Vec<usize>) {
        (std::mem::take(&mut self.wakers), std::mem::take(&mut self.touched))
    }

    /// True if there is something for the server to read, to write or to accept.
    pub(super) fn has_server_events(&self) -> bool {
        self.backlog_changed || !self.ready.is_empty()
    }

    /// Ends all faults of the network.
    pub(super) fn heal(&mut self, now: u64) {
        for path in &mut self.paths {
            *path = Path::default();
        }
        self.link.loss = 0.0;
        for index in 0..self.connections.len() {
            self.connections[index].client_end.reads_from = now;
        }
    }

    /// Opens a connection from a client. Its number is returned at once; the answer arrives later.
    pub(super) fn connect(&mut self, client: usize, now: u64) -> usize {
        let index = self.connections.len();
        let seed = Random::new(self.seed ^ (index as u64) << 8).bits();
        self.connections.push(SimulatedConnection {
            client,
            client_end: End::new(Random::new(seed), EndState::Connecting),
            server_end: End::new(Random::new(seed ^ 1), EndState::Closed),
            cut: false,
            closed_by_proxy: false,
            token: None,
            watch_writable: false,
        });
        self.connections[index].client_end.reads_from = self.paths[client].reads_from;
        self.send(index, Side::Server, Segment::Connect, now);
        index
    }

    /// Sends a segment to a side.
    fn send(&mut self, index: usize, to: Side, segment: Segment, now: u64) {
        let connection = &mut self.connections[index];
        if connection.cut {
            return;
        }
        let path = self.paths[connection.client];
        let Link { delay, jitter, loss, .. } = self.link;
        let end = connection.end_mut(to);
        let nanos = |span: std::time::Duration| u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
        let mut takes = nanos(delay) + end.random.below(nanos(jitter).max(1));
        let mut again = RETRANSMIT;
        while loss > 0.0 && end.random.chance(loss) && again < 8 * RETRANSMIT {
            takes += again;
            again *= 2;
        }
        if now < path.slow_until {
            takes += end.random.below(path.extra.max(1));
        }
        let blocked = path.blocked_until[usize::from(to == Side::Client)];
        let leaves = now.max(blocked);
        let arrives = (leaves + takes).max(end.last_arrival);
        end.last_arrival = arrives;
        if let Segment::Data(bytes) = &segment {
            end.incoming_bytes += bytes.len();
        }
        end.incoming.push_back((arrives, segment));
        self.segments += 1;
        self.arrivals.push((arrives, Arrival::Segment { connection: index, to }));
    }

    /// Delivers the segments that have arrived at a side.
    pub(super) fn deliver(&mut self, index: usize, to: Side, now: u64) {
        loop {
            let connection = &mut self.connections[index];
            let end = connection.end_mut(to);
            match end.incoming.front() {
                Some((arrives, _)) if *arrives <= now => {}
                _ => return,
            }
            let Some((_, segment)) = end.incoming.pop_front() else { return };
            if let Segment::Data(bytes) = &segment {
                end.incoming_bytes -= bytes.len();
            }
            if to == Side::Server && !self.machine_up {
                // A machine that is down answers nothing. TCP sends the segment again, and all that follow it.
                let later = now + RETRANSMIT;
                let end = self.connections[index].end_mut(to);
                if let Segment::Data(bytes) = &segment {
                    end.incoming_bytes += bytes.len();
                }
                end.incoming.push_front((later, segment));
                end.last_arrival = end.last_arrival.max(later);
                self.arrivals.push((later, Arrival::Segment { connection: index, to }));
                return;
            }
            self.receive(index, to, segment, now);
        }
    }

    /// Describes the segments that have arrived at a side and are not delivered.
    pub(super) fn arriving(&self, index: usize, to: Side, now: u64) -> Vec<String> {
        let incoming = &self.connections[index].end(to).incoming;
        let arrived = incoming.iter().take_while(|(arrives, _)| *arrives <= now);
        let describe = |(_, segment): &(u64, Segment)| match segment {
            Segment::Data(bytes) => String::from_utf8_lossy(bytes).trim_end().replace('\n', " | "),
            other => format!("{other:?}"),
        };
        arrived.map(describe).collect()
    }

    fn receive(&mut self, index: usize, to: Side, segment: Segment, now: u64) {
        let connection = &mut self.connections[index];
        let client = connection.client;
        let end = connection.end_mut(to);
        match segment {
            Segment::Connect => {
                let accepts = self.listening;
                if accepts {
                    end.state = EndState::Open;
                    self.backlog.push_back(index);
                    self.backlog_changed = true;
                }
                let answer = if accepts { Segment::Connected } else { Segment::Refused };
                self.send(index, Side::Client, answer, now);
                return;
            }
            Segment::Connected => {
                if end.state == EndState::Connecting {
                    end.state = EndState::Open;
                } else {
                    // The client has given up meanwhile.
                    self.send(index, Side::Server, Segment::Reset, now);
                    return;
                }
            }
            Segment::Refused => {
                if end.state == EndState::Connecting {
                    end.state = EndState::Broken { reported: false };
                }
            }
            Segment::Data(bytes) => match end.state {
                EndState::Open => end.received.extend(bytes),
                EndState::Connecting => {}
                // No program reads this: the kernel answers with a reset.
                EndState::Closed | EndState::Broken { .. } | EndState::Vanished => {
                    self.send(index, to.other(), Segment::Reset, now);
                    return;
                }
            },
            Segment::Finish => end.finished = true,
            Segment::Reset => {
                if matches!(end.state, EndState::Open | EndState::Connecting) {
                    end.state = EndState::Broken { reported: false };
                }
            }
        }
        self.notify(index, to, client);
    }

    /// Tells a side that there is news.
    fn notify(&mut self, index: usize, to: Side, client: usize) {
        let end = self.connections[index].end_mut(to);
        self.wakers.extend(end.wake());
        match to {
            Side::Client => self.touched.push(client),
            Side::Server => {
                self.set_ready(index);
            }
        }
    }

    fn set_ready(&mut self, index: usize) {
        if !self.ready.contains(&index) {
            self.ready.push_back(index);
        }
    }

    /// Breaks one side of a connection: it gets an error.
    pub(super) fn break_end(&mut self, index: usize, side: Side) {
        let connection = &mut self.connections[index];
        let client = connection.client;
        let end = connection.end_mut(side);
        if matches!(end.state, EndState::Open | EndState::Connecting) {
            end.state = EndState::Broken { reported: false };
            self.notify(index, side, client);
        }
    }

    /// If a proxy has closed the server's side of a connection: its client, and true if the client does not know yet
    /// that the connection has ended.
    pub(super) fn half_closed(&self, index: usize) -> Option<(usize, bool)> {
        let SimulatedConnection { client, client_end, closed_by_proxy, .. } =
            &self.connections[index];
        let unaware =
            matches!(client_end.state, EndState::Open | EndState::Broken { reported: false });
        closed_by_proxy.then_some((*client, unaware))
    }

    /// Ends the stream of one side of a connection, as if its peer had closed it.
    pub(super) fn finish_end(&mut self, index: usize, side: Side) {
        let connection = &mut self.connections[index];
        // A server that has closed first does not take this for a close by the holder.
        connection.closed_by_proxy |= side == Side::Server && !connection.server_end.finish_sent;
        let client = connection.client;
        connection.end_mut(side).finished = true;
        self.notify(index, side, client);
    }

    /// Cuts a connection: nothing passes from now on. Sides that are not told give up by themselves.
    pub(super) fn cut(&mut self, index: usize, now: u64) {
        let connection = &mut self.connections[index];
        connection.cut = true;
        for side in [Side::Client, Side::Server] {
            let end = connection.end_mut(side);
            end.incoming.clear();
            end.incoming_bytes = 0;
        }
        for (side, after) in [(Side::Client, CLIENT_GIVES_UP), (Side::Server, SERVER_GIVES_UP)] {
            self.arrivals.push((now + after, Arrival::GivesUp { connection: index, side }));
        }
    }

    /// Open connections of a client.
    pub(super) fn of_client(&self, client: usize) -> Vec<usize> {
        let open = |end: &End| matches!(end.state, EndState::Open | EndState::Connecting);
        let live = |c: &SimulatedConnection| {
            c.client == client && (open(&c.client_end) || open(&c.server_end))
        };
        (0..self.connections.len()).filter(|index| live(&self.connections[*index])).collect()
    }

    /// Connections whose server side is open.
    fn of_server(&self) -> Vec<usize> {
        let open = |c: &SimulatedConnection| c.server_end.state == EndState::Open;
        (0..self.connections.len()).filter(|index| open(&self.connections[*index])).collect()
    }

    /// Removes every trace of the connections at the server's machine, which crashed. Clients that send nothing notice it
    /// by keep-alive probes.
    pub(super) fn vanish(&mut self, now: u64) {
        for index in self.of_server() {
            let end = &mut self.connections[index].server_end;
            end.state = EndState::Vanished;
            end.received.clear();
            let gives_up = Arrival::GivesUp { connection: index, side: Side::Client };
            self.arrivals.push((now + CLIENT_GIVES_UP, gives_up));
        }
        self.backlog.clear();
        self.ready.clear();
    }
}

/// Operations of programs.
impl Net {
    /// Reads from a side: `None` if there is nothing to read now.
    pub(super) fn read(
        &mut self,
        index: usize,
        side: Side,
        buffer: &mut [u8],
        now: u64,
    ) -> Option<io::Result<usize>> {
        let end = self.connections[index].end_mut(side);
        if now < end.reads_from {
            return None;
        }
        if let EndState::Broken { reported } = &mut end.state {
            *reported = true;
            return Some(Err(ErrorKind::ConnectionReset.into()));
        }
        if end.received.is_empty() {
            return end.finished.then_some(Ok(0));
        }
        let count = buffer.len().min(end.received.len());
        for (target, byte) in buffer.iter_mut().zip(end.received.drain(..count)) {
            *target = byte;
        }
        self.room_freed(index, side.other());
        Some(Ok(count))
    }

    /// Tells a writer that its peer has read.
    fn room_freed(&mut self, index: usize, side: Side) {
        let connection = &mut self.connections[index];
        match side {
            Side::Client => {
                self.wakers.extend(connection.client_end.writer.take());
                self.touched.push(connection.client);
            }
            Side::Server if connection.watch_writable => {
                self.set_ready(index);
            }
            Side::Server => {}
        }
    }

    fn room(&self, index: usize, from: Side) -> usize {
        let peer = self.connections[index].end(from.other());
        self.link.window.saturating_sub(peer.incoming_bytes + peer.received.len())
    }

    /// Writes to a side: `None` if there is no room.
    pub(super) fn write(
        &mut self,
        index: usize,
        from: Side,
        bytes: &[u8],
        now: u64,
    ) -> Option<io::Result<usize>> {
        let end = self.connections[index].end_mut(from);
        match end.state {
            EndState::Open if !end.finish_sent => {}
            EndState::Broken { .. } => return Some(Err(ErrorKind::ConnectionReset.into())),
            _ => return Some(Err(ErrorKind::BrokenPipe.into())),
        }
        let count = self.room(index, from).min(bytes.len());
        if count == 0 {
            return None;
        }
        self.send(index, from.other(), Segment::Data(bytes[..count].to_vec()), now);
        Some(Ok(count))
    }

    /// Finishes sending.
    pub(super) fn finish(&mut self, index: usize, from: Side, now: u64) {
        let end = self.connections[index].end_mut(from);
        if end.state == EndState::Open && !end.finish_sent {
            end.finish_sent = true;
            self.send(index, from.other(), Segment::Finish, now);
        }
    }

    /// Closes a side, as the program or, after its end, the kernel does. Unread bytes make it a reset.
    pub(super) fn close(&mut self, index: usize, side: Side, now: u64) {
        let end = self.connections[index].end_mut(side);
        let (was, unread) = (end.state, !end.received.is_empty());
        if matches!(was, EndState::Open | EndState::Connecting | EndState::Broken { .. }) {
            end.state = EndState::Closed;
        }
        end.received.clear();
        end.reader = None;
        end.writer = None;
        if was == EndState::Open {
            let finish_sent = end.finish_sent;
            match (unread, finish_sent) {
                (true, _) => self.send(index, side.other(), Segment::Reset, now),
                (false, false) => self.send(index, side.other(), Segment::Finish, now),
                (false, true) => {}
            }
        }
        if side == Side::Server {
            self.ready.retain(|ready| *ready != index);
            self.connections[index].token = None;
        }
    }
}

/// Operations of the server's event loop.
impl Net {
    pub(super) fn register(&mut self, index: usize, token: usize) {
        self.connections[index].token = Some(token);
        // Bytes may have arrived before.
        self.set_ready(index);
    }

    pub(super) fn watch_writable(&mut self, index: usize, on: bool) {
        self.connections[index].watch_writable = on;
        if on {
            self.set_ready(index);
        }
    }

    pub(super) fn deregister(&mut self, index: usize) {
        self.connections[index].token = None;
        self.ready.retain(|ready| *ready != index);
    }

    /// Takes the connections with news: token, readable, writable, closed.
    pub(super) fn take_ready(&mut self, most: usize) -> Vec<(usize, bool, bool, bool)> {
        let mut events = Vec::new();
        while events.len() < most
            && let Some(index) = self.ready.pop_front()
        {
            let connection = &self.connections[index];
            let Some(token) = connection.token else { continue };
            let end = &connection.server_end;
            let broken = matches!(end.state, EndState::Broken { .. });
            let readable = !end.received.is_empty() || end.finished || broken;
            let writable =
                connection.watch_writable && (broken || self.room(index, Side::Server) > 0);
            if readable || writable {
                events.push((token, readable, writable, end.finished || broken));
            }
        }
        events
    }

    /// Pending error of the server's side.
    pub(super) fn take_error(&self, index: usize) -> Option<io::Error> {
        let broken = matches!(self.connections[index].server_end.state, EndState::Broken { .. });
        broken.then(|| ErrorKind::ConnectionReset.into())
    }
}
