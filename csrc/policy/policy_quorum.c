/* policy_quorum.c: rounds that close once all but k gradients have come and a grace has passed. A late worker goes on:
 * its gradient, of the samples that it claimed, becomes part of the round that is open when it comes. So none is lost and
 * none counts twice (Decoupled DiLoCo, arXiv 2604.21428, merges late outer gradients so).
 *
 * The grace is a share of the time from the round's opening to its quorum, so that hardly late workers stay in step: one
 * that comes in a later round begins the round after that. It is for those that began with this round. A worker that is
 * late from an earlier one has had its grace, and a round that lacks only such workers closes at its quorum.
 */
#include "policy/policy.h"

static bool is_computing(const struct member *m) { return m->state == PYPS_ACTIVE && m->claim_count; }

/* When the open round was opened: the workers in it have claimed no later, and those that are late before. */
static uint64_t opened(const struct view *v) {
    uint64_t last = 0;
    for (uint32_t slot = 0; slot < v->participants; slot++) {
        const struct member *m = view_member(v, slot);
        if (m->state == PYPS_ACTIVE && m->rank >= 0 && m->claim_since > last) last = m->claim_since;
    }
    return last;
}

/* Whether workers that began with the round have not come. */
static bool lacks_some(const struct view *v, uint64_t since) {
    for (uint32_t slot = 0; slot < v->participants; slot++)
        if (is_computing(view_member(v, slot)) && view_member(v, slot)->claim_since >= since) return true;
    return false;
}

static bool quorum_staged(struct view *v, uint64_t now) {
    uint64_t since = opened(v), k = (uint64_t)v->policy_params.backup;
    v->next_deadline = 0;
    if (!v->outstanding) return true;
    if (v->outstanding > k) return false; /* one that came while the round was open has no part in it */
    if (!lacks_some(v, since)) return true;
    uint64_t all = (uint64_t)v->staged + v->outstanding, quorum = all > k ? all - k : 1;
    const struct source *last = &view_pending(v)[quorum - 1];
    uint64_t reached = view_rank(v, (uint32_t)view_member(v, last->slot)->rank)->pushed_at;
    double grace = reached > since ? v->policy_params.own * (double)(reached - since) : 0;
    uint64_t closes_at = reached + policy_whole(grace, UINT64_MAX / 4);
    if (now >= closes_at) return true;
    v->next_deadline = closes_at;
    return false;
}

static uint64_t progress(const struct view *v) { return v->round; }

static int check_grace(const pyps_policy_params *params) {
    return policy_check_number("own", params->own, 0, 1e6);
}

const struct policy policy_quorum = {.name = "quorum",
                                     .check_params = check_grace,
                                     .assigns_rounds = true,
                                     .stages = true,
                                     .waits_for_round = true,
                                     .merges_late = true,
                                     .closes = quorum_staged,
                                     .progress = progress};
