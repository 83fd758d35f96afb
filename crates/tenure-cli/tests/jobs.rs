//! `tenure work` and `tenure job` against a real server, beside workers that use plain SQL in psql.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

use std::io::Write as _;
use std::process::{Child, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

#[path = "jobs/bulk.rs"]
mod bulk;
#[path = "jobs/checkpoints.rs"]
mod checkpoints;
#[path = "jobs/completing.rs"]
mod completing;
#[path = "jobs/importing.rs"]
mod importing;
#[path = "jobs/killed.rs"]
mod killed;
#[path = "jobs/outputs.rs"]
mod outputs;
#[path = "jobs/pausing.rs"]
mod pausing;
#[allow(dead_code, reason = "shared with the tests of the store")]
#[path = "../../tenure/tests/pg_lease/server.rs"]
mod pg_server;
#[path = "cli/queue.rs"]
mod queue;
#[path = "jobs/retention.rs"]
mod retention;
#[path = "jobs/schedules.rs"]
mod schedules;
#[path = "jobs/schema.rs"]
mod schema;
#[path = "../../tenure/tests/services/mod.rs"]
mod services;
#[allow(dead_code, reason = "shared with the tests of `run`")]
#[path = "cli/session.rs"]
mod session;
#[path = "jobs/stopping.rs"]
mod stopping;
#[allow(dead_code, reason = "shared with the tests of the stores")]
#[path = "cli/support.rs"]
mod support;

use queue::Queue;
use session::Session;
use support::{Running, children, eventually, runs};

/// A session of psql that claims, heartbeats and completes by plain SQL.
fn plain_worker(queue: &Queue, name: &str, jobs: usize) -> Child {
    let table = &queue.table;
    let one = format!(
        "WITH claimed AS (
             UPDATE {table} SET locked_until = NOW() + INTERVAL '5 minutes', locked_by = '{name}'
             WHERE id = (SELECT id FROM {table}
                 WHERE completed_at IS NULL AND failed_at IS NULL AND (locked_until IS NULL OR locked_until <= NOW())
                 ORDER BY priority DESC, created_at ASC FOR UPDATE SKIP LOCKED LIMIT 1)
             RETURNING id)
         SELECT coalesce((SELECT id FROM claimed), 0) AS id \\gset
         UPDATE {table} SET locked_until = NOW() + INTERVAL '5 minutes'
             WHERE id = :id AND locked_by = '{name}' AND locked_until > NOW();
         INSERT INTO {0}.done SELECT :id, '{name}' WHERE :id > 0;
         SELECT pg_sleep(0.005);
         UPDATE {table} SET completed_at = NOW(), locked_until = NULL, locked_by = NULL WHERE id = :id;\n",
        queue.schema
    );
    let mut psql = queue.psql().stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut stdin = psql.stdin.take().unwrap();
    std::thread::spawn(move || drop(stdin.write_all(one.repeat(jobs).as_bytes())));
    psql
}

