//! Progress and result that the command of a job writes to descriptors of its own.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tenure::jobs::{Job, ProgressLines};
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe::Receiver;
use tokio::task::JoinHandle;

use crate::mutex::Mutex;
use crate::report::Reporter;

/// Time that is waited for the rest of the output after a command has ended. Processes that it left behind may keep its
/// streams open: end of file may never come.
pub(super) const OUTPUT_DRAIN_TIMEOUT: Duration = Duration::from_millis(200);
/// Maximum size of a result in bytes.
const MAX_RESULT_BYTES: usize = 1 << 20;

/// Reads what the command writes. Dropping it ends the reading: processes that the command left behind may keep the pipes
/// open.
pub(super) struct JobOutputs {
    progress: JoinHandle<()>,
    result: JoinHandle<()>,
    result_bytes: Arc<Mutex<Vec<u8>>>,
}

/// A pipe whose reading end does not block a thread: there may be hundreds of commands.
pub(super) fn async_pipe() -> io::Result<(Receiver, OwnedFd)> {
    let (reader, writer) = io::pipe()?;
    Ok((Receiver::from_owned_fd(reader.into())?, writer.into()))
}

impl JobOutputs {
    pub(super) fn read(
        job: &Job,
        mut progress: Receiver,
        mut result: Receiver,
        reporter: Arc<Reporter>,
    ) -> Self {
        let job = job.clone();
        let progress = tokio::spawn(async move {
            let (mut lines, mut bytes) = (ProgressLines::default(), [0; 4096]);
            while let Ok(read @ 1..) = progress.read(&mut bytes).await {
                if let Some(line) = lines.push(&bytes[..read])
                    && let Err(error) = job.set_progress(&line)
                {
                    warn_once(&reporter, &error);
                }
            }
        });
        let result_bytes = Arc::<Mutex<Vec<u8>>>::default();
        let kept = Arc::clone(&result_bytes);
        let result = tokio::spawn(async move {
            let mut bytes = [0; 8192];
            while let Ok(read @ 1..) = result.read(&mut bytes).await {
                let mut kept = kept.lock();
                // One byte more than the limit tells that it was passed.
                let room = (MAX_RESULT_BYTES + 1).saturating_sub(kept.len());
                kept.extend_from_slice(&bytes[..read.min(room)]);
            }
        });
        Self { progress, result, result_bytes }
    }

    /// Sets the result of the job to what its command has written, if it has written anything. An error is the reason for
    /// which the attempt has failed.
    pub(super) async fn set_result(mut self, job: &Job) -> Result<(), String> {
        let _ = tokio::time::timeout(OUTPUT_DRAIN_TIMEOUT, &mut self.result).await;
        let bytes = std::mem::take(&mut *self.result_bytes.lock());
        if bytes.trim_ascii().is_empty() {
            return Ok(());
        }
        let text = String::from_utf8(bytes).map_err(|_| "the result is no UTF-8".to_owned())?;
        job.set_result(text).map_err(|error| error.chain())
    }
}

impl Drop for JobOutputs {
    fn drop(&mut self) {
        self.progress.abort();
        self.result.abort();
    }
}

/// Reports once that progress cannot be stored.
fn warn_once(reporter: &Reporter, error: &tenure::Error) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if !WARNED.swap(true, Ordering::Relaxed) {
        reporter.error(&format!("progress is not stored: {}", error.chain()));
    }
}
