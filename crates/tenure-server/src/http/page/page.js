"use strict";

// The page keeps one stream open, for the view that is shown. Data from clients is inserted as text, never as markup.

const $ = (id) => document.getElementById(id);
const make = (tag, text, classes) => {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (classes) element.className = classes;
  return element;
};
const svg = (tag, attributes) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
};

const TITLES = [
  ["name", "Name"], ["kind", "Kind"], ["holder", "Held by"], ["token", "Token"],
  ["held", "Held for"], ["lease", "Lease"], ["waiting", "Waiting"], ["oldest", "Oldest wait"],
];

let token = sessionStorage.getItem("tenure-token") || "";
let sort = { by: "", down: true };
let last = null;      // Latest data from the server,
let receivedAt = 0;   // and its arrival on this page's clock: countdowns continue from there.
let stream = null;    // The open request.
let pressing = false; // True while a mouse button or a finger is down,
let held = null;      // and the update that came meanwhile.

function span(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 10000) return (ms / 1000).toFixed(1) + " s";
  const s = Math.floor(ms / 1000), m = Math.floor(s / 60), h = Math.floor(m / 60);
  if (m === 0) return s + " s";
  if (h === 0) return m + " m " + (s % 60) + " s";
  return h + " h " + (m % 60) + " m";
}

function identity(by) {
  if (!by) return "unknown client";
  const own = by.host && by.id.startsWith(by.host + ":" + by.pid + ":");
  return (own ? by.host : by.id) + (by.pid ? " (pid " + by.pid + ")" : "");
}

function route() {
  const parts = location.hash.replace(/^#\/?/, "").split("/");
  if (parts[0] === "key" && parts.length >= 3) {
    return { view: "key", kind: parts[1], name: decodeURIComponent(parts.slice(2).join("/")) };
  }
  if (parts[0] === "job" && parts.length === 3) {
    return { view: "job", store: decodeURIComponent(parts[1]), id: decodeURIComponent(parts[2]) };
  }
  return { view: parts[0] === "server" || parts[0] === "watched" ? parts[0] : "now" };
}

// ---- the stream ----

async function follow() {
  if (stream) stream.abort();
  const own = stream = new AbortController();
  const where = route();
  held = null;
  if (where.view === "job") clearOtherJob(where);
  for (const view of ["now", "key", "watched", "job", "server"]) $(view).hidden = view !== where.view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === (where.view === "job" ? "watched" : where.view)) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  let url = "/events?view=" + where.view;
  if (where.view === "key") url += "&kind=" + where.kind + "&name=" + encodeURIComponent(where.name);
  if (where.view === "job") url += "&store=" + encodeURIComponent(where.store) + "&id=" + encodeURIComponent(where.id);
  if (where.view === "now" && $("filter").value) url += "&filter=" + encodeURIComponent($("filter").value);
  try {
    const headers = token ? { Authorization: "Bearer " + token } : {};
    const answer = await fetch(url, { headers, signal: own.signal });
    if (answer.status === 401) return ask();
    if (!answer.ok) throw new Error("the server responded with status " + answer.status);
    state("live");
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      text += value;
      for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
        const data = text.slice(0, end).split("\n").filter((line) => line.startsWith("data:"));
        if (data.length) show(JSON.parse(data.map((line) => line.slice(5)).join("\n")), where);
      }
    }
    throw new Error("the server closed the stream");
  } catch (error) {
    if (own.signal.aborted) return;
    state("no connection: retrying", true);
    setTimeout(() => { if (stream === own) follow(); }, 1000);
  }
}

function state(text, bad) {
  $("state").textContent = text;
  $("state").className = bad ? "bad" : "";
}

function ask() {
  state("the auth token is required", true);
  $("entering").showModal();
}

function show(data, where) {
  // A click on an element that is replaced between press and release is lost: the update waits for the release.
  if (pressing) {
    held = () => show(data, where);
    return;
  }
  last = data;
  receivedAt = performance.now();
  $("watched-link").hidden = !data.watched;
  if (where.view === "now") showNow();
  if (where.view === "key") showKey();
  if (where.view === "watched") showWatched();
  if (where.view === "job") showJob(where);
  if (where.view === "server") showServer();
}

