"use strict";

// Job queues: their summaries in the view of watched stores, and the view of one job. Loaded before page.js, whose
// helpers these functions call.

// Errors and payloads are hostile text. They are inserted as text, and characters that would reorder or hide their
// surroundings are spelled out.
function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g,
    (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));
}

// JSON text with a line per field. Parsing and printing it would round large numbers, so only blanks are inserted.
function indented(json) {
  let text = "", depth = 0, quoted = false;
  const line = () => "\n" + "  ".repeat(Math.max(0, depth));
  for (let at = 0; at < json.length; at++) {
    const c = json[at];
    if (quoted) {
      text += c === "\\" ? c + (json[++at] ?? "") : c;
      quoted = c !== "\"";
    } else if (c === "{" || c === "[") {
      const end = json.slice(at + 1).search(/\S/) + at + 1;
      if (json[end] === "}" || json[end] === "]") {
        text += c + json[end];
        at = end;
      } else {
        depth++;
        text += c + line();
      }
    } else if (c === "}" || c === "]") {
      depth--;
      text += line() + c;
    } else if (c === ",") text += c + line();
    else if (c === ":") text += ": ";
    else if (!/\s/.test(c)) {
      quoted = c === "\"";
      text += c;
    }
  }
  return text;
}

const attempts = (job) => job.attempt + (job.most === null ? "" : " of " + job.most);

// ---- a queue in the view of watched stores ----

function jobs(store) {
  const parts = [tiles(store)], before = store.paused === null ? 1 : 2;
  if (store.paused !== null) parts.push(make("p", "Paused" + (store.paused === "" ? "" : ": " + visible(store.paused)) + ". Workers of tenure claim no jobs.", "bad"));
  const link = (job) => {
    const element = make("a", visible(job.id));
    element.href = "#/job/" + encodeURIComponent(store.store) + "/" + encodeURIComponent(job.id);
    return element;
  };
  const text = (value, classes) => (value === null ? null : make("div", visible(value), classes));
  if (store.failed.length) {
    const rows = store.failed.map((job) => ({
      cells: [link(job), ago(job.failed_at, "short"), make("span", attempts(job), "short"), text(job.error, "error"), text(job.payload, "payload")],
    }));
    parts.push(make("h3", listTitle("Failed, latest first", store, "FAILED", rows)), table(["Job", "Failed", "Attempt", "Error", "Payload"], rows));
  }
  if (store.running.length) {
    const rows = store.running.map((job) => {
      const ran = make("span", job.running_ms === null ? "–" : "≥ ");
      if (job.running_ms !== null) ran.append(since(store, job.running_ms));
      const left = job.state === "EXPIRED" ? "expired" : until(store, job.left_ms);
      return { late: job.state === "EXPIRED", cells: [link(job), text(job.worker), make("span", attempts(job), "short"), ran, left, text(job.progress, "progress")] };
    });
    const titles = ["Job", "Worker", "Attempt", "Running for", "Lease left", "Progress"];
    // Most commands report no progress.
    if (rows.every(({ cells }) => cells[5] === null)) {
      titles.pop();
      for (const { cells } of rows) cells.pop();
    }
    parts.push(make("h3", listTitle("Running", store, "RUNNING", rows)), table(titles, rows));
  }
  if (parts.length === before) parts.push(make("p", "No job runs, and none has failed.", "dim"));
  return parts;
}

function listTitle(title, store, state, rows) {
  const all = new Map(store.counts).get(state) ?? 0;
  return all > rows.length ? title + " (" + rows.length + " of " + all.toLocaleString() + ")" : title;
}

