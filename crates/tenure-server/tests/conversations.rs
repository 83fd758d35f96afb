//! Conversations with the engine in logical time, each a file that reads without Rust.
//!
//! | line | means |
//! |---|---|
//! | `server NAME=VALUE …` | settings, before anything else |
//! | `a> l k 10 33` | `a` asks: command, key, argument; a name that is new connects first |
//! | `a>> l\nk\n10` | `a` sends these bytes and no more; `\n \r \t \xNN` and `{x*300}` are understood |
//! | `a< ok T1 33` | what `a` is told. `T1` is a token and `F1` its number: the same each time; `*` is any text |
//! | `a< (parting)`, `a< (closed)` | the server ends the connection for writing, closes it |
//! | `a connects`, `a connects from ADDRESS`, `a is turned away` | |
//! | `a hangs up`, `a breaks` | FIN, RST |
//! | `a stops reading`, `a reads` | replies pile up, go on |
//! | `at 5s` | the time from the start; all timers go off in order |
//! | `late 5s` | the same, but the timers have not gone off yet |
//! | `timers` | now they do |
//! | `history N` | remembers N events of each key from here on |
//! | `drain`, `secret NEW` | commands of the operator |
//!
//! What is told has to follow the line that caused it: nothing may be unread when the next one is carried out.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::IpAddr;
use std::time::Duration;

use tenure_core::table::Owner;
use tenure_core::{LockToken, Time};
use tenure_server::{Engine, Hangup, Settings};

#[test]
fn conversations() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/conversations");
    let mut files: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
    files.sort();
    let only = std::env::var("CONVERSATION").unwrap_or_default();
    let mut failed = 0;
    for path in files.iter().filter(|path| path.to_str().unwrap().contains(&only)) {
        let text = std::fs::read_to_string(path).unwrap();
        let name = path.file_name().unwrap().to_str().unwrap();
        for conversation in conversations_of(&text) {
            // One that fails does not hide the others; its panic has said where.
            failed += usize::from(std::panic::catch_unwind(|| hold(name, &conversation)).is_err());
        }
    }
    assert_eq!(failed, 0, "conversations failed, see above");
    assert!(files.len() >= 6, "the conversations are there");
}

fn hold(file: &str, conversation: &[(usize, &str)]) {
    let mut scene = Scene::default();
    for (number, line) in conversation {
        scene.place = format!("{file}:{number}: {line}");
        scene.line(line);
    }
    scene.place += " (end)";
    scene.nothing_is_unread();
}

/// Conversations of one file begin with a line of `=` and a title each.
fn conversations_of(text: &str) -> Vec<Vec<(usize, &str)>> {
    let mut all: Vec<Vec<(usize, &str)>> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        if line.starts_with("==") {
            all.push(Vec::new());
        } else if let Some(lines) = all.last_mut()
            && !line.trim().is_empty()
            && !line.starts_with('#')
        {
            lines.push((number, line));
        }
    }
    all
}

#[derive(Default)]
struct Scene {
    engine: Option<Engine>,
    settings: Settings,
    secret: Option<String>,
    now: Time,
    peers: BTreeMap<String, Peer>,
    names: HashMap<Owner, String>,
    tokens: HashMap<String, LockToken>,
    place: String,
}

struct Peer {
    owner: Owner,
    partial: Vec<u8>,
    inbox: VecDeque<String>,
    reads: bool,
}

impl Scene {
    fn line(&mut self, line: &str) {
        let (subject, rest) = line.split_once(' ').unwrap_or((line, ""));
        if let Some(name) = subject.strip_suffix('<') {
            return self.expect(name, rest);
        }
        self.nothing_is_unread();
        match (subject, rest) {
            ("server", rest) => return rest.split(' ').for_each(|setting| self.set(setting)),
            ("at", time) => self.pass(Time::ZERO + span(time)),
            ("late", time) => self.now = Time::ZERO + span(time),
            ("timers", "") => self.pass(self.now),
            ("drain", "") => {
                let now = self.now;
                self.engine().drain(now);
            }
            ("history", most) => {
                let now = self.now;
                self.engine().keep_history(most.parse().unwrap(), 1_000, "", now);
            }
            ("secret", secret) => self.engine().set_secret(Some(secret.as_bytes())),
            (name, rest) => match (name.strip_suffix(">>"), name.strip_suffix('>')) {
                (Some(name), _) => self.send(name, &raw(&self.substitute(rest))),
                (None, Some(name)) => self.ask(name, rest),
                (None, None) => self.happens(name, rest),
            },
        }
        self.deliver();
        self.engine().check();
    }

