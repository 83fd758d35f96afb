//! A small server of the JSON API of Google Cloud Storage: generations, conditions, one write a second and name, and
//! faults on command. It runs within the test's process, on a port of its own.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};

/// A running server. It ends with the process.
#[derive(Clone, Debug)]
pub(crate) struct Fake {
    url: String,
    state: Arc<Mutex<State>>,
}

/// What the server is told to do.
#[derive(Clone, Copy, Debug)]
#[allow(dead_code, reason = "not every test program tells it everything")]
#[expect(clippy::struct_excessive_bools, reason = "each is true or false by itself")]
pub(crate) struct Manner {
    /// Times are told to the millisecond; else in whole seconds, as the real one does.
    pub(crate) fine: bool,
    /// How far its clock is from ours, in seconds.
    pub(crate) skew: i64,
    /// How far `Date` is ahead of the clock that stamps objects, in seconds: a proxy replaces the header.
    pub(crate) date: i64,
    /// One write a second and name.
    pub(crate) limited: bool,
    /// Conditions are ignored.
    pub(crate) careless: bool,
    /// Says nothing of the version with the content, as some emulators.
    pub(crate) terse: bool,
}

/// A kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Op {
    Read,
    Write,
    Delete,
    List,
    Bucket,
}

/// What happens to a request.
#[derive(Clone, Copy, Debug)]
#[allow(dead_code, reason = "not every test program makes every fault")]
pub(crate) enum Fault {
    /// It is done, and the connection ends before the reply.
    DropReply,
    /// The connection ends before it is done.
    DropRequest,
    /// It is answered with this status and not done.
    Refuse(u16),
    /// It is done, and answered with this status.
    Fail(u16),
    /// It is done after this many milliseconds.
    Delay(u64),
}

#[derive(Debug)]
struct State {
    manner: Manner,
    objects: BTreeMap<String, Object>,
    generation: u64,
    /// Generations tell writes apart and nothing else: here each is smaller than the one before.
    falling: bool,
    /// For the next request of this kind on a name with this end.
    planned: Vec<(Op, String, Fault)>,
    /// For any request on a name that does not end with `.bell`, with a probability of this many per cent.
    chance: u64,
    random: u64,
    /// Number of requests that are delayed and not answered yet.
    delayed: usize,
    seen: Vec<(Op, String, u16)>,
    bucket: Value,
    written: BTreeMap<String, Instant>,
}

#[derive(Clone, Debug)]
struct Object {
    generation: u64,
    body: Vec<u8>,
    modified: Duration,
}

struct Request {
    method: String,
    path: String,
    query: BTreeMap<String, String>,
    body: Vec<u8>,
    kind: String,
}

struct Reply {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
}

