//! Many clients of one server, what they do, and what must be true of what they are told.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use tenure_core::table::Owner;
use tenure_core::{Random, Time};
use tenure_server::{Engine, Hangup, Settings};

use crate::Seen;
use crate::model::{Hold, How, Model, Name};
use crate::reference::{Asked, Stream};
use crate::requests;

const SECRET: &[u8] = b"hush";
const STEPS: u64 = 600;

pub(crate) struct World<'a> {
    engine: Engine,
    settings: Settings,
    secret: bool,
    /// How many events of a key are remembered.
    remembers: usize,
    draining: bool,
    now: Time,
    random: Random,
    peers: Vec<Peer>,
    model: Model,
    /// Waiting claims of our extension by id: name, mode, owner, and connection.
    claims: HashMap<Vec<u8>, (Name, How, Option<u64>, Owner)>,
    /// Claims that waited when their connection closed: perhaps granted, with no client to notify.
    orphans: HashSet<Vec<u8>>,
    /// Claims that were given up during the present call.
    given_up: HashSet<Vec<u8>>,
    /// Connections to be closed.
    over: VecDeque<Owner>,
    seen: &'a mut Seen,
    requests: u64,
}

#[expect(clippy::struct_excessive_bools, reason = "each may be so while any other is")]
struct Peer {
    owner: Owner,
    /// What it wants to send, of which parts arrive.
    unsent: Vec<u8>,
    stream: Stream,
    /// Requests that are whole, and not answered.
    asked: VecDeque<Asked>,
    partial: Vec<u8>,
    trusted: bool,
    hello: bool,
    keep: bool,
    reads: bool,
    /// It was told why it is sent away, or is.
    parting: bool,
}

/// One course of events; says how many requests were answered.
pub(crate) fn episode(course: u64, seen: &mut Seen) -> u64 {
    let mut random = Random::new(course);
    let mut settings = Settings {
        default_lease: Duration::from_secs(4),
        max_lease: Duration::from_secs(8),
        auto_release: random.chance(0.8),
        read_timeout: Some(Duration::from_secs(3)),
        write_timeout: Some(Duration::from_secs(2)),
        max_connections: 12,
        max_claims_per_connection: 3,
        max_watches_per_connection: 2,
        ..Settings::default()
    };
    settings.table.max_keys = if random.chance(0.5) { 5 } else { 1000 };
    settings.table.max_waiters_per_key = if random.chance(0.5) { 2 } else { 1000 };
    settings.table.max_idle = Duration::from_secs(random.below(3));
    let secret = random.chance(0.4);
    let mut engine = Engine::new(settings.clone(), secret.then_some(SECRET), 1, 1);
    let remembers = usize::try_from(random.below(4)).expect("it is small");
    engine.keep_history(remembers, 0, "", Time::ZERO);
    let mut world = World {
        engine,
        settings,
        secret,
        remembers,
        draining: false,
        now: Time::ZERO,
        random,
        peers: Vec::new(),
        model: Model::default(),
        claims: HashMap::new(),
        orphans: HashSet::new(),
        given_up: HashSet::new(),
        over: VecDeque::new(),
        seen,
        requests: 0,
    };
    let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| world.run()));
    if let Err(panic) = unwound {
        eprintln!("the course of seed {course} went wrong");
        std::panic::resume_unwind(panic);
    }
    world.requests
}

