//! Stores behind a proxy that answers in their place for a while: they are waited for.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use super::fake::Fake;
use super::limits::is_waited_for;
use super::nats_server::NatsServer;
use super::support::{Scene, Server};
use super::table::forward_connection;

/// A front of a store, which answers nonsense until it is cured, and forwards connections from then on.
struct Front {
    port: u16,
    cured: Arc<AtomicBool>,
}

impl Front {
    fn start(store: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let cured = Arc::new(AtomicBool::new(false));
        let (store, is_cured) = (store.to_owned(), Arc::clone(&cured));
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if is_cured.load(Ordering::SeqCst) {
                    forward_connection(client, &store);
                } else {
                    thread::spawn(move || answer_nonsense(&client));
                }
            }
        });
        Self { port, cured }
    }

    fn cure(&self) {
        self.cured.store(true, Ordering::SeqCst);
    }
}

/// Answers the first bytes of a client as no store does, and hangs up.
fn answer_nonsense(mut client: &TcpStream) {
    // A client of NATS sends nothing before the server does.
    client.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    let _ = client.read(&mut [0; 4_096]);
    let page = "<html>log in</html>";
    let length = page.len();
    // The client may have hung up by itself.
    let _ = write!(client, "HTTP/1.1 418 Teapot\r\ncontent-length: {length}\r\n\r\n{page}");
    let _ = client.shutdown(Shutdown::Both);
}

#[test]
fn a_lock_server_that_answers_nonsense_is_waited_for() {
    let scene = Scene::new();
    let server = Server::start(&scene, &[]);
    let front = Front::start(server.url.trim_start_matches("tenure://"));
    let url = format!("tenure://127.0.0.1:{}", front.port);
    is_waited_for(&scene, &url, "demo", "the store has been away", || front.cure());
}

#[test]
fn an_object_store_that_answers_nonsense_is_waited_for() {
    let (scene, fake) = (Scene::new(), Fake::quick());
    let host = fake.host().trim_start_matches("http://").to_owned();
    let front = Front::start(&host);
    let url = fake.store("p").replace(&host, &format!("127.0.0.1:{}", front.port));
    is_waited_for(&scene, &url, "demo", "418", || front.cure());
}

#[test]
fn a_nats_server_that_answers_nonsense_is_waited_for() {
    let scene = Scene::new();
    let Some(mut nats) = NatsServer::new(&scene, "nats", &[]) else { return };
    nats.up();
    let front = Front::start(&format!("127.0.0.1:{}", nats.port));
    let url = format!("nats://127.0.0.1:{}/locks", front.port);
    is_waited_for(&scene, &url, "demo", "the store has", || front.cure());
}
