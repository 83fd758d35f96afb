//! Every store is started after the commands that need it. Each command runs, and the outage was reported: on a terminal,
//! in a file, and as JSON.

use std::any::Any;
use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;

use super::fake::Fake;
use super::nats_server::NatsServer;
use super::pg_server::{Server as PgServer, free_port};
use super::session::Session;
use super::support::{Scene, Server, eventually};
use super::{event_names, services, start, until_said};

/// Starts a store while commands wait for it. Returns what keeps the store alive.
type StartStore<'a> = Box<dyn FnOnce() -> Box<dyn Any> + 'a>;

/// Runs three commands before the store is up, starts the store once all of them have reported the outage, and checks
/// that they ran.
fn starts_later(store: &str, scene: &Scene, url: &str, start_store: StartStore<'_>) {
    let name = |form: &str| format!("demo-{form}");
    let run = |form: &str, option: &str| {
        let line = format!("run {option} --wait 60s --ttl 15s {} -- echo ran", name(form));
        [vec!["-s".to_owned(), url.to_owned()], line.split(' ').map(str::to_owned).collect()]
    };
    let begin = |scene: &Scene, form: &str, option: &str| {
        let [store, line] = run(form, option);
        let words = line[..1].iter().chain(&store).chain(&line[1..]);
        let words: Vec<&str> = words.map(String::as_str).filter(|word| !word.is_empty()).collect();
        start(scene, &words)
    };
    let json_scene = Scene::new();
    let mut log = begin(scene, "log", "");
    let mut json = begin(&json_scene, "json", "--json");
    let mut terminal = Session::new(scene);
    let [_, line] = run("tty", "--max-hold 1h");
    terminal.enter(&format!("$TENURE {} -s '{url}' {}", line[0], line[1..].join(" ")));
    let away = "the store has been away";
    terminal.shows(&format!("tenure: {}: {away}", name("tty")));
    until_said(scene, &format!("tenure: {}: {away}", name("log")));
    until_said(&json_scene, away);
    let running = start_store();
    terminal.shows(&format!("tenure: {}: the store is back after", name("tty")));
    terminal.shows("ran\r\n");
    assert_eq!(terminal.code(), "0");
    assert_eq!((log.line().as_str(), log.code()), ("ran", Some(0)), "{}", scene.read("said"));
    let said = scene.read("said");
    assert!(said.contains(&format!("tenure: {}: the store is back after", name("log"))), "{said}");
    assert_eq!((json.line().as_str(), json.code()), ("ran", Some(0)));
    let events = json_scene.read("said");
    let names = event_names(&events);
    let [first, .., last] = &names[..] else { panic!("{events}") };
    assert_eq!((&**first, &**last), ("error", "released"), "{events}");
    assert!(names.iter().any(|event| event == "store_back"), "{events}");
    drop(running);
    println!("| {store} | yes | terminal, file, JSON |");
}

#[test]
fn lock_server() {
    let (scene, port) = (Scene::new(), free_port());
    let url = format!("tenure://127.0.0.1:{port}");
    let start_store = || Box::new(Server::start_at(&scene, port, &[])) as Box<dyn Any>;
    starts_later("lock server", &scene, &url, Box::new(start_store));
}

fn postgres(store: &str, scheme: &str) {
    let Some(mut server) = PgServer::start() else { return };
    let (scene, url) = (Scene::new(), server.url());
    assert_eq!(scene.outcome(&["schema", "-s", &url, "--locks", "--apply"]).0, Some(0));
    server.down();
    let start_store = move || {
        server.up();
        Box::new(server) as Box<dyn Any>
    };
    starts_later(store, &scene, &url.replacen("postgres:", scheme, 1), Box::new(start_store));
}

#[test]
fn postgres_lease_rows() {
    postgres("PostgreSQL lease rows", "postgres:");
}

#[test]
fn postgres_advisory_locks() {
    postgres("PostgreSQL advisory locks", "postgres+advisory:");
}

fn nats(store: &str, options: &str) {
    let scene = Scene::new();
    let Some(mut server) = NatsServer::new(&scene, "nats", &[]) else { return };
    let url = format!("nats://127.0.0.1:{}/locks{options}", server.port);
    let start_store = move || {
        server.up();
        Box::new(server) as Box<dyn Any>
    };
    starts_later(store, &scene, &url, Box::new(start_store));
}

