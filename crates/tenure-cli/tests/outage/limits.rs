//! Servers that refuse for a limit, elect a leader or are in recovery: they are waited for.

use super::nats_server::NatsServer;
use super::pg_server::{Server as PgServer, free_port};
use super::support::{Running, Scene, Server, eventually};
use super::{start, until_said};

/// Waits for `name` while the store refuses for `reason`, makes the store answer, and sees the command run. `--try`
/// fails at once meanwhile.
pub(super) fn is_waited_for(
    scene: &Scene,
    url: &str,
    name: &str,
    reason: &str,
    cure: impl FnOnce(),
) {
    let run = ["run", "-s", url, "--wait", "60s", name, "--", "echo", "ran"];
    let mut running = start(scene, &run);
    until_said(scene, &format!("{name}: the store has "));
    let said = scene.read("said");
    assert!(said.contains(reason), "{said}");
    let (code, _, said) = scene.outcome(&["run", "-s", url, "--try", name, "true"]);
    assert_eq!(code, Some(125), "{said}");
    cure();
    assert_eq!((running.line().as_str(), running.code()), ("ran", Some(0)));
    until_said(scene, "the store is back after");
}

fn holder(scene: &Scene, url: &str, name: &str) -> Running {
    let script = "echo ready; exec sleep 300";
    let mut holder = scene.start(&["run", "-s", url, name, "--", "sh", "-c", script]);
    assert_eq!(holder.line(), "ready");
    holder
}

#[test]
fn a_limit_of_keys_is_waited_for() {
    let scene = Scene::new();
    let server = Server::start(&scene, &["--max-locks", "1", "--gc-max-idle", "1s"]);
    let holder = holder(&scene, &server.url, "other");
    is_waited_for(&scene, &server.url, "demo", "limit of keys in use", || drop(holder));
}

#[test]
fn a_limit_of_waiters_is_waited_for() {
    let scene = Scene::new();
    let server = Server::start(&scene, &["--max-waiters", "1"]);
    let holder = holder(&scene, &server.url, "demo");
    let mut waiter = scene.start(&["run", "-s", &server.url, "demo", "--", "echo", "waited"]);
    let status = ["status", "-s", &server.url, "--json", "demo"];
    eventually("a waiter", || scene.outcome(&status).1.contains(r#""place":1"#).then_some(()));
    let run = ["run", "-s", &server.url, "--wait", "60s", "demo", "--", "echo", "ran"];
    let mut running = start(&scene, &run);
    until_said(&scene, "the server's limit of waiters for this key is reached");
    drop(holder);
    assert_eq!((waiter.line().as_str(), waiter.code()), ("waited", Some(0)));
    assert_eq!((running.line().as_str(), running.code()), ("ran", Some(0)));
}

#[test]
fn a_nats_cluster_without_a_leader_is_waited_for() {
    let scene = Scene::new();
    let routes: Vec<u16> = (0..3).map(|_| free_port()).collect();
    let known: Vec<String> = routes.iter().map(|port| format!("nats://127.0.0.1:{port}")).collect();
    let nodes: Option<Vec<NatsServer>> = (0..3)
        .map(|number| {
            let (name, known) = (format!("node{number}"), known.join(","));
            let listen = format!("nats://127.0.0.1:{}", routes[number]);
            let cluster = ["--name", &name, "--cluster_name", "away", "--cluster", &listen];
            NatsServer::new(&scene, &name, &[&cluster[..], &["--routes", &known]].concat())
        })
        .collect();
    let Some(mut nodes) = nodes else { return };
    nodes[0].up();
    let url = format!("nats://127.0.0.1:{}/locks", nodes[0].port);
    // A request to a cluster without a leader is not answered, so there is no error yet.
    is_waited_for(&scene, &url, "demo", "the store has not answered for", || {
        nodes[1].up();
        nodes[2].up();
    });
}

#[test]
fn a_database_in_recovery_is_waited_for() {
    let Some(mut server) = PgServer::start_with(None, "hot_standby = off\n") else { return };
    let (scene, url) = (Scene::new(), server.url());
    assert_eq!(scene.outcome(&["schema", "-s", &url, "--locks", "--apply"]).0, Some(0));
    server.down();
    // Until it is promoted, this server replays its log and accepts no connection.
    server.write("standby.signal", "");
    server.spawn();
    let recovering = "the server refused the connection";
    eventually("it refuses", || {
        let (_, _, said) = scene.outcome(&["status", "-s", &url, "demo"]);
        said.contains(recovering).then_some(())
    });
    is_waited_for(&scene, &url, "demo", recovering, || server.promote());
}
