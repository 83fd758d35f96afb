//! The task of a connection: writes requests, and passes replies and pushed messages to callers, watches and claims.

#[cfg(unix)]
use std::os::fd::OwnedFd;
use std::sync::Arc;

use tenure_core::wire::{ClaimId, Push};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite};

use super::claim::{ClaimState, ServerClaims, ServerConnection};
use super::connection::{Connection, ConnectionEnd, ConnectionInner, ReplyTarget};
use super::wire::OwnedReply;
use crate::Clock;

/// Longest line of a server: a page of a list with many holders.
const MAX_REPLY_BYTES: usize = 32 << 20;

/// A byte stream, plain or TLS.
pub(super) trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for T {}

/// Starts a connection on a stream. `keep_open_fd` is another descriptor of the same socket, if it is one. Pushed messages
/// are for those of `claims` that the connection carries.
pub(super) fn start(
    stream: impl ByteStream + 'static,
    #[cfg(unix)] keep_open_fd: Option<OwnedFd>,
    clock: &Clock,
    claims: &Arc<ServerClaims>,
) -> Arc<ServerConnection> {
    let connection = Connection::new(
        #[cfg(unix)]
        keep_open_fd,
        clock,
    );
    let task =
        ConnectionTask { connection: Arc::clone(connection.inner()), claims: Arc::clone(claims) };
    tokio::spawn(task.run(stream));
    connection
}

struct ConnectionTask {
    connection: Arc<ConnectionInner<ClaimState>>,
    claims: Arc<ServerClaims>,
}

impl ConnectionTask {
    /// Reads and writes until either ends.
    async fn run(self, stream: impl ByteStream) {
        let (mut reader, mut writer) = tokio::io::split(stream);
        let end = tokio::select! {
            biased;
            end = self.read(&mut reader) => end,
            end = self.connection.write(&mut writer) => end,
            never = self.connection.ping() => match never {},
        };
        // The socket is closed before any claim learns of the end. Otherwise a claim could be sent again on another
        // connection while the server still counts the old one as open, and be refused as claimed elsewhere.
        drop((reader, writer));
        if let ConnectionEnd::Broken(why) = &end {
            tracing::debug!(name: "tenure.disconnected", %why);
        }
        self.handle_end(&end);
    }

    async fn read(&self, reader: &mut (impl AsyncRead + Unpin)) -> ConnectionEnd {
        let mut buffer = Vec::with_capacity(4096);
        let mut scanned = 0;
        loop {
            match reader.read_buf(&mut buffer).await {
                Ok(0) => return ConnectionEnd::ClosedByPeer,
                Ok(_) => {}
                Err(error) => return ConnectionEnd::Broken(error.to_string().into()),
            }
            let mut begin = 0;
            while let Some(at) = buffer[scanned..].iter().position(|byte| *byte == b'\n') {
                let line = &buffer[begin..scanned + at];
                let line = line.strip_suffix(b"\r").unwrap_or(line);
                if let Err(why) = self.handle_line(line) {
                    return ConnectionEnd::Broken(why.into());
                }
                scanned += at + 1;
                begin = scanned;
            }
            buffer.drain(..begin);
            scanned = buffer.len();
            if buffer.len() > MAX_REPLY_BYTES {
                return ConnectionEnd::Broken("a reply is too long".into());
            }
            if buffer.is_empty() {
                buffer.shrink_to(64 << 10);
            }
        }
    }

    /// Passes a line to its recipient.
    fn handle_line(&self, line: &[u8]) -> Result<(), &'static str> {
        if line.first() == Some(&b'!') {
            if let Some(push) = Push::parse(line) {
                self.handle_push(&push);
            }
            return Ok(());
        }
        let reply = OwnedReply::parse(line).ok_or("the server sent a line that is not a reply")?;
        let target =
            self.connection.next_target().ok_or("the server sent a reply without a request")?;
        match target {
            // Fails if the caller has timed out.
            ReplyTarget::Caller(caller) => drop(caller.send(reply)),
            ReplyTarget::Claim(claim_state) => claim_state.handle_reply(reply),
            ReplyTarget::Wait(claim_state) => {
                if let Some(claim_state) = claim_state.upgrade() {
                    claim_state.handle_reply(reply);
                }
            }
            ReplyTarget::Discard => {}
        }
        Ok(())
    }

    fn handle_push(&self, push: &Push<'_>) {
        match *push {
            Push::Changed { id } => self.connection.wake_watch(id),
            Push::Granted { id: ClaimId(id), token, lease } => {
                if let Some(claim_state) =
                    self.claims.claim_by_id(id).filter(|claim_state| self.carries(claim_state))
                {
                    claim_state.handle_reply(OwnedReply::Granted { token, lease });
                }
            }
            Push::Gone { id: ClaimId(id) } => {
                if let Some(claim_state) =
                    self.claims.claim_by_id(id).filter(|claim_state| self.carries(claim_state))
                {
                    claim_state.handle_gone();
                }
            }
            Push::HandoffRequested { number } => {
                if let Some(claim_state) = self
                    .claims
                    .claim_by_number(number)
                    .filter(|claim_state| self.carries(claim_state))
                {
                    claim_state.handle_handoff_request();
                }
            }
            Push::Ended { number, why } => {
                if let Some(claim_state) = self
                    .claims
                    .claim_by_number(number)
                    .filter(|claim_state| self.carries(claim_state))
                {
                    claim_state.handle_ended(why);
                }
            }
        }
    }

    fn carries(&self, claim_state: &Arc<ClaimState>) -> bool {
        Arc::ptr_eq(claim_state.connection().inner(), &self.connection)
    }

    /// Ends the connection: all requests and watches fail, and its claims are notified.
    fn handle_end(&self, end: &ConnectionEnd) {
        let unanswered = self.connection.finish(end);
        for claim_state in self.claims.all().iter().filter(|claim_state| self.carries(claim_state))
        {
            claim_state.handle_disconnect(end);
        }
        drop(unanswered);
    }
}
