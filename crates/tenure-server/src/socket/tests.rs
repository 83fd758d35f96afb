#[path = "../../tests/skip/mod.rs"]
mod skip;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream as Peer};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use mio::net::TcpStream;
use tenure_core::Time;

use super::*;
use crate::network::{NetworkEvent, SystemNetwork};
use crate::{Engine, Settings};

/// Sockets of a server and their peers, with replies sent one by one or in batches.
struct World {
    sockets: Sockets<TcpStream>,
    network: SystemNetwork,
    owners: Vec<Owner>,
    peers: Vec<Peer>,
}

impl World {
    fn new(peers: usize, batched: bool) -> Self {
        let mut engine = Engine::new(Settings::default(), None, 1, 1);
        let mut world = Self {
            sockets: Sockets::new(),
            network: SystemNetwork::new(TcpListener::bind("127.0.0.1:0").unwrap()).unwrap().0,
            owners: Vec::new(),
            peers: Vec::new(),
        };
        if batched {
            world.sockets.enable_batching();
            if world.sockets.send_batch.is_none() {
                eprintln!("io_uring is not available: replies are sent one by one");
            }
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        for _ in 0..peers {
            world.peers.push(Peer::connect(listener.local_addr().unwrap()).unwrap());
            let (stream, _) = listener.accept().unwrap();
            stream.set_nonblocking(true).unwrap();
            let owner = engine.open(None, Time::ZERO).unwrap();
            let stream = TcpStream::from_std(stream);
            let socket = Socket::new(owner, stream, None, &world.network).unwrap();
            world.sockets.insert(socket);
            world.owners.push(owner);
        }
        world
    }

    fn segments(&self, parts: &[(usize, Range<usize>)]) -> Vec<OutputSegment> {
        let segment = |(peer, bytes): &(usize, Range<usize>)| OutputSegment {
            to: self.owners[*peer],
            bytes: bytes.clone(),
        };
        parts.iter().map(segment).collect()
    }

    /// Sends parts of `out` to peers, and returns the progress of each.
    fn send(&mut self, out: &[u8], parts: &[(usize, Range<usize>)]) -> Vec<(usize, Progress)> {
        let segments = self.segments(parts);
        let mut reported = Vec::new();
        self.sockets.send(out, &segments, &self.network, |to, progress| {
            reported.push((self.owners.iter().position(|owner| *owner == to).unwrap(), progress));
        });
        reported
    }

    fn read(&mut self, peer: usize, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.peers[peer].read_exact(&mut bytes).unwrap();
        bytes
    }
}

#[test]
fn each_connection_receives_its_segments_in_order() {
    for batched in [false, true] {
        let mut world = World::new(3, batched);
        let parts = [(0, 0..2), (1, 2..3), (0, 3..5), (2, 5..6), (1, 6..7), (0, 7..8)];
        let progress = world.send(b"abcdefgh", &parts);
        assert_eq!(progress, parts.map(|(peer, _)| (peer, Progress::Done)));
        assert_eq!(world.read(0, 5), b"abdeh");
        assert_eq!(world.read(1, 2), b"cg");
        assert_eq!(world.read(2, 1), b"f");
    }
}

#[test]
fn batched_send_has_at_most_one_segment_per_connection() {
    let mut world = World::new(2, true);
    let segments = world.segments(&[(0, 0..1), (1, 1..2), (0, 2..3), (1, 3..4)]);
    let batched = if world.sockets.send_batch.is_some() { 2 } else { 0 };
    assert_eq!(world.sockets.batchable(&segments), batched);
}

#[test]
fn more_segments_than_a_batch_are_all_sent() {
    for batched in [false, true] {
        let count = usize::from(send_batch::MAX_BATCH) + 3;
        let mut world = World::new(count, batched);
        let out: Vec<u8> = (0..=u8::MAX).collect();
        let parts: Vec<_> = (0..count).map(|peer| (peer, peer..peer + 1)).collect();
        assert_eq!(world.send(&out, &parts).len(), count);
        for peer in 0..count {
            assert_eq!(world.read(peer, 1), &out[peer..=peer]);
        }
    }
}

#[test]
fn connections_beyond_the_batch_limit_are_sent_to_separately() {
    let count = usize::from(send_batch::MAX_BATCH) + 3;
    let mut world = World::new(count, true);
    let out: Vec<u8> = (0..=u8::MAX).collect();
    let parts: Vec<_> = (0..count).map(|peer| (peer, peer..peer + 1)).collect();
    let segments = world.segments(&parts);
    if world.sockets.send_batch.is_none() {
        return skip::skip("io_uring is not available");
    }
    let mut reported = 0;
    world.sockets.send_batched(&out, &segments, &world.network, &mut |_, progress| {
        assert_eq!(progress, Progress::Done);
        reported += 1;
    });
    assert_eq!(reported, count);
    for peer in 0..count {
        assert_eq!(world.read(peer, 1), &out[peer..=peer]);
    }
    assert!(world.sockets.send_batch.is_some(), "the batch sender stays usable");
}

#[test]
fn nothing_is_sent_after_a_lost_segment() {
    for batched in [false, true] {
        let mut world = World::new(2, batched);
        let owner = world.owners[0];
        let socket = world.sockets.get_mut(owner).unwrap();
        let lost = Err(ErrorKind::Other.into());
        assert_eq!(socket.keep_unsent(b"a", &lost, &world.network), Progress::Broken);
        world.send(b"bc", &[(0, 0..1), (1, 1..2)]);
        assert_eq!(world.read(1, 1), b"c");
        world.peers[0].set_nonblocking(true).unwrap();
        let read = world.peers[0].read(&mut [0]);
        assert_eq!(read.unwrap_err().kind(), ErrorKind::WouldBlock);
    }
}

#[test]
fn blocked_connection_receives_all_bytes_later_and_in_order() {
    const LARGE: usize = 12 << 20;
    for batched in [false, true] {
        let mut world = World::new(2, batched);
        let out: Vec<u8> = (0..251).cycle().take(LARGE + 8).collect();
        let parts = [(0, 0..LARGE), (1, 0..4), (0, LARGE..LARGE + 4), (1, 4..8)];
        let progress = world.send(&out, &parts);
        let (done, blocked) = (Progress::Done, Progress::Blocked);
        assert_eq!(progress, [(0, blocked), (1, done), (0, blocked), (1, done)]);
        assert_eq!(world.read(1, 8), &out[..8]);
        // Queued behind the backlog, although the socket has room again.
        let mut received = world.read(0, LARGE / 4);
        world.send(&out, &[(1, 0..1), (0, LARGE + 4..LARGE + 8)]);
        let owner = world.owners[0];
        let mut peer = world.peers[0].try_clone().unwrap();
        let reader = std::thread::spawn(move || {
            let mut bytes = vec![0; LARGE - LARGE / 4 + 8];
            peer.read_exact(&mut bytes).map(|()| bytes)
        });
        let registry = &world.network;
        while world.sockets.get_mut(owner).unwrap().flush(registry) == blocked {
            std::thread::yield_now();
        }
        received.extend(reader.join().unwrap().unwrap());
        assert!(received == out, "the stream is not what was sent");
    }
}

#[test]
fn broken_connection_does_not_stop_sends_to_others() {
    for batched in [false, true] {
        let mut world = World::new(3, batched);
        // Closed with unread bytes: the kernel resets the connection.
        world.send(b"x", &[(1, 0..1)]);
        world.peers[1].write_all(b"y").unwrap();
        let gone = world.peers.remove(1);
        gone.peek(&mut [0]).unwrap();
        drop(gone);
        let progress = world.send(b"abc", &[(0, 0..1), (1, 1..2), (2, 2..3)]);
        assert_eq!(progress, [(0, Progress::Done), (1, Progress::Broken), (2, Progress::Done)]);
        assert_eq!(world.read(0, 1), b"a");
        assert_eq!(world.read(1, 1), b"c");
    }
}

#[test]
fn a_peer_that_does_not_read_is_given_up_when_its_backlog_is_full() {
    const PIECE: usize = 4 << 20;
    let mut world = World::new(1, false);
    let out = vec![7; PIECE];
    let progress = (0..16).map(|_| world.send(&out, &[(0, 0..PIECE)])[0].1);
    let taken = progress.take_while(|progress| *progress != Progress::Broken).count();
    // The buffers of both sockets take a few pieces as well.
    let limit = MAX_BACKLOG_BYTES / PIECE;
    assert!((limit..limit + 8).contains(&taken), "{taken} pieces");
}

#[test]
fn an_event_of_an_earlier_connection_in_the_slot_is_ignored() {
    let world = World::new(1, false);
    let owner = world.owners[0];
    let raw: usize = token(owner);
    assert_eq!(world.sockets.owner(raw), Some(owner));
    let earlier = raw ^ (INDEX_MASK + 1);
    assert_eq!(world.sockets.owner(earlier), None);
}

/// Stream that is not a socket of the system.
#[derive(Debug)]
struct OpaqueStream(TcpStream);

impl Read for OpaqueStream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.read(bytes)
    }
}

