//! Every fuzz target, briefly: on its samples, on changes of them, and on random bytes.

use tenure_core::Random;
use tenure_fuzz::Samples;

fn briefly(target: fn(&[u8]), samples: &Samples, rounds: usize) {
    for sample in samples {
        target(sample);
    }
    let mut random = Random::new(1);
    for _ in 0..rounds {
        target(&tenure_fuzz::mutate(samples, &mut random));
        let noise = (0..random.below(300)).map(|_| random.bits().to_le_bytes()[0]);
        target(&noise.collect::<Vec<_>>());
    }
}

#[test]
fn wire_requests() {
    briefly(tenure_fuzz::wire_requests, &tenure_fuzz::request_samples(), 2_000);
}

#[test]
fn wire_replies() {
    briefly(tenure_fuzz::wire_replies, &tenure_fuzz::reply_samples(), 20_000);
}

#[test]
fn journal() {
    briefly(tenure_fuzz::journal, &tenure_fuzz::journal_samples(), 150);
}

#[test]
fn nats_record() {
    briefly(tenure_fuzz::nats_record, &tenure_fuzz::nats_samples(), 20_000);
}

#[test]
fn object_record() {
    briefly(tenure_fuzz::object_record, &tenure_fuzz::object_samples(), 20_000);
}

#[test]
fn file_record() {
    briefly(tenure_fuzz::file_record, &tenure_fuzz::file_samples(), 20_000);
}