// ---- Now ----

function value(row, by) {
  const holder = row.holder;
  switch (by) {
    case "name": return row.name;
    case "kind": return row.kind;
    case "holder": return holder ? identity(holder.by) : "";
    case "token": return holder ? BigInt(holder.token) : 0n;
    case "held": return holder ? holder.held_ms : -1;
    case "lease": return holder ? holder.left_ms : Infinity;
    case "waiting": return row.waiting;
    default: return row.oldest_ms ?? -1;
  }
}

function showNow() {
  const rows = last.rows.slice();
  if (sort.by) {
    rows.sort((a, b) => {
      const [x, y] = [value(a, sort.by), value(b, sort.by)];
      return (x < y ? -1 : x > y ? 1 : 0) * (sort.down ? -1 : 1);
    });
  }
  const body = $("rows"), old = new Map();
  for (const line of body.children) old.set(line.dataset.key, line);
  rows.forEach((row, at) => {
    const key = row.kind + "/" + row.name;
    const line = old.get(key) || newLine(key, row);
    old.delete(key);
    fillLine(line, row);
    if (body.children[at] !== line) body.insertBefore(line, body.children[at] || null);
  });
  for (const line of old.values()) line.remove();
  $("empty").hidden = rows.length > 0;
  $("count").textContent = last.keys > rows.length ? rows.length + " of " + last.keys + " names" : rows.length + (rows.length === 1 ? " name" : " names");
  tick();
}

function newLine(key, row) {
  const line = make("tr");
  line.dataset.key = key;
  for (const [, title] of TITLES) {
    const cell = make("td");
    cell.dataset.title = title;
    line.append(cell);
  }
  const link = make("a", row.name);
  link.href = "#/key/" + row.kind + "/" + encodeURIComponent(row.name);
  line.children[0].append(link);
  const track = make("div", undefined, "track"), fill = make("div", undefined, "fill");
  track.append(fill);
  line.children[5].className = "lease";
  line.children[5].append(make("span"), track);
  for (const at of [3, 4, 6, 7]) line.children[at].className = "number";
  return line;
}

function fillLine(line, row) {
  const holder = row.holder, cells = line.children;
  line.row = row;
  line.className = row.late ? "late" : "";
  cells[1].textContent = row.kind === "semaphore" ? "semaphore " + row.held + "/" + row.limit : row.kind;
  cells[2].replaceChildren(make("span", holder ? identity(holder.by) : "–"));
  if (holder && holder.by && holder.by.note) cells[2].append(" ", make("span", holder.by.note, "dim"));
  if (row.held > 1) cells[2].append(" ", make("span", "and " + (row.held - 1) + " more", "dim"));
  cells[3].textContent = holder ? holder.token : "–";
  cells[6].textContent = row.waiting || "–";
}

// Updates what counts up or down, several times per second, between two updates from the server.
function tick() {
  const passed = performance.now() - receivedAt, where = route().view;
  if (where === "now") {
    for (const line of $("rows").children) {
      const { holder, oldest_ms: oldest } = line.row, cells = line.children;
      const left = holder ? Math.max(0, holder.left_ms - passed) : 0;
      cells[4].textContent = holder ? span(holder.held_ms + passed) : "–";
      cells[5].firstChild.textContent = holder ? span(left) : "–";
      cells[5].lastChild.firstChild.style.width = holder && holder.lease_ms ? (100 * left / holder.lease_ms).toFixed(1) + "%" : "0";
      cells[7].textContent = oldest === null ? "–" : span(oldest + passed);
    }
  }
  for (const element of document.querySelectorAll("[data-counts]")) {
    const { from, way } = element.counts;
    element.textContent = span(Math.max(0, from + way * passed));
  }
}

function counting(ms, way) {
  const element = make("span");
  element.dataset.counts = "";
  element.counts = { from: ms, way };
  return element;
}

// Replaces the children of a box. The element in the place of the one that had the keyboard focus gets it: the link to
// the same page, else the button at the same position.
function replaceKeepingFocus(box, children) {
  const [focus, buttons] = [document.activeElement, () => [...box.querySelectorAll("button")]];
  const at = buttons().indexOf(focus), href = box.contains(focus) ? focus.getAttribute("href") : null;
  box.replaceChildren(...children);
  if (href !== null) [...box.querySelectorAll("a")].find((link) => link.getAttribute("href") === href)?.focus();
  else if (at >= 0) buttons()[at]?.focus();
}

