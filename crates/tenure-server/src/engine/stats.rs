//! `stats`: all keys in one line of JSON, written in slices so that a large table does not delay other requests.

use std::fmt::{self, Write as _};
use std::time::Duration;

use tenure_core::Time;
use tenure_core::table::{Owner, Summary};

use super::Engine;
use super::connection::ConnectionState;
use super::long_reply::{LongReply, SECTIONS};

/// Table slots visited per slice. Between two slices other connections are served.
const SLOTS_PER_SLICE: usize = 1024;

impl Engine {
    /// Writes the next slice of a long reply. True if it was the last: the connection is then ready.
    pub(super) fn continue_long_reply(&mut self, owner: Owner, now: Time) -> bool {
        let Some(connection) = self.connections.get_mut(owner) else { return false };
        let ConnectionState::LongReply(state) = &mut connection.state else { return false };
        let mut reply = std::mem::replace(&mut **state, LongReply::new(0));
        let mut text = String::new();
        let done = self.write_slice(&mut reply, &mut text, now);
        self.out.bytes.extend_from_slice(text.as_bytes());
        let Some(connection) = self.connections.get_mut(owner) else { return false };
        if !done {
            connection.state = ConnectionState::LongReply(Box::new(reply));
            return false;
        }
        connection.state = ConnectionState::Ready;
        if let Some(extension) = &mut connection.extension {
            let deferred = std::mem::take(&mut extension.deferred_pushes);
            self.out.bytes.extend_from_slice(&deferred);
        }
        true
    }

    /// Appends the next slice to `text`. True if it was the last.
    fn write_slice(&self, reply: &mut LongReply, text: &mut String, now: Time) -> bool {
        if reply.section > SECTIONS.len() {
            return true;
        }
        if !reply.begun {
            reply.begun = true;
            put(text, format_args!("{{\"connections\":{}", reply.connections));
        }
        while let Some((name, space, idle)) = SECTIONS.get(reply.section).copied() {
            if reply.next_slot == 0 {
                put(text, format_args!(",\"{name}\":["));
            }
            let (keys, next) = self.locks.table().page(reply.next_slot, SLOTS_PER_SLICE);
            for (key_space, summary) in &keys {
                if *key_space == space && summary.idle_since.is_some() == idle {
                    if !std::mem::take(&mut reply.section_is_empty) {
                        text.push(',');
                    }
                    put_key(text, summary, now);
                }
            }
            if let Some(next) = next {
                reply.next_slot = next;
                return false;
            }
            text.push(']');
            *reply = LongReply {
                section: reply.section + 1,
                next_slot: 0,
                section_is_empty: true,
                ..*reply
            };
        }
        text.push_str("}\n");
        true
    }
}

fn put_key(text: &mut String, key: &Summary, now: Time) {
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

fn put(text: &mut String, arguments: fmt::Arguments<'_>) {
    text.write_fmt(arguments).expect("writing to a String cannot fail");
}
