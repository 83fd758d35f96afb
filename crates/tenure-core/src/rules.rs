//! The safety rules of the contract as a value, so that each can be switched off alone and be seen to matter.

/// Which safety rules are obeyed. Everything that ships uses [`Rules::ALL`].
///
/// The simulator takes one rule away at a time and must then find two holders at once, a late `lost` or a token that
/// fell: that is how we know that the rule is needed and that the simulator would notice its absence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::struct_excessive_bools, reason = "each rule is on or off by itself")]
pub struct Rules {
    /// Contract 1: a lease counts from before the request was sent, not from when its reply came.
    pub count_from_request: bool,
    /// Contract 1: the holder's lease ends a margin before the store's can.
    pub keep_margin: bool,
    /// Contract 1: the holder's clock runs on while the machine is suspended.
    pub count_suspended_time: bool,
    /// Contract 1: a hold is valid until its deadline, not until somebody notices that it ended.
    pub validity_is_a_deadline: bool,
    /// Contract 2: `lost` fires from a timer and does not wait for a request that hangs.
    pub lost_by_timer: bool,
    /// Contract 3: only a clear answer extends a hold; a timeout does not.
    pub only_clear_answers_extend: bool,
    /// Contract 4: a grant that came out of a wait counts from a renewal that confirms it.
    pub confirm_waited_grants: bool,
    /// Contract 4: a grant that another handed to us, where no renewal confirms it, counts from a look that was without it
    /// and from no later than the store says that it was made.
    pub count_from_last_look: bool,
    /// Contract 4: a grant that is past its own deadline is released, not returned.
    pub release_late_grants: bool,
    /// Contract 5: a hold is taken over by observation of its version, not by comparing clocks of two clients.
    pub take_over_by_observation: bool,
    /// Contract 5: an observation counts from after the reply that first showed the version.
    pub observe_from_reply: bool,
    /// Contract 5: the times in a store's headers are two clocks, which count only if they agreed at an own write.
    pub compare_store_clocks: bool,
    /// Contract 5: a record that the challenger has not observed is taken over only when it is older than three leases and
    /// 30 s by the store's own timestamps, which come from the clocks of several servers.
    pub distrust_store_clocks: bool,
    /// Contract 5: where the end of a connection frees a hold, its holder says lost at once.
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