/// What happens.
impl World<'_> {
    fn run(&mut self) {
        for step in 0..STEPS {
            if self.peers.len() < 2 {
                self.connect();
            }
            if self.peers.is_empty() {
                break;
            }
            match self.random.below(100) {
                0..4 => self.connect(),
                4..7 => self.disconnect_random_peer(),
                7..22 => self.pass_time(),
                22..24 => self.look_away(),
                24 if step > STEPS / 2 && self.random.chance(0.1) => {
                    self.draining = true;
                    self.engine.drain(self.now);
                }
                _ => self.send(),
            }
            self.deliver();
            if self.random.chance(0.1) {
                self.engine.check();
            }
        }
        while let Some(peer) = self.peers.first() {
            let owner = peer.owner;
            self.leave(owner, Hangup::Aborted);
            self.deliver();
        }
        self.elapse(Duration::from_secs(30));
        self.engine.check();
        assert_eq!(self.engine.leftovers(), [0; 6], "all have left, and something stayed");
        assert_eq!(self.engine.poll_timeout(), None, "nothing is due any more");
    }

    fn connect(&mut self) {
        let opened = self.engine.open(None, self.now);
        let full = self.peers.len() >= self.settings.max_connections || self.draining;
        assert_eq!(opened.is_none(), full, "let in, or not");
        let Some(owner) = opened else { return };
        let mut peer = Peer {
            owner,
            unsent: Vec::new(),
            stream: Stream::default(),
            asked: VecDeque::new(),
            partial: Vec::new(),
            trusted: !self.secret,
            hello: false,
            keep: false,
            reads: true,
            parting: false,
        };
        if self.secret && self.random.chance(0.8) {
            peer.unsent.extend_from_slice(b"auth\n_\nhush\n");
        }
        self.peers.push(peer);
    }

    fn send(&mut self) {
        let at = self.random_peer();
        let peer = &mut self.peers[at];
        while peer.unsent.len() < 40 || self.random.chance(0.2) {
            let bytes = requests::request(&self.model, true, &mut self.random);
            peer.unsent.extend_from_slice(&bytes);
        }
        let most = peer.unsent.len() as u64;
        let part = if self.random.chance(0.5) { most } else { 1 + self.random.below(most) };
        let bytes: Vec<u8> =
            peer.unsent.drain(..usize::try_from(part).expect("a length")).collect();
        let asked = peer.stream.feed(&bytes);
        self.requests += asked.len() as u64;
        peer.asked.extend(asked);
        self.engine.receive(peer.owner, &bytes, self.now);
    }

    fn random_peer(&mut self) -> usize {
        usize::try_from(self.random.below(self.peers.len() as u64)).expect("an index")
    }

    fn disconnect_random_peer(&mut self) {
        let at = self.random_peer();
        let how = if self.random.chance(0.5) { Hangup::Finished } else { Hangup::Aborted };
        self.leave(self.peers[at].owner, how);
    }

    fn leave(&mut self, owner: Owner, how: Hangup) {
        let Some(at) = self.peers.iter().position(|peer| peer.owner == owner) else { return };
        let peer = self.peers.remove(at);
        let orphans = self.claims.extract_if(|_, claim| claim.3 == owner).map(|(id, _)| id);
        self.orphans.extend(orphans);
        let closed_first = how == Hangup::Finished && !self.engine.is_closing(owner);
        let kept = !closed_first && (self.draining || peer.keep);
        if self.settings.auto_release && !kept {
            self.model.left(owner.id());
        }
        self.engine.hang_up(owner, how, self.now);
    }

    fn look_away(&mut self) {
        let at = self.random_peer();
        let peer = &mut self.peers[at];
        peer.reads = !peer.reads;
        if peer.reads {
            self.engine.write_done(peer.owner, self.now);
        }
    }

    fn pass_time(&mut self) {
        let span = Duration::from_millis(self.random.below(1200));
        if self.random.chance(0.3) {
            // The timers are late.
            self.now = self.now + span;
            self.model.settled(self.now);
        } else {
            self.elapse(span);
        }
    }

    fn elapse(&mut self, span: Duration) {
        let until = self.now + span;
        let mut idle_for = 0;
        while let Some(due) = self.engine.poll_timeout().filter(|due| *due <= until) {
            // Requests that waited are served, and what they leave behind may be due in the same instant.
            idle_for = if due <= self.now { idle_for + 1 } else { 0 };
            assert!(idle_for < 50, "a loop that never sleeps");
            self.now = self.now.max(due);
            self.engine.handle_timeout(self.now);
            self.deliver();
        }
        self.now = until;
    }
}

