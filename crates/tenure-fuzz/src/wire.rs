//! The protocol of the lock server.

use tenure_core::Time;
use tenure_core::wire::{Framed, Framer, Push, Reply, Request};
use tenure_server::{Engine, Settings};

use crate::Samples;

/// Bytes that a server receives.
pub fn wire_requests(bytes: &[u8]) {
    let mut framer = Framer::default();
    let mut rest = bytes;
    while let Framed::Request { lines, len } = framer.next(rest) {
        if let Ok(request) = Request::parse(lines) {
            is_read_back(&request);
        }
        rest = &rest[len..];
    }
    serve(bytes);
}

/// Bytes that a client receives.
pub fn wire_replies(bytes: &[u8]) {
    for line in bytes.split(|byte| *byte == b'\n') {
        if let Some(reply) = Reply::parse(line) {
            let mut written = Vec::new();
            reply.write(&mut written);
            assert_eq!(Reply::parse(without_end(&written)), Some(reply));
        }
        if let Some(push) = Push::parse(line) {
            let mut written = Vec::new();
            push.write(&mut written);
            assert_eq!(Push::parse(without_end(&written)), Some(push));
        }
    }
}

/// Valid requests.
pub fn request_samples() -> Samples {
    [
        "l\nprinter\n10 33\n",
        "sl\npool\n10 3 33\n",
        "e\nprinter\n33\n",
        "w\nprinter\n10\n",
        "n\nprinter\n1_00000000000000000000000000000000 33\n",
        "r\nprinter\n1_00000000000000000000000000000000\n",
        "stats\n_\n\n",
        "ping\n_\n\n",
        concat!(
            "hello\n_\n{\"holder\":\"a\",\"pid\":7}\n",
            "x\nprinter\n00000000000000000000000000000001 x 5 try bound\n",
            "xp\n_\n00000000000000000000000000000001\n",
            "xn\nprinter\n1_00000000000000000000000000000000 33\n",
            "watch\nprinter\n1 2\n",
            "brk\nprinter\n7 by hand\n",
            "ls\n_\n\n",
            "hist\nprinter\n\n",
        ),
        "auth\n_\nsecret\n",
    ]
    .map(|text| text.as_bytes().to_vec())
    .to_vec()
}

/// Valid replies, as a server sends them.
pub fn reply_samples() -> Samples {
    let mut samples = vec![b"ok\n".to_vec(), b"timeout\n".to_vec(), b"error_max_locks\n".to_vec()];
    for request in request_samples() {
        samples.push(serve(&request));
    }
    samples
}

fn is_read_back(request: &Request<'_>) {
    let mut written = Vec::new();
    request.write(&mut written);
    let Framed::Request { lines, .. } = Framer::default().next(&written) else {
        panic!("{request:?} is written as {:?}", String::from_utf8_lossy(&written))
    };
    assert_eq!(Request::parse(lines), Ok(*request));
}

/// Replies of a server to these bytes, received at once and then byte by byte.
fn serve(bytes: &[u8]) -> Vec<u8> {
    let mut engine = Engine::new(Settings::default(), None, 1, 1);
    let now = Time::from_nanos(1_000_000_000);
    let mut replies = Vec::new();
    if let Some(client) = engine.open(None, now) {
        engine.receive(client, bytes, now);
        replies.extend_from_slice(engine.output().0);
        engine.clear_output();
    }
    if let Some(client) = engine.open(None, now) {
        for byte in bytes {
            if engine.is_closing(client) {
                break;
            }
            engine.receive(client, &[*byte], now);
            engine.clear_output();
        }
    }
    engine.handle_timeout(Time::MAX);
    engine.clear_output();
    replies
}

fn without_end(line: &[u8]) -> &[u8] {
    line.strip_suffix(b"\n").unwrap_or(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sample_consists_of_valid_requests() {
        for sample in request_samples() {
            let mut rest = &sample[..];
            while !rest.is_empty() {
                let text = String::from_utf8_lossy(rest).into_owned();
                let Framed::Request { lines, len } = Framer::default().next(rest) else {
                    panic!("{text:?} is no request")
                };
                assert!(Request::parse(lines).is_ok(), "{text:?}");
                rest = &rest[len..];
            }
        }
    }
}
