//! Answers too long for one turn: they stay whole, and no client can make the server buffer more than it must.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

use std::net::IpAddr;

use tenure_core::Time;
use tenure_core::table::Owner;
use tenure_server::{Engine, Settings};

const NOW: Time = Time::ZERO;
const MANY: usize = 1500;

/// A server with many locks, all of one connection.
fn full(of: usize) -> (Engine, Owner) {
    let mut engine = Engine::new(Settings::default(), None, 1, 1);
    let holder = engine.open(None::<IpAddr>, NOW).unwrap();
    for key in 0..of {
        engine.receive(holder, format!("l\nkey-{key}\n0\n").as_bytes(), NOW);
        engine.clear_output();
    }
    (engine, holder)
}

/// What was said to a connection since the last time.
fn said(engine: &mut Engine, to: Owner) -> String {
    let (out, segments) = engine.output();
    let mut text = Vec::new();
    for segment in segments {
        if segment.to == to {
            text.extend_from_slice(&out[segment.bytes.clone()]);
        }
    }
    engine.clear_output();
    String::from_utf8(text).unwrap()
}

/// The same, until a long answer has come to its end.
fn said_in_full(engine: &mut Engine, to: Owner) -> String {
    let mut text = said(engine, to);
    while engine.has_long_reply(to) {
        engine.write_done(to, NOW);
        text += &said(engine, to);
    }
    text
}

#[test]
fn stats_of_a_large_table_is_one_line_and_what_is_behind_it_waits() {
    let (mut engine, _) = full(MANY);
    let asker = engine.open(None, NOW).unwrap();
    engine.receive(asker, b"stats\n_\n_\nping\n_\n_\n", NOW);
    assert!(engine.has_long_reply(asker) && !engine.is_ready(asker));
    let text = said_in_full(&mut engine, asker);
    let (stats, rest) = text.split_once('\n').unwrap();
    assert_eq!(rest, "ok\n");
    let stats: serde_json::Value =
        serde_json::from_str(stats.strip_prefix("ok ").unwrap()).unwrap();
    assert_eq!(stats["locks"].as_array().unwrap().len(), MANY);
    engine.check();
}

#[test]
fn nothing_is_said_in_the_middle_of_a_long_answer() {
    let (mut engine, holder) = full(MANY);
    let asker = engine.open(None, NOW).unwrap();
    engine.receive(asker, b"hello\n_\n{}\nwatch\nother\n0 7\n", NOW);
    said(&mut engine, asker);
    engine.receive(asker, b"stats\n_\n_\n", NOW);
    let mut text = said(&mut engine, asker);
    assert!(engine.has_long_reply(asker));
    engine.receive(holder, b"l\nother\n0\n", NOW);
    text += &said_in_full(&mut engine, asker);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 2, "{:?}", &text[text.len() - 80..]);
    assert!(lines[0].starts_with("ok {") && lines[0].ends_with("]}"), "the answer is whole");
    assert_eq!(lines[1], "! changed 7");
    engine.check();
}

#[test]
fn a_flood_of_questions_with_long_answers_is_answered_bit_by_bit() {
    for (question, keys) in
        [("stats\n_\n_\n", 900), ("ls\n\n\n", 900), ("q\nkey-1\n\n", 2), ("stats\n_\n_\n", MANY)]
    {
        let (mut engine, _) = full(keys);
        let asker = engine.open(None, NOW).unwrap();
        engine.receive(asker, b"hello\n_\n{}\n", NOW);
        said(&mut engine, asker);
        let times = 600;
        engine.receive(asker, question.repeat(times).as_bytes(), NOW);
        let (mut answers, mut most) = (0, 0);
        loop {
            let part = said(&mut engine, asker);
            most = most.max(part.len());
            answers += part.bytes().filter(|byte| *byte == b'\n').count();
            if !engine.has_long_reply(asker) {
                break;
            }
            engine.write_done(asker, NOW);
        }
        assert_eq!(answers, times, "{question:?}");
        assert!(most < 256 * 1024, "{question:?}: {most} bytes at once");
        engine.check();
    }
}