/// What is told.
impl World<'_> {
    /// Takes what the engine has to say, as a driver would.
    fn deliver(&mut self) {
        loop {
            self.engine.commit().expect("nothing is written");
            let (out, segments) = self.engine.output();
            let (out, mut segments) = (out.to_vec(), segments.to_vec());
            // They go out in another order than they were decided in, but not those of one peer.
            segments.sort_by_key(|segment| segment.to.id());
            assert!(
                segments.is_sorted_by_key(|segment| (segment.to.id(), segment.bytes.start)),
                "out of order: {segments:?}",
            );
            segments.sort_by_key(|segment| segment.bytes.start);
            self.engine.clear_output();
            while self.engine.poll_resumed().is_some() {}
            let mut count = 0;
            for segment in &segments {
                self.told(segment.to, &out[segment.bytes.clone()]);
                count += segment.bytes.len();
            }
            assert_eq!(count, out.len(), "bytes for nobody");
            self.model.settled(self.now);
            self.given_up.clear();
            self.collect_closed_peers();
            for segment in &segments {
                let peer = self.peers.iter().find(|peer| peer.owner == segment.to);
                match peer.map(|peer| peer.reads) {
                    Some(true) => self.engine.write_done(segment.to, self.now),
                    Some(false) => self.engine.write_blocked(segment.to, self.now),
                    None => {}
                }
            }
            // One after the other: the end of one may be the turn of another.
            match self.over.pop_front() {
                Some(owner) => self.leave(owner, Hangup::Aborted),
                None if segments.is_empty() => break,
                None => {}
            }
        }
        self.everybody_is_answered();
    }

    fn collect_closed_peers(&mut self) {
        while let Some(owner) = self.engine.poll_close() {
            let Some(peer) = self.peers.iter_mut().find(|peer| peer.owner == owner) else {
                continue;
            };
            let over = self.engine.must_close(owner, self.now);
            assert!(over || peer.parting, "sent away without a word");
            let how = if peer.parting { "parted" } else { "write_timeout" };
            if over {
                self.seen.insert(("end".to_owned(), how.to_owned()));
                self.over.push_back(owner);
            }
        }
    }

    /// Checks that every client that does not wait has been answered.
    fn everybody_is_answered(&self) {
        for peer in &self.peers {
            let waits = matches!(
                peer.asked.front(),
                Some(Asked::Lock { timeout: 1.., .. } | Asked::Wait { timeout: 1.., .. })
            );
            assert!(waits || !self.engine.is_waiting(peer.owner), "waits for {:?}", peer.asked);
            if self.engine.is_ready(peer.owner) {
                assert!(peer.asked.is_empty(), "not answered: {:?}", peer.asked);
                assert!(!peer.parting, "sent away, and served");
                assert!(peer.partial.is_empty(), "half a line");
            }
        }
    }

    fn told(&mut self, to: Owner, bytes: &[u8]) {
        let at = self.peers.iter().position(|peer| peer.owner == to).expect("told to nobody");
        self.peers[at].partial.extend_from_slice(bytes);
        let mut text = std::mem::take(&mut self.peers[at].partial);
        while let Some(end) = text.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = text.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line[..end]).into_owned();
            assert!(!self.peers[at].parting, "told after the last word: {line:?}");
            match line.strip_prefix("! ") {
                Some(push) => self.pushed(at, push),
                None => self.answered(at, &line),
            }
        }
        self.peers[at].partial = text;
    }

    fn pushed(&mut self, at: usize, push: &str) {
        assert!(self.peers[at].hello, "a push for who did not say hello");
        let words: Vec<&str> = push.split(' ').collect();
        self.seen.insert(("push".to_owned(), words[0].to_owned()));
        if words[0] == "granted" {
            if self.given_up.contains(words[1].as_bytes()) {
                // It was given up before its client was told, and may have been made anew since.
                return self.model.untold(words[2].as_bytes());
            }
            let (name, how, owner, _) =
                self.claims.remove(words[1].as_bytes()).expect("a claim that waits");
            if self.model.is_known(words[2].as_bytes()) {
                // Asked for again by its id before this came.
                return;
            }
            let lease = Duration::from_millis(words[3].parse().expect("a lease"));
            let claim = Some(words[1].as_bytes().to_vec());
            let hold = Hold { name, how, owner, claim, lease, ends: self.now + lease };
            self.model.granted(words[2].as_bytes(), hold, true, self.now);
        }
    }

    fn answered(&mut self, at: usize, line: &str) {
        let Some(asked) = self.peers[at].asked.pop_front() else {
            let peer = &mut self.peers[at];
            assert_eq!(line, "error", "the last word");
            peer.parting = true;
            let why = if peer.stream.too_long { "too_long" } else { "read_timeout" };
            self.seen.insert(("end".to_owned(), why.to_owned()));
            return;
        };
        let word = line.split(' ').next().unwrap_or_default();
        self.seen.insert((command(&asked), word.to_owned()));
        if line == "error_draining" {
            assert!(self.draining);
            self.peers[at].parting = true;
            self.peers[at].asked.clear();
            return;
        }
        if !self.peers[at].trusted {
            let right = matches!(&asked, Asked::Auth { secret } if secret == SECRET);
            assert_eq!(line, if right { "ok" } else { "error_auth" }, "{asked:?}");
            self.peers[at].trusted = right;
            if !right {
                self.peers[at].parting = true;
                self.peers[at].asked.clear();
            }
            return;
        }
        if self.draining
            && line == "error"
            && matches!(asked, Asked::Lock { .. } | Asked::Wait { .. })
        {
            return;
        }
        self.judge(at, &asked, line);
    }
}