impl Write for OpaqueStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl NetworkStream for OpaqueStream {
    fn finish(&self) {
        self.0.finish();
    }

    fn take_error(&self) -> io::Result<Option<io::Error>> {
        self.0.take_error()
    }

    fn socket(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

#[derive(Debug)]
struct OpaqueNetwork(SystemNetwork);

impl Network for OpaqueNetwork {
    type Stream = OpaqueStream;

    fn now(&self) -> Time {
        self.0.now()
    }

    fn wait(
        &mut self,
        timeout: Option<Duration>,
        events: &mut Vec<NetworkEvent>,
    ) -> io::Result<()> {
        self.0.wait(timeout, events)
    }

    fn accept(&mut self) -> io::Result<(OpaqueStream, SocketAddr)> {
        self.0.accept().map(|(stream, from)| (OpaqueStream(stream), from))
    }

    fn stop_listening(&mut self) {
        self.0.stop_listening();
    }

    fn register(&self, stream: &mut OpaqueStream, token: usize) -> io::Result<()> {
        self.0.register(&mut stream.0, token)
    }

    fn watch_writable(&self, stream: &mut OpaqueStream, token: usize, on: bool) -> io::Result<()> {
        self.0.watch_writable(&mut stream.0, token, on)
    }

    fn deregister(&self, stream: &mut OpaqueStream) {
        self.0.deregister(&mut stream.0);
    }
}

#[test]
fn streams_that_are_no_sockets_are_sent_to_separately() {
    let world = World::new(2, true);
    if world.sockets.send_batch.is_none() {
        return skip::skip("io_uring is not available");
    }
    let World { sockets, network, owners, mut peers } = world;
    let network = OpaqueNetwork(network);
    let mut opaque = Sockets::new();
    opaque.enable_batching();
    for socket in sockets.slots.0.into_iter().flatten() {
        let Transport::Plain(mut stream) = socket.transport else { panic!("in the clear") };
        network.0.deregister(&mut stream);
        opaque.insert(Socket::new(socket.owner, OpaqueStream(stream), None, &network).unwrap());
    }
    let segments = [(owners[0], 0..1), (owners[1], 1..2)];
    let segments = segments.map(|(to, bytes)| OutputSegment { to, bytes });
    opaque.send(b"ab", &segments, &network, |_, progress| assert_eq!(progress, Progress::Done));
    for (peer, expected) in peers.iter_mut().zip(*b"ab") {
        let mut received = [0];
        peer.read_exact(&mut received).unwrap();
        assert_eq!(received, [expected]);
    }
}
