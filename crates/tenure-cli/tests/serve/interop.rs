//! A client in the field, as it is: the Python package `dflockd`, which knows nothing of us.

use std::path::Path;
use std::process::Command;

use crate::skip::skip;
use crate::support::Server;

#[test]
fn the_python_client_gets_on_with_it() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../tools/dflockd");
    if !folder.join("dflockd/client.py").is_file() {
        let required = std::env::var("TENURE_TEST_SERVICES").is_ok_and(|value| value == "required");
        assert!(!required, "the Python client is not there: cargo xtask setup");
        skip("the Python client is not there: cargo xtask setup");
        return;
    }
    let server = Server::start(&[]);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/serve/interop.py");
    let output = Command::new("python3")
        .arg(script)
        .arg(server.address.port().to_string())
        .env("PYTHONPATH", folder)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
}