#[test]
fn each_job_has_its_payload_and_its_environment() {
    let Some(queue) = Queue::new("environment") else { return };
    let first = queue.add(&["--payload", r#"{"a": 1}"#, "--priority", "5"]);
    let large = format!("\"{}\"", "x".repeat(300_000));
    std::fs::write(queue.scene.path("large"), &large).unwrap();
    let mut add = queue.tenure(&["job", "add", &queue.table, "--payload", "-", "--json"]);
    add.stdin(std::fs::File::open(queue.scene.path("large")).unwrap());
    let added = add.output().unwrap();
    let second: Value = serde_json::from_slice(&added.stdout).unwrap();
    assert_eq!(second["new"], true);
    let script = "wc -c > size-$TENURE_JOB_ID; \
                  echo $TENURE_JOB_ID $TENURE_JOB_ATTEMPT $TENURE_TOKEN $TENURE_NAME >> seen";
    let work = ["work", "--json", "--until-empty", &queue.table, "--", "sh", "-c", script];
    let (code, _, stderr) = queue.outcome(&work);
    assert_eq!(code, Some(0), "{stderr}");
    let seen = queue.scene.read("seen");
    let first_line: Vec<&str> = seen.lines().next().unwrap().split(' ').collect();
    assert_eq!((first_line[0], first_line[1], first_line[3]), (&*first, "1", &*queue.table));
    assert!(first_line[2].parse::<u128>().unwrap() > 0);
    let second = second["id"].as_str().unwrap();
    assert_eq!(queue.scene.read(&format!("size-{first}")).trim(), "9");
    assert_eq!(queue.scene.read(&format!("size-{second}")).trim(), "300003");
    assert_eq!(queue.state(&first), "COMPLETED");
    let events: Vec<Value> =
        stderr.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let named = |name: &str| events.iter().filter(|event| event["event"] == name).count();
    assert_eq!((named("job_started"), named("job_ended")), (2, 2), "{stderr}");
}

#[test]
fn a_poison_job_ends_failed_with_its_error_and_can_be_tried_again() {
    let Some(queue) = Queue::new("poison") else { return };
    let poison = queue.add(&["--max-attempts", "2"]);
    let fine = queue.add(&["--payload", "7"]);
    let script = "read payload; [ $payload = 7 ] || { echo cannot do $payload >&2; exit 1; }";
    let mut work = vec!["work", "--until-empty", "--retry-base", "100ms", &queue.table];
    work.extend(["--", "sh", "-c", script]);
    let (code, _, stderr) = queue.outcome(&work);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stderr.contains("1 done, 1 failed, 1 to be retried"), "{stderr}");
    let shown = queue.show(&poison);
    assert_eq!((&shown["state"], &shown["attempts"]), (&"FAILED".into(), &2.into()));
    assert_eq!(shown["error"], "exit code 1: cannot do null");
    assert_eq!(queue.state(&fine), "COMPLETED");
    assert_eq!(queue.outcome(&["job", "retry", &queue.table, &poison]).0, Some(0));
    let shown = queue.show(&poison);
    assert_eq!((&shown["state"], &shown["attempts"]), (&"AVAILABLE".into(), &0.into()));
}

#[test]
fn two_sessions_of_psql_and_one_of_ours_share_a_thousand_jobs() {
    const JOBS: usize = 1_000;
    let Some(queue) = Queue::new("shared") else { return };
    queue.sql(&format!("CREATE TABLE {}.done (job bigint, by text)", queue.schema));
    queue.sql(&format!(
        "INSERT INTO {} (priority) SELECT n % 3 FROM generate_series(1, {JOBS}) AS n",
        queue.table
    ));
    let script = "echo $TENURE_JOB_ID >> ours";
    let ours = ["work", "-q", "-c", "2", "--until-empty", &queue.table, "--", "sh", "-c", script];
    let mut ours = Running::new(&mut queue.tenure(&ours));
    let plain = ["plain 1", "plain 2"].map(|name| plain_worker(&queue, name, JOBS / 2 - 50));
    for mut psql in plain {
        assert!(psql.wait().unwrap().success());
    }
    assert_eq!(ours.code(), Some(0));
    let by_ours: Vec<i64> =
        queue.scene.read("ours").lines().map(|line| line.parse().unwrap()).collect();
    let by_plain = queue.sql(&format!("SELECT job FROM {}.done", queue.schema));
    let by_plain: Vec<i64> = by_plain.lines().map(|line| line.parse().unwrap()).collect();
    println!("{} by ours, {} by psql", by_ours.len(), by_plain.len());
    assert!(by_ours.len() >= 100 && !by_plain.is_empty());
    let mut all = [by_ours, by_plain].concat();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), JOBS, "each was done");
    let once = format!(
        "SELECT count(*) FROM {} WHERE completed_at IS NOT NULL AND lease_token = 1 AND attempts = 1",
        queue.table
    );
    assert_eq!(queue.sql(&once), JOBS.to_string(), "each once");
}

#[test]
fn told_to_stop_it_waits_for_its_commands_then_stops_them_and_gives_the_jobs_back() {
    let Some(queue) = Queue::new("stopping") else { return };
    let quick = queue.add(&["--payload", "1", "--priority", "1"]);
    let slow = queue.add(&["--payload", "300", "--priority", "1"]);
    let never = queue.add(&[]);
    let script = "read seconds; echo ready; sleep $seconds";
    let mut work = vec!["work", "-c", "2", "--grace", "3s", &queue.table];
    work.extend(["--", "sh", "-c", script]);
    let mut working = Running::new(&mut queue.tenure(&work));
    assert_eq!((working.line(), working.line()), ("ready".into(), "ready".into()));
    working.signal(Signal::SIGTERM);
    assert_eq!(working.code(), Some(0));
    assert_eq!(queue.state(&quick), "COMPLETED");
    let shown = queue.show(&slow);
    assert_eq!((&shown["state"], &shown["attempts"]), (&"AVAILABLE".into(), &0.into()));
    assert_eq!(queue.show(&never)["lease_token"], 0, "never claimed");
}

