//! Recent events per key, kept in memory for operators: the last few events of the most recently used keys.

use std::collections::{HashMap, VecDeque};

use serde_json::{Value, json};
use tenure_core::Time;
use tenure_core::table::KeySpace;

/// Maximum number of keys per generation. With two generations, the history keeps the events of at least this number of
/// most recently used keys, and of at most twice as many.
const KEYS_PER_GENERATION: usize = 2_048;
/// Maximum length of an event's text, in characters.
const MAX_TEXT_CHARS: usize = 400;

/// An event of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistoryEvent {
    /// Time of the event, in milliseconds since 1970.
    pub at: u64,
    /// Kind of the event.
    pub kind: HistoryEventKind,
    /// Fencing number of the hold concerned; 0 for events of a waiter.
    pub number: u64,
    /// Identity of the client for `Waiting`, `Granted` and `GaveUp`; the operator's reason for `Broken` and
    /// `HandoffRequested`; otherwise empty.
    pub text: Box<str>,
}

/// Kinds of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HistoryEventKind {
    /// A claim joined the queue.
    Waiting,
    /// A hold was granted.
    Granted,
    /// A hold was released.
    Released,
    /// The lease of a hold expired.
    Expired,
    /// An operator broke a hold.
    Broken,
    /// A hold ended with the connection it was granted to.
    Disconnected,
    /// A two-phase claim was abandoned after it was granted.
    Abandoned,
    /// A waiter left the queue or timed out.
    GaveUp,
    /// An operator asked the holder to release.
    HandoffRequested,
}

impl HistoryEventKind {
    const ALL: [(Self, &'static str); 9] = [
        (Self::Waiting, "waiting"),
        (Self::Granted, "granted"),
        (Self::Released, "released"),
        (Self::Expired, "expired"),
        (Self::Broken, "broken"),
        (Self::Disconnected, "disconnected"),
        (Self::Abandoned, "abandoned"),
        (Self::GaveUp, "gave_up"),
        (Self::HandoffRequested, "handoff_requested"),
    ];

    /// Name of the kind, as in JSON.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(kind, _)| *kind == self).map_or("", |(_, name)| name)
    }

    fn parse(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, known)| *known == name).map(|(kind, _)| *kind)
    }
}

type HistoryKey = (KeySpace, Box<[u8]>);
type EventRing = VecDeque<HistoryEvent>;

/// Events of the most recently used keys, in two generations.
///
/// When `recent` is full it becomes `older`, and the former `older` is dropped. A key that is used again moves from
/// `older` to `recent`. This approximates a least-recently-used cache without a list of keys in order of use.
#[derive(Debug, Default)]
pub(super) struct History {
    /// Maximum number of events per key; 0 if no history is kept.
    max_events: usize,
    /// Milliseconds since 1970 at the origin of the engine's clock.
    origin: u64,
    recent: HashMap<HistoryKey, EventRing>,
    older: HashMap<HistoryKey, EventRing>,
}

impl History {
    pub(super) fn enable(&mut self, max_events: usize, origin: u64) {
        (self.max_events, self.origin) = (max_events, origin);
    }

    pub(super) fn is_enabled(&self) -> bool {
        self.max_events > 0
    }

    pub(super) fn add(
        &mut self,
        (space, key): (KeySpace, &[u8]),
        kind: HistoryEventKind,
        number: u64,
        text: &str,
        now: Time,
    ) {
        if self.max_events == 0 {
            return;
        }
        let at = self.origin.saturating_add(now.as_nanos() / 1_000_000);
        let text: String = text.chars().take(MAX_TEXT_CHARS).collect();
        let (max_events, ring) = (self.max_events, self.ring((space, key.into())));
        if ring.len() >= max_events {
            ring.pop_front();
        }
        ring.push_back(HistoryEvent { at, kind, number, text: text.into() });
    }

    fn ring(&mut self, key: HistoryKey) -> &mut EventRing {
        if !self.recent.contains_key(&key) {
            if self.recent.len() >= KEYS_PER_GENERATION {
                self.older = std::mem::take(&mut self.recent);
            }
            let ring = self.older.remove(&key).unwrap_or_default();
            self.recent.insert(key.clone(), ring);
        }
        self.recent.entry(key).or_default()
    }

    pub(super) fn events_of(&self, space: KeySpace, key: &[u8]) -> Vec<HistoryEvent> {
        let key = (space, key.into());
        let ring = self.recent.get(&key).or_else(|| self.older.get(&key));
        ring.into_iter().flatten().cloned().collect()
    }

