//! The protocol read a second time, naively and from its description alone, to be compared with the real thing.

/// What a well-formed request of the protocol asks, in plain words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    Lock {
        semaphore: bool,
        key: Vec<u8>,
        limit: u64,
        timeout: u64,
        lease: Option<u64>,
    },
    Enqueue {
        semaphore: bool,
        key: Vec<u8>,
        limit: u64,
        lease: Option<u64>,
    },
    Wait {
        semaphore: bool,
        key: Vec<u8>,
        timeout: u64,
    },
    Renew {
        semaphore: bool,
        key: Vec<u8>,
        token: Vec<u8>,
        lease: Option<u64>,
    },
    Release {
        semaphore: bool,
        key: Vec<u8>,
        token: Vec<u8>,
    },
    Stats,
    Ping,
    Auth {
        secret: Vec<u8>,
    },
    /// Of our extension, or unknown: its first line.
    Other {
        command: Vec<u8>,
        key: Vec<u8>,
        argument: Vec<u8>,
    },
    /// `error`, and the connection stays open.
    Bad,
}

/// What a stream of bytes amounts to: its requests, and whether a line too long ends it.
#[derive(Debug, Default)]
pub(crate) struct Stream {
    bytes: Vec<u8>,
    lines: Vec<Vec<u8>>,
    pub(crate) too_long: bool,
}

impl Stream {
    /// Takes more bytes, and gives the requests that are whole by now.
    pub(crate) fn feed(&mut self, bytes: &[u8]) -> Vec<Asked> {
        let mut asked = Vec::new();
        for byte in bytes {
            if self.too_long {
                break;
            }
            if *byte != b'\n' {
                self.bytes.push(*byte);
                continue;
            }
            let line = std::mem::take(&mut self.bytes);
            if line.len() > self.limit() {
                self.too_long = true;
                break;
            }
            let end = line.iter().rposition(|byte| *byte != b'\r').map_or(0, |last| last + 1);
            self.lines.push(line[..end].to_vec());
            if self.lines.len() == 3 {
                let lines = std::mem::take(&mut self.lines);
                asked.push(read(&lines[0], &lines[1], &lines[2]));
            }
        }
        asked
    }

    fn limit(&self) -> usize {
        match &self.lines[..] {
            [command, _] if command == b"auth" => 65_536,
            [command, _] if command == b"hello" || command == b"x" => 4096,
            _ => 256,
        }
    }
}

fn read(command: &[u8], key: &[u8], argument: &[u8]) -> Asked {
    let semaphore = command.first() == Some(&b's');
    let fields = split(argument);
    let good_key = !key.is_empty() && !key.iter().any(|byte| b" \t\r".contains(byte));
    let key = key.to_vec();
    let bare = if semaphore { &command[1..] } else { command };
    let asked = match command {
        b"stats" => return Asked::Stats,
        b"ping" => return Asked::Ping,
        b"auth" => return Asked::Auth { secret: trim(argument) },
        b"l" | b"sl" | b"e" | b"se" | b"w" | b"sw" | b"n" | b"sn" | b"r" | b"sr" if !good_key => {
            return Asked::Bad;
        }
        b"l" | b"sl" | b"e" | b"se" => claim(bare == b"l", semaphore, key, &fields),
        b"w" | b"sw" if fields.len() == 1 => {
            seconds(&fields[0], 0).map(|timeout| Asked::Wait { semaphore, key, timeout })
        }
        b"n" | b"sn" if fields.len() == 1 || fields.len() == 2 => {
            let token = fields[0].clone();
            optional(fields.get(1)).map(|lease| Asked::Renew { semaphore, key, token, lease })
        }
        b"r" | b"sr" => {
            let token = trim(argument);
            (!token.is_empty()).then_some(Asked::Release { semaphore, key, token })
        }
        b"w" | b"sw" | b"n" | b"sn" => None,
        _ => {
            let (command, argument) = (command.to_vec(), argument.to_vec());
            return Asked::Other { command, key, argument };
        }
    };
    asked.unwrap_or(Asked::Bad)
}

/// `l`, `sl`, `e` and `se`: a timeout for the first two, a limit for those of semaphores, and perhaps a lease.
fn claim(waits: bool, semaphore: bool, key: Vec<u8>, fields: &[Vec<u8>]) -> Option<Asked> {
    let mut fields = fields.iter();
    let timeout = if waits { seconds(fields.next()?, 0)? } else { 0 };
    let limit = if semaphore { number(fields.next()?, 1, 1_048_576)? } else { 1 };
    let lease = optional(fields.next())?;
    if fields.next().is_some() {
        return None;
    }
    Some(if waits {
        Asked::Lock { semaphore, key, limit, timeout, lease }
    } else {
        Asked::Enqueue { semaphore, key, limit, lease }
    })
}

#[expect(clippy::option_option, reason = "a lease that is wrong, and one that is not there")]
fn optional(field: Option<&Vec<u8>>) -> Option<Option<u64>> {
    match field {
        None => Some(None),
        Some(field) => seconds(field, 1).map(Some),
    }
}

fn seconds(field: &[u8], least: i128) -> Option<u64> {
    number(field, least, 9_223_372_036)
}

fn number(field: &[u8], least: i128, most: i128) -> Option<u64> {
    let text = String::from_utf8(field.to_vec()).ok()?;
    let digits = text.strip_prefix(['+', '-']).unwrap_or(&text);
    if digits.is_empty() || !digits.chars().all(|c| c.is_ascii_digit()) {
        return None;
    }
    let value: i128 = text.parse().ok()?;
    (least <= value && value <= most).then(|| u64::try_from(value).expect("it is not negative"))
}

/// The fields between white space, each character that is no text for itself.
fn split(line: &[u8]) -> Vec<Vec<u8>> {
    let mut fields = vec![Vec::new()];
    for chunk in line.utf8_chunks() {
        for c in chunk.valid().chars() {
            if c.is_whitespace() {
                fields.push(Vec::new());
            } else {
                let mut buffer = [0; 4];
                let field = fields.last_mut().expect("there is one");
                field.extend_from_slice(c.encode_utf8(&mut buffer).as_bytes());
            }
        }
        fields.last_mut().expect("there is one").extend_from_slice(chunk.invalid());
    }
    fields.retain(|field| !field.is_empty());
    fields
}

fn trim(line: &[u8]) -> Vec<u8> {
    let mut rest = line;
    loop {
        let before = rest;
        for space in WHITE {
            let mut buffer = [0; 4];
            let space = space.encode_utf8(&mut buffer).as_bytes();
            rest = rest.strip_prefix(space).unwrap_or(rest);
            rest = rest.strip_suffix(space).unwrap_or(rest);
        }
        if rest == before {
            return rest.to_vec();
        }
    }
}

/// White space as Unicode lists it.
const WHITE: [char; 25] = [
    '\t', '\n', '\u{b}', '\u{c}', '\r', ' ', '\u{85}', '\u{a0}', '\u{1680}', '\u{2000}',
    '\u{2001}', '\u{2002}', '\u{2003}', '\u{2004}', '\u{2005}', '\u{2006}', '\u{2007}', '\u{2008}',
    '\u{2009}', '\u{200a}', '\u{2028}', '\u{2029}', '\u{202f}', '\u{205f}', '\u{3000}',
];
