//! Rows that claims leave out, because they cannot be read or claimed.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::Time;

/// Time for which a row is left out. Then it is tried again: it may have been mended.
const SET_ASIDE_TIME: Duration = Duration::from_secs(600);
/// Maximum number of rows that are set aside. Beyond it the row that was set aside first is tried again.
const MAX_ROWS_SET_ASIDE: usize = 1_000;
/// Number of rows that fail, with none that succeeds, from which the table is at fault and not a row.
const MAX_FAILED_ROWS: usize = 10;

/// Rows that claims leave out for a while, by id.
///
/// ```
/// use std::time::Duration;
/// use tenure_core::Time;
/// use tenure_core::jobs::SetAside;
///
/// let (mut rows, now) = (SetAside::default(), Time::ZERO);
/// assert!(rows.add("7", now), "to be reported");
/// assert_eq!(rows.ids(now), ["7"]);
/// let later = now + Duration::from_secs(600);
/// assert!(rows.ids(later).is_empty(), "it may have been mended");
/// assert!(!rows.add("7", later), "it was reported before");
/// ```
#[derive(Clone, Debug, Default)]
pub struct SetAside {
    /// End of the time for which each row is left out. Rows whose time is over are kept: they were reported.
    until: BTreeMap<String, Time>,
}

impl SetAside {
    /// Sets a row aside. True if it was not set aside before, and is to be reported.
    pub fn add(&mut self, id: &str, now: Time) -> bool {
        if self.until.insert(id.to_owned(), now + SET_ASIDE_TIME).is_some() {
            return false;
        }
        if self.until.len() > MAX_ROWS_SET_ASIDE {
            let first = self.until.iter().min_by_key(|(_, until)| **until);
            if let Some(first) = first.map(|(id, _)| id.clone()) {
                self.until.remove(&first);
            }
        }
        true
    }

    /// Ids of the rows to leave out at `now`.
    pub fn ids(&self, now: Time) -> Vec<String> {
        self.until.iter().filter(|(_, until)| now < **until).map(|(id, _)| id.clone()).collect()
    }

    /// True if the claims of so many rows failed that the table is at fault, not its rows: none is set aside.
    pub const fn is_fault_of_table(claimed: usize, failed: usize) -> bool {
        claimed == 0 && failed >= MAX_FAILED_ROWS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn at_most_so_many_rows_are_left_out() {
        let mut rows = SetAside::default();
        let at = |nth: usize| Time::ZERO + Duration::from_millis(u64::try_from(nth).unwrap());
        for nth in 0..=MAX_ROWS_SET_ASIDE {
            assert!(rows.add(&nth.to_string(), at(nth)));
        }
        let ids = rows.ids(at(MAX_ROWS_SET_ASIDE));
        assert_eq!(ids.len(), MAX_ROWS_SET_ASIDE);
        assert!(!ids.contains(&"0".to_owned()), "the first is tried again");
    }

    #[test]
    fn the_table_is_at_fault_if_many_rows_fail_and_none_does_not() {
        assert!(SetAside::is_fault_of_table(0, MAX_FAILED_ROWS));
        assert!(!SetAside::is_fault_of_table(1, 100));
        assert!(!SetAside::is_fault_of_table(0, 1));
    }
}