    /// Serializes all events as JSON lines, one line per key, the most recently used key last.
    pub(super) fn to_json_lines(&self) -> String {
        let mut rings: Vec<_> = self.older.iter().chain(&self.recent).collect();
        rings.sort_by_key(|((_, key), ring)| (ring.back().map(|last| last.at), key.clone()));
        let line = |((space, key), ring): (&HistoryKey, &EventRing)| {
            let events: Vec<Value> = ring.iter().map(event_json).collect();
            let key: Vec<u8> = key.to_vec();
            let is_semaphore = *space == KeySpace::Semaphore;
            format!("{}\n", json!({ "key": key, "slots": is_semaphore, "events": events }))
        };
        rings.into_iter().map(line).collect()
    }

    /// Adds events that [`to_json_lines`](Self::to_json_lines) serialized. Invalid lines are skipped: no lock depends on the history.
    pub(super) fn add_json_lines(&mut self, text: &str) {
        if self.max_events == 0 {
            return;
        }
        for line in text.lines() {
            let Ok(value) = serde_json::from_str::<Value>(line) else { continue };
            let bytes = value["key"].as_array().map(|bytes| {
                bytes.iter().filter_map(|byte| u8::try_from(byte.as_u64()?).ok()).collect()
            });
            let Some(key): Option<Box<[u8]>> = bytes else { continue };
            let is_semaphore = value["slots"].as_bool().unwrap_or(false);
            let space = if is_semaphore { KeySpace::Semaphore } else { KeySpace::Lock };
            let events = value["events"].as_array().into_iter().flatten().filter_map(parse_event);
            let max_events = self.max_events;
            let ring = self.ring((space, key));
            ring.extend(events);
            while ring.len() > max_events {
                ring.pop_front();
            }
        }
    }
}

/// JSON of an event, as in replies and in the history file.
pub(super) fn event_json(event: &HistoryEvent) -> Value {
    let HistoryEvent { at, kind, number, text } = event;
    json!({ "at": at, "what": kind.name(), "fence": number.to_string(), "text": text })
}

fn parse_event(value: &Value) -> Option<HistoryEvent> {
    Some(HistoryEvent {
        at: value["at"].as_u64()?,
        kind: HistoryEventKind::parse(value["what"].as_str()?)?,
        number: value["fence"].as_str()?.parse().ok()?,
        text: value["text"].as_str()?.into(),
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    fn numbers(history: &History, key: &[u8]) -> Vec<u64> {
        history.events_of(KeySpace::Lock, key).iter().map(|event| event.number).collect()
    }

    #[test]
    fn a_key_has_its_last_events_and_no_more() {
        let mut history = History::default();
        history.add((KeySpace::Lock, b"a"), HistoryEventKind::Granted, 1, "x", at(1));
        assert!(numbers(&history, b"a").is_empty(), "no history unless it is enabled");
        history.enable(3, 1_000);
        for number in 1..=5 {
            history.add((KeySpace::Lock, b"a"), HistoryEventKind::Granted, number, "x", at(number));
        }
        assert_eq!(numbers(&history, b"a"), [3, 4, 5]);
        assert_eq!(history.events_of(KeySpace::Lock, b"a")[0].at, 1_003);
        assert_eq!(history.events_of(KeySpace::Semaphore, b"a"), []);
    }

    #[test]
    fn the_keys_used_last_are_remembered_and_their_number_is_bounded() {
        let mut history = History::default();
        history.enable(2, 0);
        for number in 0..20_000_u64 {
            let key = number.to_be_bytes();
            history.add((KeySpace::Lock, &key), HistoryEventKind::Granted, number, "", at(number));
            history.add(
                (KeySpace::Lock, b"busy"),
                HistoryEventKind::Granted,
                number,
                "",
                at(number),
            );
            assert!(history.recent.len() + history.older.len() <= 2 * KEYS_PER_GENERATION + 1);
        }
        assert_eq!(numbers(&history, b"busy"), [19_998, 19_999]);
        assert_eq!(numbers(&history, &19_000_u64.to_be_bytes()), [19_000]);
        assert!(numbers(&history, &0_u64.to_be_bytes()).is_empty());
    }

    #[test]
    fn written_history_reads_back_and_invalid_lines_are_skipped() {
        let mut history = History::default();
        history.enable(4, 7);
        history.add((KeySpace::Lock, b"a\xff"), HistoryEventKind::Granted, 9, "web-1 \"x\"", at(5));
        history.add((KeySpace::Lock, b"a\xff"), HistoryEventKind::Broken, 9, "stuck", at(6));
        history.add((KeySpace::Semaphore, b"a\xff"), HistoryEventKind::Waiting, 0, "", at(6));
        let text = history.to_json_lines();
        let mut restored = History::default();
        restored.enable(4, 0);
        restored
            .add_json_lines(&format!("rubbish\n{{}}\n{text}{{\"key\":[1],\"events\":[{{}}]}}\n"));
        for space in [KeySpace::Lock, KeySpace::Semaphore] {
            assert_eq!(restored.events_of(space, b"a\xff"), history.events_of(space, b"a\xff"));
        }
    }
}
