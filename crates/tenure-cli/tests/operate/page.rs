//! The page in a real browser: contention that real clients make shows up, the countdown moves, a break works, and
//! nothing complains.

use nix::sys::signal::Signal;
use serde_json::json;

use crate::browser::Browser;
use crate::http::crowd;
use crate::watching::{advisory_url, at_work, jobs_url};
use crate::{Served, TOKEN, services};

/// The text of a cell of the first row.
fn cell(at: usize) -> String {
    format!("document.querySelector('#rows tr')?.children[{at}].innerText")
}

#[test]
fn the_page_shows_contention_counts_down_and_breaks() {
    let Some(program) = services::chromium() else { return };
    let served = Served::start(&["--http", "127.0.0.1:0"]);
    let mut browser = Browser::start(&program);
    browser.look(1000, 430, "light");
    browser.order("Page.navigate", &json!({ "url": format!("http://{}/", served.http) }));
    browser.until("document.getElementById('state')?.textContent === 'live'");
    browser.until("!document.getElementById('empty').hidden");

    let mut contenders = crowd(&served, "reports/nightly", 10);
    let mut other = crowd(&served, "db/migrate", 1);
    let took = browser.until(&format!("{} === '9'", cell(6)));
    eprintln!("ten contenders are on the page after {took:?}");
    assert!(browser.evaluate(&cell(0)).as_str().unwrap().contains("reports/nightly"));
    let held = browser.evaluate(&cell(2)).as_str().unwrap().to_owned();
    assert!(held.contains("web-1") && held.contains("deploy 42"), "{held}");
    let lease = browser.evaluate(&cell(5));
    browser.until(&format!("{} !== {lease}", cell(5)));
    let widths =
        "new Set([...document.querySelectorAll('.fill')].map(bar => bar.style.width)).size";
    assert!(browser.evaluate(widths).as_u64().unwrap() >= 1);
    browser.photograph("page-light");
    browser.look(1000, 430, "dark");
    browser.photograph("page-dark");
    browser.look(390, 700, "dark");
    let wide = "document.documentElement.scrollWidth <= window.innerWidth";
    assert_eq!(browser.evaluate(wide), json!(true), "it is as wide as a phone");
    browser.photograph("page-phone");
    browser.look(1000, 640, "light");

    // By keyboard: filter, choose, open.
    browser.press("/", 191);
    browser.until("document.activeElement.id === 'filter'");
    browser.evaluate("(f => { f.value = 'nightly'; f.dispatchEvent(new Event('input')); })(document.activeElement)");
    browser.until("document.querySelectorAll('#rows tr').length === 1");
    browser.press("Escape", 27);
    browser.press("ArrowDown", 40);
    browser.until("document.activeElement.textContent === 'reports/nightly'");
    browser.press("Enter", 13);
    browser.evaluate("document.activeElement.click()");
    browser.until("document.querySelectorAll('#waiters li').length === 9");
    browser.until("document.querySelectorAll('#strip rect').length >= 1");
    browser.photograph("page-name");

    // Breaking is refused with a wrong token and without a reason. Then it succeeds, and the first waiter gets the
    // lock. The waiters started together, so the page is read to find which of them is first.
    let first = "document.querySelector('#waiters li').innerText.match(/web-\\d+ /)[0]";
    let next = browser.evaluate(first).as_str().unwrap().to_owned();
    browser.evaluate("document.querySelector('#holders button').click()");
    browser.until("document.getElementById('breaking').open");
    let fill = |token: &str| {
        format!(
            "document.getElementById('break-reason').value = 'stuck since noon'; \
             document.getElementById('break-token').value = '{token}'; \
             document.getElementById('break-now').click()"
        )
    };
    browser.evaluate(&fill("wrong"));
    browser.until("document.getElementById('break-error').textContent.includes('token is wrong')");
    assert_eq!(browser.complaints.len(), 1, "the refusal is in the log: {:?}", browser.complaints);
    browser.complaints.clear();
    browser.evaluate(&fill(TOKEN));
    browser.until("!document.getElementById('breaking').open");
    assert_eq!(contenders[0].code(), Some(79));
    browser.until(&format!("document.getElementById('holders').innerText.includes('{next}')"));
    browser.until("document.querySelectorAll('#waiters li').length === 8");
    browser.until("document.getElementById('events').innerText.includes('stuck since noon')");
    browser.until("[...document.querySelectorAll('#strip rect')].some(bar => bar.getAttribute('fill') === 'var(--late)')");

    // Every change of hands is seen, soon after the next holder's command began.
    let number =
        |of: &str| format!("document.querySelector('{of}').innerText.match(/web-(\\d+) /)?.[1]");
    for _ in 0..5 {
        let [now, next] = ["#holders", "#waiters li"].map(|of| browser.evaluate(&number(of)));
        let [now, next] = [now, next].map(|id| id.as_str().unwrap().parse::<usize>().unwrap());
        contenders[now - 1].signal(Signal::SIGTERM);
        assert_eq!(contenders[next - 1].line(), "ready");
        let took = browser.until(&format!("{} === '{next}'", number("#holders")));
        eprintln!("the next holder is on the page {took:?} after its command began");
    }

    browser.evaluate("location.hash = '#/server'");
    browser.until("document.getElementById('figures').innerText.includes('Broken by hand')");
    other.clear();
    assert_eq!(browser.complaints, [] as [String; 0], "the page complained");
}