    fn set(&mut self, setting: &str) {
        let (name, value) = setting.split_once('=').unwrap();
        let number = || value.parse::<usize>().unwrap();
        let timeout = || Some(span(value)).filter(|span| !span.is_zero());
        let settings = &mut self.settings;
        match name {
            "secret" => self.secret = Some(value.to_owned()),
            "default_lease" => settings.default_lease = span(value),
            "max_lease" => settings.max_lease = span(value),
            "auto_release" => settings.auto_release = value.parse().unwrap(),
            "read_timeout" => settings.read_timeout = timeout(),
            "write_timeout" => settings.write_timeout = timeout(),
            "max_connections" => settings.max_connections = number(),
            "max_connections_per_peer" => settings.max_connections_per_peer = number(),
            "max_auth_failures" => settings.max_auth_failures = value.parse().unwrap(),
            "max_claims" => settings.max_claims_per_connection = number(),
            "max_watches" => settings.max_watches_per_connection = number(),
            "max_locks" => settings.table.max_keys = number(),
            "max_waiters" => settings.table.max_waiters_per_key = number(),
            "max_idle" => settings.table.max_idle = span(value),
            _ => panic!("{}: no such setting: {name}", self.place),
        }
    }

    fn engine(&mut self) -> &mut Engine {
        let (settings, secret) = (&self.settings, &self.secret);
        self.engine.get_or_insert_with(|| {
            Engine::new(settings.clone(), secret.as_ref().map(String::as_bytes), 0xabc, 1)
        })
    }

    fn connect(&mut self, name: &str, from: Option<IpAddr>) -> bool {
        let now = self.now;
        let Some(owner) = self.engine().open(from, now) else { return false };
        let peer = Peer { owner, partial: Vec::new(), inbox: VecDeque::new(), reads: true };
        self.peers.insert(name.to_owned(), peer);
        self.names.insert(owner, name.to_owned());
        true
    }

    fn ask(&mut self, name: &str, rest: &str) {
        let rest = self.substitute(rest);
        let mut parts = rest.splitn(3, ' ');
        let mut part = || parts.next().unwrap_or_default().to_owned();
        let (command, key, argument) = (part(), part(), part());
        self.send(name, &raw(&format!("{command}\\n{key}\\n{argument}\\n")));
    }

    fn send(&mut self, name: &str, bytes: &[u8]) {
        if !self.peers.contains_key(name) {
            assert!(self.connect(name, None), "{}: {name} is turned away", self.place);
        }
        let (owner, now) = (self.peers[name].owner, self.now);
        self.engine().receive(owner, bytes, now);
    }

    fn happens(&mut self, name: &str, what: &str) {
        let now = self.now;
        match what {
            "connects" => assert!(self.connect(name, None), "{}", self.place),
            "is turned away" => assert!(!self.connect(name, None), "{}", self.place),
            "hangs up" | "breaks" => {
                let owner = self.peers.remove(name).unwrap().owner;
                let how = if what == "breaks" { Hangup::Aborted } else { Hangup::Finished };
                self.engine().hang_up(owner, how, now);
            }
            "stops reading" => self.peers.get_mut(name).unwrap().reads = false,
            "reads" => {
                let peer = self.peers.get_mut(name).unwrap();
                peer.reads = true;
                let owner = peer.owner;
                let lines = std::mem::take(&mut peer.partial);
                peer.take(&lines);
                self.engine().write_done(owner, now);
            }
            other => {
                let (verb, address) = other.rsplit_once(' ').unwrap();
                let address = Some(address.parse().unwrap());
                match verb {
                    "connects from" => assert!(self.connect(name, address), "{}", self.place),
                    "is turned away from" => {
                        assert!(!self.connect(name, address), "{}", self.place);
                    }
                    _ => panic!("{}: what is that?", self.place),
                }
            }
        }
    }

    fn pass(&mut self, until: Time) {
        assert!(until >= self.now, "{}: time goes on", self.place);
        while let Some(due) = self.engine().poll_timeout().filter(|due| *due <= until) {
            self.now = self.now.max(due);
            let now = self.now;
            self.engine().handle_timeout(now);
            let next = self.engine().poll_timeout();
            assert!(next.is_none_or(|next| next > now), "{}: a busy loop", self.place);
            self.deliver();
        }
        self.now = until;
    }

    /// Takes what the engine has to say, as a driver would.
    fn deliver(&mut self) {
        loop {
            let now = self.now;
            let engine = self.engine.as_mut().unwrap();
            engine.commit().unwrap();
            let (out, segments) = engine.output();
            let mut count = 0;
            let mut told = Vec::new();
            for segment in segments {
                let peer = self.names.get(&segment.to).and_then(|name| self.peers.get_mut(name));
                let peer = peer.unwrap_or_else(|| panic!("{}: told to nobody", self.place));
                assert_eq!(peer.owner, segment.to, "{}: of a former connection", self.place);
                peer.partial.extend_from_slice(&out[segment.bytes.clone()]);
                count += segment.bytes.len();
                told.push((segment.to, peer.reads));
                if peer.reads {
                    let lines = std::mem::take(&mut peer.partial);
                    peer.take(&lines);
                }
            }
            assert_eq!(count, out.len(), "{}: bytes for nobody", self.place);
            engine.clear_output();
            while engine.poll_resumed().is_some() {}
            let idle = told.is_empty();
            let mut over = Vec::new();
            while let Some(owner) = engine.poll_close() {
                let Some(peer) = self.names.get(&owner).and_then(|name| self.peers.get_mut(name))
                else {
                    continue;
                };
                let is_over = engine.must_close(owner, now);
                peer.inbox.push_back(if is_over { "(closed)" } else { "(parting)" }.to_owned());
                over.extend(is_over.then_some(owner));
            }
            for owner in over {
                engine.hang_up(owner, Hangup::Aborted, now);
            }
            for (owner, reads) in told {
                if reads { engine.write_done(owner, now) } else { engine.write_blocked(owner, now) }
            }
            if idle && engine.output().1.is_empty() {
                return;
            }
        }
    }

