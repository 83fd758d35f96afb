//! Round trips of every kind of line, and rejected lines.

use super::*;
use crate::LockToken;
use crate::table::{KeySpace, Mode};

const TOKEN: LockToken = LockToken::new(0x2a, 0xfeed);
const ID: ClaimId = ClaimId(0x1234_5678_9abc_def0);

fn parse(text: &str) -> Result<Request<'_>, Malformed> {
    let framed = Framer::default().next(text.as_bytes());
    let Framed::Request { lines, len } = framed else { panic!("{text:?} is {framed:?}") };
    assert_eq!(len, text.len(), "{text:?}");
    Request::parse(lines)
}

#[test]
fn requests_mean_what_the_protocol_says() {
    let (lock, semaphore) = (KeySpace::Lock, KeySpace::Semaphore);
    let slot = Mode::Slot { limit: 3 };
    let token = "000000000000002a000000000000feed";
    for (text, request) in [
        (
            "l\nk\n10\n",
            Request::Lock { key: b"k", mode: Mode::Exclusive, timeout: 10, lease: None },
        ),
        (
            "l\nk\n+3 007\n",
            Request::Lock { key: b"k", mode: Mode::Exclusive, timeout: 3, lease: Some(7) },
        ),
        ("l\nk\n-0\n", Request::Lock { key: b"k", mode: Mode::Exclusive, timeout: 0, lease: None }),
        ("sl\nk\n10 3 5\n", Request::Lock { key: b"k", mode: slot, timeout: 10, lease: Some(5) }),
        ("e\nk\n\n", Request::Enqueue { key: b"k", mode: Mode::Exclusive, lease: None }),
        ("e\nk\n 9 \n", Request::Enqueue { key: b"k", mode: Mode::Exclusive, lease: Some(9) }),
        ("se\nk\n3\n", Request::Enqueue { key: b"k", mode: slot, lease: None }),
        ("w\nk\n0\n", Request::Wait { key: b"k", space: lock, timeout: 0 }),
        ("sw\nk\n4\n", Request::Wait { key: b"k", space: semaphore, timeout: 4 }),
        (
            &format!("n\nk\n{token}\n"),
            Request::Renew { key: b"k", space: lock, token: Some(TOKEN), lease: None },
        ),
        (
            &format!("sn\nk\n{token} 8\n"),
            Request::Renew { key: b"k", space: semaphore, token: Some(TOKEN), lease: Some(8) },
        ),
        (
            "n\nk\nnonsense 8\n",
            Request::Renew { key: b"k", space: lock, token: None, lease: Some(8) },
        ),
        (
            &format!("r\nk\n {token} \n"),
            Request::Release { key: b"k", space: lock, token: Some(TOKEN) },
        ),
        ("sr\nk\na b\n", Request::Release { key: b"k", space: semaphore, token: None }),
        ("stats\n\nwhatever\n", Request::Stats),
        ("ping\n\n\n", Request::Ping),
        ("auth\n_\n a secret \n", Request::Auth { secret: b"a secret" }),
    ] {
        assert_eq!(parse(text), Ok(request), "{text:?}");
    }
}

#[test]
fn malformed_requests_are_rejected() {
    for text in [
        "L\nk\n1\n",
        " l\nk\n1\n",
        "l \nk\n1\n",
        "\nk\n1\n",
        "acquire\nk\n1\n", // commands
        "l\n\n1\n",
        "l\na b\n1\n",
        "l\na\tb\n1\n",
        "l\na\rb\n1\n",
        "e\n\n\n",
        "r\n\nt\n", // keys
        "l\nk\n\n",
        "l\nk\n1 2 3\n",
        "l\nk\n-1\n",
        "l\nk\n1 0\n",
        "l\nk\n1 -4\n",
        "l\nk\n1.5\n",
        "l\nk\n1e3\n",
        "l\nk\n0x10\n",
        "l\nk\n1_0\n",
        "l\nk\n9223372037\n",
        "l\nk\n1 9223372037\n",
        "l\nk\n99999999999999999999\n",
        "sl\nk\n1\n",
        "sl\nk\n1 0\n",
        "sl\nk\n1 1048577\n",
        "sl\nk\n1 2 3 4\n",
        "se\nk\n\n",
        "e\nk\n1 2\n",
        "w\nk\n\n",
        "w\nk\n1 2\n",
        "sw\nk\nx\n",
        "n\nk\n\n",
        "n\nk\nt 0\n",
        "n\nk\nt 1 2\n",
        "r\nk\n \n", // arguments
        "x\nk\nzz x 5 try bound\n",
        "x\nk\n00000000000000000000000000000001 x 0 try bound\n",
        "x\nk\n00000000000000000000000000000001 x 5 maybe bound\n",
        "xa\n_\n1\n",
        "xn\nk\nt\n",
        "watch\nk\n1\n",
        "brk\nk\n-1 why\n",
        "q\n\n\n",
    ] {
        assert_eq!(parse(text), Err(Malformed), "{text:?}");
    }
}

