//! Requests as clients send them, and requests that no client should send.

use tenure_core::Random;

use crate::model::Model;
use crate::parsing::pick;

const KEYS: &[&[u8]] = &[b"a", b"a", b"b", b"c", b"d/1", b"\xff\x00"];
const SHORT: &[&[u8]] = &[b"0", b"0", b"1", b"1", b"2", b"3"];
const LEASES: &[&[u8]] = &[b"", b"1", b"1", b"2", b"3", b"5", b"9"];
const LIMITS: &[&[u8]] = &[b"1", b"2", b"2", b"2", b"3"];
const IDS: &[&[u8]] = &[
    b"00000000000000000000000000000001",
    b"00000000000000000000000000000002",
    b"00000000000000000000000000000003",
    b"00000000000000000000000000000004",
    b"00000000000000000000000000000005",
];
const MILLIS: &[&[u8]] = &[b"1", b"700", b"1500", b"2500"];
const CORE: &[&[u8]] = &[
    b"l", b"l", b"l", b"e", b"e", b"w", b"w", b"n", b"r", b"r", b"r", b"sl", b"sl", b"se", b"sw",
    b"sn", b"sr", b"sr", b"stats", b"ping", b"auth",
];
const EXTENSION: &[&[u8]] = &[
    b"hello", b"x", b"x", b"x", b"xp", b"xa", b"xn", b"q", b"sq", b"ls", b"watch", b"watch",
    b"unwatch", b"brk", b"sxn", b"hist", b"shist",
];

/// One request. `tokens` are of a space and key, so their request is about these more often than not.
pub(crate) fn request(model: &Model, extended: bool, random: &mut Random) -> Vec<u8> {
    let commands = if extended && random.chance(0.5) { EXTENSION } else { CORE };
    let command = pick(random, commands);
    let mut key = pick(random, KEYS).to_vec();
    let argument = match command {
        b"l" => join(&[pick(random, SHORT), pick(random, LEASES)]),
        b"sl" => join(&[pick(random, SHORT), pick(random, LIMITS), pick(random, LEASES)]),
        b"e" => pick(random, LEASES).to_vec(),
        b"se" => join(&[pick(random, LIMITS), pick(random, LEASES)]),
        b"w" | b"sw" => pick(random, SHORT).to_vec(),
        b"n" | b"r" | b"sn" | b"sr" | b"xn" | b"sxn" | b"brk" => {
            let skip = usize::try_from(random.bits() >> 32).expect("it is small");
            let (mut token, of) = match model.some_token(skip) {
                Some((token, (_, of))) => (token.to_vec(), of.clone()),
                None => (vec![b'0'; 32], key.clone()),
            };
            if random.chance(0.9) {
                key = of;
            }
            if random.chance(0.1) {
                let at = usize::try_from(random.below(32)).expect("it is small");
                token[at] = b"0123456789abcdefF"[at % 17];
            }
            match command {
                b"n" | b"sn" => join(&[&token, pick(random, LEASES)]),
                b"xn" | b"sxn" => join(&[&token, pick(random, MILLIS)]),
                b"brk" => {
                    let number = token.iter().all(u8::is_ascii_hexdigit);
                    let number = if number { crate::model::number(&token) } else { 0 };
                    join(&[number.to_string().as_bytes(), b"because"])
                }
                _ => token,
            }
        }
        b"auth" => pick(random, &[b"hush", b"wrong"]).to_vec(),
        b"hello" => pick(random, &[b"{}", b"{\"keep\":true}", b"{\"keep\":true}", b"7"]).to_vec(),
        b"x" => join(&[
            pick(random, IDS),
            pick(random, &[b"x", b"x", b"s", b"s", b"1", b"2"]),
            pick(random, MILLIS),
            pick(random, &[b"queue", b"queue", b"try"]),
            pick(random, &[b"bound", b"bound", b"detached"]),
            b"me",
        ]),
        b"xp" | b"xa" => pick(random, IDS).to_vec(),
        b"watch" => join(&[b"0", pick(random, &[b"1", b"2", b"3"])]),
        b"unwatch" => pick(random, &[b"1", b"2", b"3"]).to_vec(),
        _ => Vec::new(),
    };
    let mut bytes = [command, &key, &argument].join(&b'\n');
    bytes.push(b'\n');
    if random.chance(0.02) {
        garble(&mut bytes, random);
    }
    bytes
}

/// Whether our extension has such a command.
pub(crate) fn is_known(command: &[u8]) -> bool {
    EXTENSION.contains(&command)
}

fn join(parts: &[&[u8]]) -> Vec<u8> {
    parts.join(&b' ')
}

fn garble(bytes: &mut Vec<u8>, random: &mut Random) {
    let at = usize::try_from(random.below(bytes.len() as u64)).expect("an index");
    match random.below(8) {
        0 => drop(bytes.remove(at)),
        1 | 2 => bytes[at] = u8::try_from(random.below(256)).expect("a byte"),
        3 => drop(bytes.splice(at..at, [b'x'; 300])),
        4 => bytes.truncate(at),
        _ => bytes.insert(at, u8::try_from(random.below(256)).expect("a byte")),
    }
}
