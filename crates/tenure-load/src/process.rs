//! What the kernel says of the server's process: processor time and memory.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};

/// How often memory is looked at until it stays as it is.
const MEMORY_POLL_INTERVAL: Duration = Duration::from_millis(250);

/// A process of this machine.
#[derive(Clone, Copy, Debug)]
pub struct Process(pub u32);

impl Process {
    /// The processor time of its threads so far, user and system.
    ///
    /// Of a single thread the kernel tells nanoseconds. Of several it does so for those that have not ended, which makes
    /// a server that ends threads look cheap; so then it is `stat`, which has all of them, in ticks of 10 ms.
    ///
    /// # Errors
    ///
    /// When there is no such process, or the kernel keeps no such statistics.
    pub fn cpu(self) -> Result<Duration> {
        let folder = format!("/proc/{}/task", self.0);
        let threads = fs::read_dir(&folder).with_context(|| format!("reading {folder}"))?.count();
        let path = format!("/proc/{}/{}", self.0, if threads == 1 { "schedstat" } else { "stat" });
        let text = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
        let time = if threads == 1 { nanoseconds(&text) } else { ticks(&text) };
        time.with_context(|| format!("{path} has no time in it"))
    }

    /// The bytes of memory that it has now. `smaps_rollup` counts pages, while `status` may be some hundred off.
    ///
    /// # Errors
    ///
    /// When there is no such process, or it belongs to somebody else.
    pub fn memory(self) -> Result<u64> {
        let path = format!("/proc/{}/smaps_rollup", self.0);
        let text = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
        let line = text.lines().find_map(|line| line.strip_prefix("Rss:"));
        let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        Ok(kilobytes.with_context(|| format!("{path} has no Rss"))? * 1024)
    }

    /// Keeps its threads on one core.
    ///
    /// Where server and load run is the kernel's choice, made anew for each load, and it changes the rate by half: on one
    /// core they take turns, on two they wake each other up. What is compared must have the same choice.
    ///
    /// # Errors
    ///
    /// When there is no such process or core, or it belongs to somebody else.
    pub fn pin(self, core: usize) -> Result<()> {
        ensure!(core < CpuSet::MAX_CPU, "there is no core {core}");
        let mut cores = CpuSet::new();
        cores.set(core);
        let folder = format!("/proc/{}/task", self.0);
        for thread in fs::read_dir(&folder).with_context(|| format!("reading {folder}"))? {
            let thread = thread?.file_name();
            let number = thread.to_str().and_then(|name| name.parse().ok());
            let thread = number.and_then(Pid::from_raw).context("a thread without a number")?;
            sched_setaffinity(Some(thread), &cores)
                .with_context(|| format!("pinning to core {core}"))?;
        }
        Ok(())
    }

    /// The bytes of memory once they stay as they are while the process does nothing, or after
    /// `limit`.
    ///
    /// # Errors
    ///
    /// As [`Process::memory`] and [`Process::cpu`].
    pub fn memory_at_rest(self, limit: Duration) -> Result<u64> {
        let deadline = Instant::now() + limit;
        let (mut memory, mut cpu) = (self.memory()?, self.cpu()?);
        loop {
            std::thread::sleep(MEMORY_POLL_INTERVAL.min(limit));
            let (memory_now, cpu_now) = (self.memory()?, self.cpu()?);
            // A server's own timers may run; a thousandth of the time is rest.
            let idle = cpu_now.saturating_sub(cpu) < MEMORY_POLL_INTERVAL / 1000;
            if (memory_now == memory && idle) || Instant::now() >= deadline {
                return Ok(memory_now);
            }
            (memory, cpu) = (memory_now, cpu_now);
        }
    }
}

fn nanoseconds(schedstat: &str) -> Option<Duration> {
    Some(Duration::from_nanos(schedstat.split_whitespace().next()?.parse().ok()?))
}

/// The 14th and 15th field, of which the second, the name, may have blanks in it.
fn ticks(stat: &str) -> Option<Duration> {
    let fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11).take(2);
    let ticks = fields.map(|field| field.parse::<u64>().ok()).sum::<Option<u64>>()?;
    Some(Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_used_time_and_memory() {
        let this = Process(std::process::id());
        let before = this.cpu().unwrap();
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(50) {
            std::hint::spin_loop();
        }
        assert!(this.cpu().unwrap() > before);
        assert!(this.memory().unwrap() > 100_000);
    }

    #[test]
    fn both_forms_of_the_time_are_read() {
        assert_eq!(nanoseconds("1234 5 6\n"), Some(Duration::from_nanos(1234)));
        let stat = "1 (a b) c) S 1 1 1 0 -1 0 0 0 0 0 150 50 0 0 20 0 1 0 2";
        let seconds = 200 / rustix::param::clock_ticks_per_second();
        assert_eq!(ticks(stat), Some(Duration::from_secs(seconds)));
    }

    #[test]
    fn a_process_that_is_not_there_is_an_error() {
        assert!(Process(u32::MAX).cpu().is_err());
        assert!(Process(u32::MAX).memory().is_err());
    }
}