    fn expect(&mut self, name: &str, expected: &str) {
        let place = &self.place;
        let inbox = &mut self.peers.get_mut(name).unwrap().inbox;
        let said = inbox.pop_front().unwrap_or_else(|| panic!("{place}: nothing was said"));
        let (mut wanted, mut given) = (expected.split(' '), said.split(' '));
        loop {
            match (wanted.next(), given.next()) {
                (None, None) => return,
                (Some("*"), _) if wanted.clone().next().is_none() => return,
                (Some(want), Some(got)) if self.tokens_match(want, got) || matches(want, got) => {}
                _ => panic!("{}: said was {said:?}", self.place),
            }
        }
    }

    /// A token or a number that is known must be the same; one that is new is larger than all before.
    fn tokens_match(&mut self, want: &str, got: &str) -> bool {
        let named = |prefix| want.strip_prefix(prefix).is_some_and(is_number);
        if named('F') {
            return self.tokens[&want.replace('F', "T")].number().to_string() == got;
        }
        let Some(token) = LockToken::from_hex(got.as_bytes()).filter(|_| named('T')) else {
            return false;
        };
        if let Some(known) = self.tokens.get(want) {
            return *known == token;
        }
        let largest = self.tokens.values().map(|token| token.number()).max().unwrap_or(0);
        assert!(token.number() > largest, "{}: a number that does not grow", self.place);
        self.tokens.insert(want.to_owned(), token);
        true
    }

    fn substitute(&self, text: &str) -> String {
        let words = text.split(' ').map(|word| match self.tokens.get(word) {
            Some(token) => token.to_string(),
            None => match self.tokens.get(&word.replacen('F', "T", 1)) {
                Some(token) if word.starts_with('F') => token.number().to_string(),
                _ => word.to_owned(),
            },
        });
        words.collect::<Vec<_>>().join(" ")
    }

    fn nothing_is_unread(&self) {
        for (name, peer) in &self.peers {
            assert!(peer.inbox.is_empty(), "{}: {name} was told {:?}", self.place, peer.inbox);
        }
    }
}

impl Peer {
    /// Whole lines into the inbox, what is left of one kept.
    fn take(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            self.inbox.push_back(String::from_utf8_lossy(&rest[..end]).into_owned());
            rest = &rest[end + 1..];
        }
        self.partial = rest.to_vec();
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Whether a text is as expected, where `*` stands for any text.
fn matches(want: &str, got: &str) -> bool {
    let Some((before, after)) = want.split_once('*') else { return want == got };
    let Some(rest) = got.strip_prefix(before) else { return false };
    (0..=rest.len()).any(|at| rest.is_char_boundary(at) && matches(after, &rest[at..]))
}

fn span(text: &str) -> Duration {
    let (number, unit) = text.split_at(text.find(|c: char| c.is_alphabetic()).unwrap());
    let number: u64 = number.parse().unwrap();
    match unit {
        "ns" => Duration::from_nanos(number),
        "ms" => Duration::from_millis(number),
        "s" => Duration::from_secs(number),
        _ => panic!("no unit of time: {text}"),
    }
}

/// Bytes as a conversation writes them.
fn raw(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        rest = &rest[first.len_utf8()..];
        match first {
            '\\' => {
                let (escape, after) = rest.split_at(1);
                rest = after;
                bytes.push(match escape {
                    "n" => b'\n',
                    "r" => b'\r',
                    "t" => b'\t',
                    "x" => {
                        let (digits, after) = rest.split_at(2);
                        rest = after;
                        u8::from_str_radix(digits, 16).unwrap()
                    }
                    _ => panic!("no such escape in {text:?}"),
                });
            }
            '{' if rest.contains('*') && !rest.starts_with('"') && !rest.starts_with('}') => {
                let (group, after) = rest.split_once('}').unwrap();
                let (what, times) = group.rsplit_once('*').unwrap();
                rest = after;
                bytes.extend(raw(what).repeat(times.parse().unwrap()));
            }
            other => bytes.extend_from_slice(other.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    bytes
}
