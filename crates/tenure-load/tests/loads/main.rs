//! Each load on a server that is right, and on servers that are wrong in the way that it is there to see.

mod responder;

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;

use anyhow::Result;
use responder::Fault;
use tenure_load::Target;
use tenure_load::loads::cycle::{self, Shape};
use tenure_load::loads::{Span, burst, churn, close, expiry, memory, pipeline, scrape, slowloris};
use tenure_load::process::Process;

const SPAN: Span = Span { secs: 0.2, warmup: 0.05 };
/// This process is never at rest.
const REST: memory::SettleOptions = memory::SettleOptions { settle: 0.01 };

/// The responder is in this process, so this process is the server's.
fn target(fault: Fault) -> Target {
    let address = responder::start(fault);
    Target { address, process: Some(Process(std::process::id())), fenced: true }
}

fn cycle(fault: Fault, conns: usize, hot: bool, two_phase: bool) -> Result<cycle::CycleOutcome> {
    cycle::run(&target(fault), cycle::CycleOptions { conns, span: SPAN }, Shape { hot, two_phase })
}

/// Asserts that a load ended with an error that says so.
fn refused<T>(outcome: Result<T>, why: &str) {
    let Err(error) = outcome else { panic!("taken for right, where it should say: {why}") };
    let error = format!("{error:#}");
    assert!(error.contains(why), "{error}");
}

#[test]
fn own_keys_are_counted_and_timed() {
    for two_phase in [false, true] {
        let found = cycle(Fault::None, 4, false, two_phase).unwrap();
        assert!(found.pairs > 10 && found.pairs_per_s > 50.0, "{found:?}");
        assert!(found.pair.p50_us > 0.0 && found.pair.p50_us >= found.release.p50_us, "{found:?}");
        assert!(found.server_cpu_us_per_pair.unwrap() > 0.0, "{found:?}");
        assert!(found.hand_off.is_none());
    }
}

#[test]
fn a_hot_key_goes_round() {
    for two_phase in [false, true] {
        let found = cycle(Fault::None, 4, true, two_phase).unwrap();
        let hand_off = found.hand_off.unwrap();
        assert!(hand_off.gap.n > 10, "{hand_off:?}");
        assert!(hand_off.fairness > 0.8 && hand_off.grants_min > 0, "{hand_off:?}");
    }
}

#[test]
fn a_pipeline_answers_all_of_a_batch() {
    let options = pipeline::PipelineOptions { conns: 2, depth: 16, span: SPAN };
    let found = pipeline::run(&target(Fault::None), &options).unwrap();
    assert!(found.batch.n > 2 && found.requests_per_s > 100.0, "{found:?}");
}

#[test]
fn memory_is_that_of_what_was_asked_for() {
    let target = target(Fault::None);
    let idle = memory::idle(&target, memory::IdleOptions { conns: 20, rest: REST }).unwrap();
    assert_eq!(idle.n, 20);
    let hold =
        memory::hold(&target, memory::HoldOptions { keys: 20_000, conns: 3, rest: REST }).unwrap();
    assert!(hold.n == 20_000 && hold.bytes_each > 50.0, "{hold:?}");
    let waiters =
        memory::waiters(&target, memory::WaiterOptions { conns: 20, rest: REST }).unwrap();
    assert_eq!(waiters.n, 20);
}

#[test]
fn the_end_of_a_lease_and_of_a_connection_pass_the_key_on() {
    let target = target(Fault::None);
    let options = expiry::ExpiryOptions { samples: 10, leases: 500 };
    let found = expiry::run(&target, &options).unwrap();
    assert!(found.late.n == 10 && found.late.max_us < 5e6, "{found:?}");
    let found = close::run(&target, &close::CloseOptions { samples: 5, keys: 500 }).unwrap();
    assert!(found.granted.n == 5 && found.granted.p50_us > 0.0, "{found:?}");
}

#[test]
fn a_burst_is_served_to_the_last() {
    let found = burst::run(&target(Fault::None), burst::BurstOptions { conns: 30 }).unwrap();
    assert!(found.hand_offs_per_s > 0.0, "{found:?}");
}

#[test]
fn connections_come_and_go_and_silent_ones_stay() {
    let target = target(Fault::None);
    let found = churn::run(&target, churn::ChurnOptions { span: SPAN }).unwrap();
    assert!(found.cycles_per_s > 10.0, "{found:?}");
    let options = slowloris::SlowlorisOptions { conns: 2, idle: 20, half: 20, span: SPAN };
    let found = slowloris::run(&target, &options).unwrap();
    assert!(found.p99_ratio > 0.0 && found.crowded.n > 5, "{found:?}");
}

/// Where every request gets this reply.
fn http(reply: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("it is bound").to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a connection");
            let asked = BufReader::new(&stream).lines().map_while(Result::ok);
            asked.take_while(|line| !line.is_empty()).for_each(drop);
            stream.write_all(reply.as_bytes()).expect("it reads");
        }
    });
    address
}

#[test]
fn metrics_are_read_while_others_lock() {
    let options = |http| scrape::ScrapeOptions {
        http,
        conns: 2,
        keys: 50,
        every: 0.01,
        turns: 1,
        span: SPAN,
    };
    let reply = "HTTP/1.1 200 OK\r\n\r\nup 1\n";
    let found = scrape::run(&target(Fault::None), &options(http(reply))).unwrap();
    assert_eq!(found.bytes, reply.len());
    assert!(found.rate_ratio > 0.0 && found.scrape.n > 0, "{found:?}");
    let wrong = options(http("HTTP/1.1 503 Service Unavailable\r\n\r\n"));
    refused(scrape::run(&target(Fault::None), &wrong), "503");
}

#[test]
fn wrong_grants_are_refused() {
    for fault in [Fault::OtherLease, Fault::FourthField, Fault::Capitals] {
        refused(cycle(fault, 2, false, false), "wrong reply");
    }
    refused(cycle(Fault::SameFence, 2, false, false), "fence 1 was granted after 1");
    refused(cycle(Fault::OtherToken, 2, false, true), "another token");
    let options = pipeline::PipelineOptions { conns: 1, depth: 4, span: SPAN };
    refused(pipeline::run(&target(Fault::SameFence), &options), "fence");
    let options = memory::HoldOptions { keys: 9, conns: 1, rest: REST };
    refused(memory::hold(&target(Fault::OtherLease), options), "wrong reply");
}

#[test]
fn two_holders_at_once_are_refused() {
    refused(cycle(Fault::NoExclusion, 8, true, false), "wrong reply");
    let early = target(Fault::EarlyExpiry);
    let outcome = expiry::run(&early, &expiry::ExpiryOptions { samples: 3, leases: 10 });
    refused(outcome, "granted while a lease ran");
}

#[test]
fn a_release_that_fails_and_a_connection_that_ends_are_refused() {
    refused(cycle(Fault::NoRelease, 2, false, false), "\"error\" instead of \"ok\"");
    refused(cycle(Fault::HangUp, 2, false, false), "connection");
    // What comes first depends on whether the request was there when it hung up.
    let error = churn::run(&target(Fault::HangUp), churn::ChurnOptions { span: SPAN }).unwrap_err();
    let error = format!("{error:#}");
    let says = |text: &str| error.contains(text);
    assert!(says("closed") || says("reset") || says("pipe"), "{error}");
}
