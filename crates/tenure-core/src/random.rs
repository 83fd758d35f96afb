//! Deterministic random numbers: a small generator whose whole state is its seed.

/// `SplitMix64` generator: good enough to spread retries and to drive simulations, not for secrets.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Random(u64);

impl Random {
    /// Creates the generator of a seed. The same seed gives the same numbers.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Next 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Next number, uniform in `[0, 1)`.
    #[expect(clippy::cast_precision_loss, reason = "53 bits fit")]
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Number below `bound`; 0 if `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(bound)) >> 64) as u64
    }

    /// True with the given probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seed_decides_and_the_ranges_hold() {
        let mut one = Random::new(7);
        let mut two = Random::new(7);
        let mut low = 0;
        for _ in 0..10_000 {
            assert_eq!(one.bits(), two.bits());
            assert!((0.0..1.0).contains(&one.unit()));
            assert!(one.below(10) < 10);
            low += u32::from(one.chance(0.25));
            two = one.clone();
        }
        assert!((2_300..2_700).contains(&low), "{low}");
        assert_eq!(one.below(0), 0);
    }
}
