//! Inputs that are almost valid: changes of valid samples, from a seed.

use tenure_core::Random;

/// Valid inputs of a target.
pub type Samples = Vec<Vec<u8>>;

/// Numbers at which arithmetic overflows.
const EXTREMES: &[&str] =
    &["0", "1", "4294967296", "9223372036854775808", "18446744073709551615", "1e19", "-1", "1e308"];

/// Returns a sample with a few random changes.
pub fn mutate(samples: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    let mut bytes = pick(samples, random).cloned().unwrap_or_default();
    for _ in 0..=random.below(4) {
        match random.below(7) {
            0 => flip_bit(&mut bytes, random),
            1 => bytes.truncate(index(bytes.len() + 1, random)),
            2 => {
                let byte = u8::try_from(random.below(256)).unwrap_or_default();
                bytes.insert(index(bytes.len() + 1, random), byte);
            }
            3 => fill(&mut bytes, random),
            4 => splice(&mut bytes, samples, random),
            _ => replace_number(&mut bytes, random),
        }
    }
    bytes
}

fn flip_bit(bytes: &mut [u8], random: &mut Random) {
    if !bytes.is_empty() {
        bytes[index(bytes.len(), random)] ^= 1 << random.below(8);
    }
}

/// Overwrites up to nine bytes with zeros or ones: the extreme values of binary numbers.
fn fill(bytes: &mut [u8], random: &mut Random) {
    let from = index(bytes.len() + 1, random);
    let to = (from + index(10, random)).min(bytes.len());
    bytes[from..to].fill(if random.chance(0.5) { 0xff } else { 0 });
}

/// Replaces the end with the end of another sample.
fn splice(bytes: &mut Vec<u8>, samples: &[Vec<u8>], random: &mut Random) {
    let Some(other) = pick(samples, random) else { return };
    bytes.truncate(index(bytes.len() + 1, random));
    bytes.extend_from_slice(&other[index(other.len() + 1, random)..]);
}

/// Replaces a run of digits with an extreme number.
fn replace_number(bytes: &mut Vec<u8>, random: &mut Random) {
    let from = index(bytes.len() + 1, random);
    let Some(start) = bytes[from..].iter().position(u8::is_ascii_digit) else { return };
    let start = from + start;
    let length = bytes[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let number = EXTREMES[index(EXTREMES.len(), random)];
    bytes.splice(start..start + length, number.bytes());
}

fn pick<'a, T>(all: &'a [T], random: &mut Random) -> Option<&'a T> {
    all.get(index(all.len().max(1), random))
}

fn index(bound: usize, random: &mut Random) -> usize {
    usize::try_from(random.below(bound as u64)).unwrap_or_default()
}
