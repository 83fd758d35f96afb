//! `stats`: all keys in one line, told bit by bit so that a large table holds nobody up.

use std::fmt::{self, Write as _};
use std::time::Duration;

use tenure_core::Time;
use tenure_core::table::{KeySpace, Owner, Summary};

use super::Engine;
use super::connection::ConnectionState;

/// How much of the table is looked at before others have their turn.
const SLOTS_PER_SLICE: usize = 1024;

/// How far the answer has come.
#[derive(Debug)]
pub(super) struct LongReply {
    /// Which of the four lists.
    section: usize,
    /// How far through the table.
    from: usize,
    /// Whether the list has nothing yet.
    first: bool,
    begun: bool,
    connections: usize,
}

impl LongReply {
    pub(super) fn new(connections: usize) -> Self {
        Self { section: 0, from: 0, first: true, begun: false, connections }
    }

    /// Nothing more to tell, only to wait until what was said is read.
    pub(super) fn pause() -> Self {
        Self { section: SECTIONS.len() + 1, begun: true, ..Self::new(0) }
    }
}

const SECTIONS: [(&str, KeySpace, bool); 4] = [
    ("locks", KeySpace::Lock, false),
    ("semaphores", KeySpace::Semaphore, false),
    ("idle_locks", KeySpace::Lock, true),
    ("idle_semaphores", KeySpace::Semaphore, true),
];

impl Engine {
    /// Tells the next slice of a long answer, and whether it was the last.
    pub(super) fn continue_long_reply(&mut self, owner: Owner, now: Time) -> bool {
        let Some(connection) = self.connection_mut(owner) else { return false };
        let ConnectionState::LongReply(telling) = &mut connection.state else { return false };
        let mut reply = std::mem::replace(&mut **telling, LongReply::new(0));
        let mut text = String::new();
        let done = self.write_slice(&mut reply, &mut text, now);
        self.out.bytes.extend_from_slice(text.as_bytes());
        let Some(connection) = self.connection_mut(owner) else { return false };
        if !done {
            connection.state = ConnectionState::LongReply(Box::new(reply));
            return false;
        }
        connection.state = ConnectionState::Ready;
        if let Some(extension) = &mut connection.extension {
            let later = std::mem::take(&mut extension.deferred_pushes);
            self.out.bytes.extend_from_slice(&later);
        }
        true
    }

    fn write_slice(&self, reply: &mut LongReply, text: &mut String, now: Time) -> bool {
        if reply.section > SECTIONS.len() {
            return true;
        }
        if !reply.begun {
            reply.begun = true;
            put(text, format_args!("{{\"connections\":{}", reply.connections));
        }
        while let Some((name, space, idle)) = SECTIONS.get(reply.section).copied() {
            if reply.from == 0 {
                put(text, format_args!(",\"{name}\":["));
            }
            let (keys, next) = self.table.page(reply.from, SLOTS_PER_SLICE);
            for (of, key) in &keys {
                if *of == space && key.idle_since.is_some() == idle {
                    if !std::mem::take(&mut reply.first) {
                        text.push(',');
                    }
                    describe(text, key, now);
                }
            }
            if let Some(next) = next {
                reply.from = next;
                return false;
            }
            text.push(']');
            *reply = LongReply { section: reply.section + 1, from: 0, first: true, ..*reply };
        }
        text.push_str("}\n");
        true
    }
}

fn describe(text: &mut String, key: &Summary, now: Time) {
    let name = serde_json::Value::from(String::from_utf8_lossy(&key.key));
    put(text, format_args!("{{\"key\":{name}"));
    match (key.idle_since, key.limit, &key.first) {
        (Some(since), _, _) => {
            put(text, format_args!(",\"idle_s\":{:.3}", now.since(since).as_secs_f64()));
        }
        (None, Some(limit), _) => {
            let Summary { holders, waiters, .. } = key;
            put(
                text,
                format_args!(",\"limit\":{limit},\"holders\":{holders},\"waiters\":{waiters}"),
            );
        }
        (None, None, first) => {
            let owner = first.as_ref().and_then(|holder| holder.owner).map_or(0, Owner::id);
            let left = first.as_ref().map_or(Duration::ZERO, |holder| holder.ends.since(now));
            let (left, waiters) = (left.as_secs_f64(), key.waiters);
            put(
                text,
                format_args!(
                    ",\"owner_conn_id\":{owner},\"lease_expires_in_s\":{left:.3},\"waiters\":{waiters}"
                ),
            );
        }
    }
    text.push('}');
}

fn put(text: &mut String, what: fmt::Arguments<'_>) {
    text.write_fmt(what).expect("a text takes whatever is written to it");
}