// ---- one name ----

function showKey() {
  const { view, events, now } = last, where = route();
  $("name").textContent = where.name;
  $("summary").textContent = where.kind + " · " + (view.held ? "held by " + view.held : "free") + " · " + (view.waiting || "none") + " waiting";
  const holders = view.holders.map((holder) => {
    const item = make("li");
    for (const action of ACTIONS) {
      const button = make("button", action.button);
      button.type = "button";
      button.addEventListener("click", () => {
        const target = { name: where.name, kind: where.kind, token: holder.fence };
        openDialog(action, target, where.name + ", held by " + identity(holder.by) + " with token " + holder.fence + action.then);
      });
      item.append(button);
    }
    item.append(identity(holder.by), make("div", holder.by && holder.by.note, "dim"));
    const facts = make("div", "token " + holder.fence + " · held for ", "dim");
    facts.append(counting(holder.held_ms, 1), " · lease ends in ", counting(holder.left_ms, -1));
    item.append(facts);
    return item;
  });
  const waiters = view.waiters.map((waiter, at) => {
    const item = make("li", (at + 1) + ". " + identity(waiter.by));
    const facts = make("div", waiter.by && waiter.by.note ? waiter.by.note + " · waiting for " : "waiting for ", "dim");
    facts.append(counting(waiter.waited_ms, 1));
    item.append(facts);
    return item;
  });
  replaceKeepingFocus($("holders"), holders.length ? holders : [make("li", "None.", "dim")]);
  $("waiters").replaceChildren(...(waiters.length ? waiters : [make("li", "None.", "dim")]));
  $("events").replaceChildren(...(events.length ? events.slice().reverse().map(event) : [make("li", last.remembers ? "No events yet." : "This server keeps no history: --history is 0.", "dim")]));
  strip(events, now);
  tick();
}

function event({ at, what, fence, by, text }) {
  const item = make("li");
  item.append(make("span", new Date(at).toLocaleTimeString() + " ", "dim"), make("span", what.replace("_", " "), "what " + what));
  if (by) item.append(" " + identity(by));
  if (fence !== "0") item.append(make("span", " token " + fence, "dim"));
  if (text) item.append(" “" + text + "”");
  return item;
}

function color(text) {
  let hash = 7;
  for (const c of text) hash = (hash * 31 + c.codePointAt(0)) >>> 0;
  return "hsl(" + (hash % 360) + " 45% 55%)";
}

// Timeline of holds: a bar per hold, a gap while the name was free, a mark at a hold that ended without a release.
function strip(events, now) {
  const holds = [], open = new Map();
  for (const { at, what, fence, by } of events) {
    if (what === "granted") {
      const hold = { from: at, to: null, by, how: "" };
      open.set(fence, hold);
      holds.push(hold);
    } else if (open.has(fence) && what !== "handoff_requested") {
      Object.assign(open.get(fence), { to: at, how: what });
      open.delete(fence);
    }
  }
  const first = holds.length ? holds[0].from : now - 60000;
  const begin = Math.min(first, now - 1000), width = 1000;
  const x = (at) => width * (at - begin) / Math.max(1, now - begin);
  const picture = svg("svg", { viewBox: "0 0 1000 52", preserveAspectRatio: "none", role: "img" });
  const title = svg("title", {});
  title.textContent = holds.length + " holds in the last " + span(now - begin);
  picture.append(title);
  for (const hold of holds) {
    const from = x(hold.from), to = x(hold.to ?? now);
    const bar = svg("rect", { x: from, y: 8, width: Math.max(1.5, to - from), height: 22, fill: color(hold.by ? hold.by.id : "") });
    const tooltip = svg("title", {});
    tooltip.textContent = identity(hold.by) + ", " + span((hold.to ?? now) - hold.from) + (hold.how ? ", " + hold.how : ", still held");
    bar.append(tooltip);
    picture.append(bar);
    if (hold.how && hold.how !== "released") {
      picture.append(svg("rect", { x: to - 1.5, y: 4, width: 3, height: 30, fill: "var(--late)" }));
    }
  }
  $("strip").replaceChildren(picture, make("div", "the last " + span(now - begin) + "; a red edge marks a hold that expired, was broken or lost its connection", "dim"));
}