#[allow(dead_code, reason = "not every test program asks everything of it")]
impl Fake {
    pub(crate) fn start(manner: Manner) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let state = State {
            manner,
            objects: BTreeMap::new(),
            generation: 1_600_000_000_000_000,
            falling: false,
            planned: Vec::new(),
            chance: 0,
            random: 1,
            delayed: 0,
            seen: Vec::new(),
            bucket: json!({ "kind": "storage#bucket", "name": "locks" }),
            written: BTreeMap::new(),
        };
        let fake = Self { url, state: Arc::new(Mutex::new(state)) };
        let serving = fake.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let serving = serving.clone();
                thread::spawn(move || serving.serve(&stream));
            }
        });
        fake
    }

    /// A clock in milliseconds and no limit: for tests that would take minutes otherwise.
    pub(crate) fn quick() -> Self {
        Self::start(Manner {
            fine: true,
            skew: 0,
            date: 0,
            limited: false,
            careless: false,
            terse: false,
        })
    }

    /// As the real one.
    pub(crate) fn real() -> Self {
        Self::start(Manner {
            fine: false,
            skew: 0,
            date: 0,
            limited: true,
            careless: false,
            terse: false,
        })
    }

    /// The URL of the server.
    pub(crate) fn host(&self) -> &str {
        &self.url
    }

    /// The URL of a store on it.
    pub(crate) fn store(&self, prefix: &str) -> String {
        let manner = self.manner();
        let grain = if manner.fine { "&grain=20ms&poll=20ms&bell=30ms" } else { "" };
        format!("gs://locks/{prefix}?endpoint={}&anonymous=true{grain}", self.url)
    }

    pub(crate) fn manner(&self) -> Manner {
        self.state().manner
    }

    pub(crate) fn set(&self, change: impl FnOnce(&mut Manner)) {
        change(&mut self.state().manner);
    }

    /// From now on each generation is smaller than the one before.
    pub(crate) fn fall(&self) {
        self.state().falling = true;
    }

    pub(crate) fn set_bucket(&self, bucket: Value) {
        self.state().bucket = bucket;
    }

    /// Makes the next request of this kind, on an object whose name ends so, go wrong.
    pub(crate) fn next(&self, op: Op, end: &str, fault: Fault) {
        self.state().planned.push((op, end.to_owned(), fault));
    }

    /// Whether every planned fault has happened.
    pub(crate) fn is_quiet(&self) -> bool {
        self.state().planned.is_empty()
    }

    /// True while a delayed request has not reached the store.
    pub(crate) fn is_delaying(&self) -> bool {
        self.state().delayed > 0
    }

    /// Makes so many of a hundred requests go wrong.
    pub(crate) fn trouble(&self, chance: u64, seed: u64) {
        let mut state = self.state();
        (state.chance, state.random) = (chance, seed);
    }

    /// What an object holds.
    pub(crate) fn object(&self, name: &str) -> Option<Value> {
        let state = self.state();
        serde_json::from_slice(&state.objects.get(name)?.body).ok()
    }

    /// Writes an object past all conditions, as an operator would.
    pub(crate) fn put(&self, name: &str, body: impl Into<Vec<u8>>) {
        self.state().write(name, body.into());
    }

    /// A conditional write, as a program of the plain format makes it; whether it was done.
    pub(crate) fn swap(&self, name: &str, expected: u64, body: Option<&Value>) -> bool {
        let mut state = self.state();
        if state.objects.get(name).map_or(0, |object| object.generation) != expected {
            return false;
        }
        match body {
            Some(body) => drop(state.write(name, body.to_string().into())),
            None => drop(state.objects.remove(name)),
        }
        true
    }

    /// What an object holds, and its generation; 0 where there is none.
    pub(crate) fn read(&self, name: &str) -> (Option<Value>, u64) {
        let generation = self.state().objects.get(name).map_or(0, |object| object.generation);
        (self.object(name), generation)
    }

    /// Makes an object look as if it had been written this many seconds earlier.
    pub(crate) fn age(&self, name: &str, seconds: u64) {
        if let Some(object) = self.state().objects.get_mut(name) {
            object.modified = object.modified.saturating_sub(Duration::from_secs(seconds));
        }
    }

    /// When an object was last written, by the store's time.
    pub(crate) fn modified(&self, name: &str) -> f64 {
        let state = self.state();
        state.objects.get(name).expect("there").modified.as_secs_f64()
    }

    pub(crate) fn remove(&self, name: &str) {
        self.state().objects.remove(name);
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.state().objects.keys().cloned().collect()
    }

    /// The store's time.
    pub(crate) fn now(&self) -> f64 {
        self.state().now().as_secs_f64()
    }

    /// The requests since the last call, with their status.
    pub(crate) fn seen(&self) -> Vec<(Op, String, u16)> {
        std::mem::take(&mut self.state().seen)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self, stream: &TcpStream) {
        let _ = stream.set_nodelay(true);
        let mut reader = BufReader::new(stream);
        while let Some(request) = read(&mut reader) {
            let (op, name) = request.what();
            let fault = self.state().draw(op, &name);
            if let Some(Fault::DropRequest) = fault {
                break;
            }
            if let Some(Fault::Delay(millis)) = fault {
                thread::sleep(Duration::from_millis(millis));
            }
            let mut reply = match fault {
                Some(Fault::Refuse(status)) => refuse(status, "refused, as commanded"),
                _ => self.state().answer(&request),
            };
            if let Some(Fault::Delay(_)) = fault {
                self.state().delayed -= 1;
            }
            if let Some(Fault::DropReply) = fault {
                break;
            }
            if let Some(Fault::Fail(status)) = fault {
                reply = refuse(status, "failed, as commanded");
            }
            self.state().seen.push((op, name, reply.status));
            let date = self.state().date();
            if write(stream, &reply, &date).is_err() {
                return;
            }
        }
        let _ = stream.shutdown(Shutdown::Both);
    }
}

