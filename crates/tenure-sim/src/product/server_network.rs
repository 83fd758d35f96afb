//! The network under the server's event loop, and its tap.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::time::Duration;

use tenure_core::Time;
use tenure_server::network::{COMMANDS, LISTENER, Network, NetworkEvent, NetworkStream};

use super::network::Side;
use super::plan::ServerPoint;
use super::referee::ProductBreach;
use super::server_faults::server_operation;
use super::world::{self, ProductWorld};

/// Most events per wait.
const EVENTS: usize = 128;

/// Network of the server.
#[derive(Debug)]
pub(super) struct SimulatedNetwork;

impl Network for SimulatedNetwork {
    type Stream = ServerStream;

    fn now(&self) -> Time {
        let now = world::with(|world| world.host.borrow().clock.read(world.now.get()));
        server_operation(ServerPoint::Clock);
        now
    }

    fn wait(
        &mut self,
        _timeout: Option<Duration>,
        events: &mut Vec<NetworkEvent>,
    ) -> io::Result<()> {
        events.clear();
        world::with(|world| {
            let now = world.host.borrow().clock.read(world.now.get());
            let breach = world.tap.borrow_mut().end_turn(now);
            if let Some((breach, what)) = breach {
                world.breach(breach, what);
            }
            let event = |token, readable, writable, closed| NetworkEvent {
                token,
                readable,
                writable,
                closed,
            };
            if std::mem::take(&mut world.host.borrow_mut().commands) {
                events.push(event(COMMANDS, true, false, false));
            }
            let mut net = world.net.borrow_mut();
            if std::mem::take(&mut net.backlog_changed) {
                events.push(event(LISTENER, true, false, false));
            }
            for (token, readable, writable, closed) in net.take_ready(EVENTS - events.len()) {
                events.push(event(token, readable, writable, closed));
            }
        });
        server_operation(ServerPoint::Any);
        Ok(())
    }

    fn accept(&mut self) -> io::Result<(ServerStream, SocketAddr)> {
        let next = world::with(|world| {
            let mut net = world.net.borrow_mut();
            net.backlog.pop_front().map(|index| (index, net.connections[index].client))
        });
        let (index, client) = next.ok_or(ErrorKind::WouldBlock)?;
        let stream = ServerStream(index);
        server_operation(ServerPoint::Any);
        let last = u8::try_from(client + 1).unwrap_or(u8::MAX);
        let port = u16::try_from(1024 + index).unwrap_or(u16::MAX);
        Ok((stream, SocketAddr::from((Ipv4Addr::new(10, 0, 0, last), port))))
    }

    fn stop_listening(&mut self) {
        world::with(|world| {
            let now = world.now.get();
            let mut net = world.net.borrow_mut();
            net.listening = false;
            while let Some(connection) = net.backlog.pop_front() {
                net.close(connection, Side::Server, now);
            }
        });
    }

    fn register(&self, stream: &mut ServerStream, token: usize) -> io::Result<()> {
        world::with(|world| world.net.borrow_mut().register(stream.0, token));
        Ok(())
    }

    fn watch_writable(&self, stream: &mut ServerStream, _token: usize, on: bool) -> io::Result<()> {
        world::with(|world| world.net.borrow_mut().watch_writable(stream.0, on));
        Ok(())
    }

    fn deregister(&self, stream: &mut ServerStream) {
        world::with(|world| world.net.borrow_mut().deregister(stream.0));
    }
}

/// The server's side of a connection.
#[derive(Debug)]
pub(super) struct ServerStream(usize);

impl Read for ServerStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = world::with(|world| {
            let read = world.net.borrow_mut().read(self.0, Side::Server, buffer, world.now.get());
            match &read {
                None => {}
                Some(Ok(0) | Err(_)) => world.tap.borrow_mut().forget(self.0),
                Some(Ok(read)) => world.tap.borrow_mut().read(self.0, &buffer[..*read]),
            }
            read
        });
        server_operation(ServerPoint::Read);
        read.unwrap_or(Err(ErrorKind::WouldBlock.into()))
    }
}

impl Write for ServerStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = world::with(|world| {
            let now = world.now.get();
            let written = world.net.borrow_mut().write(self.0, Side::Server, bytes, now);
            world.tap_written(self.0, bytes, written.as_ref());
            written
        });
        server_operation(ServerPoint::Write);
        written.unwrap_or(Err(ErrorKind::WouldBlock.into()))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl NetworkStream for ServerStream {
    fn finish(&self) {
        world::with(|world| {
            world.net.borrow_mut().finish(self.0, Side::Server, world.now.get());
            // The server closes the connection: a grant to one of its claims is no longer pushed.
            world.tap.borrow_mut().forget(self.0);
        });
    }

    fn take_error(&self) -> io::Result<Option<io::Error>> {
        Ok(world::with(|world| world.net.borrow().take_error(self.0)))
    }

    fn socket(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl Drop for ServerStream {
    fn drop(&mut self) {
        world::with(|world| {
            world.net.borrow_mut().close(self.0, Side::Server, world.now.get());
            world.tap.borrow_mut().closed(self.0);
        });
    }
}

impl ProductWorld {
    /// Shows the tap what the server has written.
    fn tap_written(&self, connection: usize, bytes: &[u8], written: Option<&io::Result<usize>>) {
        let mut tap = self.tap.borrow_mut();
        let count = match written {
            Some(Ok(count)) => *count,
            // Not received by the client, but decided by the server.
            Some(Err(_)) => bytes.len(),
            None => 0,
        };
        tap.written(connection, &bytes[..count]);
        if count < bytes.len() {
            tap.blocked(connection);
        } else {
            tap.unblocked(connection);
        }
        let expired = std::mem::take(&mut tap.expired);
        drop(tap);
        for number in expired {
            let early = self.judged(|referee, eyes| referee.ended_early(number, eyes));
            if let Some(what) = early {
                self.breach(ProductBreach::EndedEarly, what);
            }
        }
    }
}