// ---- elections and jobs ----

function showWatched() {
  // Text that the user has selected must not be replaced before it is copied.
  const selection = getSelection();
  if (!selection.isCollapsed && $("stores").contains(selection.anchorNode)) return;
  replaceKeepingFocus($("stores"), last.stores.map((store) => {
    const box = make("section", undefined, "store");
    box.append(make("h2", store.store));
    if (store.age_ms === null) box.append(make("p", "Loading…", "dim"));
    else if (store.error) box.append(make("p", "Cannot read this store: " + store.error, "bad"));
    else if (store.names) box.append(...names(store));
    else box.append(...jobs(store));
    return box;
  }));
  if (!last.stores.length) $("stores").append(make("p", "No other stores are shown: start the server with --watch URL.", "dim"));
  tick();
}

function table(titles, rows) {
  const whole = make("table"), head = make("tr"), top = make("thead"), body = make("tbody");
  for (const title of titles) head.append(make("th", title, "plain"));
  top.append(head);
  for (const { cells, late } of rows) {
    const line = make("tr", undefined, late ? "late" : "");
    cells.forEach((content, at) => {
      const cell = make("td");
      cell.dataset.title = titles[at];
      cell.append(content ?? "–");
      line.append(cell);
    });
    body.append(line);
  }
  whole.append(top, body);
  return whole;
}

// Durations that were measured when the store was read, corrected to now.
const since = (store, ms) => (ms === null ? null : counting(ms + store.age_ms, 1));
const until = (store, ms) => (ms === null ? null : counting(ms - store.age_ms, -1));

function names(store) {
  const rows = store.names.flatMap((name) => {
    const holders = name.holders.length ? name.holders : [null];
    return holders.map((holder, at) => {
      const by = make("span", holder ? identity(holder.by) : "–");
      if (holder && holder.by && holder.by.note) by.append(" ", make("span", holder.by.note, "dim"));
      const waiting = at > 0 || !name.waiting ? null : make("span", String(name.waiting));
      if (waiting && name.oldest_ms !== null) waiting.append(", the oldest for ", since(store, name.oldest_ms));
      const facts = holder ? [holder.token, since(store, holder.held_ms), until(store, holder.left_ms)] : [null, null, null];
      return { cells: [name.name, name.kind, by, ...facts, waiting] };
    });
  });
  if (!rows.length) return [make("p", "Nothing is held.", "dim")];
  const parts = [table(["Name", "Kind", "Held by", "Token", "Held for", "Lease left", "Waiting"], rows)];
  if (store.more) parts.push(make("p", "Only the first names are listed.", "dim"));
  return parts;
}

// ---- server ----

let before = null;

function showServer() {
  const figures = last.figures, at = receivedAt;
  const rate = (name) => {
    if (!before || at - before.at < 200) return "";
    const each = (figures[name] - before.figures[name]) * 1000 / (at - before.at);
    return " (" + (each >= 100 ? Math.round(each).toLocaleString() : each.toFixed(1)) + " per second)";
  };
  const lines = [
    ["Version", figures.version],
    ["Survives a restart", figures.durable ? "yes, it has a data directory" : "no"],
    ["Uptime", span(figures.up_ms)],
    ["Memory", (figures.memory_bytes / 1048576).toFixed(1) + " MiB"],
    ["Connections", figures.connections.toLocaleString()],
    ["Names in use", figures.keys.toLocaleString()],
    ["Holds", figures.holds.toLocaleString()],
    ["Waiting", figures.waiting.toLocaleString() + (figures.oldest_ms === null ? "" : ", the oldest for " + span(figures.oldest_ms))],
    ["Requests", figures.requests.toLocaleString() + rate("requests")],
    ["Grants", figures.granted.toLocaleString() + rate("granted")],
    ["Renewals", figures.renewed.toLocaleString() + rate("renewed")],
    ["Leases expired", figures.expired.toLocaleString()],
    ["Broken by hand", figures.evicted.toLocaleString()],
    ["Ended with their connection", figures.disconnected.toLocaleString()],
    ["Wrong tokens", figures.wrong_secrets.toLocaleString()],
  ];
  const parts = lines.flatMap(([title, text]) => [make("dt", title), make("dd", text)]);
  $("figures").replaceChildren(...parts);
  before = { figures, at };
}

