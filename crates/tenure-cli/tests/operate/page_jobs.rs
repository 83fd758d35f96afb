//! Job queues on the page: read, retried and cancelled, over HTTP and in a real browser.

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::browser::Browser;
use crate::http::{HTTP, get, json_of, request};
use crate::queue::Queue;
use crate::support::eventually;
use crate::watching::{at_work, jobs_url};
use crate::{Served, TOKEN, services};

/// Text that would run, close its element, reverse its line, or color a terminal, were it not escaped.
const HOSTILE: &str =
    "</pre><img src=x onerror=\"document.title='pwned'\"> \u{202e}desrever \u{1b}[31mred";

/// A server that shows a queue.
fn serving(queue: &Queue) -> Served {
    Served::start(&[&HTTP[..], &["--watch", &jobs_url(queue)]].concat())
}

/// The queue as the server shows it, once it was read.
fn shown(served: &Served) -> Value {
    eventually("the queue is read", || {
        let store = json_of(&served.http, "/api/watched")["stores"][0].clone();
        store["counts"].is_array().then_some(store)
    })
}

/// A text for a query of a URL.
fn escaped(text: &str) -> String {
    let byte = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => char::from(byte).to_string(),
        other => format!("%{other:02X}"),
    };
    text.bytes().map(byte).collect()
}

fn job_path(store: &Value, id: &str) -> String {
    format!("/api/job?store={}&id={}", escaped(store["store"].as_str().unwrap()), escaped(id))
}

/// Requests a change of a job.
fn change(served: &Served, what: &str, secret: &str, body: &Value) -> (u16, String) {
    let head = format!(
        "POST /api/job/{what} HTTP/1.1\r\nAuthorization: Bearer {secret}\r\nContent-Type: application/json"
    );
    request(&served.http, &head, &body.to_string())
}

#[test]
fn page_data_of_a_queue_has_depth_age_rates_running_and_failed_jobs() {
    let Some((queue, _working)) = at_work("page_data") else { return };
    let long = format!("\"{}\"", "x".repeat(5_000));
    queue.add(&["--payload", &long, "--priority", "-1"]);
    let served = serving(&queue);
    let store = eventually("there are rates", || {
        let store = shown(&served);
        store["rates"].is_object().then_some(store)
    });
    assert_eq!(store["counts"][0], json!(["AVAILABLE", 1]));
    assert!(store["oldest_ms"].as_u64().unwrap() < 60_000, "{store}");
    let (running, failed) = (&store["running"][0], &store["failed"][0]);
    assert!(running["running_ms"].is_u64() && running["left_ms"].is_u64(), "{running}");
    assert_eq!((&running["attempt"], &running["state"]), (&1.into(), &"RUNNING".into()));
    assert_eq!((&failed["payload"], &failed["can_retry"]), (&"1".into(), &true.into()));
    assert!(
        failed["failed_at"].as_u64().unwrap()
            <= json_of(&served.http, "/api/watched")["now"].as_u64().unwrap()
    );

    // Jobs that end between two readings make a rate.
    let completed = format!("UPDATE {} SET completed_at = now() WHERE payload = '2'", queue.table);
    queue.sql(&completed);
    eventually("a rate", || {
        shown(&served)["rates"]["completed"].as_f64().is_some_and(|rate| rate > 0.0).then_some(())
    });
}

