//! A lock server of a page, with a thread for each connection: right unless told how to be wrong.

use std::collections::{HashMap, VecDeque};
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

/// The way in which a responder is wrong.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// It is right.
    None,
    /// Grants have another lease than was asked for.
    OtherLease,
    /// Grants have a fourth field.
    FourthField,
    /// Tokens are in capitals.
    Capitals,
    /// Fences stay as they are.
    SameFence,
    /// Held keys are granted.
    NoExclusion,
    /// Leases end after half their time.
    EarlyExpiry,
    /// Releases fail.
    NoRelease,
    /// Connections end after the first reply.
    HangUp,
    /// `w` gives another token than `e`.
    OtherToken,
}

#[derive(Default)]
struct Key {
    holder: Option<Holder>,
    queue: VecDeque<u64>,
}

struct Holder {
    token: String,
    connection: u64,
    until: Instant,
}

#[derive(Default)]
struct Table {
    keys: HashMap<String, Key>,
    last: u64,
}

struct Shared {
    fault: Fault,
    table: Mutex<Table>,
    changed: Condvar,
}

/// Starts one on a free port; it lasts as long as the test's process.
pub(crate) fn start(fault: Fault) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("it is bound");
    let shared = Arc::new(Shared { fault, table: Mutex::default(), changed: Condvar::new() });
    thread::spawn(move || {
        for (number, stream) in (0..).zip(listener.incoming()) {
            let (stream, shared) = (stream.expect("a connection"), Arc::clone(&shared));
            thread::spawn(move || shared.serve(&stream, number));
        }
    });
    address
}

impl Shared {
    fn serve(&self, stream: &TcpStream, connection: u64) {
        stream.set_nodelay(true).expect("a socket");
        let mut places = HashMap::new();
        let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
        while let (Some(command), Some(key), Some(argument)) =
            (lines.next(), lines.next(), lines.next())
        {
            let mut numbers = argument.split(' ').map(|field| field.parse().unwrap_or(0));
            let mut number = || numbers.next().unwrap_or(0_u32);
            let reply = match command.as_str() {
                "l" => {
                    let ticket = self.enqueue(&key);
                    self.wait("ok", &key, ticket, connection, number(), number())
                }
                "e" => self.enter(&key, connection, number(), &mut places),
                "w" => match places.remove(&key) {
                    Some((_, _, Some(grant))) if self.fault != Fault::OtherToken => grant,
                    Some((_, _, Some(_))) => "ok ffffffffffffffffffffffffffffffff 33".to_owned(),
                    Some((ticket, lease, None)) => {
                        self.wait("ok", &key, ticket, connection, number(), lease)
                    }
                    None => "error_not_enqueued".to_owned(),
                },
                "r" => self.release(&key, &argument),
                _ => "error".to_owned(),
            };
            let sent = (&*stream).write_all((reply + "\n").as_bytes());
            if sent.is_err() || self.fault == Fault::HangUp {
                break;
            }
        }
        self.end(connection);
    }

    fn enqueue(&self, key: &str) -> u64 {
        let mut table = self.table();
        table.last += 1;
        let ticket = table.last;
        table.keys.entry(key.to_owned()).or_default().queue.push_back(ticket);
        ticket
    }

    fn enter(
        &self,
        key: &str,
        connection: u64,
        lease: u32,
        places: &mut HashMap<String, (u64, u32, Option<String>)>,
    ) -> String {
        let ticket = self.enqueue(key);
        let grant = self.attempt(&mut self.table(), "ok", key, ticket, connection, lease);
        let reply = match &grant {
            Some(grant) => grant.replacen("ok", "acquired", 1),
            None => "queued".to_owned(),
        };
        places.insert(key.to_owned(), (ticket, lease, grant));
        reply
    }

    fn wait(
        &self,
        word: &str,
        key: &str,
        ticket: u64,
        by: u64,
        timeout: u32,
        lease: u32,
    ) -> String {
        let deadline = Instant::now() + Duration::from_secs(timeout.into());
        let mut table = self.table();
        loop {
            if let Some(grant) = self.attempt(&mut table, word, key, ticket, by, lease) {
                return grant;
            }
            let entry = table.keys.get_mut(key).expect("enqueued");
            let until = entry.holder.as_ref().map_or(deadline, |holder| holder.until.min(deadline));
            if Instant::now() >= deadline {
                entry.queue.retain(|other| *other != ticket);
                return "timeout".to_owned();
            }
            let pause = until.saturating_duration_since(Instant::now());
            table = self.changed.wait_timeout(table, pause).expect("no thread panics").0;
        }
    }

    fn attempt(
        &self,
        table: &mut Table,
        word: &str,
        key: &str,
        ticket: u64,
        connection: u64,
        lease: u32,
    ) -> Option<String> {
        let now = Instant::now();
        let entry = table.keys.get_mut(key)?;
        let held = entry.holder.as_ref().is_some_and(|holder| holder.until > now);
        if (held && self.fault != Fault::NoExclusion) || entry.queue.front() != Some(&ticket) {
            return None;
        }
        entry.queue.pop_front();
        table.last += 1;
        let fence = if self.fault == Fault::SameFence { 1 } else { table.last };
        let mut token = format!("{fence:016x}{:016x}", 0xabc_u64);
        if self.fault == Fault::Capitals {
            token.make_ascii_uppercase();
        }
        let share = if self.fault == Fault::EarlyExpiry { 0.5 } else { 1.0 };
        let until = now + Duration::from_secs(lease.into()).mul_f64(share);
        entry.holder = Some(Holder { token: token.clone(), connection, until });
        self.changed.notify_all();
        let lease = if self.fault == Fault::OtherLease { lease + 1 } else { lease };
        let mut grant = format!("{word} {token} {lease}");
        if self.fault == Fault::FourthField {
            write!(grant, " 1").expect("a string takes it");
        }
        Some(grant)
    }

    fn release(&self, key: &str, token: &str) -> String {
        let mut table = self.table();
        let Some(entry) = table.keys.get_mut(key) else { return "error".to_owned() };
        let known = entry.holder.as_ref().is_some_and(|holder| holder.token == token);
        if !known || self.fault == Fault::NoRelease {
            return "error".to_owned();
        }
        entry.holder = None;
        self.changed.notify_all();
        "ok".to_owned()
    }

    fn end(&self, connection: u64) {
        for entry in self.table().keys.values_mut() {
            entry.holder.take_if(|holder| holder.connection == connection);
        }
        self.changed.notify_all();
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().expect("no thread panics")
    }
}