#[test]
fn the_command_of_a_cancelled_job_is_stopped() {
    let Some(queue) = Queue::new("cancelled") else { return };
    let id = queue.add(&[]);
    let script = "echo $$; exec sleep 300";
    let mut work = vec!["work", "--json", "--lease", "2s", "--until-empty", &queue.table];
    work.extend(["--", "sh", "-c", script]);
    let mut working = Running::new(&mut queue.tenure(&work));
    let child = working.number();
    let cancel = ["job", "cancel", "--reason", "not needed", &queue.table, &id];
    assert_eq!(queue.outcome(&cancel).0, Some(0));
    assert_eq!(working.code(), Some(0));
    assert!(!runs(child));
    let shown = queue.show(&id);
    assert_eq!((&shown["state"], &shown["error"]), (&"FAILED".into(), &"not needed".into()));
}

#[test]
fn jobs_are_listed_and_changed_by_hand() {
    let Some(queue) = Queue::new("hand") else { return };
    let ids: Vec<String> = (0..3).map(|_| queue.add(&["--delay", "1h"])).collect();
    let free = queue.add(&["--unique-key", "k"]);
    assert_eq!(queue.add(&["--unique-key", "k"]), free);
    let (_, table, _) = queue.outcome(&["job", "ls", &queue.table]);
    assert_eq!(table.lines().count(), 5, "{table}");
    assert!(table.starts_with("ID") && table.contains("DELAYED"), "{table}");
    let only = ["job", "ls", "--json", "--state", "delayed", "--limit", "2", &queue.table];
    let (_, lines, _) = queue.outcome(&only);
    assert_eq!(lines.lines().count(), 2, "{lines}");
    assert_eq!(queue.outcome(&["job", "retry", &queue.table, &ids[0]]).0, Some(0));
    assert_eq!(queue.state(&ids[0]), "AVAILABLE");
    assert_eq!(queue.outcome(&["job", "cancel", &queue.table, &ids[1]]).0, Some(0));
    assert_eq!(queue.outcome(&["job", "rm", &queue.table, &ids[1], &ids[2]]).0, Some(0));
    assert_eq!(queue.outcome(&["job", "show", &queue.table, &ids[1]]).0, Some(1));
    let (code, text, _) = queue.outcome(&["job", "show", &queue.table, &free]);
    assert_eq!(code, Some(0));
    assert!(text.contains("unique_key: k") && text.contains("state: AVAILABLE"), "{text}");
}

#[test]
fn rows_with_anything_in_them_are_listed_shown_and_worked_off() {
    let Some(queue) = Queue::new("anything") else { return };
    queue.sql(&format!(
        "ALTER TABLE {0} ALTER priority DROP NOT NULL, ALTER attempts DROP NOT NULL, ALTER lease_token DROP NOT NULL,
             ALTER created_at DROP NOT NULL;
         INSERT INTO {0} (id, priority, attempts, lease_token, created_at, payload, error_message) VALUES
             (101, NULL, NULL, NULL, NULL, NULL, NULL), (102, 1, 0, 0, '0001-01-01', '1', E'a\\x1b[2J'),
             (103, -1, -5, -5, '12000-01-01', '2', ''), (104, 0, 0, 9223372036854775807, '1960-01-01', '3', NULL)",
        queue.table
    ));
    let (code, table, stderr) = queue.outcome(&["job", "ls", &queue.table]);
    assert_eq!((code, table.lines().count()), (Some(0), 5), "{table}{stderr}");
    for id in ["101", "102", "103", "104"] {
        assert_eq!(queue.state(id), "AVAILABLE");
        assert_eq!(queue.outcome(&["job", "show", &queue.table, id]).0, Some(0));
    }
    let shown = queue.show("101");
    assert_eq!((&shown["priority"], &shown["lease_token"]), (&0.into(), &0.into()));
    let work = ["work", "--until-empty", &queue.table, "--", "true"];
    let (code, _, stderr) = queue.outcome(&work);
    assert_eq!(code, Some(0), "{stderr}");
    let told = stderr.lines().filter(|line| line.contains("job 104 of")).count();
    assert!(told == 1 && stderr.contains("3 done"), "{stderr}");
    assert_eq!(queue.state("104"), "AVAILABLE");
}

