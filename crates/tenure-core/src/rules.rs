//! Safety rules of the contract as a value, so that the simulator can switch each off and show that it matters.

/// Set of safety rules. Production code uses [`Rules::ALL`].
///
/// The simulator removes one rule at a time and must then find two holders at once, a late `lost` or a token that
/// decreased. This proves that the rule is needed and that the simulator notices its absence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::struct_excessive_bools, reason = "each rule is on or off by itself")]
pub struct Rules {
    /// Contract 1: a lease counts from before the request was sent, not from when its reply came.
    pub count_from_request: bool,
    /// Contract 1: the holder's lease ends a margin before the store's can.
    pub keep_margin: bool,
    /// Contract 1: the holder's clock runs on while the machine is suspended.
    pub count_suspended_time: bool,
    /// Contract 1: a hold is valid until its deadline, not until an event reports its end.
    pub validity_is_a_deadline: bool,
    /// Contract 2: `lost` fires from a timer and does not wait for a request that hangs.
    pub lost_by_timer: bool,
    /// Contract 3: only a clear answer extends a hold; a timeout does not.
    pub only_clear_answers_extend: bool,
    /// Contract 4: a grant that came out of a wait counts from a renewal that confirms it.
    pub confirm_waited_grants: bool,
    /// Contract 4: a grant that another client handed to us, if no renewal confirms it, counts from the last read that
    /// did not show it, and from no later than the store's time of the grant.
    pub count_from_last_look: bool,
    /// Contract 4: a grant that is past its own deadline is released, not returned.
    pub release_late_grants: bool,
    /// Contract 5: a hold is taken over by observation of its version, not by comparing clocks of two clients.
    pub take_over_by_observation: bool,
    /// Contract 5: an observation counts from after the reply that first showed the version.
    pub observe_from_reply: bool,
    /// Contract 5: the times in a store's headers are of two clocks, which count only if they agree at an own write.
    pub compare_store_clocks: bool,
    /// Contract 5: a record that the challenger has not observed is taken over only when it is older than three leases
    /// and 30 s by the store's own timestamps, which come from the clocks of several servers.
    pub distrust_store_clocks: bool,
    /// Contract 5: if the end of a connection frees a hold, its holder reports the loss at once.
    pub lost_on_broken_connection: bool,
    /// Contract 6: a renewal names the owner and the version that it renews.
    pub renewal_names_version: bool,
}

impl Rules {
    /// Every rule.
    pub const ALL: Self = Self {
        count_from_request: true,
        keep_margin: true,
        count_suspended_time: true,
        validity_is_a_deadline: true,
        lost_by_timer: true,
        only_clear_answers_extend: true,
        confirm_waited_grants: true,
        count_from_last_look: true,
        release_late_grants: true,
        take_over_by_observation: true,
        observe_from_reply: true,
        compare_store_clocks: true,
        distrust_store_clocks: true,
        lost_on_broken_connection: true,
        renewal_names_version: true,
    };
}

impl Default for Rules {
    fn default() -> Self {
        Self::ALL
    }
}
