//! Commands that complete their own job in SQL.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::queue::Queue;
use crate::services;
use crate::support::{Running, runs};

/// Shell code that completes the job with the public statement, by the environment of the command.
fn complete(queue: &Queue) -> String {
    let psql = services::postgres_programs().unwrap().join("psql");
    let statement = tenure::jobs::sql::complete(&queue.table, "bigint").unwrap();
    std::fs::write(
        queue.scene.path("complete.sql"),
        format!(
            "PREPARE complete (text, bigint, text) AS {statement};\n\
             EXECUTE complete (:'job', :token, :'worker') \\gset\n"
        ),
    )
    .unwrap();
    format!(
        "'{}' '{}' -XAtq -v ON_ERROR_STOP=1 -v job=$TENURE_JOB_ID -v token=$TENURE_LEASE_TOKEN \
         -v worker=$TENURE_HOLDER -f complete.sql",
        psql.display(),
        queue.url
    )
}

#[test]
fn a_command_that_completes_its_job_in_sql_is_left_to_end() {
    let Some(queue) = Queue::new("own") else { return };
    let lease = Duration::from_secs(2);
    let id = queue.add(&[]);
    let script = format!(
        "{} && echo $$; while [ ! -e go ]; do sleep 0.1; done; touch ended",
        complete(&queue)
    );
    let mut work = vec!["work", "--json", "--lease", "2s", "--until-empty", &queue.table];
    work.extend(["--", "sh", "-c", &script]);
    let said = std::fs::File::create(queue.scene.path("said")).unwrap();
    let mut working = Running::new(queue.tenure(&work).stderr(said));
    let command = working.number();
    assert_eq!(queue.state(&id), "COMPLETED");
    // Past the lease, at whose end worker or guardian would kill a command without a job.
    let completed = Instant::now();
    while completed.elapsed() < lease + Duration::from_secs(1) {
        assert!(runs(command), "killed after {:?}", completed.elapsed());
        std::thread::sleep(Duration::from_millis(50));
    }
    std::fs::write(queue.scene.path("go"), "").unwrap();
    assert_eq!(working.code(), Some(0));
    assert!(queue.scene.path("ended").exists());
    let said = queue.scene.read("said");
    assert!(said.contains(r#""outcome":"completed""#) && !said.contains("lost"), "{said}");
}

#[test]
fn a_job_that_its_command_completed_counts_as_completed_however_the_command_ends() {
    let Some(queue) = Queue::new("own_code") else { return };
    let id = queue.add(&["--payload", "1"]);
    let stopped = queue.add(&["--payload", "2"]);
    let script = format!(
        "read payload; {} || exit 9; [ $payload = 1 ] && exit 3; echo completed; exec sleep 300",
        complete(&queue)
    );
    let work = ["work", "--grace", "0s", &queue.table, "--", "sh", "-c", &script];
    let said = std::fs::File::create(queue.scene.path("said")).unwrap();
    let mut working = Running::new(queue.tenure(&work).stderr(said));
    assert_eq!(working.line(), "completed");
    working.signal(Signal::SIGTERM);
    assert_eq!(working.code(), Some(0));
    let said = queue.scene.read("said");
    assert!(said.contains("2 done, 0 failed, 0 running"), "{said}");
    for id in [id, stopped] {
        assert_eq!(queue.state(&id), "COMPLETED");
    }
}

#[test]
fn the_statement_of_a_late_command_completes_nothing() {
    let Some(queue) = Queue::new("own_late") else { return };
    let id = queue.add(&[]);
    let claim =
        format!("UPDATE {} SET lease_token = lease_token + 1, locked_by = 'other'", queue.table);
    let psql = services::postgres_programs().unwrap().join("psql");
    let script = format!(
        "'{}' '{}' -Xqc \"{claim}\"; {}; echo $? > code",
        psql.display(),
        queue.url,
        complete(&queue)
    );
    let work = ["work", "--until-empty", &queue.table, "--", "sh", "-c", &script];
    let (code, _, stderr) = queue.outcome(&work);
    assert_eq!(code, Some(0), "{stderr}");
    assert_eq!(queue.scene.read("code").trim(), "3", "psql stops at the missing row");
    assert!(stderr.contains("1 lost"), "{stderr}");
    assert_eq!(queue.show(&id)["locked_by"], "other");
}