#[test]
fn http_retry_and_cancel_have_the_conditions_of_a_break() {
    let Some((queue, mut working)) = at_work("page_http") else { return };
    let served = serving(&queue);
    let store = shown(&served);
    let id = store["failed"][0]["id"].as_str().unwrap().to_owned();
    let seen = json_of(&served.http, &job_path(&store, &id))["job"].clone();
    assert_eq!((&seen["state"], &seen["payload"]), (&"FAILED".into(), &"1".into()));
    assert_eq!(seen["error"], "exit code 1: no such report");
    let told = |id: &str, token: &Value, reason: &str| json!({ "store": store["store"], "id": id, "token": token, "reason": reason });

    // Refused, and nothing changes.
    let good = told(&id, &seen["token"], "report is there");
    assert_eq!(change(&served, "retry", "wrong", &good).0, 401);
    assert_eq!(change(&served, "retry", TOKEN, &told(&id, &seen["token"], " \n")).0, 400);
    assert_eq!(change(&served, "retry", TOKEN, &told(&id, &json!("x"), "reason")).0, 400);
    let (status, why) = change(&served, "retry", TOKEN, &told(&id, &json!("99"), "reason"));
    assert_eq!(status, 409, "{why}");
    assert!(why.contains("since it was read"), "{why}");
    let (status, why) = change(&served, "cancel", TOKEN, &good);
    assert_eq!(status, 409, "{why}");
    assert!(why.contains("is FAILED and cannot be cancelled"), "{why}");
    assert_eq!(change(&served, "retry", TOKEN, &told("123456", &seen["token"], "reason")).0, 404);
    let mut elsewhere = good.clone();
    elsewhere["store"] = "postgres://elsewhere/app, queue jobs".into();
    assert_eq!(change(&served, "retry", TOKEN, &elsewhere).0, 404);
    let (status, _) = request(&served.http, "POST /api/job/retry HTTP/1.1", "{}");
    assert!(status == 400 || status == 415, "{status}");
    let foreign =
        "POST /api/job/retry HTTP/1.1\r\nHost: evil.example\r\nContent-Type: application/json";
    assert_eq!(request(&served.http, foreign, &good.to_string()).0, 421);
    assert_eq!(queue.state(&id), "FAILED");
    assert!(!served.said().contains("job_retried"), "{}", served.said());

    // Retried once, with a line in the log.
    assert_eq!(change(&served, "retry", TOKEN, &good).0, 204);
    assert_eq!(queue.state(&id), "AVAILABLE");
    let (status, why) = change(&served, "retry", TOKEN, &good);
    assert_eq!(status, 409, "{why}");
    assert!(why.contains("is AVAILABLE and cannot be requeued"), "{why}");
    let line = eventually("it is logged", || {
        let said = served.said();
        said.lines().find(|line| line.contains("job_retried")).map(str::to_owned)
    });
    for part in ["report is there", "127.0.0.1", &*queue.table] {
        assert!(line.contains(part), "no {part:?} in {line}");
    }

    // A running job is cancelled.
    let running = shown(&served)["running"][0].clone();
    let hung = running["id"].as_str().unwrap();
    let cancel = told(hung, &running["token"], "no longer needed");
    assert_eq!(change(&served, "cancel", TOKEN, &cancel).0, 204);
    let job = queue.show(hung);
    assert_eq!((&job["state"], &job["error"]), (&"FAILED".into(), &"no longer needed".into()));
    assert!(served.said().contains("job_cancelled"), "{}", served.said());
    assert!(!served.said().contains(TOKEN));
    working.signal(Signal::SIGTERM);
    assert_eq!(working.code(), Some(0));

    // The retried job is claimed and fails again: the operator has read another claim.
    let work = ["work", "-q", "--until-empty", &queue.table, "--", "sh", "-c", "exit 1"];
    assert_eq!(queue.outcome(&work).0, Some(0));
    assert_eq!(queue.state(&id), "FAILED");
    assert_eq!(change(&served, "retry", TOKEN, &good).0, 409);
}