#[test]
fn nats_bucket() {
    nats("NATS", "");
}

#[test]
fn nats_bucket_of_nlock() {
    nats("NATS, form of nlock", "?form=nlock&ttl=30s");
}

/// Listens on `port` and forwards every connection to `address`.
fn forward(port: u16, address: &str) -> Box<dyn Any> {
    let address = address.to_owned();
    let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            forward_connection(client, &address);
        }
    });
    Box::new(())
}

/// Forwards a connection to `address`, in the background.
pub(super) fn forward_connection(client: TcpStream, address: &str) {
    let Ok(server) = TcpStream::connect(address) else { return };
    let copy = |mut from: TcpStream, mut to: TcpStream| {
        thread::spawn(move || {
            let _ = io::copy(&mut from, &mut to);
            let _ = to.shutdown(Shutdown::Write);
        })
    };
    copy(client.try_clone().unwrap(), server.try_clone().unwrap());
    copy(server, client);
}

/// A store of the suite that no test may stop. Its port is one on which nothing listens until the store is started.
fn object_store(store: &str, url: &str, endpoint: &str) {
    let (scene, port) = (Scene::new(), free_port());
    let address = endpoint.trim_start_matches("http://");
    let (address, path) = address.split_once('/').unwrap_or((address, ""));
    let own = format!("http://127.0.0.1:{port}/{path}");
    let url = url.replace("{endpoint}", own.trim_end_matches('/'));
    starts_later(store, &scene, &url, Box::new(|| forward(port, address)));
}

#[test]
fn s3() {
    let Some(endpoint) = services::s3() else { return };
    let prefix = format!("outage-{}", std::process::id());
    object_store("S3", &format!("s3://locks/{prefix}?endpoint={{endpoint}}"), &endpoint);
}

#[test]
fn azure() {
    let Some(endpoint) = services::azure() else { return };
    let prefix = format!("outage-{}", std::process::id());
    object_store("Azure", &format!("az://locks/{prefix}?endpoint={{endpoint}}"), &endpoint);
}

#[test]
fn google() {
    let fake = Fake::quick();
    let url = fake.store("outage").replace(fake.host(), "{endpoint}");
    object_store("Google", &url, fake.host());
}

/// The store of this host has no server that could be away. A folder that is not there is created; a folder that cannot
/// be created is a refusal, which ends at once.
#[test]
fn file() {
    let scene = Scene::new();
    let url = format!("file:{}", scene.path("missing/store").display());
    let run = ["run", "-s", &url, "--wait", "60s", "demo", "--", "echo", "ran"];
    let (code, _, said) = scene.outcome(&run);
    assert!(code == Some(125) && said.contains("its parent does not exist"), "{code:?}: {said}");
    let (code, _, said) = scene.outcome(&[&["run", "--json"], &run[1..]].concat());
    assert_eq!((code, event_names(&said)), (Some(125), vec!["error".to_owned()]), "{said}");
    let mut terminal = Session::new(&scene);
    terminal.enter(&format!("$TENURE {}", run.join(" ")));
    terminal.shows("its parent does not exist");
    assert_eq!(terminal.code(), "125");
    std::fs::create_dir(scene.path("missing")).unwrap();
    assert_eq!(scene.outcome(&run).0, Some(0));
    // A store that is removed while a command waits is made anew for it, and the holder has lost its hold.
    let hold =
        ["run", "-s", &url, "--ttl", "3s", "demo", "--", "sh", "-c", "echo ready; sleep 300"];
    let mut holder = scene.start(&hold);
    assert_eq!(holder.line(), "ready");
    let mut waiter = start(&scene, &run);
    until_said(&scene, "waiting for demo: held by");
    std::fs::rename(scene.path("missing/store"), scene.path("moved")).unwrap();
    assert_eq!((waiter.line().as_str(), waiter.code()), ("ran", Some(0)));
    eventually("the holder ends", || holder.code().filter(|code| *code == 79));
    println!("| file | 125 at once | terminal, file, JSON |");
}
