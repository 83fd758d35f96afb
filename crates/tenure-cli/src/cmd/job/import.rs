//! `tenure job add --from`: enqueues the jobs of a file, one JSON object per line.

use std::fs::File;
use std::io::{BufRead, BufReader};

use serde::Deserialize;
use serde_json::value::RawValue;
use tenure::jobs::{ImportedJobs, NewJob};
use tenure::{Error, ErrorKind, Result};

use super::queue_args::QueueArgs;
use crate::args::value::duration_or_zero;
use crate::cmd;
use crate::exit::Exit;

/// Maximum number of lines: all jobs of a file are one transaction.
const MAX_LINES: usize = 1_000_000;

/// A line of the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ImportLine<'a> {
    #[serde(borrow)]
    payload: Option<&'a RawValue>,
    priority: Option<i32>,
    delay: Option<String>,
    max_attempts: Option<u32>,
    unique_key: Option<String>,
    group_key: Option<String>,
    #[serde(borrow)]
    meta: Option<&'a RawValue>,
}

pub(super) async fn run(arguments: &QueueArgs, path: &str) -> Exit {
    let read = if path == "-" {
        read_jobs(std::io::stdin().lock())
    } else {
        File::open(path)
            .map_err(|error| unreadable(path, error))
            .and_then(|file| read_jobs(BufReader::new(file)))
    };
    let jobs = match read {
        Ok(jobs) => jobs,
        Err(error) => return cmd::report_error(&error),
    };
    let queue = match arguments.connect().await {
        Ok(queue) => queue,
        Err(exit) => return exit,
    };
    match queue.import(&jobs).await {
        Ok(imported) => print(arguments, imported),
        Err(error) => cmd::report_error(&error),
    }
}

fn print(arguments: &QueueArgs, imported: ImportedJobs) -> Exit {
    let ImportedJobs { new, existing, .. } = imported;
    let text = if arguments.json {
        format!("{}\n", serde_json::json!({ "new": new, "existing": existing }))
    } else if existing == 0 {
        format!("{new} jobs added\n")
    } else {
        format!("{new} jobs added, {existing} left out: a job of the same unique key is open\n")
    };
    cmd::print(text.as_bytes())
}

fn unreadable(path: &str, error: std::io::Error) -> Error {
    Error::new(ErrorKind::Invalid, format!("cannot read {path}")).because(error)
}

/// Reads all jobs. The first line that is no job is an error, with its number.
fn read_jobs(mut lines: impl BufRead) -> Result<Vec<NewJob>> {
    let (mut jobs, mut line, mut number) = (Vec::new(), String::new(), 0_usize);
    loop {
        line.clear();
        number += 1;
        let read = lines.read_line(&mut line);
        let at = |error: Error| {
            Error::new(ErrorKind::Invalid, format!("line {number}: {error}; no job was added"))
        };
        if read.map_err(|error| at(unreadable("it", error)))? == 0 {
            return Ok(jobs);
        }
        if line.trim().is_empty() {
            continue;
        }
        if jobs.len() == MAX_LINES {
            let message = format!("there are more than {MAX_LINES} jobs: split the file");
            return Err(at(Error::new(ErrorKind::Invalid, message)));
        }
        jobs.push(parse(&line).map_err(at)?);
    }
}

fn parse(line: &str) -> Result<NewJob> {
    let invalid = |message: String| Error::new(ErrorKind::Invalid, message);
    let line: ImportLine<'_> =
        serde_json::from_str(line).map_err(|error| invalid(format!("not a job: {error}")))?;
    let mut job = NewJob::json(line.payload.map_or("null", RawValue::get))?;
    if let Some(priority) = line.priority {
        job = job.priority(priority);
    }
    if let Some(delay) = line.delay {
        let delay =
            duration_or_zero(&delay).map_err(|error| invalid(format!("invalid delay: {error}")))?;
        job = job.delay(delay);
    }
    if let Some(limit) = line.max_attempts {
        job = job.max_attempts(limit);
    }
    if let Some(key) = line.unique_key {
        job = job.unique_key(key);
    }
    if let Some(group) = line.group_key {
        job = job.group_key(group);
    }
    if let Some(meta) = line.meta {
        job = job.meta(meta.get())?;
    }
    job.check()?;
    Ok(job)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_line_is_refused_with_its_number() {
        let read = |text: &str| read_jobs(text.as_bytes());
        assert_eq!(read("{}\n\n{\"payload\": [1], \"delay\": \"5s\"}").unwrap().len(), 2);
        for (line, says) in [
            ("{", "not a job"),
            ("7", "not a job"),
            (r#"{"paylod": 1}"#, "unknown field"),
            (r#"{"delay": "soon"}"#, "invalid delay"),
            (r#"{"max_attempts": 0}"#, "attempts"),
            (r#"{"unique_key": ""}"#, "key"),
            (r#"{"meta": 7}"#, "metadata"),
        ] {
            let error = read(&format!("{{}}\n{line}\n{{}}")).unwrap_err().to_string();
            assert!(error.contains("line 2: ") && error.contains(says), "{line}: {error}");
        }
    }
}
