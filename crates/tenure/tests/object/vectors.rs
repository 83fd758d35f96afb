//! The fake is held to what the documentation of the JSON API says.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpStream};

use crate::fake::{Fake, Manner};

fn ask(fake: &Fake, first: &str, body: &str) -> String {
    let mut stream =
        TcpStream::connect(fake.host().trim_start_matches("http://")).expect("it listens");
    let length = body.len();
    let asked = format!("{first} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n{body}");
    stream.write_all(asked.as_bytes()).expect("sent");
    stream.shutdown(Shutdown::Write).expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("answered");
    answer
}

#[test]
fn the_fake_answers_as_the_documentation_says() {
    let fake = Fake::start(Manner { limited: false, ..Fake::real().manner() });
    let (mut generation, mut old) = ("0".to_owned(), "0".to_owned());
    let mut vectors = 0;
    for vector in include_str!("vectors.txt").split("\n> ").skip(1) {
        let fill = |text: &str, generation: &str, old: &str| {
            text.replace("{g}", generation).replace("{old}", old)
        };
        let (asked, expected) = vector.split_once("\n< ").expect("an answer");
        let (first, body) = asked.split_once('\n').unwrap_or((asked, ""));
        let answer = ask(&fake, &fill(first, &generation, &old), body);
        if first.starts_with("POST") && answer.starts_with("HTTP/1.1 200") {
            let found =
                answer.split("\"generation\":\"").nth(1).and_then(|rest| rest.split('"').next());
            old = std::mem::replace(&mut generation, found.expect("a generation").to_owned());
        }
        let mut parts = expected.trim().split(' ');
        let status = parts.next().expect("a status");
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{first}: {answer}");
        let rest = fill(expected.trim().trim_start_matches(status), &generation, &old);
        for part in rest.split_whitespace() {
            assert!(answer.contains(part), "{first}: no {part} in {answer}");
        }
        vectors += 1;
    }
    assert_eq!(vectors, 18);
}

#[test]
fn a_second_write_within_a_second_is_refused_by_name() {
    let fake = Fake::real();
    let write = |name: &str| {
        let first = format!("POST /upload/storage/v1/b/locks/o?uploadType=media&name={name}");
        ask(&fake, &first, "{}")
    };
    assert!(write("a").starts_with("HTTP/1.1 200"));
    assert!(write("a").starts_with("HTTP/1.1 429"));
    assert!(write("b").starts_with("HTTP/1.1 200"), "another name");
}
