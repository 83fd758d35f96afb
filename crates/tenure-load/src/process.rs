//! What the kernel says of the server's process: processor time and memory.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

/// How often memory is looked at until it stays as it is.
const GLANCE: Duration = Duration::from_millis(250);

/// How long memory may take to come to rest.
const REST: Duration = Duration::from_secs(6);

/// A process of this machine.
#[derive(Clone, Copy, Debug)]
pub struct Process(pub u32);

impl Process {
    /// The processor time of its threads so far, user and system, to the nanosecond.
    ///
    /// `stat` has the same in ticks of 10 ms, which is coarse for a load of a second. Threads that have ended are not
    /// in it: a server that starts threads under load would look too cheap here.
    ///
    /// # Errors
    ///
    /// When there is no such process, or the kernel keeps no such statistics.
    pub fn cpu(self) -> Result<Duration> {
        let folder = format!("/proc/{}/task", self.0);
        let threads = fs::read_dir(&folder).with_context(|| format!("reading {folder}"))?;
        let mut nanos = 0;
        for thread in threads {
            let path = thread?.path().join("schedstat");
            // A thread may end between the listing and here.
            let Ok(text) = fs::read_to_string(&path) else { continue };
            let first = text.split_whitespace().next().and_then(|field| field.parse::<u64>().ok());
            nanos += first.with_context(|| format!("{} has no time in it", path.display()))?;
        }
        Ok(Duration::from_nanos(nanos))
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

    /// The bytes of memory once they stay as they are while the process does nothing, or after a few seconds.
    ///
    /// # Errors
    ///
    /// As [`Process::memory`] and [`Process::cpu`].
    pub fn memory_at_rest(self) -> Result<u64> {
        let deadline = Instant::now() + REST;
        let (mut memory, mut cpu) = (self.memory()?, self.cpu()?);
        loop {
            std::thread::sleep(GLANCE);
            let (memory_now, cpu_now) = (self.memory()?, self.cpu()?);
            // A server's own timers may run; a thousandth of the time is rest.
            let idle = cpu_now.saturating_sub(cpu) < GLANCE / 1000;
            if (memory_now == memory && idle) || Instant::now() >= deadline {
                return Ok(memory_now);
            }
            (memory, cpu) = (memory_now, cpu_now);
        }
    }
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
    fn a_process_that_is_not_there_is_an_error() {
        assert!(Process(u32::MAX).cpu().is_err());
        assert!(Process(u32::MAX).memory().is_err());
    }
}
