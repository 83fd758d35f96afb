//! Waiting on real sockets: order, time, and peers that vanish.

use std::time::{Duration, Instant};

use rustix::net::sockopt::set_socket_linger;

use crate::support::{Client, Server, connect, eventually, many_files};

#[test]
fn a_burst_is_granted_in_the_order_it_came() {
    let many = 2000.min(many_files() - 200);
    let server = Server::start(&[]);
    let mut holder = server.client();
    holder.send("l k 0");
    let token = holder.token();
    let mut waiters: Vec<_> = (0..many).map(|_| server.client()).collect();
    for waiter in &mut waiters {
        waiter.send("l k 600");
    }
    eventually("all wait", || {
        holder.ask("stats _").contains(&format!("\"waiters\":{many}}}")).then_some(())
    });
    assert_eq!(holder.ask(&format!("r k {token}")), "ok");
    let mut last = token;
    for waiter in waiters {
        // Each holds it until it hangs up. Out of order, this would wait in vain.
        let mut waiter = waiter;
        let token = waiter.token();
        assert!(token > last, "numbers grow");
        last = token;
    }
}

#[test]
fn a_silent_holder_keeps_its_lock_for_its_lease() {
    let server = Server::start(&["--read-timeout", "200ms"]);
    let (mut holder, mut other) = (server.client(), server.client());
    holder.send("l k 0 60");
    let token = holder.token();
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(other.ask("l k 0"), "timeout");
    assert_eq!(holder.ask(&format!("n k {token} 60")), "ok 60", "the connection is there too");
}

#[test]
fn the_end_of_a_lease_passes_the_lock_on_in_order() {
    let server = Server::start(&[]);
    let mut holder = server.client();
    holder.send("l k 0 1");
    let token = holder.token();
    let began = Instant::now();
    let (mut second, mut third) = (server.client(), server.client());
    second.send("l k 60 1");
    eventually("it waits", || server.client().ask("q k").contains("\"waiting\":1").then_some(()));
    third.send("l k 60 1");
    assert!(second.token() > token);
    let after = began.elapsed();
    // The grant takes a few milliseconds more than the lease; the upper bound allows for a busy machine.
    assert!((Duration::from_millis(800)..Duration::from_secs(6)).contains(&after), "{after:?}");
    assert_eq!(holder.ask(&format!("r k {token}")), "error");
    third.token();
}

#[test]
fn waiters_that_vanish_free_their_place_at_once() {
    let server = Server::start(&[]);
    let mut holder = server.client();
    holder.send("l k 0 600");
    let token = holder.token();
    let mut doomed = Vec::new();
    for _ in 0..20 {
        let stream = connect(server.address);
        set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
        let mut client = Client::new(stream);
        client.send("l k 600");
        doomed.push(client);
    }
    let waiting = |count: usize| format!("\"waiting\":{count}}}");
    eventually("they wait", || holder.ask("q k").ends_with(&waiting(20)).then_some(()));
    let mut last = server.client();
    last.send("l k 600");
    eventually("it waits", || holder.ask("q k").ends_with(&waiting(21)).then_some(()));
    // Half of them break, half of them only leave.
    for (number, client) in doomed.into_iter().enumerate() {
        if number % 2 == 0 {
            set_socket_linger(client.0.get_ref(), None).unwrap();
        }
        drop(client);
    }
    eventually("they are gone", || holder.ask("q k").ends_with(&waiting(1)).then_some(()));
    assert_eq!(holder.ask(&format!("r k {token}")), "ok");
    last.token();
}

#[test]
fn a_client_that_says_so_keeps_its_lock_when_its_connection_breaks() {
    let server = Server::start(&[]);
    let mut busy = server.client();
    assert!(busy.ask("l busy 0 600").starts_with("ok "));
    for (abrupt, waits, kept) in [
        (true, false, "timeout"),
        (true, true, "timeout"),
        (false, false, "ok "),
        (false, true, "ok "),
    ] {
        let key = format!("{abrupt}-{waits}");
        let stream = connect(server.address);
        if abrupt {
            set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
        }
        let mut client = Client::new(stream);
        assert!(client.ask("hello _ {\"keep\":true}").starts_with("ok {"));
        assert!(client.ask(&format!("l {key} 0 60")).starts_with("ok "));
        if waits {
            client.send("l busy 60");
            eventually("it waits", || busy.ask("q busy").contains("\"waiting\":1").then_some(()));
        }
        drop(client);
        let mut other = server.client();
        // By now both ends are known: the break is not slower than a connection.
        let answer = other.ask(&format!("l {key} 1"));
        assert!(answer.starts_with(kept), "{key}: {answer}");
        eventually("it waits no more", || {
            busy.ask("q busy").contains("\"waiting\":0").then_some(())
        });
    }
}

#[test]
fn stats_of_many_keys_comes_to_its_end() {
    let server = Server::start(&[]);
    let mut client = server.client();
    let keys: Vec<_> = (0..5000).map(|key| format!("key/{key}")).collect();
    for keys in keys.chunks(1000) {
        client.hold_all(keys);
    }
    // Also where whole stretches of the table have nothing of what is being told.
    let stats = client.ask("stats _");
    assert_eq!(stats.matches("\"key\"").count(), 5000);
    assert_eq!(client.ask("ping _"), "ok");
}