impl Request {
    fn what(&self) -> (Op, String) {
        let objects = self.path.ends_with("/o") || self.path.contains("/o/");
        let op = match (&*self.method, objects) {
            ("POST" | "PUT", _) => Op::Write,
            ("DELETE", _) => Op::Delete,
            ("GET", true) if self.path.contains("/o/") => Op::Read,
            ("GET", true) => Op::List,
            _ => Op::Bucket,
        };
        let name = match op {
            Op::Write => self.upload().map(|(name, _)| name).unwrap_or_default(),
            _ => self.path.split_once("/o/").map(|(_, name)| decode(name)).unwrap_or_default(),
        };
        (op, name)
    }

    /// The name and the content of an upload.
    fn upload(&self) -> Option<(String, Vec<u8>)> {
        if self.query.get("uploadType").map(String::as_str) == Some("media") {
            return Some((self.query.get("name")?.clone(), self.body.clone()));
        }
        let boundary = format!("--{}", self.kind.split_once("boundary=")?.1);
        let text = String::from_utf8_lossy(&self.body).into_owned();
        let mut parts = text.split(&boundary).skip(1).map(|part| {
            let content = part.split_once("\r\n\r\n").map_or("", |(_, content)| content);
            content.strip_suffix("\r\n").unwrap_or(content)
        });
        let about: Value = serde_json::from_str(parts.next()?).ok()?;
        Some((about["name"].as_str()?.to_owned(), parts.next()?.as_bytes().to_vec()))
    }
}

impl State {
    fn now(&self) -> Duration {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
        shifted(now, self.manner.skew)
    }

    fn date(&self) -> String {
        self.told(shifted(self.now(), self.manner.date))
    }

    fn told(&self, time: Duration) -> String {
        http_date(time, self.manner.fine)
    }

    /// The fault of a request that begins now.
    fn draw(&mut self, op: Op, name: &str) -> Option<Fault> {
        let fault = self.draw_fault(op, name);
        self.delayed += usize::from(matches!(fault, Some(Fault::Delay(_))));
        fault
    }

    fn draw_fault(&mut self, op: Op, name: &str) -> Option<Fault> {
        let planned = self
            .planned
            .iter()
            .position(|(planned, end, _)| *planned == op && name.ends_with(&**end));
        if let Some(at) = planned {
            return Some(self.planned.remove(at).2);
        }
        if self.chance == 0 || op == Op::List {
            return None;
        }
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let dice = self.random >> 33;
        if dice % 100 >= self.chance {
            return None;
        }
        let faults = [
            Fault::DropReply,
            Fault::DropRequest,
            Fault::Refuse(503),
            Fault::Refuse(429),
            Fault::Fail(503),
            Fault::Delay(40),
        ];
        Some(faults[usize::try_from(dice / 100 % 6).expect("small")])
    }

    fn write(&mut self, name: &str, body: Vec<u8>) -> u64 {
        self.generation = if self.falling { self.generation - 1 } else { self.generation + 1 };
        let (generation, modified) = (self.generation, self.now());
        self.objects.insert(name.to_owned(), Object { generation, body, modified });
        generation
    }

