//! Metrics of an outage.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use super::pg_server::free_port;
use super::support::{Scene, Server, eventually};
use super::{start, until_said};

/// Metrics of a process, or nothing if it does not serve them yet.
pub(super) fn scrape(port: u16) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    let request = "GET /metrics HTTP/1.1\r\nhost: tests\r\nconnection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).ok()?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply).ok()?;
    Some(reply)
}

#[test]
fn an_outage_is_counted_and_its_end_is_seen() {
    let (scene, port, http) = (Scene::new(), free_port(), free_port());
    let (url, listen) = (format!("tenure://127.0.0.1:{port}"), format!("127.0.0.1:{http}"));
    let lead = ["lead", "-s", &url, "--metrics", &listen, "demo", "--", "sleep", "300"];
    let _leading = start(&scene, &lead);
    until_said(&scene, "the store has been away");
    let has = |line: &str| scrape(http).filter(|text| text.lines().any(|found| found == line));
    assert!(has(r#"tenure_store_away{store="server"} 1"#).is_some(), "{:?}", scrape(http));
    assert!(has(r#"tenure_store_outages_total{store="server"} 1"#).is_some());
    let _server = Server::start_at(&scene, port, &[]);
    eventually("the end of the outage", || has(r#"tenure_store_away{store="server"} 0"#));
    assert!(has(r#"tenure_store_outages_total{store="server"} 1"#).is_some());
}
