//! A real browser, which tests of the page look through.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

/// A browser without a screen, spoken to by its debugging protocol over a pipe.
pub(crate) struct Browser {
    process: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
    session: Option<String>,
    last: u64,
    /// What the page complained of.
    pub(crate) complaints: Vec<String>,
    /// Number of clicks with the mouse.
    pub(crate) clicks: usize,
    _profile: TempDir,
}

impl Browser {
    pub(crate) fn start(program: &str) -> Self {
        let profile = TempDir::new().unwrap();
        // The browser reads orders from descriptor 3 and answers on 4: the shell makes these of its own input and output.
        let script = "exec \"$0\" --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run \
                      --remote-debugging-pipe --user-data-dir=\"$1\" about:blank 3<&0 4>&1 >/dev/null </dev/null";
        let mut process = Command::new("sh")
            .args(["-c", script, program])
            .arg(profile.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let orders = process.stdin.take().unwrap();
        let answers = BufReader::new(process.stdout.take().unwrap());
        let (session, complaints) = (None, Vec::new());
        let mut browser = Self {
            process,
            orders,
            answers,
            session,
            last: 0,
            complaints,
            clicks: 0,
            _profile: profile,
        };
        let target = browser.order("Target.createTarget", &json!({ "url": "about:blank" }));
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let attached = browser.order("Target.attachToTarget", &attach);
        browser.session = Some(attached["sessionId"].as_str().unwrap().to_owned());
        for domain in ["Page", "Runtime", "Log"] {
            browser.order(&format!("{domain}.enable"), &json!({}));
        }
        browser
    }

    /// Gives an order and waits for its answer; what the page says meanwhile is noted.
    pub(crate) fn order(&mut self, method: &str, parameters: &Value) -> Value {
        self.last += 1;
        let mut message = json!({ "id": self.last, "method": method, "params": parameters });
        if let Some(session) = &self.session {
            message["sessionId"] = session.as_str().into();
        }
        self.orders.write_all(message.to_string().as_bytes()).unwrap();
        self.orders.write_all(b"\0").unwrap();
        loop {
            let mut bytes = Vec::new();
            self.answers.read_until(0, &mut bytes).unwrap();
            assert_eq!(bytes.pop(), Some(0), "the browser ended");
            let said: Value = serde_json::from_slice(&bytes).unwrap();
            if said["id"] == self.last {
                assert!(said["error"].is_null(), "{method}: {said}");
                return said["result"].clone();
            }
            match said["method"].as_str().unwrap_or_default() {
                "Runtime.exceptionThrown" => self.complaints.push(said["params"].to_string()),
                "Runtime.consoleAPICalled" if said["params"]["type"] == "error" => {
                    self.complaints.push(said["params"].to_string());
                }
                "Log.entryAdded" if said["params"]["entry"]["level"] == "error" => {
                    self.complaints.push(said["params"]["entry"].to_string());
                }
                _ => {}
            }
        }
    }

    pub(crate) fn evaluate(&mut self, expression: &str) -> Value {
        let parameters =
            json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let result = self.order("Runtime.evaluate", &parameters);
        assert!(result["exceptionDetails"].is_null(), "{expression}: {result}");
        result["result"]["value"].clone()
    }

    /// Looks until an expression is true.
    pub(crate) fn until(&mut self, expression: &str) -> Duration {
        let began = Instant::now();
        while self.evaluate(&format!("!!({expression})")) != json!(true) {
            let text = self.evaluate("document.body.innerText");
            assert!(began.elapsed() < Duration::from_secs(30), "never: {expression}\n{text}");
            std::thread::sleep(Duration::from_millis(20));
        }
        began.elapsed()
    }

    pub(crate) fn press(&mut self, key: &str, code: u32) {
        for kind in ["keyDown", "keyUp"] {
            let text = if key.len() == 1 { key } else { "" };
            let pressed =
                json!({ "type": kind, "key": key, "text": text, "windowsVirtualKeyCode": code });
            self.order("Input.dispatchKeyEvent", &pressed);
        }
    }

    /// Clicks with the mouse on the middle of the first element that a selector finds.
    pub(crate) fn click(&mut self, selector: &str) {
        let quoted = json!(selector);
        self.until(&format!("document.querySelector({quoted})"));
        let place = self.evaluate(&format!(
            "(box => [box.x + box.width / 2, box.y + box.height / 2])(\
                 (e => (e.scrollIntoView({{ block: 'nearest' }}), e.getBoundingClientRect()))(document.querySelector({quoted})))"
        ));
        for kind in ["mousePressed", "mouseReleased"] {
            let event = json!({ "type": kind, "x": place[0], "y": place[1], "button": "left", "clickCount": 1 });
            self.order("Input.dispatchMouseEvent", &event);
            // A hand holds the button for a moment, in which the page may get data.
            std::thread::sleep(Duration::from_millis(120));
        }
        self.clicks += 1;
    }

    /// Types into the element that has the focus.
    pub(crate) fn type_text(&mut self, text: &str) {
        self.order("Input.insertText", &json!({ "text": text }));
    }

    pub(crate) fn look(&mut self, width: u32, height: u32, theme: &str) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500 });
        self.order("Emulation.setDeviceMetricsOverride", &size);
        let features = json!({ "features": [{ "name": "prefers-color-scheme", "value": theme }] });
        self.order("Emulation.setEmulatedMedia", &features);
    }

    /// A picture of the page, kept where `TENURE_SCREENSHOTS` names a folder.
    pub(crate) fn photograph(&mut self, name: &str) {
        let Ok(folder) = std::env::var("TENURE_SCREENSHOTS") else { return };
        let shot = self.order("Page.captureScreenshot", &json!({ "format": "png" }));
        let file = format!("{folder}/{name}.png");
        // The one thing here that is not text: decoded by a program that every system has.
        let mut child = Command::new("base64")
            .arg("-d")
            .stdin(Stdio::piped())
            .stdout(std::fs::File::create(file).unwrap())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(shot["data"].as_str().unwrap().as_bytes()).unwrap();
        assert!(child.wait().unwrap().success());
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
