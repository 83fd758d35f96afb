//! The echo server: the baseline cost of a server on this runtime.
//!
//! One thread, one task per connection. It finds the ends of requests, and answers each with a reply of the size that a
//! lock server's reply has; the replies to one read are one write. It keeps no locks, uses no clock, and its token is
//! constant. A server that parses requests and writes replies can hardly take less, so the difference to the echo is
//! the cost of a lock server's own work.

use std::io;
use std::net::SocketAddr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// Bytes read at once: about a hundred requests.
const READ_BYTES: usize = 1_024;

/// Initial capacity for replies: enough for a few requests.
const REPLY_BUFFER_BYTES: usize = 256;

const GRANTED: &[u8] = b"ok 0123456789abcdef0123456789abcdef 33\n";
const ACQUIRED: &[u8] = b"acquired 0123456789abcdef0123456789abcdef 33\n";
const RENEWED: &[u8] = b"ok 33\n";
const DONE: &[u8] = b"ok\n";

/// Serves until the process ends.
///
/// # Errors
///
/// The address cannot be bound.
pub fn serve(address: SocketAddr) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    runtime.block_on(async {
        let listener = TcpListener::bind(address).await?;
        run(listener).await
    })
}

/// Serves on an existing listener.
///
/// # Errors
///
/// None at present: a failed accept is retried, and this never returns.
pub async fn run(listener: TcpListener) -> io::Result<()> {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                tokio::spawn(serve_connection(stream));
            }
            // Out of file descriptors: retried until a connection is closed.
            Err(_) => tokio::task::yield_now().await,
        }
    }
}

async fn serve_connection(mut stream: TcpStream) {
    if stream.set_nodelay(true).is_err() {
        return;
    }
    let mut bytes = vec![0; READ_BYTES];
    let mut replies = Vec::with_capacity(REPLY_BUFFER_BYTES);
    let mut request = Request::default();
    loop {
        match stream.read(&mut bytes).await {
            Ok(0) | Err(_) => return,
            Ok(read) => bytes[..read].iter().for_each(|byte| request.next(*byte, &mut replies)),
        }
        if !replies.is_empty() && stream.write_all(&replies).await.is_err() {
            return;
        }
        replies.clear();
    }
}

/// The part of a request that its reply depends on: the number of complete lines, and the first letters.
#[derive(Default)]
struct Request {
    lines: u8,
    command: [u8; 2],
    letters: usize,
}

impl Request {
    fn next(&mut self, byte: u8, replies: &mut Vec<u8>) {
        if byte == b'\n' {
            self.lines += 1;
            if self.lines == 3 {
                replies.extend_from_slice(self.reply());
                *self = Self::default();
            }
        } else if self.lines == 0 {
            if let Some(letter) = self.command.get_mut(self.letters) {
                *letter = byte;
            }
            self.letters += 1;
        }
    }

    fn reply(&self) -> &'static [u8] {
        let [first, second] = self.command;
        // Semaphore commands are lock commands with the prefix `s`.
        match if first == b's' && second != 0 { second } else { first } {
            b'l' | b'w' => GRANTED,
            b'e' => ACQUIRED,
            b'n' => RENEWED,
            _ => DONE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_request_gets_the_reply_of_its_command_wherever_it_was_cut() {
        let requests =
            b"l\nkey\n10 33\ne\nl\n33\nw\nk\n9\nsl\nk\n1 1\nn\nk\nt\nr\nk\nt\nping\n\n\n";
        let wanted = [GRANTED, ACQUIRED, GRANTED, GRANTED, RENEWED, DONE, DONE].concat();
        let (mut request, mut replies) = (Request::default(), Vec::new());
        for byte in requests {
            request.next(*byte, &mut replies);
        }
        assert_eq!(String::from_utf8(replies), String::from_utf8(wanted));
    }
}