/// Whether answers are right.
impl World<'_> {
    fn judge(&mut self, at: usize, asked: &Asked, line: &str) {
        let words: Vec<&str> = line.split(' ').collect();
        let owner = Some(self.peers[at].owner.id());
        match asked {
            Asked::Bad | Asked::Auth { .. } => assert_eq!(line, "error", "{asked:?}"),
            Asked::Ping => assert_eq!(line, "ok"),
            Asked::Stats => {
                let json = line.strip_prefix("ok ").expect("what stats says");
                if self.random.chance(0.05) {
                    let stats: serde_json::Value = serde_json::from_str(json).expect("json");
                    assert_eq!(stats["connections"], self.peers.len());
                }
            }
            Asked::Lock { semaphore, key, limit, lease, timeout } => match words[..] {
                ["ok", token, told] => {
                    self.grant(token, told, *semaphore, key, *limit, *lease, owner);
                }
                ["timeout" | "error_max_locks"] => {}
                ["error_max_waiters"] => assert!(*timeout > 0, "a try does not wait"),
                ["error_limit_mismatch"] => assert!(semaphore),
                _ => panic!("{asked:?}: {line:?}"),
            },
            Asked::Enqueue { semaphore, key, limit, lease } => match words[..] {
                ["acquired", token, told] => {
                    self.grant(token, told, *semaphore, key, *limit, *lease, owner);
                }
                ["queued" | "error_already_enqueued" | "error_max_locks" | "error_max_waiters"] => {
                }
                ["error_limit_mismatch"] => assert!(semaphore),
                _ => panic!("{asked:?}: {line:?}"),
            },
            Asked::Wait { semaphore, key, .. } => match words[..] {
                ["ok", token, told] => self.fetched(token, told, (*semaphore, key.clone()), owner),
                ["timeout" | "error_not_enqueued" | "error_lease_expired"] => {}
                _ => panic!("{asked:?}: {line:?}"),
            },
            Asked::Renew { semaphore, key, token, lease } => {
                let name = (*semaphore, key.clone());
                let lease = self.lease(*lease);
                if self.model.proven(token, &name, self.now).is_some() {
                    assert_eq!(line, format!("ok {}", lease.as_secs()), "{asked:?}");
                    self.model.renew(token, &name, lease, self.now);
                } else {
                    assert_eq!(line, "error", "{asked:?}");
                }
            }
            Asked::Release { semaphore, key, token } => {
                let name = (*semaphore, key.clone());
                if self.model.proven(token, &name, self.now).is_some() {
                    assert_eq!(line, "ok", "{asked:?}");
                    self.model.release(token, &name, self.now);
                } else {
                    assert_eq!(line, "error", "{asked:?}");
                }
            }
            Asked::Other { command, key, argument } => {
                self.judge_other(at, command, key, argument, line);
            }
        }
    }

    fn lease(&self, seconds: Option<u64>) -> Duration {
        let lease = seconds.map_or(self.settings.default_lease, Duration::from_secs);
        lease.min(self.settings.max_lease)
    }

    #[expect(clippy::too_many_arguments, reason = "a grant has as many sides")]
    fn grant(
        &mut self,
        token: &str,
        told: &str,
        semaphore: bool,
        key: &[u8],
        limit: u64,
        lease: Option<u64>,
        owner: Option<u64>,
    ) {
        let lease = self.lease(lease);
        assert_eq!(told, lease.as_secs().to_string());
        let how = if semaphore { How::OneOf(limit) } else { How::Alone };
        let name = (semaphore, key.to_vec());
        let hold = Hold { name, how, owner, claim: None, lease, ends: self.now + lease };
        self.model.granted(token.as_bytes(), hold, true, self.now);
    }

    /// The second phase: the grant of `e`, which is alive, or one that was not told yet.
    fn fetched(&mut self, token: &str, told: &str, name: Name, owner: Option<u64>) {
        let lease = Duration::from_secs(told.parse().expect("a lease"));
        let token = token.as_bytes();
        if self.model.is_known(token) {
            // A lease in milliseconds is told in whole seconds, and kept as it is.
            let hold = self.model.proven(token, &name, self.now).expect("a dead token");
            assert_eq!(hold.lease.as_secs(), lease.as_secs());
            hold.ends = self.now + hold.lease;
        } else {
            // The test does not record the limit of a semaphore.
            let how = if name.0 { How::OneOf(3) } else { How::Alone };
            let hold = Hold { name, how, owner, claim: None, lease, ends: self.now + lease };
            self.model.granted(token, hold, false, self.now);
        }
    }

    fn judge_other(&mut self, at: usize, command: &[u8], key: &[u8], argument: &[u8], line: &str) {
        let words: Vec<&str> = line.split(' ').collect();
        let argument = String::from_utf8_lossy(argument).into_owned();
        let fields: Vec<&str> = argument.split_whitespace().collect();
        let open = matches!(command, b"hello" | b"q" | b"sq" | b"brk" | b"sbrk");
        if !open && !self.peers[at].hello {
            assert_eq!(line, "error", "without hello");
            return;
        }
        match (command, &words[..]) {
            (b"hello", ["ok", ..]) => {
                self.peers[at].hello = true;
                let said: serde_json::Value =
                    serde_json::from_str(argument.trim()).expect("it was read");
                self.peers[at].keep = said["keep"] == true;
            }
            (b"x", ["ok", token, told]) => self.claimed(at, key, &fields, token, told),
            (b"x", ["queued"]) => {
                let (name, how, owner) = self.wanted(at, key, &fields);
                // Where the id is known, the claim is still the first that was made.
                let id = fields[0].to_ascii_lowercase().into_bytes();
                let from = self.peers[at].owner;
                self.claims.entry(id).or_insert((name, how, owner, from));
            }
            (b"xa", ["ok"]) => {
                let id = fields[0].to_ascii_lowercase().into_bytes();
                self.claims.remove(&id);
                self.model.abandoned(&id);
                self.given_up.insert(id);
            }
            (b"hist" | b"shist", ["ok", ..]) => self.remembered(line),
            (b"xn" | b"sxn", ["ok", lease, _]) => {
                let name = (command[0] == b's', key.to_vec());
                let lease = Duration::from_millis(lease.parse().expect("a lease"));
                self.model.renew(fields[0].as_bytes(), &name, lease, self.now);
            }
            (b"brk" | b"sbrk", ["ok"]) => {
                assert!(self.secret, "broken without a secret");
                self.model.broke(fields[0].parse().expect("a number"));
            }
            (_, ["ok", ..] | ["timeout"]) => {}
            (_, [error, ..]) => assert!(error.starts_with("error"), "{line:?}"),
            (_, []) => panic!("an empty line"),
        }
    }

    /// A few events at most, in the order in which they happened.
    fn remembered(&self, line: &str) {
        let json = line.strip_prefix("ok ").expect("what is remembered");
        let said: serde_json::Value = serde_json::from_str(json).expect("json");
        assert_eq!(said["kept"], self.remembers > 0);
        let events = said["events"].as_array().expect("events");
        assert!(events.len() <= self.remembers, "{line}");
        let times: Vec<u64> = events.iter().filter_map(|event| event["at"].as_u64()).collect();
        assert!(times.len() == events.len() && times.is_sorted(), "{line}");
        let now = u64::try_from(self.now.since(Time::ZERO).as_millis()).expect("it is small");
        assert!(times.last().is_none_or(|last| *last <= now), "{line}");
    }

    fn wanted(&self, at: usize, key: &[u8], fields: &[&str]) -> (Name, How, Option<u64>) {
        let how = match fields[1] {
            "x" => How::Alone,
            "s" => How::Shared,
            limit => How::OneOf(limit.parse().expect("a limit")),
        };
        let owner = (fields[4] == "bound").then(|| self.peers[at].owner.id());
        ((matches!(how, How::OneOf(_)), key.to_vec()), how, owner)
    }

    fn claimed(&mut self, at: usize, key: &[u8], fields: &[&str], token: &str, told: &str) {
        // Where the id is known, the claim is still the first that was made.
        let id = fields[0].to_ascii_lowercase().into_bytes();
        let (name, how, owner) = match self.claims.get(&id).cloned() {
            Some((name, how, owner, _)) => (name, how, owner),
            None => self.wanted(at, key, fields),
        };
        let token = token.as_bytes();
        if self.model.is_known(token) {
            let alive = self.model.proven(token, &name, self.now).is_some();
            assert!(alive || self.model.is_untold(token), "a dead token");
            return;
        }
        let lease = Duration::from_millis(told.parse().expect("a lease"));
        let hold =
            Hold { name, how, owner, claim: Some(id.clone()), lease, ends: self.now + lease };
        if self.orphans.remove(&id) {
            return self.model.untold(token);
        }
        self.model.granted(token, hold, true, self.now);
    }
}

fn command(asked: &Asked) -> String {
    let of = |semaphore: &bool, name: &str| {
        if *semaphore { format!("s{name}") } else { name.to_owned() }
    };
    match asked {
        Asked::Lock { semaphore, .. } => of(semaphore, "l"),
        Asked::Enqueue { semaphore, .. } => of(semaphore, "e"),
        Asked::Wait { semaphore, .. } => of(semaphore, "w"),
        Asked::Renew { semaphore, .. } => of(semaphore, "n"),
        Asked::Release { semaphore, .. } => of(semaphore, "r"),
        Asked::Stats => "stats".to_owned(),
        Asked::Ping => "ping".to_owned(),
        Asked::Auth { .. } => "auth".to_owned(),
        Asked::Other { command, .. } if requests::is_known(command) => {
            String::from_utf8_lossy(command).into_owned()
        }
        Asked::Other { .. } => "unknown".to_owned(),
        Asked::Bad => "bad".to_owned(),
    }
}
