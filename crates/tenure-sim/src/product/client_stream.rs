//! The streams of a client process to the server.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::network::{EndState, Net, Side};
use super::world;

/// A client's side of a connection.
#[derive(Debug)]
pub(super) struct ClientStream {
    client: usize,
    connection: usize,
}

/// Connects a client to the server.
pub(super) async fn connect(client: usize) -> io::Result<ClientStream> {
    let connection = world::with(|world| {
        let now = world.process(client).real_time(world.now.get());
        world.net.borrow_mut().connect(client, now)
    });
    let stream = ClientStream { client, connection };
    poll_fn(|cx| {
        world::with(|world| {
            let mut net = world.net.borrow_mut();
            let end = net.connections[connection].end_mut(Side::Client);
            match end.state {
                EndState::Connecting => {
                    end.reader = Some(cx.waker().clone());
                    Poll::Pending
                }
                EndState::Open => Poll::Ready(Ok(())),
                _ => Poll::Ready(Err(io::ErrorKind::ConnectionRefused.into())),
            }
        })
    })
    .await
    .map(|()| stream)
}

impl ClientStream {
    fn with<T>(&self, f: impl FnOnce(&mut Net, u64) -> T) -> T {
        world::with(|world| {
            let now = world.process(self.client).real_time(world.now.get());
            f(&mut world.net.borrow_mut(), now)
        })
    }
}

impl AsyncRead for ClientStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.with(|net, now| {
            let target = buffer.initialize_unfilled();
            match net.read(self.connection, Side::Client, target, now) {
                Some(Ok(read)) => {
                    buffer.advance(read);
                    Poll::Ready(Ok(()))
                }
                Some(Err(error)) => Poll::Ready(Err(error)),
                None => {
                    let end = net.connections[self.connection].end_mut(Side::Client);
                    end.reader = Some(cx.waker().clone());
                    Poll::Pending
                }
            }
        })
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.with(|net, now| {
            if let Some(result) = net.write(self.connection, Side::Client, bytes, now) {
                return Poll::Ready(result);
            }
            let end = net.connections[self.connection].end_mut(Side::Client);
            end.writer = Some(cx.waker().clone());
            Poll::Pending
        })
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.with(|net, now| net.finish(self.connection, Side::Client, now));
        Poll::Ready(Ok(()))
    }
}

impl Drop for ClientStream {
    fn drop(&mut self) {
        self.with(|net, now| net.close(self.connection, Side::Client, now));
    }
}