#[test]
fn jobs_are_refused_without_auth_token_unknown_and_unreachable() {
    let Some((queue, _working)) = at_work("page_refused") else { return };
    let watch = jobs_url(&queue);
    let down = "postgres://me:hunter2@127.0.0.1:1/app?queue=jobs";
    let open = Served::start_open(&[&HTTP[..], &["--watch", &watch, "--watch", down]].concat());
    let store = shown(&open);
    let id = store["failed"][0]["id"].as_str().unwrap();
    let job = json_of(&open.http, &job_path(&store, id))["job"].clone();
    let body =
        json!({ "store": store["store"], "id": id, "token": job["token"], "reason": "reason" });
    for what in ["retry", "cancel"] {
        let (status, why) = change(&open, what, "", &body);
        assert_eq!(status, 403, "{why}");
        assert!(why.contains("--auth-token-file"), "{why}");
    }
    assert_eq!(queue.state(id), "FAILED");
    assert_eq!(get(&open.http, &job_path(&store, "987654")).0, 404);
    assert_eq!(get(&open.http, &job_path(&store, "no number")).0, 400);
    assert_eq!(get(&open.http, &job_path(&json!({ "store": "nowhere" }), id)).0, 404);
    let away = json!({ "store": "postgres://127.0.0.1:1/app, queue jobs" });
    let (status, why) = get(&open.http, &job_path(&away, id));
    assert_eq!(status, 502, "{why}");
    assert!(!why.contains("hunter2"), "{why}");

    // Beyond this host the token is needed to read, too.
    let guarded = Served::start(&["--http", "0.0.0.0:0", "--watch", &watch]);
    let address = format!("127.0.0.1:{}", guarded.http.rsplit(':').next().unwrap());
    assert_eq!(get(&address, &job_path(&store, id)).0, 401);
    let known = format!("GET {} HTTP/1.1\r\nAuthorization: Bearer {TOKEN}", job_path(&store, id));
    assert_eq!(request(&address, &known, "").0, 200);
}

/// Marks a job as failed.
fn fail(queue: &Queue, id: &str, error: &str) {
    let sql = format!(
        "UPDATE {} SET failed_at = clock_timestamp(), attempts = 3, error_message = $e${error}$e$ WHERE id = {id}",
        queue.table
    );
    queue.sql(&sql);
}

#[test]
fn a_failed_job_is_found_read_and_retried_in_three_clicks() {
    let Some(program) = services::chromium() else { return };
    let Some(queue) = Queue::new("clicks") else { return };
    let payload = json!({ "report": 7, "big": 1, "note": HOSTILE, "nested": { "empty": [], "list": [1, "a, {b}"] } });
    let payload = payload.to_string().replace("\"big\":1", "\"big\":12345678901234567890");
    let id = queue.add(&["--payload", &payload, "--max-attempts", "3", "--unique-key", "report 7"]);
    fail(&queue, &id, &format!("no such report\n  at line 7: {HOSTILE}"));
    let served = serving(&queue);
    let mut browser = Browser::start(&program);
    browser.look(1100, 700, "light");
    browser.order("Page.navigate", &json!({ "url": format!("http://{}/", served.http) }));
    browser.until("document.getElementById('watched-link')?.hidden === false");

    // Found.
    browser.click("#watched-link");
    browser.until("document.querySelector('#stores .error')?.innerText.includes('no such report')");
    browser.photograph("page-queue");
    // Read.
    browser.click("#stores td a");
    browser.until("!document.getElementById('job-found').hidden");
    let text = |id: &str| format!("document.getElementById('{id}').textContent");
    let error = browser.evaluate(&text("job-error")).as_str().unwrap().to_owned();
    assert!(
        error.contains("</pre><img src=x") && error.contains("\\u202edesrever \\u001b[31m"),
        "{error}"
    );
    let payload = browser.evaluate(&text("job-payload")).as_str().unwrap().to_owned();
    for part in ["\"big\": 12345678901234567890,\n", "\"empty\": []", "\"a, {b}\"", "</pre><img"] {
        assert!(payload.contains(part), "no {part:?} in {payload}");
    }
    let facts = browser.evaluate("document.getElementById('job-facts').innerText");
    let facts = facts.as_str().unwrap();
    assert!(facts.contains("3 of 3") && facts.contains("report 7"), "{facts}");
    browser.photograph("page-job");
    // Retried. The reason has the focus, then the token; Enter confirms.
    browser.click("#job-actions button");
    browser.until("document.activeElement.id === 'break-reason'");
    browser.type_text("report is there");
    browser.photograph("page-retry");
    browser.press("Tab", 9);
    browser.evaluate("document.getElementById('break-token').focus()");
    browser.type_text(TOKEN);
    browser.press("\r", 13);
    browser.until("!document.getElementById('breaking').open");
    browser.until("document.getElementById('job-state').textContent === 'available'");
    assert_eq!(browser.clicks, 3);
    assert_eq!(queue.state(&id), "AVAILABLE");
    assert_ne!(browser.evaluate("document.title"), json!("pwned"));
    assert_eq!(browser.evaluate("document.querySelectorAll('main img').length"), json!(0));

    // From the page of the job, it can now be cancelled; the token is remembered.
    browser.click("#job-actions button");
    browser.until("document.activeElement.id === 'break-reason'");
    browser.type_text("no longer needed");
    browser.press("\r", 13);
    browser.until("document.getElementById('job-state').textContent === 'failed'");
    browser.until(&format!("{} === 'no longer needed'", text("job-error")));
    assert_eq!(browser.complaints, [] as [String; 0], "the page complained");
}

