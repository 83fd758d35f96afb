//! The order of primaries of one PostgreSQL cluster that are up at the same time.
//!
//! A fail-over may leave two primaries: the promoted standby, and the former primary, which was only cut off or was
//! started again. The promotion began a new timeline, so the larger timeline is the newer primary. Two standbys that
//! are promoted independently begin the same timeline: nothing orders those two.

/// One run of a primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PrimaryRun {
    /// System identifier: the same for all servers of a cluster.
    pub system: i64,
    /// Timeline that the primary writes.
    pub timeline: i64,
    /// Start time of the server, in microseconds since 1970. No two servers start in the same microsecond.
    pub started: i64,
}

/// Standing of a primary among the other primaries that are up. The numbers are those of the other primaries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It may grant, unless the key is held at an older primary, whose holders may not know of this one yet.
    Newest {
        /// Older primaries.
        older: Vec<usize>,
    },
    /// It must not grant, and its holds have ended: this one is newer.
    Superseded {
        /// The newest primary.
        by: usize,
    },
    /// It must not grant: these cannot be ordered with it. Its holds go on, unless the key is held there, too.
    Unordered {
        /// Primaries of the same timeline, or of another cluster.
        with: Vec<usize>,
    },
}

/// Standing of the primary `own` among `others`. One of them that is the same run under another name is skipped.
pub fn standing(
    own: PrimaryRun,
    others: impl IntoIterator<Item = (usize, PrimaryRun)>,
) -> Standing {
    let (mut older, mut with) = (Vec::new(), Vec::new());
    let mut newest: Option<(i64, usize)> = None;
    for (number, other) in others {
        if other == own {
            continue;
        }
        if other.system != own.system || other.timeline == own.timeline {
            with.push(number);
        } else if other.timeline < own.timeline {
            older.push(number);
        } else if newest.is_none_or(|(timeline, _)| other.timeline > timeline) {
            newest = Some((other.timeline, number));
        }
    }
    match newest {
        Some((_, by)) => Standing::Superseded { by },
        None if with.is_empty() => Standing::Newest { older },
        None => Standing::Unordered { with },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(system: i64, timeline: i64, started: i64) -> PrimaryRun {
        PrimaryRun { system, timeline, started }
    }

    #[test]
    fn a_primary_ranks_by_its_timeline() {
        let own = run(1, 5, 50);
        let (same, older, newer, newest) = (own, run(1, 4, 40), run(1, 6, 60), run(1, 7, 70));
        let (twin, foreign) = (run(1, 5, 51), run(2, 9, 90));
        let of = |others: &[PrimaryRun]| standing(own, others.iter().copied().enumerate());
        assert_eq!(of(&[]), Standing::Newest { older: vec![] });
        assert_eq!(of(&[same, older]), Standing::Newest { older: vec![1] });
        assert_eq!(of(&[older, newer, newest, twin]), Standing::Superseded { by: 2 });
        assert_eq!(of(&[older, twin]), Standing::Unordered { with: vec![1] });
        assert_eq!(of(&[foreign]), Standing::Unordered { with: vec![0] });
    }

    /// Two primaries never both may grant, each with the other in view, and one of two always may if they are ordered.
    #[test]
    fn of_two_primaries_that_see_each_other_at_most_one_grants() {
        let runs: Vec<PrimaryRun> =
            (0..16).map(|bits| run(bits & 1, bits >> 1 & 3, 100 + (bits >> 3))).collect();
        for a in &runs {
            for b in runs.iter().filter(|b| *b != a) {
                let grants = |own: PrimaryRun, other| {
                    matches!(standing(own, [(0, other)]), Standing::Newest { .. })
                };
                let both = (grants(*a, *b), grants(*b, *a));
                assert_ne!(both, (true, true), "{a:?} {b:?}");
                let ordered = a.system == b.system && a.timeline != b.timeline;
                assert_eq!(both.0 || both.1, ordered, "{a:?} {b:?}");
            }
        }
    }
}
