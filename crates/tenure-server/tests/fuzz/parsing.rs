//! The framer and the parser against the reference, on bytes that are nearly right.

use tenure_core::table::{KeySpace, Mode};
use tenure_core::wire::{Framed, Framer, Request};
use tenure_core::{LockToken, Random};

use crate::reference::{Asked, Stream};

/// Streams of a few requests each, garbled and cut; says how many requests were compared.
pub(crate) fn run(seed: u64, streams: u64) -> u64 {
    let mut random = Random::new(seed);
    let mut compared = 0;
    for stream in 0..streams {
        let bytes = garbled(&mut random);
        let mut reference = Stream::default();
        let expected = reference.feed(&bytes);
        let (found, too_long) = framed(&bytes, &mut random);
        let place =
            || format!("seed {seed}, stream {stream}: {:?}", bytes.escape_ascii().to_string());
        assert_eq!(too_long, reference.too_long, "{}", place());
        assert_eq!(found.len(), expected.len(), "{}", place());
        for (found, expected) in found.iter().zip(&expected) {
            let other = matches!(expected, Asked::Other { .. });
            assert!(other || *found == known(expected), "{found:?}, not {expected:?}: {}", place());
        }
        compared += expected.len() as u64 + 1;
    }
    compared
}

/// What the real framer and parser make of it, given bit by bit.
fn framed(bytes: &[u8], random: &mut Random) -> (Vec<Asked>, bool) {
    let mut framer = Framer::default();
    let mut asked = Vec::new();
    let (mut begin, mut end) = (0, 0);
    while end < bytes.len() {
        let step = if random.chance(0.3) { 1 } else { 1 + random.below(600) };
        end = bytes.len().min(end + usize::try_from(step).expect("it is small"));
        loop {
            match framer.next(&bytes[begin..end]) {
                Framed::Request { lines, len } => {
                    begin += len;
                    asked.push(Request::parse(lines).map_or(Asked::Bad, |request| plain(&request)));
                }
                Framed::Partial => break,
                Framed::Discarded => {
                    begin = end;
                    break;
                }
                Framed::TooLong => return (asked, true),
            }
        }
    }
    (asked, false)
}

/// Replaces every text that cannot be a token of the server: readers need not distinguish such texts.
fn known(asked: &Asked) -> Asked {
    let mut asked = asked.clone();
    if let Asked::Renew { token, .. } | Asked::Release { token, .. } = &mut asked
        && (token.len() != 32 || !token.iter().all(|digit| b"0123456789abcdef".contains(digit)))
    {
        *token = b"?".to_vec();
    }
    asked
}

fn plain(request: &Request<'_>) -> Asked {
    let semaphore = |space| space == KeySpace::Semaphore;
    let limit = |mode| match mode {
        Mode::Slot { limit } => u64::from(limit),
        Mode::Exclusive | Mode::Shared => 1,
    };
    let proof = |token: Option<LockToken>| token.map_or(b"?".to_vec(), |t| t.to_hex().to_vec());
    match *request {
        Request::Lock { key, mode, timeout, lease } => {
            let (semaphore, limit) = (semaphore(mode.space()), limit(mode));
            Asked::Lock { semaphore, key: key.to_vec(), limit, timeout, lease }
        }
        Request::Enqueue { key, mode, lease } => {
            let (semaphore, limit) = (semaphore(mode.space()), limit(mode));
            Asked::Enqueue { semaphore, key: key.to_vec(), limit, lease }
        }
        Request::Wait { key, space, timeout } => {
            Asked::Wait { semaphore: semaphore(space), key: key.to_vec(), timeout }
        }
        Request::Renew { key, space, token, lease } => {
            let (semaphore, token) = (semaphore(space), proof(token));
            Asked::Renew { semaphore, key: key.to_vec(), token, lease }
        }
        Request::Release { key, space, token } => {
            Asked::Release { semaphore: semaphore(space), key: key.to_vec(), token: proof(token) }
        }
        Request::Stats => Asked::Stats,
        Request::Ping => Asked::Ping,
        Request::Auth { secret } => Asked::Auth { secret: secret.to_vec() },
        Request::Extended(_) => {
            Asked::Other { command: Vec::new(), key: Vec::new(), argument: Vec::new() }
        }
    }
}

/// Some requests, most of them right before they were garbled.
fn garbled(random: &mut Random) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..=random.below(4) {
        let command = pick(random, COMMANDS);
        let key = pick(random, KEYS);
        let parts: Vec<&[u8]> = (0..random.below(5)).map(|_| pick(random, PARTS)).collect();
        let blank = pick(random, BLANKS);
        let end = pick(random, &[b"\n", b"\n", b"\r\n", b"\r\r\n"]);
        for line in [command.to_vec(), key.to_vec(), parts.join(blank)] {
            bytes.extend_from_slice(&line);
            if random.chance(0.01) {
                let filling = 240 + usize::try_from(random.below(20)).expect("it is small");
                bytes.resize(bytes.len() + filling, b'x');
            }
            bytes.extend_from_slice(end);
        }
    }
    for _ in 0..random.below(3) {
        let at = usize::try_from(random.below(bytes.len() as u64)).expect("an index");
        match random.below(3) {
            0 => bytes[at] = u8::try_from(random.below(256)).expect("a byte"),
            1 => drop(bytes.remove(at)),
            _ => bytes.insert(at, u8::try_from(random.below(256)).expect("a byte")),
        }
        if bytes.is_empty() {
            break;
        }
    }
    bytes
}

pub(crate) fn pick<'a>(random: &mut Random, from: &[&'a [u8]]) -> &'a [u8] {
    from[usize::try_from(random.below(from.len() as u64)).expect("an index")]
}

const COMMANDS: &[&[u8]] = &[
    b"l", b"sl", b"e", b"se", b"w", b"sw", b"n", b"sn", b"r", b"sr", b"stats", b"ping", b"auth",
    b"hello", b"x", b"L", b"", b"ss", b"sping", b" l",
];
const KEYS: &[&[u8]] =
    &[b"k", b"", b"\xff\x00", b"\xc2\xa0", b"a b", b"a\rb", b"a\tb", b"_", b"k\r"];
const PARTS: &[&[u8]] = &[
    b"0",
    b"1",
    b"10",
    b"+3",
    b"-0",
    b"-1",
    b"007",
    b"1_0",
    b"0x10",
    b"1.5",
    b"1e3",
    b"+",
    b"",
    b"1048576",
    b"1048577",
    b"9223372036",
    b"9223372037",
    b"9223372036854775807",
    b"9223372036854775808",
    b"99999999999999999999",
    b"\xd9\xa3",
    b"?",
    b"00000000000000010000000000000001",
    b"0000000000000001000000000000000a",
];
const BLANKS: &[&[u8]] = &[
    b" ",
    b" ",
    b" ",
    b"  ",
    b"\t",
    b"\x0b",
    b"\x0c",
    b"\r",
    b"\xc2\xa0",
    b"\xc2\x85",
    b"\xe3\x80\x80",
    b"\xe2\x80\x89",
    b"\x1c",
    b"\xe2\x80\x8b",
];