#[test]
fn requests_survive_their_bytes() {
    let requests = [
        Request::Lock { key: b"k\xff\0", mode: Mode::Exclusive, timeout: 10, lease: Some(1) },
        Request::Lock {
            key: b"k",
            mode: Mode::Slot { limit: MAX_SEMAPHORE_SLOTS },
            timeout: MAX_SECONDS,
            lease: None,
        },
        Request::Enqueue { key: b"k", mode: Mode::Exclusive, lease: None },
        Request::Enqueue { key: b"k", mode: Mode::Slot { limit: 1 }, lease: Some(MAX_SECONDS) },
        Request::Wait { key: b"k", space: KeySpace::Semaphore, timeout: 3 },
        Request::Renew { key: b"k", space: KeySpace::Lock, token: Some(TOKEN), lease: Some(4) },
        Request::Release { key: b"k", space: KeySpace::Semaphore, token: Some(TOKEN) },
        Request::Stats,
        Request::Ping,
        Request::Auth { secret: b"s" },
    ];
    let (key, space) = (&b"k"[..], KeySpace::Semaphore);
    let extended = [
        ExtensionRequest::Hello { about: b"{\"pid\":1}" },
        ExtensionRequest::Claim {
            id: ID,
            key,
            mode: Mode::Shared,
            lease: 250,
            queue: true,
            detached: false,
            by: b"web-1 a note",
        },
        ExtensionRequest::Claim {
            id: ID,
            key,
            mode: Mode::Slot { limit: 4 },
            lease: 1,
            queue: false,
            detached: true,
            by: b"",
        },
        ExtensionRequest::Position { id: ID },
        ExtensionRequest::Abandon { id: ID },
        ExtensionRequest::Detach { id: ID },
        ExtensionRequest::Renew { key, space, token: Some(TOKEN), lease: 1500 },
        ExtensionRequest::Query { key, space: KeySpace::Lock },
        ExtensionRequest::List { prefix: b"", space, after: None },
        ExtensionRequest::List { prefix: b"a/", space: KeySpace::Lock, after: Some(b"a/b") },
        ExtensionRequest::Watch { key, space, seen: u64::MAX, id: 7 },
        ExtensionRequest::Unwatch { id: 7 },
        ExtensionRequest::Break { key, space, number: u64::MAX, reason: b"stuck since noon" },
    ];
    for request in requests.into_iter().chain(extended.map(Request::Extended)) {
        let mut bytes = Vec::new();
        request.write(&mut bytes);
        let framed = Framer::default().next(&bytes);
        let Framed::Request { lines, len } = framed else { panic!("{request:?} is {framed:?}") };
        assert_eq!(len, bytes.len(), "{request:?}");
        assert_eq!(Request::parse(lines), Ok(request));
    }
}

#[test]
fn replies_and_pushes_survive_their_bytes() {
    let replies = [
        (Reply::Done, "ok\n"),
        (Reply::Granted { token: TOKEN, lease: 33 }, "ok 000000000000002a000000000000feed 33\n"),
        (
            Reply::Acquired { token: TOKEN, lease: 1 },
            "acquired 000000000000002a000000000000feed 1\n",
        ),
        (Reply::Queued, "queued\n"),
        (Reply::Number(33), "ok 33\n"),
        (Reply::Renewed { lease: 1500, waiters: 2 }, "ok 1500 2\n"),
        (Reply::Timeout, "timeout\n"),
        (Reply::Json(b"{\"a\": 1}"), "ok {\"a\": 1}\n"),
        (Reply::ERROR, "error\n"),
        (Reply::MAX_LOCKS, "error_max_locks\n"),
        (Reply::DRAINING, "error_draining\n"),
        (Reply::Error(b"from_the_future"), "error_from_the_future\n"),
    ];
    for (reply, text) in replies {
        let mut out = Vec::new();
        reply.write(&mut out);
        assert_eq!(out, text.as_bytes());
        assert_eq!(Reply::parse(text.trim_end().as_bytes()), Some(reply), "{text:?}");
    }
    for line in
        ["", "okay", "ok a b", "acquired x 3", "queued 1", "timeout 3", "ok 1 2 3", "! gone 1"]
    {
        assert_eq!(Reply::parse(line.as_bytes()), None, "{line:?}");
    }
    for push in [
        Push::Granted { id: ID, token: TOKEN, lease: 700 },
        Push::Gone { id: ID },
        Push::HandoffRequested { number: 9 },
        Push::Ended { number: u64::MAX, why: b"evicted by hand" },
        Push::Changed { id: 3 },
    ] {
        let mut out = Vec::new();
        push.write(&mut out);
        let line = out.strip_suffix(b"\n").expect("a line");
        assert_eq!(Push::parse(line), Some(push));
        assert_eq!(Reply::parse(line), None, "{push:?} is no reply");
    }
}

#[test]
fn numbers_are_written_in_decimal() {
    for value in [0, 9, 10, 12_345, u64::MAX] {
        let mut out = Vec::new();
        write_number(&mut out, value);
        assert_eq!(out, value.to_string().as_bytes());
    }
}
