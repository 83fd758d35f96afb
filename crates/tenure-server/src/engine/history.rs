//! What happened to each key of late: a few events of the keys that were used last, for people who ask afterwards.

use std::collections::{HashMap, VecDeque};

use serde_json::{Value, json};
use tenure_core::Time;
use tenure_core::table::{Ending, KeySpace};

/// As many keys are remembered at least, and twice as many at most: those that something happened to last.
const KEYS_PER_GENERATION: usize = 2_048;
/// The longest text of who or why.
const MAX_TEXT_CHARS: usize = 400;

/// Something that happened to a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistoryEvent {
    /// When, in milliseconds since 1970.
    pub at: u64,
    /// What.
    pub kind: HistoryEventKind,
    /// The fencing number of the hold that it happened to; 0 for who waits.
    pub number: u64,
    /// Who was granted it or waits, or why it was broken or asked for.
    pub text: Box<str>,
}

/// What can happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HistoryEventKind {
    /// Somebody waits.
    Waiting,
    /// Somebody has it.
    Granted,
    /// It was released.
    Released,
    /// Its lease was over.
    Expired,
    /// It was broken by hand.
    Broken,
    /// The connection that it lived on ended.
    Disconnected,
    /// It was granted to a claim that was given up.
    Abandoned,
    /// Somebody no longer waits.
    GaveUp,
    /// Its holder was asked by hand to give it up.
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

    /// The word for it.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(what, _)| *what == self).map_or("", |(_, word)| word)
    }

    fn parse(word: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, known)| *known == word).map(|(what, _)| *what)
    }
}

impl From<Ending> for HistoryEventKind {
    fn from(how: Ending) -> Self {
        match how {
            Ending::Expired => Self::Expired,
            Ending::Evicted => Self::Broken,
            Ending::Disconnected => Self::Disconnected,
            Ending::Abandoned => Self::Abandoned,
        }
    }
}

type HistoryKey = (KeySpace, Box<[u8]>);
type EventRing = VecDeque<HistoryEvent>;

/// The events of the keys that were used last.
#[derive(Debug, Default)]
pub(super) struct History {
    /// How many events of a key; zero where nothing is remembered.
    max_events: usize,
    /// Milliseconds since 1970 at the origin of the engine's clock.
    origin: u64,
    /// Keys that something happened to of late, and those before them. When the first are too many they become the
    /// second, and the second are forgotten: nobody has to keep an order.
    recent: HashMap<HistoryKey, EventRing>,
    older: HashMap<HistoryKey, EventRing>,
    /// Why the hold is broken that is about to be.
    pub(super) reason: Box<str>,
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
        let (most, ring) = (self.max_events, self.ring((space, key.into())));
        if ring.len() >= most {
            ring.pop_front();
        }
        ring.push_back(HistoryEvent { at, kind, number, text: text.into() });
    }

    fn ring(&mut self, of: HistoryKey) -> &mut EventRing {
        if !self.recent.contains_key(&of) {
            if self.recent.len() >= KEYS_PER_GENERATION {
                self.older = std::mem::take(&mut self.recent);
            }
            let ring = self.older.remove(&of).unwrap_or_default();
            self.recent.insert(of.clone(), ring);
        }
        self.recent.entry(of).or_default()
    }

    pub(super) fn of(&self, space: KeySpace, key: &[u8]) -> Vec<HistoryEvent> {
        let of = (space, key.into());
        let ring = self.recent.get(&of).or_else(|| self.older.get(&of));
        ring.into_iter().flatten().cloned().collect()
    }

    /// All of it as lines of text, a key each.
    pub(super) fn write(&self) -> String {
        let mut rings: Vec<_> = self.older.iter().chain(&self.recent).collect();
        rings.sort_by_key(|((_, key), ring)| (ring.back().map(|last| last.at), key.clone()));
        let line = |((space, key), ring): (&HistoryKey, &EventRing)| {
            let events: Vec<Value> = ring.iter().map(event_json).collect();
            let key: Vec<u8> = key.to_vec();
            let slots = *space == KeySpace::Semaphore;
            format!("{}\n", json!({ "key": key, "slots": slots, "events": events }))
        };
        rings.into_iter().map(line).collect()
    }

    /// Takes up what was written. Lines that make no sense are left out: nothing depends on them.
    pub(super) fn read(&mut self, text: &str) {
        if self.max_events == 0 {
            return;
        }
        for line in text.lines() {
            let Ok(value) = serde_json::from_str::<Value>(line) else { continue };
            let bytes = value["key"].as_array().map(|bytes| {
                bytes.iter().filter_map(|byte| u8::try_from(byte.as_u64()?).ok()).collect()
            });
            let Some(key): Option<Box<[u8]>> = bytes else { continue };
            let slots = value["slots"].as_bool().unwrap_or(false);
            let space = if slots { KeySpace::Semaphore } else { KeySpace::Lock };
            let events = value["events"].as_array().into_iter().flatten().filter_map(parse_event);
            let most = self.max_events;
            let ring = self.ring((space, key));
            ring.extend(events);
            while ring.len() > most {
                ring.pop_front();
            }
        }
    }
}

/// An event, for whoever asks.
pub(super) fn event_json(happened: &HistoryEvent) -> Value {
    let HistoryEvent { at, kind, number, text } = happened;
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
        history.of(KeySpace::Lock, key).iter().map(|happened| happened.number).collect()
    }

    #[test]
    fn a_key_has_its_last_events_and_no_more() {
        let mut history = History::default();
        history.add((KeySpace::Lock, b"a"), HistoryEventKind::Granted, 1, "x", at(1));
        assert!(numbers(&history, b"a").is_empty(), "not kept unless told so");
        history.enable(3, 1_000);
        for number in 1..=5 {
            history.add((KeySpace::Lock, b"a"), HistoryEventKind::Granted, number, "x", at(number));
        }
        assert_eq!(numbers(&history, b"a"), [3, 4, 5]);
        assert_eq!(history.of(KeySpace::Lock, b"a")[0].at, 1_003);
        assert_eq!(history.of(KeySpace::Semaphore, b"a"), []);
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
        let text = history.write();
        let mut again = History::default();
        again.enable(4, 0);
        again.read(&format!("rubbish\n{{}}\n{text}{{\"key\":[1],\"events\":[{{}}]}}\n"));
        for space in [KeySpace::Lock, KeySpace::Semaphore] {
            assert_eq!(again.of(space, b"a\xff"), history.of(space, b"a\xff"));
        }
    }
}