#[test]
fn the_page_shows_queues_with_no_jobs_with_many_and_on_a_phone() {
    let Some(program) = services::chromium() else { return };
    let Some(queue) = Queue::new("crowded") else { return };
    let served = serving(&queue);
    let mut browser = Browser::start(&program);
    browser.look(1100, 500, "light");
    browser.order("Page.navigate", &json!({ "url": format!("http://{}/#/watched", served.http) }));
    browser.until("document.getElementById('stores')?.innerText.includes('No job runs')");
    browser.photograph("queue-empty");

    let word = "x".repeat(400);
    queue.sql(&format!(
        "INSERT INTO {table} (payload, completed_at) SELECT 'null', now() FROM generate_series(1, 30000);
         INSERT INTO {table} (payload, failed_at, attempts, max_attempts, error_message)
             SELECT jsonb_build_object('user', n, 'text', '{word}'), now() - n * interval '7 minutes', 10, 10,
                    'connection refused: ' || n || ' {word}' FROM generate_series(1, 60) AS n;
         INSERT INTO {table} (payload, attempts, locked_by, locked_until)
             SELECT '1', 1, 'worker-with-a-long-name-' || n, now() + n * interval '1 minute' FROM generate_series(0, 29) AS n;
         INSERT INTO {table} (payload, created_at) SELECT '2', now() - n * interval '1 minute' FROM generate_series(1, 500) AS n",
        table = queue.table
    ));
    browser.until("document.getElementById('stores').innerText.includes('20 of 60')");
    let text =
        browser.evaluate("document.getElementById('stores').innerText.replace(/\\s+/g, ' ')");
    let text = text.as_str().unwrap();
    for part in
        ["available 500 oldest 8 h", "completed 30,000", "failed 60", "expired", "Running (20 of "]
    {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    let narrow = "document.documentElement.scrollWidth <= window.innerWidth";
    for (width, height, theme) in
        [(1100, 900, "light"), (1100, 900, "dark"), (390, 1200, "light"), (390, 1200, "dark")]
    {
        browser.look(width, height, theme);
        assert_eq!(browser.evaluate(narrow), json!(true), "{width} pixels are enough");
        browser.photograph(&format!("queue-many-{width}-{theme}"));
    }
    // The keyboard: a link keeps the focus while the page is rewritten.
    browser.evaluate("document.querySelectorAll('#stores td a')[3].focus()");
    let focused = browser.evaluate("document.activeElement.textContent");
    let before = browser.evaluate("receivedAt");
    browser.until(&format!("receivedAt > {before} + 900"));
    assert_eq!(browser.evaluate("document.activeElement.textContent"), focused);
    browser.press("Enter", 13);
    browser.evaluate("location.hash.startsWith('#/job/') || document.activeElement.click()");
    browser.until("!document.getElementById('job-found').hidden");
    for (width, theme) in [(1100, "dark"), (390, "dark")] {
        browser.look(width, 900, theme);
        assert_eq!(browser.evaluate(narrow), json!(true), "{width} pixels are enough");
        browser.photograph(&format!("job-{width}-{theme}"));
    }
    // A job that is deleted while it is shown has no buttons.
    queue.sql(&format!("DELETE FROM {} WHERE failed_at IS NOT NULL", queue.table));
    browser.until("document.getElementById('job-missing').innerText.includes('there is no job')");
    assert_eq!(
        browser.evaluate("document.querySelectorAll('#job-actions button').length"),
        json!(0)
    );
    browser.press("Escape", 27);
    browser.until("!document.getElementById('watched').hidden");
    assert_eq!(browser.complaints, [] as [String; 0], "the page complained");
}