// ---- changes by an operator ----

const ACTIONS = [
  { path: "/api/break", button: "Break…", title: "Break this hold?", now: "Break", then: ". The holder is notified and stops." },
  { path: "/api/step-down", button: "Step down…", title: "Ask the holder to step down?", now: "Send request", then: ". The holder is notified and decides for itself: tenure lead --step-down-on-request and tenure run --on-request comply." },
];

let target = null, path = "";

function openDialog(action, about, what) {
  target = about;
  path = action.path;
  $("break-title").textContent = action.title;
  $("break-now").textContent = action.now;
  $("break-now").className = action.classes ?? "danger";
  $("break-what").textContent = what;
  $("break-error").textContent = "";
  $("break-token").value = token;
  $("breaking").showModal();
  $("break-reason").focus();
}

$("break-cancel").addEventListener("click", () => $("breaking").close());
$("break-form").addEventListener("submit", async (submitted) => {
  submitted.preventDefault();
  const given = $("break-token").value;
  const answer = await fetch(path, {
    method: "POST",
    headers: { Authorization: "Bearer " + given, "Content-Type": "application/json" },
    body: JSON.stringify({ ...target, reason: $("break-reason").value }),
  }).catch(() => null);
  if (answer && answer.ok) {
    token = given;
    sessionStorage.setItem("tenure-token", given);
    $("break-reason").value = "";
    $("breaking").close();
    follow();
    return;
  }
  $("break-error").textContent = answer ? await answer.text() : "the server cannot be reached";
});
$("enter-form").addEventListener("submit", () => {
  token = $("enter-token").value;
  sessionStorage.setItem("tenure-token", token);
  $("enter-token").value = "";
  follow();
});

// ---- keys, theme, start ----

$("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = root.dataset.theme || (dark ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
  localStorage.setItem("tenure-theme", root.dataset.theme);
});

let typing = 0;
$("filter").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(follow, 150);
});

document.addEventListener("keydown", (pressed) => {
  const writing = pressed.target instanceof HTMLInputElement;
  if (pressed.key === "/" && !writing) {
    pressed.preventDefault();
    location.hash = "#/";
    $("filter").focus();
  } else if (pressed.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (writing) pressed.target.blur();
    else location.hash = route().view === "job" ? "#/watched" : "#/";
  } else if ((pressed.key === "ArrowDown" || pressed.key === "ArrowUp") && !document.querySelector("dialog[open]")) {
    const links = [...document.querySelectorAll("#now:not([hidden]) #rows a, #watched:not([hidden]) a")], at = links.indexOf(document.activeElement);
    const next = links[Math.min(links.length - 1, Math.max(0, at + (pressed.key === "ArrowDown" ? 1 : -1)))];
    if (next) {
      pressed.preventDefault();
      next.focus();
    }
  }
});

for (const [by, title] of TITLES) {
  const head = make("th"), button = make("button", title);
  button.type = "button";
  button.addEventListener("click", () => {
    sort = { by, down: sort.by === by ? !sort.down : by !== "name" };
    for (const other of $("titles").children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", sort.down ? "descending" : "ascending");
    if (last && route().view === "now") showNow();
  });
  head.append(button);
  $("titles").append(head);
}

const theme = localStorage.getItem("tenure-theme");
if (theme) document.documentElement.dataset.theme = theme;
addEventListener("hashchange", follow);
addEventListener("pointerdown", () => { pressing = true; });
for (const end of ["pointerup", "pointercancel", "blur"]) {
  addEventListener(end, () => {
    pressing = false;
    // After the click, which may leave the view.
    setTimeout(() => {
      const update = held;
      held = null;
      if (update) update();
    });
  });
}
setInterval(() => { if (last) tick(); }, 250);
follow();
