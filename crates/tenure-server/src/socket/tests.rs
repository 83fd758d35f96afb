use std::io::{Read, Write};
use std::net::TcpStream as Peer;
use std::ops::Range;

use mio::Poll;
use tenure_core::Time;

use super::*;
use crate::{Engine, Settings};

/// Sockets of a server and their peers, with replies sent one by one or together.
struct World {
    sockets: Sockets,
    poll: Poll,
    owners: Vec<Owner>,
    peers: Vec<Peer>,
}

impl World {
    fn new(peers: usize, together: bool) -> Self {
        let mut engine = Engine::new(Settings::default(), None, 1, 1);
        let mut world = Self {
            sockets: Sockets::default(),
            poll: Poll::new().unwrap(),
            owners: Vec::new(),
            peers: Vec::new(),
        };
        if together {
            world.sockets.enable_batching();
            if world.sockets.send_batch.is_none() {
                eprintln!("sent one by one: io_uring is not to be had here");
            }
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        for _ in 0..peers {
            world.peers.push(Peer::connect(listener.local_addr().unwrap()).unwrap());
            let (stream, _) = listener.accept().unwrap();
            stream.set_nonblocking(true).unwrap();
            let owner = engine.open(None, Time::ZERO).unwrap();
            let stream = TcpStream::from_std(stream);
            let socket = Socket::new(owner, stream, None, world.poll.registry()).unwrap();
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

    /// Sends these parts of `out` to these peers, and says how each went.
    fn send(&mut self, out: &[u8], parts: &[(usize, Range<usize>)]) -> Vec<(usize, Progress)> {
        let segments = self.segments(parts);
        let mut told = Vec::new();
        self.sockets.send(out, &segments, self.poll.registry(), |to, progress| {
            told.push((self.owners.iter().position(|owner| *owner == to).unwrap(), progress));
        });
        told
    }

    fn read(&mut self, peer: usize, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.peers[peer].read_exact(&mut bytes).unwrap();
        bytes
    }
}

#[test]
fn everybody_hears_what_is_for_them_in_order() {
    for together in [false, true] {
        let mut world = World::new(3, together);
        let parts = [(0, 0..2), (1, 2..3), (0, 3..5), (2, 5..6), (1, 6..7), (0, 7..8)];
        let told = world.send(b"abcdefgh", &parts);
        assert_eq!(told, parts.map(|(peer, _)| (peer, Progress::Done)));
        assert_eq!(world.read(0, 5), b"abdeh");
        assert_eq!(world.read(1, 2), b"cg");
        assert_eq!(world.read(2, 1), b"f");
    }
}

#[test]
fn batched_send_has_at_most_one_segment_per_connection() {
    let mut world = World::new(2, true);
    let segments = world.segments(&[(0, 0..1), (1, 1..2), (0, 2..3), (1, 3..4)]);
    let together = if world.sockets.send_batch.is_some() { 2 } else { 0 };
    assert_eq!(world.sockets.batchable(&segments), together);
}

#[test]
fn more_than_go_into_one_call_are_told_too() {
    for together in [false, true] {
        let count = usize::from(send_batch::MAX_BATCH) + 3;
        let mut world = World::new(count, together);
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
        return eprintln!("io_uring is not to be had here");
    }
    let mut told = 0;
    world.sockets.send_batched(&out, &segments, world.poll.registry(), &mut |_, progress| {
        assert_eq!(progress, Progress::Done);
        told += 1;
    });
    assert_eq!(told, count);
    for peer in 0..count {
        assert_eq!(world.read(peer, 1), &out[peer..=peer]);
    }
    assert!(world.sockets.send_batch.is_some(), "it can be used again");
}

#[test]
fn nothing_follows_where_something_is_missing() {
    for together in [false, true] {
        let mut world = World::new(2, together);
        let owner = world.owners[0];
        let registry = world.poll.registry().try_clone().unwrap();
        let socket = world.sockets.get_mut(owner).unwrap();
        let lost = Err(ErrorKind::Other.into());
        assert_eq!(socket.keep_unsent(b"a", &lost, &registry), Progress::Broken);
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
    for together in [false, true] {
        let mut world = World::new(2, together);
        let out: Vec<u8> = (0..251).cycle().take(LARGE + 8).collect();
        let parts = [(0, 0..LARGE), (1, 0..4), (0, LARGE..LARGE + 4), (1, 4..8)];
        let told = world.send(&out, &parts);
        let (done, blocked) = (Progress::Done, Progress::Blocked);
        assert_eq!(told, [(0, blocked), (1, done), (0, blocked), (1, done)]);
        assert_eq!(world.read(1, 8), &out[..8]);
        // Later than what waits already.
        world.send(&out, &[(1, 0..1), (0, LARGE + 4..LARGE + 8)]);
        let owner = world.owners[0];
        let mut peer = world.peers[0].try_clone().unwrap();
        let reader = std::thread::spawn(move || {
            let mut bytes = vec![0; LARGE + 8];
            peer.read_exact(&mut bytes).map(|()| bytes)
        });
        let registry = world.poll.registry();
        while world.sockets.get_mut(owner).unwrap().flush(registry) == blocked {
            std::thread::yield_now();
        }
        assert!(reader.join().unwrap().unwrap() == out, "the stream is not what was sent");
    }
}

#[test]
fn broken_connection_does_not_stop_sends_to_others() {
    for together in [false, true] {
        let mut world = World::new(3, together);
        // Closed with something unread: the system resets the connection.
        world.send(b"x", &[(1, 0..1)]);
        world.peers[1].write_all(b"y").unwrap();
        let gone = world.peers.remove(1);
        gone.peek(&mut [0]).unwrap();
        drop(gone);
        let told = world.send(b"abc", &[(0, 0..1), (1, 1..2), (2, 2..3)]);
        assert_eq!(told, [(0, Progress::Done), (1, Progress::Broken), (2, Progress::Done)]);
        assert_eq!(world.read(0, 1), b"a");
        assert_eq!(world.read(1, 1), b"c");
    }
}