#[test]
fn invalid_job_and_work_arguments_are_rejected() {
    let Some(queue) = Queue::new("refused") else { return };
    let table = &*queue.table;
    let missing = format!("{}.none", queue.schema);
    let id = queue.add(&[]);
    assert_eq!(queue.outcome(&["work", "-q", "--until-empty", table, "true"]).0, Some(0));
    for (arguments, code, says) in [
        (&["work", &missing, "true"][..], 125, "tenure schema --queue"),
        (&["job", "ls", &missing], 125, "tenure schema --queue"),
        (&["job", "add", table, "--payload", "{"], 2, "not JSON"),
        (&["job", "add", table, "--max-attempts", "0"], 2, "max-attempts"),
        (&["job", "add", "no queue", "--payload", "1"], 2, "name"),
        (&["work", "--lease", "-5s", table, "true"], 2, "lease"),
        (&["work", "--lease", "10ms", table, "true"], 2, "10ms"),
        (&["work", "-s", "memory:", table, "true"], 2, "PostgreSQL"),
        (&["job", "show", table, "999"], 1, "no job 999"),
        (&["job", "retry", table, &id], 1, "COMPLETED"),
        (&["job", "cancel", table, &id], 1, "COMPLETED"),
        (&["job", "rm", table, "x"], 1, "value"),
        (&["job", "ls", table, "--state", "odd"], 2, "available"),
    ] {
        let (exit, _, stderr) = queue.outcome(arguments);
        assert_eq!(exit, Some(code), "{arguments:?}: {stderr}");
        assert!(stderr.contains(says), "{arguments:?}: {stderr}");
        assert!(stderr.lines().count() == 1, "{stderr}");
    }
    let kept = queue.add(&[]);
    let (code, _, stderr) = queue.outcome(&["work", table, "/no/such/program"]);
    assert_eq!(code, Some(127), "{stderr}");
    assert_eq!(queue.state(&kept), "AVAILABLE", "given back");
    assert_eq!(queue.show(&kept)["attempts"], 0);
}

#[test]
fn a_killed_guardian_costs_its_own_job_and_no_other() {
    let Some(queue) = Queue::new("guardian") else { return };
    for _ in 0..3 {
        queue.add(&[]);
    }
    // What leaves its group is found, too.
    let script = "setsid sleep 300 & echo $TENURE_JOB_ID $$ $!; wait";
    let mut work = vec!["work", "-q", "-c", "3", "--retry-base", "100ms", "--grace", "0s"];
    work.extend([&queue.table, "--", "sh", "-c", script]);
    let mut working = Running::new(&mut queue.tenure(&work));
    let mut started = || -> (String, [i32; 2]) {
        let line = working.line();
        let words: Vec<&str> = line.split(' ').collect();
        (words[0].to_owned(), [words[1], words[2]].map(|id| id.parse().unwrap()))
    };
    let (unlucky, processes) = started();
    let others = [started(), started()];
    let again = {
        let guardians = children(working.id());
        assert_eq!(guardians.len(), 3);
        let of_unlucky = |guardian: &&i32| children(**guardian).contains(&processes[0]);
        let guardian = *guardians.iter().find(of_unlucky).unwrap();
        kill(Pid::from_raw(guardian), Signal::SIGKILL).unwrap();
        let line = working.line();
        line.split(' ').next().unwrap().to_owned()
    };
    assert_eq!(again, unlucky, "it is tried again");
    assert!(!processes.iter().any(|process| runs(*process)), "nothing of it was left before that");
    let shown = queue.show(&unlucky);
    assert_eq!((&shown["state"], &shown["attempts"]), (&"RUNNING".into(), &2.into()));
    assert!(shown["error"].as_str().unwrap().contains("guardian"), "{shown}");
    for (id, processes) in others {
        let shown = queue.show(&id);
        assert_eq!((&shown["state"], &shown["lease_token"]), (&"RUNNING".into(), &1.into()));
        assert!(processes.iter().all(|process| runs(*process)), "job {id} was hit");
    }
    working.signal(Signal::SIGTERM);
    assert_eq!(working.code(), Some(0));
}