// Numbers of jobs, with the age of the oldest and the rates.
function tiles(store) {
  const list = make("ul", undefined, "tiles");
  const perSecond = (rate) => (rate === undefined || rate === null ? "" : (rate >= 100 ? Math.round(rate).toLocaleString() : rate.toFixed(1)) + " per second");
  for (const [state, number] of store.counts) {
    const bad = number > 0 && (state === "FAILED" || state === "EXPIRED");
    const tile = make("li", undefined, bad ? "bad" : number === 0 ? "none" : "");
    tile.append(make("span", state.toLowerCase(), "label"), " ", make("b", (store.estimated.includes(state) ? "≈ " : "") + number.toLocaleString() + (store.at_least.includes(state) ? "+" : "")));
    const note = make("span", undefined, "note");
    if (state === "AVAILABLE" && store.oldest_ms !== null) note.append("oldest ", since(store, store.oldest_ms));
    if (state === "COMPLETED") note.append(perSecond(store.rates?.completed));
    if (state === "FAILED") note.append(perSecond(store.rates?.failed));
    tile.append(" ", note);
    list.append(tile);
  }
  return list;
}

// Time that has passed since an event, by the server's clock.
function ago(at, classes) {
  if (at === null) return null;
  const element = make("span", undefined, classes);
  element.append(counting(Math.max(0, last.now - at), 1), " ago");
  return element;
}

// ---- one job ----

// Removes the job that was shown before: its buttons must not stay under the name of another.
function clearOtherJob(where) {
  const name = "Job " + visible(where.id);
  if ($("job-id").textContent === name && $("job-store").textContent === where.store) return;
  $("job-id").textContent = name;
  $("job-store").textContent = where.store;
  $("job-found").hidden = $("job-state").hidden = true;
  $("job-actions").replaceChildren();
  $("job-missing").hidden = false;
  $("job-missing").textContent = "Loading…";
}

function showJob(where) {
  const { job, error } = last;
  $("job-missing").hidden = !!job;
  $("job-found").hidden = !job;
  $("job-state").hidden = !job;
  if (!job) {
    $("job-missing").textContent = visible(error);
    $("job-actions").replaceChildren();
    return;
  }
  $("job-state").textContent = job.state.toLowerCase();
  $("job-state").className = "state " + job.state.toLowerCase();
  const shown = JOB_ACTIONS.filter((action) => job[action.allowed]).map((action) => {
    const button = make("button", action.button, action.classes);
    button.type = "button";
    button.addEventListener("click", () => {
      const target = { store: where.store, id: where.id, token: job.token };
      openDialog(action, target, "Job " + visible(where.id) + " of " + where.store + action.then);
    });
    return button;
  });
  replaceKeepingFocus($("job-actions"), shown);
  $("job-error-title").hidden = $("job-error").hidden = job.error === null;
  $("job-error").textContent = visible(job.error ?? "");
  $("job-payload").textContent = job.payload === null ? "none" : visible(indented(job.payload));
  const time = (at) => {
    if (at === null) return null;
    const element = make("span", new Date(at).toLocaleString() + " (");
    element.append(ago(at), ")");
    return element;
  };
  const facts = [
    ["Attempts", attempts(job)],
    ["Worker", job.worker === null ? null : visible(job.worker)],
    ["Running for at least", job.running_ms === null ? null : counting(job.running_ms, 1)],
    [job.state === "DELAYED" ? "Available in" : "Lease ends in", job.left_ms === null ? null : counting(job.left_ms, -1)],
    ["Progress", job.progress === null ? null : visible(job.progress)],
    ["Enqueued", time(job.created_at)],
    ["Failed", time(job.failed_at)],
    ["Completed", time(job.completed_at)],
    ["Priority", String(job.priority)],
    ["Unique key", job.key === null ? null : visible(job.key)],
    ["Token of the last claim", job.token],
  ];
  $("job-facts").replaceChildren(...facts.filter(([, value]) => value !== null).flatMap(([title, value]) => {
    const fact = make("dd");
    fact.append(value);
    return [make("dt", title), fact];
  }));
  tick();
}

const JOB_ACTIONS = [
  { path: "/api/job/retry", allowed: "can_retry", button: "Retry…", classes: "main", title: "Retry this job?", now: "Retry", then: ". It becomes available at once, with all its attempts." },
  { path: "/api/job/cancel", allowed: "can_cancel", button: "Cancel job…", title: "Cancel this job?", now: "Cancel the job", then: ". It is marked as failed; if a worker runs it, the worker is told at its next heartbeat." },
];