#[test]
fn the_page_shows_other_stores_and_asks_a_leader_to_step_down() {
    let Some(program) = services::chromium() else { return };
    let Some((queue, mut working)) = at_work("page") else { return };
    let (jobs, advisory) = (jobs_url(&queue), advisory_url(&queue));
    let down = "nats://me:hunter2@127.0.0.1:1/locks";
    let mut flags = vec!["--http", "127.0.0.1:0"];
    for url in [&*jobs, down, &advisory] {
        flags.extend(["--watch", url]);
    }
    let served = Served::start(&flags);
    let name = format!("page-{}", std::process::id());
    let lead = ["lead", "-q", "-s", &advisory, "--id", "web-7", &name, "--", "sleep", "300"];
    let _leader = queue.scene.start(&lead);
    let mut browser = Browser::start(&program);
    browser.look(1000, 640, "light");
    browser.order("Page.navigate", &json!({ "url": format!("http://{}/", served.http) }));
    browser.until("document.getElementById('watched-link')?.hidden === false");
    browser.evaluate("document.getElementById('watched-link').focus()");
    browser.press("Enter", 13);
    browser.evaluate("document.activeElement.click()");
    let text = "document.getElementById('stores').innerText.replace(/\\s+/g, ' ')";
    browser.until(&format!("{text}.includes('no such report')"));
    browser.until(&format!("{text}.includes('web-7')"));
    browser.until("document.querySelector('#stores .bad')");
    let seen = browser.evaluate(text).as_str().unwrap().to_owned();
    for part in [&*queue.table, "running 1", "delayed 1", "failed 1", "nats://127.0.0.1:1/locks"] {
        assert!(seen.contains(part), "no {part:?} in {seen}");
    }
    assert!(!seen.contains("hunter2"), "{seen}");
    let left = "document.querySelector('#stores [data-counts]').textContent";
    let before = browser.evaluate(left);
    browser.until(&format!("{left} !== {before}"));
    browser.photograph("page-watched");
    browser.look(390, 900, "dark");
    let wide = "document.documentElement.scrollWidth <= window.innerWidth";
    assert_eq!(browser.evaluate(wide), json!(true), "it is as wide as a phone");
    browser.photograph("page-watched-phone");
    browser.look(1000, 640, "light");
    // Live: the worker ends, and its job is released.
    working.signal(Signal::SIGTERM);
    assert_eq!(working.code(), Some(0));
    browser.until(&format!("{text}.includes('available 1') && {text}.includes('running 0')"));

    // A leader of the server's own, asked from the page.
    let script = "echo $TENURE_TOKEN; exec sleep 300";
    let lead = ["--quiet", "--step-down-on-request", "own/lead", "--", "sh", "-c", script];
    let mut own = served.begin("lead", &lead);
    let first: u128 = own.line().parse().unwrap();
    browser.evaluate("location.hash = '#/key/lock/own%2Flead'");
    browser.until("document.querySelectorAll('#holders button').length === 2");
    // The page is rewritten continuously; the keyboard focus stays on its button.
    browser.evaluate("document.querySelectorAll('#holders button')[1].focus()");
    let before = browser.evaluate("receivedAt");
    browser.until(&format!("receivedAt > {before} + 900"));
    assert_eq!(browser.evaluate("document.activeElement.textContent"), json!("Step down…"));
    browser.press("Enter", 13);
    browser.evaluate("document.getElementById('breaking').open || document.activeElement.click()");
    browser.until("document.getElementById('breaking').open");
    browser.evaluate(&format!(
        "document.getElementById('break-reason').value = 'host goes down'; \
         document.getElementById('break-token').value = '{TOKEN}'; \
         document.getElementById('break-now').click()"
    ));
    browser.until("!document.getElementById('breaking').open");
    let second: u128 = own.line().parse().unwrap();
    assert!(second > first, "{first}, {second}");
    browser.until("document.getElementById('events').innerText.includes('host goes down')");
    assert_eq!(browser.complaints, [] as [String; 0], "the page complained");
}