    fn answer(&mut self, request: &Request) -> Reply {
        let bucket = request.path.split("/b/").nth(1).and_then(|rest| rest.split('/').next());
        match bucket {
            Some("denied") => {
                return refuse(403, "anonymous caller does not have storage.objects access");
            }
            None | Some("absent") => return refuse(404, "The specified bucket does not exist."),
            Some(_) => {}
        }
        let (op, name) = request.what();
        match op {
            Op::Write => self.upload(request),
            Op::Read => self.read(request, &name),
            Op::Delete => self.delete(request, &name),
            Op::List => self.list(request),
            Op::Bucket => {
                Reply { status: 200, headers: vec![], body: self.bucket.to_string().into() }
            }
        }
    }

    /// What the conditions of a request say: 412 or 304 where they are not met.
    fn unmet(&self, request: &Request, name: &str) -> Option<u16> {
        if self.manner.careless {
            return None;
        }
        let generation = self.objects.get(name).map_or(0, |object| object.generation);
        let named = |condition| request.query.get(condition).map(|text| text.parse::<u64>().ok());
        if named("ifGenerationMatch").is_some_and(|wanted| wanted != Some(generation)) {
            return Some(412);
        }
        named("ifGenerationNotMatch").is_some_and(|other| other == Some(generation)).then_some(304)
    }

    fn upload(&mut self, request: &Request) -> Reply {
        let Some((name, body)) = request.upload() else { return refuse(400, "no upload") };
        if let Some(status) = self.unmet(request, &name) {
            return refuse(
                status,
                "At least one of the pre-conditions you specified did not hold.",
            );
        }
        let limit = Duration::from_secs(1);
        let recent = self.written.get(&name).is_some_and(|last| last.elapsed() < limit);
        if self.manner.limited && recent {
            return refuse(
                429,
                "The object exceeded the rate limit for object mutation operations",
            );
        }
        self.written.insert(name.clone(), Instant::now());
        let generation = self.write(&name, body);
        let updated = rfc3339(self.objects[&name].modified);
        let about = json!({
            "kind": "storage#object", "name": name, "bucket": "locks",
            "generation": generation.to_string(), "metageneration": "1", "updated": updated,
        });
        Reply { status: 200, headers: vec![], body: about.to_string().into() }
    }

    fn read(&self, request: &Request, name: &str) -> Reply {
        let Some(object) = self.objects.get(name) else {
            return refuse(404, &format!("No such object: locks/{name}"));
        };
        if let Some(status) = self.unmet(request, name) {
            return Reply { status, headers: vec![], body: Vec::new() };
        }
        if request.query.get("alt").map(String::as_str) != Some("media") {
            let about = json!({
                "kind": "storage#object", "name": name, "bucket": "locks",
                "generation": object.generation.to_string(), "updated": rfc3339(object.modified),
            });
            return Reply { status: 200, headers: vec![], body: about.to_string().into() };
        }
        let headers = vec![
            ("x-goog-generation", object.generation.to_string()),
            ("last-modified", self.told(object.modified)),
        ];
        let headers = if self.manner.terse { vec![] } else { headers };
        Reply { status: 200, headers, body: object.body.clone() }
    }

    fn delete(&mut self, request: &Request, name: &str) -> Reply {
        if !self.objects.contains_key(name) {
            return refuse(404, &format!("No such object: locks/{name}"));
        }
        if let Some(status) = self.unmet(request, name) {
            return refuse(
                status,
                "At least one of the pre-conditions you specified did not hold.",
            );
        }
        self.objects.remove(name);
        Reply { status: 204, headers: vec![], body: Vec::new() }
    }

