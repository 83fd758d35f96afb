//! CPU time and memory of the server's process, from the kernel.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};

/// Interval between two readings of memory until it is stable.
const MEMORY_POLL_INTERVAL: Duration = Duration::from_millis(250);

/// A process of this machine.
#[derive(Clone, Copy, Debug)]
pub struct Process(pub u32);

impl Process {
    /// CPU time of all threads so far, user and system.
    ///
    /// A process with one thread is read from `schedstat`, in nanoseconds. With several threads `schedstat` would omit
    /// threads that have ended, so a server that ends threads would look cheap. Then it is read from `stat`, which has
    /// all of them, in ticks of 10 ms.
    ///
    /// # Errors
    ///
    /// There is no such process, or the kernel keeps no such statistics.
    pub fn cpu(self) -> Result<Duration> {
        let folder = format!("/proc/{}/task", self.0);
        let threads = fs::read_dir(&folder).with_context(|| format!("reading {folder}"))?.count();
        let path = format!("/proc/{}/{}", self.0, if threads == 1 { "schedstat" } else { "stat" });
        let text = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
        let time = if threads == 1 { nanoseconds(&text) } else { ticks(&text) };
        time.with_context(|| format!("{path} has no time in it"))
    }

    /// Resident memory in bytes. `smaps_rollup` counts pages exactly; `status` may be off by a few hundred pages.
    ///
    /// # Errors
    ///
    /// There is no such process, or it belongs to another user.
    pub fn memory(self) -> Result<u64> {
        let path = format!("/proc/{}/smaps_rollup", self.0);
        let text = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
        let line = text.lines().find_map(|line| line.strip_prefix("Rss:"));
        let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        Ok(kilobytes.with_context(|| format!("{path} has no Rss"))? * 1024)
    }

    /// Pins the process to one core.
    ///
    /// Otherwise the kernel chooses the cores of server and load anew for each load, which changes the rate by half: on
    /// one core they take turns, on two they wake each other. Results are comparable only with the same placement.
    ///
    /// # Errors
    ///
    /// There is no such process or core, or the process belongs to another user.
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

    /// Resident memory in bytes once it is stable and the process is idle, or after `limit`.
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
            // The server's own timers may run: less than a thousandth of the time counts as idle.
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

/// Sum of fields 14 and 15 of `stat`. Field 2, the name, may contain blanks and parentheses.
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
