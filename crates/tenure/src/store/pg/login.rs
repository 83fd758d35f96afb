//! The process number that a server announces at login, read from the stream beside the driver, which does not show it.
//!
//! A server announces the process of the session itself. A pooler answers the login on its own, with a number of its
//! own: if the number is that of the session, no pooler is in between.

use std::sync::{Arc, OnceLock};

use bytes::BytesMut;
use postgres_protocol::message::backend::Message;

/// Bytes after which a login without a process number is not read further.
const MAX_LOGIN_BYTES: usize = 1 << 16;
/// Answer to a request for TLS: it follows.
const TLS_FOLLOWS: u8 = b'S';
/// Answer to a request for TLS: the server has none.
const TLS_REFUSED: u8 = b'N';

/// Announced process number, once it was read.
#[derive(Clone, Debug, Default)]
pub(super) struct LoginPid(Arc<OnceLock<i32>>);

impl LoginPid {
    pub(super) fn get(&self) -> Option<i32> {
        self.0.get().copied()
    }
}

/// Reader of the server's messages up to the end of the login.
#[derive(Debug)]
pub(super) struct LoginReader {
    pid: LoginPid,
    stage: LoginStage,
}

#[derive(Debug)]
enum LoginStage {
    /// Before the first byte on a socket, which may be the answer to a request for TLS.
    Negotiating,
    /// Unread bytes of the login.
    Messages(BytesMut),
    Done,
}

impl LoginReader {
    /// Reader of a socket that may become encrypted. It stops there: see [`decrypted`](Self::decrypted).
    pub(super) fn of_socket(pid: LoginPid) -> Self {
        Self { pid, stage: LoginStage::Negotiating }
    }

    /// Reader of a decrypted stream.
    pub(super) fn decrypted(pid: LoginPid) -> Self {
        Self { pid, stage: LoginStage::Messages(BytesMut::new()) }
    }

    /// Reads the next bytes from the server.
    pub(super) fn read(&mut self, mut bytes: &[u8]) {
        if let LoginStage::Negotiating = self.stage {
            // The first message of a login is never one of these two letters.
            self.stage = match bytes.split_first() {
                None => return,
                Some((&TLS_FOLLOWS, _)) => LoginStage::Done,
                Some((&TLS_REFUSED, rest)) => {
                    bytes = rest;
                    LoginStage::Messages(BytesMut::new())
                }
                Some(_) => LoginStage::Messages(BytesMut::new()),
            };
        }
        let LoginStage::Messages(unread) = &mut self.stage else { return };
        unread.extend_from_slice(bytes);
        loop {
            match Message::parse(unread) {
                Ok(None) if unread.len() <= MAX_LOGIN_BYTES => return,
                Ok(Some(Message::BackendKeyData(key))) => {
                    // A login announces one process, so the cell is empty.
                    let _ = self.pid.0.set(key.process_id());
                    break;
                }
                Ok(Some(Message::ReadyForQuery(_)) | None) | Err(_) => break,
                Ok(Some(_)) => {}
            }
        }
        self.stage = LoginStage::Done;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `AuthenticationOk`, a parameter, the key, and `ReadyForQuery`.
    const LOGIN: &[u8] = b"R\0\0\0\x08\0\0\0\0S\0\0\0\x08a\0b\0K\0\0\0\x0c\0\x01\x02\x03\x09\x09\x09\x09Z\0\0\0\x05I";

    fn read(mut reader: LoginReader, bytes: &[u8], piece: usize) -> Option<i32> {
        for piece in bytes.chunks(piece) {
            reader.read(piece);
        }
        reader.pid.get()
    }

    #[test]
    fn the_number_is_found_however_the_login_is_cut_into_pieces() {
        for piece in 1..=LOGIN.len() {
            assert_eq!(
                read(LoginReader::decrypted(LoginPid::default()), LOGIN, piece),
                Some(0x1_0203)
            );
            let refused = [b"N", LOGIN].concat();
            for bytes in [LOGIN, &refused] {
                let reader = LoginReader::of_socket(LoginPid::default());
                assert_eq!(read(reader, bytes, piece), Some(0x1_0203));
            }
        }
    }

    #[test]
    fn encrypted_bytes_and_a_login_without_a_number_are_not_read_further() {
        let encrypted = [b"S", LOGIN].concat();
        assert_eq!(read(LoginReader::of_socket(LoginPid::default()), &encrypted, 7), None);
        let ready_first = [&LOGIN[18..][13..], LOGIN].concat();
        assert_eq!(read(LoginReader::decrypted(LoginPid::default()), &ready_first, 7), None);
        assert_eq!(read(LoginReader::decrypted(LoginPid::default()), b"\xff\0\0\0\x04", 1), None);
    }
}