    fn list(&self, request: &Request) -> Reply {
        let given = |name| request.query.get(name).map_or("", String::as_str);
        let (prefix, from) = (given("prefix"), given("startOffset"));
        let items =
            self.objects.iter().filter(|(name, _)| name.starts_with(prefix) && &***name >= from);
        let items = items.map(|(name, object)| {
            json!({ "name": name, "generation": object.generation.to_string(), "updated": rfc3339(object.modified) })
        });
        let items = items.take(1_000).collect::<Vec<_>>();
        let page = json!({ "kind": "storage#objects", "items": items });
        Reply { status: 200, headers: vec![], body: page.to_string().into() }
    }
}

fn shifted(time: Duration, seconds: i64) -> Duration {
    let by = Duration::from_secs(seconds.unsigned_abs());
    if seconds < 0 { time.saturating_sub(by) } else { time.saturating_add(by) }
}

fn refuse(status: u16, message: &str) -> Reply {
    let body = json!({ "error": { "code": status, "message": message } });
    Reply { status, headers: vec![], body: body.to_string().into() }
}

fn read(reader: &mut BufReader<&TcpStream>) -> Option<Request> {
    let mut first = String::new();
    reader.read_line(&mut first).ok().filter(|read| *read > 0)?;
    let mut words = first.split_whitespace();
    let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
    let (mut length, mut kind) = (0, String::new());
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|read| *read > 0)?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        match &*name.to_ascii_lowercase() {
            "content-length" => length = value.trim().parse().ok()?,
            "content-type" => value.trim().clone_into(&mut kind),
            _ => {}
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    let query = pairs.map(|(name, value)| (decode(name), decode(value))).collect();
    Some(Request { method, path: path.to_owned(), query, body, kind })
}

fn write(mut stream: &TcpStream, reply: &Reply, date: &str) -> std::io::Result<()> {
    let Reply { status, headers, body } = reply;
    let mut text = format!("HTTP/1.1 {status} -\r\ndate: {date}\r\n");
    for (name, value) in headers {
        text = format!("{text}{name}: {value}\r\n");
    }
    if !matches!(status, 204 | 304) {
        text = format!("{text}content-length: {}\r\n", body.len());
    }
    text.push_str("\r\n");
    let mut bytes = text.into_bytes();
    bytes.extend_from_slice(body);
    stream.write_all(&bytes)
}

fn decode(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let mut digit =
                || rest.next().and_then(|byte| char::from(byte).to_digit(16)).unwrap_or(0);
            let value = digit() * 16 + digit();
            bytes.push(u8::try_from(value).unwrap_or(b'?'));
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The day of a time since 1970: year, month, day.
fn civil(days: u64) -> (u64, u64, u64) {
    let mut left = days;
    let mut year = 1970;
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    while left >= if leap(year) { 366 } else { 365 } {
        left -= if leap(year) { 366 } else { 365 };
        year += 1;
    }
    let lengths = [31, if leap(year) { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 1;
    for length in lengths {
        if left < length {
            break;
        }
        left -= length;
        month += 1;
    }
    (year, month, left + 1)
}

fn http_date(time: Duration, fine: bool) -> String {
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
    let seconds = time.as_secs();
    let days = seconds / 86_400;
    let (year, month, day) = civil(days);
    let (hours, minutes) = (seconds / 3_600 % 24, seconds / 60 % 60);
    let fraction = if fine { format!(".{:03}", time.subsec_millis()) } else { String::new() };
    let weekday = DAYS[usize::try_from(days % 7).expect("small")];
    let month = MONTHS[usize::try_from(month - 1).expect("small")];
    let second = seconds % 60;
    format!("{weekday}, {day:02} {month} {year} {hours:02}:{minutes:02}:{second:02}{fraction} GMT")
}

fn rfc3339(time: Duration) -> String {
    let seconds = time.as_secs();
    let (year, month, day) = civil(seconds / 86_400);
    let (hours, minutes, second) = (seconds / 3_600 % 24, seconds / 60 % 60, seconds % 60);
    let millis = time.subsec_millis();
    format!("{year}-{month:02}-{day:02}T{hours:02}:{minutes:02}:{second:02}.{millis:03}Z")
}