#[test]
fn orphaned_processes_of_finished_jobs_are_reaped() {
    let Some(queue) = Queue::new("leftovers") else { return };
    for _ in 0..5 {
        queue.add(&["--priority", "1"]);
    }
    queue.add(&["--payload", "7"]);
    // Each leaves a process that goes on for a moment; the last one sees what became of them.
    let script = "read x; if [ $x = 7 ]; then sleep 0.5; else sleep 0.1 & fi";
    let work = ["work", "-q", &queue.table, "--", "sh", "-c", script];
    let mut working = Running::new(&mut queue.tenure(&work));
    let done = format!("SELECT count(completed_at) FROM {}", queue.table);
    eventually("all are done", || (queue.sql(&done) == "6").then_some(()));
    assert_eq!(children(working.id()), [] as [i32; 0], "neither guardians nor the dead");
    working.signal(Signal::SIGTERM);
    assert_eq!(working.code(), Some(0));
}

#[test]
fn progress_is_one_line_at_a_terminal() {
    let Some(queue) = Queue::new("progress") else { return };
    for payload in ["0", "0", "1", "2"] {
        queue.add(&["--payload", payload, "--max-attempts", "1"]);
    }
    let mut session = Session::new(&queue.scene);
    session.enter(&format!("export TENURE_STORE='{}'; echo s''et", queue.url));
    session.shows("set\r\n");
    let script = "read x; [ $x != 2 ] || while [ ! -e go ]; do sleep 0.1; done; [ $x != 1 ]";
    session.enter(&format!("$TENURE work --until-empty {} -- sh -c '{script}'", queue.table));
    let begin = format!("\r\x1b[Ktenure: {}: 2 done, 1 failed, 1 running, ", queue.table);
    session.shows(&begin);
    let rate: f64 = session.shows("/s").parse().unwrap();
    assert!(rate > 0.0, "{rate}");
    // Each word of it takes the place of the one before.
    assert_eq!(session.shows(&begin), "");
    session.shows("/s");
    std::fs::write(queue.scene.path("go"), "").unwrap();
    let between = session.shows("3 done, 1 failed, 0 running, ");
    assert!(between.ends_with(&format!("\r\x1b[Ktenure: {}: ", queue.table)), "{between:?}");
    assert!(!between.contains('\n'), "{between:?}");
    assert!(session.shows("\r\n").ends_with("/s"));
    assert_eq!(session.code(), "0");
    for flag in ["--quiet", "--json"] {
        queue.add(&["--payload", "0"]);
        session.enter(&format!(
            "$TENURE work {flag} --until-empty {} -- sh -c 'sleep 1'; echo do''ne",
            queue.table
        ));
        let said = session.shows("done\r\n");
        assert!(!said.contains(" running, "), "{flag}: {said:?}");
    }
}

#[test]
fn the_progress_line_does_not_mix_with_the_output_of_commands() {
    const LINES: usize = 400;
    let Some(queue) = Queue::new("mixed") else { return };
    for _ in 0..4 {
        queue.add(&[]);
    }
    let mut session = Session::new(&queue.scene);
    session.enter(&format!("export TENURE_STORE='{}'; echo s''et", queue.url));
    session.shows("set\r\n");
    // In pieces, on both streams, for several updates of the progress line. The last line has no end.
    let script = format!(
        "i=0; while [ $i -lt {} ]; do i=$((i + 1)); printf \"<out\"; sleep 0.04; printf \" $i>\\n\"; \
         printf \"<err $i>\\n\" >&2; done; printf \"<end>\"",
        LINES / 8
    );
    std::fs::write(queue.scene.path("script"), script).unwrap();
    session.enter(&format!(
        "$TENURE work -c 4 --until-empty {} -- sh script; echo o''ver",
        queue.table
    ));
    let shown = session.shows("over\r\n");
    let mut found = 0;
    let mut progress = 0;
    for line in shown.trim_start_matches("prompt> ").split("\r\n") {
        // Every update of the progress line begins at the beginning of a line, and is erased before other output.
        let pieces: Vec<&str> = line.split("\r\x1b[K").filter(|piece| !piece.is_empty()).collect();
        for piece in &pieces {
            let ours = piece.starts_with("tenure: ");
            progress += usize::from(ours);
            let output = piece.starts_with('<') && piece.ends_with('>');
            assert!(
                ours && !piece.contains('<') || output || piece.contains("$TENURE"),
                "{line:?}"
            );
            found += usize::from(output) * piece.matches('<').count();
        }
    }
    assert_eq!(found, LINES + 4, "{shown}");
    assert!(progress >= 2, "{shown}");
}
