//! Flags, environment, and what is refused.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;

use nix::sys::signal::Signal;

use crate::support::{Files, Server, refused, serve};

#[test]
fn a_port_in_use_is_refused_with_its_name() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let (code, said) = refused(&mut serve(&["--port", &port]));
    assert_eq!(code, Some(125), "{said}");
    assert!(said.contains(&format!("127.0.0.1:{port}")) && said.contains("in use"), "{said}");
}

#[test]
fn strangers_are_not_let_in_by_accident() {
    let (code, said) = refused(&mut serve(&["--port", "0", "--host", "0.0.0.0"]));
    assert_eq!(code, Some(125), "{said}");
    assert!(said.contains("--insecure"), "it says what to do: {said}");
    let (code, _) = refused(serve(&["--port", "0", "--auth-token", "s"]).env("DFLOCKD_HOST", "::"));
    assert_eq!(code, Some(125), "a token in the clear is not enough");
    let server = Server::start(&["--host", "0.0.0.0", "--insecure"]);
    assert_eq!(server.client().ask("ping _"), "ok");
    let server = Server::start(&["--host", "127.3.2.1"]);
    assert_eq!(server.client().ask("ping _"), "ok");
}

#[test]
fn the_environment_is_heeded_and_the_command_line_wins() {
    let environment = |command: &mut std::process::Command| {
        command
            .env("DFLOCKD_DEFAULT_LEASE_TTL_S", "7")
            .env("DFLOCKD_LEASE_SWEEP_INTERVAL_S", "1")
            .env("DFLOCKD_GC_LOOP_SLEEP", "5")
            .env("DFLOCKD_GC_MAX_UNUSED_TIME", "60")
            .env("DFLOCKD_MAX_LOCKS", "1")
            .env("DFLOCKD_MAX_CONNECTIONS", "100")
            .env("DFLOCKD_MAX_WAITERS", "1")
            .env("DFLOCKD_READ_TIMEOUT_S", "23")
            .env("DFLOCKD_WRITE_TIMEOUT_S", "5")
            .env("DFLOCKD_SHUTDOWN_TIMEOUT_S", "30")
            .env("DFLOCKD_AUTO_RELEASE_ON_DISCONNECT", "false")
            .env("DFLOCKD_AUTH_TOKEN", "hush")
            .env("DFLOCKD_PORT", "0")
            .env("DFLOCKD_DEBUG", "1");
    };
    let mut command = serve(&[]);
    environment(&mut command);
    let server = Server::spawn(&mut command);
    let mut client = server.client();
    assert_eq!(client.ask("auth _ hush"), "ok");
    assert!(client.ask("l a 0").ends_with(" 7"));
    assert_eq!(client.ask("l b 0"), "error_max_locks");
    drop(client);
    let mut client = server.client();
    assert_eq!(client.ask("auth _ hush"), "ok");
    assert_eq!(client.ask("l a 0"), "timeout", "the hold stays");

    let files = Files::new();
    let token = files.write("token", "other\n");
    let mut command = serve(&["--default-lease-ttl", "9", "--max-locks", "2"]);
    command.args(["--auto-release-on-disconnect", "--auth-token-file", &token]);
    environment(&mut command);
    let server = Server::spawn(&mut command);
    let mut client = server.client();
    assert_eq!(client.ask("auth _ other"), "ok", "the file of the command line is the token");
    assert!(client.ask("l a 0").ends_with(" 9"));
    assert!(client.ask("l b 0").starts_with("ok "));
    drop(client);
    let mut client = server.client();
    assert_eq!(client.ask("auth _ other"), "ok");
    assert!(client.ask("l a 10").starts_with("ok "), "it was released");
}

#[test]
fn the_default_lease_is_33_seconds_or_the_longest_lease() {
    assert!(Server::start(&[]).client().ask("l a 0").ends_with(" 33"));
    assert!(Server::start(&["--max-lease", "10"]).client().ask("l a 0").ends_with(" 10"));
    let (code, said) = refused(&mut serve(&["--default-lease-ttl", "20", "--max-lease", "10"]));
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("20s") && said.contains("--max-lease, which is 10s"), "{said}");
}

#[test]
fn whether_holds_outlive_their_connection_can_be_said_in_every_way() {
    for (arguments, environment, released) in [
        (&[][..], None, true),
        (&[], Some("0"), false),
        (&["--auto-release-on-disconnect=false"], None, false),
        (&["--auto-release-on-disconnect=true"], Some("false"), true),
        (&["--auto-release-on-disconnect"], Some("false"), true),
        (&["--no-auto-release-on-disconnect"], None, false),
        (&["--no-auto-release-on-disconnect"], Some("true"), false),
    ] {
        let mut command = serve(&["--port", "0"]);
        command.args(arguments);
        if let Some(value) = environment {
            command.env("DFLOCKD_AUTO_RELEASE_ON_DISCONNECT", value);
        }
        let server = Server::spawn(&mut command);
        let mut client = server.client();
        assert!(client.ask("l k 0").starts_with("ok "));
        drop(client);
        let answer = server.client().ask("l k 1");
        assert_eq!(answer.starts_with("ok "), released, "{arguments:?} {environment:?}: {answer}");
    }
}

#[test]
fn a_token_that_everybody_can_read_is_warned_of() {
    let files = Files::new();
    let path = files.write("token", " hush \n");
    let server = Server::start(&["--auth-token-file", &path]);
    assert_eq!(server.client().ask("auth _ hush"), "ok");
    assert!(!server.said().contains("can read"), "{}", server.said());
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    let server = Server::start(&["--auth-token-file", &path]);
    assert!(server.said().contains("every user of this host can read the token"));
    assert!(!server.said().contains("hush"), "a secret is never printed");
    for (name, text) in [("empty", Some(" \n")), ("absent", None)] {
        let path = text.map_or_else(
            || files.path(name).to_str().unwrap().to_owned(),
            |text| files.write(name, text),
        );
        let (code, said) = refused(&mut serve(&["--port", "0", "--auth-token-file", &path]));
        assert_eq!(code, Some(125), "{said}");
    }
}

#[test]
fn stopping_turns_waiters_away_and_waits_for_clients() {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let mut server = Server::start(&[]);
        let (mut holder, mut waiter) = (server.client(), server.client());
        assert!(holder.ask("l k 0").starts_with("ok "));
        waiter.send("l k 60");
        assert_eq!(holder.ask("e k"), "queued");
        crate::support::eventually("the waiter waits", || {
            holder.ask("stats _").contains("\"waiters\":2").then_some(())
        });
        server.signal(signal);
        assert_eq!(waiter.line(), "error");
        assert_eq!(waiter.ask("ping _"), "error_draining");
        assert!(waiter.is_closed());
        assert!(std::net::TcpStream::connect(server.address).is_err(), "nobody listens");
        drop(holder);
        assert_eq!(server.code(), Some(0), "its clients have left");
    }
}

#[test]
fn clients_that_stay_do_not_keep_a_server_that_stops() {
    let mut server = Server::start(&["--shutdown-timeout", "200ms"]);
    let mut client = server.client();
    assert_eq!(client.ask("ping _"), "ok");
    server.signal(Signal::SIGTERM);
    assert_eq!(server.code(), Some(0));
    assert!(client.is_closed());
}
